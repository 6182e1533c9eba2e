"""What a run is expected to take before anything of it was timed: programs to compile, and arithmetic.

Forwards and factorisations are counted as so many forwards over a window, at the speed that plans assume of the device.
It begins the estimate; the pace that is met counts for more from a tenth of the work on.
"""

from collections.abc import Iterator, Sequence

from kvpatch_jax.plan import DeviceCosts
from models import ModelBackbone

from .certifying import batch_name
from .journal import Journal
from .ways import ways_of
from .windows import Source

COMPILING = 12.0
"""Seconds of what is compiled for windows of a size that was not met before."""
FORWARDS = 60
"""Forwards over a window that all ways of serving it come to, about, what is factorised included."""
PLAN_FORWARDS = 6
"""The same of plans under a few bounds."""


def expected_steps(backbone: ModelBackbone, source: Source, ranks: Sequence[int], journal: Journal) -> Iterator[float]:
    """Seconds of each step that lies ahead, in order: every way of every batch, then batches that are planned for."""
    launch, flop, _ = DeviceCosts.assumed().rates("Prefill")
    ways, met, sizes = ways_of(tuple(ranks)), set[tuple[int, int]](), []
    for number, planned in enumerate(source.planned):
        rows, size = len(planned.clusters), source.size(backbone, planned)
        window = launch + rows * flop * backbone.forward_costs.flops(size)
        sizes.append(window)
        if batch_name(number) in journal:
            continue
        seconds = FORWARDS * window + (0.0 if (rows, size) in met else COMPILING)
        met.add((rows, size))
        yield from [seconds / ways] * ways
    for window, planned in zip(sizes, source.planned, strict=True):
        if planned.held_out:
            yield PLAN_FORWARDS * window
