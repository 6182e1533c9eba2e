"""First-k: recompute the chunk's first tokens, where a chunk that is prefilled alone has its attention sink."""

import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone
from ._common import Repaired, SplicedCache, check_splice, repair_everywhere, untouched


def first_k(backbone: Backbone, splice: SplicedCache, count: int) -> Repaired:
    """Recomputes the first `count` tokens of the chunk in context, at every layer.

    Source: EPIC (Hu et al. 2025, LegoLink) and its multimodal form MPIC, as Kamera App. C.3 and Table 6 compare them.

    Args:
      count: tokens per row, static, 0 … T; 0 returns the cache unchanged.

    Returns:
      The repaired cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: the count is outside 0 … T. ShapeError, LayoutError, DtypeError: the splice does not match the
        backbone.
    """
    check_splice(backbone.layout, splice, count)
    if count == 0:
        return untouched(backbone.layout, splice)
    index = jnp.asarray(np.broadcast_to(np.arange(count, dtype=np.int32), (splice.slots.shape[0], count)))
    return repair_everywhere(backbone, splice, index)
