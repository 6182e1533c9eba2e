"""Oracle-Δ: recompute the tokens whose true deficit is largest.

It cannot be used in serving, because it needs Δ. It is not an upper bound of token selection either: a question need
not read the tokens with the largest Δ, and a selection by the question's attention can do better with fewer tokens.
"""

from ..backbone import Backbone
from ..core import to_engine
from ..errors import InputError
from ._common import (
    Repaired,
    SplicedCache,
    check_splice,
    deviation,
    largest,
    live_tokens,
    read_slots,
    repair_everywhere,
    untouched,
)


def oracle_delta(backbone: Backbone, splice: SplicedCache, count: int) -> Repaired:
    """Recomputes in context, at every layer, the `count` tokens with the largest true deficit ‖Δ‖.

    ‖Δ‖ is ‖conditioned − spliced‖ over each channel's typical norm, summed over layers and channels. Source: Kamera
    App. C.3, Fig. 6a (an oracle that selects tokens by true Δ-magnitude needs about half of them).

    Args:
      splice: with `conditioned`, which affects only the selection, never the values in the cache.
      count: tokens per row, static, 0 … T; 0 returns the cache unchanged.

    Returns:
      The repaired cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: `conditioned` is None, or the count is outside 0 … T. ShapeError, LayoutError, DtypeError: the splice
        does not match the backbone.
    """
    layout = backbone.layout
    check_splice(layout, splice, count)
    if splice.conditioned is None:
        raise InputError("oracle_delta: splice.conditioned is None; expected the chunk's phase-free KV in context")
    if count == 0:
        return untouched(layout, splice)

    true = to_engine(layout, splice.conditioned, splice.tokens.positions, 0)
    score = deviation(true, read_slots(splice.cache, splice.slots), live_tokens(splice))
    return repair_everywhere(backbone, splice, largest(score, count))
