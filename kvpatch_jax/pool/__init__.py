"""Paged pools of KV: splicing, rotating and reading slots, in our own pages and in those of other engines."""

from ..core.paging import Pool as Pool
from ..core.paging import check_pool as check_pool
from .page_format import JOINED as JOINED
from .page_format import LATENT as LATENT
from .page_format import RAGGED as RAGGED
from .page_format import PageFormat as PageFormat
from .page_format import check_dtype as check_dtype
from .pool import SlotAllocator as SlotAllocator
from .pool import compaction_moves as compaction_moves
from .pool import make_pool as make_pool
from .pool import move_slots as move_slots
from .pool import pages_of as pages_of
from .pool import read_slots as read_slots
from .pool import rotate_slots as rotate_slots
from .pool import slot_mask as slot_mask
from .pool import splice as splice
from .pool import trimmed as trimmed
