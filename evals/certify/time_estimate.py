"""Expected duration of a run before anything was timed: programs to compile, and arithmetic.

Arithmetic is counted in forwards over a window, at the speed that plans assume of the device. It is the first estimate;
`Progress` weighs the measured pace more from a tenth of the work on.
"""

from collections.abc import Iterator

from kvpatch_jax.plan import DeviceCosts

from .certification_run import CertificationRun
from .serving_modes import mode_count

COMPILING = 12.0
"""Seconds to compile everything for windows of a new size."""
FORWARDS = 60
"""Forwards over a window that all modes of serving it amount to, factorisations included."""
PLAN_FORWARDS = 6
"""The same for plans under a few bounds."""


def expected_steps(run: CertificationRun) -> Iterator[float]:
    """Yields the expected seconds of each step: every mode of every batch, then every batch that is planned for."""
    launch, flop, _ = DeviceCosts.assumed().rates("Prefill")
    modes, compiled, window_seconds = mode_count(run.ranks), set[tuple[int, int]](), []
    for number, spec in enumerate(run.source.specs):
        rows, size = len(spec.clusters), run.source.size(run.backbone, spec)
        window = launch + rows * flop * run.backbone.forward_costs.flops(size)
        window_seconds.append(window)
        if run.is_measured(number):
            continue

        # Only the first batch of a size compiles.
        seconds = FORWARDS * window + (0.0 if (rows, size) in compiled else COMPILING)
        compiled.add((rows, size))
        yield from [seconds / modes] * modes

    for window, spec in zip(window_seconds, run.source.specs, strict=True):
        if spec.held_out:
            yield PLAN_FORWARDS * window
