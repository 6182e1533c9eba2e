"""Published methods that repair a spliced cache by recomputing tokens, for comparison with patches.

All have one signature: `repair(backbone, splice, count)` (`vlcache` takes one count per layer). Patches correct
features instead of tokens. The methods run on the same relocated KV as patches, and recompute their tokens in context
(Kamera §6, App. C.3).
"""

from .spliced_cache import Repair as Repair
from .spliced_cache import Repaired as Repaired
from .spliced_cache import SplicedCache as SplicedCache
from .spliced_cache import count_of_equal_bytes as count_of_equal_bytes
from .spliced_cache import deviation as deviation
from .spliced_cache import fraction_to_count as fraction_to_count
from .spliced_cache import largest as largest
from .spliced_cache import live_tokens as live_tokens
from .spliced_cache import read_slots as read_slots
from .spliced_cache import recompute_tokens as recompute_tokens
from .spliced_cache import repair_everywhere as repair_everywhere
from .token_repairs import REPAIRS as REPAIRS
from .token_repairs import Checked as Checked
from .token_repairs import cacheblend as cacheblend
from .token_repairs import check_by_layer as check_by_layer
from .token_repairs import first_k as first_k
from .token_repairs import oracle_delta as oracle_delta
from .vlcache import layer_counts as layer_counts
from .vlcache import layer_sensitivity as layer_sensitivity
from .vlcache import vlcache as vlcache
