"""Paged pools of KV: splicing, rotating and reading slots, in our own pages and in those of other engines."""

from ..core.paging import Pool as Pool
from ..core.paging import check_pool as check_pool
from ..core.paging import trimmed as trimmed
from .page_format import JOINED as JOINED
from .page_format import LATENT as LATENT
from .page_format import RAGGED as RAGGED
from .page_format import PageFormat as PageFormat
from .page_format import PageLayout as PageLayout
from .page_format import check_dtype as check_dtype
from .pool import make_pool as make_pool
from .pool import move_slots as move_slots
from .pool import read_slots as read_slots
from .pool import rotate_slots as rotate_slots
from .pool import splice as splice
from .programs import Pools as Pools
from .programs import copy_slots as copy_slots
from .programs import enlarged as enlarged
from .programs import put_rows as put_rows
from .programs import read_rows as read_rows
from .programs import rotate_pieces as rotate_pieces
from .programs import with_source as with_source
from .programs import write_piece as write_piece
from .slots import SlotAllocator as SlotAllocator
from .slots import pages_of as pages_of
from .slots import slot_mask as slot_mask
