"""Array mathematics of position-free KV: layouts, frames, rotary positions, readouts and the patch operators.

Pure functions on arrays and static descriptions of them. Nothing here depends on chunks or on where they are stored.
"""

from .buckets import Buckets as Buckets
from .frames import EngineKV as EngineKV
from .frames import FramedKV as FramedKV
from .frames import LocalKV as LocalKV
from .frames import PhaseFreeKV as PhaseFreeKV
from .frames import expect_frame as expect_frame
from .layout import AnyArray as AnyArray
from .layout import Channel as Channel
from .layout import KVLayout as KVLayout
from .layout import Positions as Positions
from .layout import Start as Start
from .layout import arrays_of as arrays_of
from .layout import as_start as as_start
from .layout import relocate as relocate
from .layout import rotate_kv as rotate_kv
from .layout import to_engine as to_engine
from .layout import to_local as to_local
from .layout import to_phase_free as to_phase_free
from .ops import ChannelFactors as ChannelFactors
from .ops import Factors as Factors
from .ops import FormPlan as FormPlan
from .ops import Heads as Heads
from .ops import Leaf as Leaf
from .ops import PatchFrame as PatchFrame
from .ops import Quantised as Quantised
from .ops import flatten_heads as flatten_heads
from .ops import is_low_rank as is_low_rank
from .ops import value_of as value_of
from .paging import DEFAULT as DEFAULT
from .paging import NO_PAGE as NO_PAGE
from .paging import Paged as Paged
from .paging import Pool as Pool
from .paging import Slots as Slots
from .paging import check_held as check_held
from .paging import check_paged as check_paged
from .paging import check_pool as check_pool
from .paging import flat as flat
from .paging import padded_slots as padded_slots
from .paging import token_offsets as token_offsets
from .paging import trimmed as trimmed
from .readout import attention_with_lse as attention_with_lse
from .readout import empty_readout as empty_readout
from .readout import merge_readouts as merge_readouts
from .rope import Angles as Angles
from .rope import Rope as Rope
from .rope import check_extent as check_extent
from .rope import check_positions as check_positions
from .rope import extent as extent
from .rope import relocation_tables as relocation_tables
from .rope import rope_tables as rope_tables
from .rope import rotate as rotate
from .scaling import Scaling as Scaling
