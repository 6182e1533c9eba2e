"""Published methods that repair a spliced cache by recomputing tokens, for comparison with patches.

There is one file per method and one signature: `repair(backbone, splice, count)` (`vlcache` takes one count per
layer). Patches correct features instead of tokens. The methods run on the same relocated KV as patches, and recompute
their tokens in context (Kamera §6, App. C.3).
"""

from typing import cast

from ._common import Repair as Repair
from ._common import Repaired as Repaired
from ._common import SplicedCache as SplicedCache
from ._common import count_of_equal_bytes as count_of_equal_bytes
from ._common import deviation as deviation
from ._common import fraction_to_count as fraction_to_count
from ._common import largest as largest
from ._common import live_tokens as live_tokens
from ._common import read_slots as read_slots
from ._common import recompute_tokens as recompute_tokens
from ._common import repair_everywhere as repair_everywhere
from .cacheblend import Checked as Checked
from .cacheblend import cacheblend as cacheblend
from .cacheblend import check_by_layer as check_by_layer
from .first_k import first_k as first_k
from .oracle_delta import oracle_delta as oracle_delta
from .vlcache import layer_counts as layer_counts
from .vlcache import layer_sensitivity as layer_sensitivity
from .vlcache import vlcache as vlcache

REPAIRS: dict[str, Repair] = {
    "first_k": first_k,
    "cacheblend": cast(Repair, cacheblend),  # a type checker sees the module of that name too
    "oracle_delta": oracle_delta,
}
"""Token repairs that take one count, by name; `vlcache` takes one per layer."""
