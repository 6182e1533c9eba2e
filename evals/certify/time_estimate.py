"""Expected duration of a run: programs to compile, forwards, factorisations, and answers that are read.

One forward is timed before the run, with the program that computes what is promised. Everything else is counted in
forwards over a window and in compilations of that program. `Progress` weighs the pace that is met more from a tenth of
the work on.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from kvpatch_jax.plan import DeviceCosts

from ..console import in_words
from ..probes.window.image_sequence import PIECE, prefilled
from .certification_run import CertificationRun
from .serving_modes import MOST_REPAIRED, ORDERS
from .window_sources import WindowSpec

COMPILED = 12.0
"""Compilations of a window's prefill that all programs for windows of a new shape amount to."""
STORED, UPDATED = 17.0, 4.0
"""Forwards over a window that prefills behind other histories, and behind another first chunk, amount to."""
REPAIRED = 3.0
"""Forwards over a chunk that repairing one amounts to."""
MODE = 0.4
"""Forwards over a window that joining a cache and reading it amount to, factorisations included."""
PLANNED = 12.0
"""Forwards over a window that plans under a few bounds amount to."""


class Pace(NamedTuple):
    """Seconds on this machine: for one FLOP of a forward, for launching one, and to compile the prefill of a window."""

    flop: float
    launch: float
    compilation: float

    @classmethod
    def assumed(cls) -> "Pace":
        """Returns what plans assume of the device."""
        launch, flop, _ = DeviceCosts.assumed().rates("Prefill")
        return cls(flop, launch, 1.0)


def measured_pace(run: CertificationRun) -> Pace:
    """Times the prefill of a batch that was not measured yet, of the least size: compiled and run, then run again."""
    remaining = (spec for number, spec in enumerate(run.source.specs) if not run.is_measured(number))
    spec = next(remaining, run.source.specs[-1])
    rows, size = len(spec.clusters), run.source.size(run.backbone, spec)
    axes = run.backbone.layout.rope.axes
    positions = np.broadcast_to(np.arange(size, dtype=np.int32), (rows, size))
    if axes is not None:
        positions = np.repeat(positions[..., None], axes, axis=2)
    tokens = run.backbone.embed(np.zeros((rows, size), np.int32), positions)

    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(prefilled(run.backbone, tokens, chunk=PIECE))
        seconds.append(time.perf_counter() - began)
    launch = DeviceCosts.assumed().rates("Prefill").launch
    once = min(seconds[1:])
    flops = rows * run.backbone.forward_costs.flops(size)
    return Pace(max(once - launch, 0.0) / flops, launch, max(seconds[0] - once, 0.0))


def expected_steps(run: CertificationRun, pace: Pace) -> Iterator[float]:
    """Yields the expected seconds of each step: every mode of every batch, then every batch that is planned for."""
    compiled, window_seconds = set[tuple[int, int]](), []
    for number, spec in enumerate(run.source.specs):
        rows, size = len(spec.clusters), run.source.size(run.backbone, spec)
        window = pace.launch + rows * pace.flop * run.backbone.forward_costs.flops(size)
        window_seconds.append(window)
        if run.is_measured(number):
            continue

        # Only the first batch of a size compiles.
        seconds = _forwards(run, spec) * window
        if (rows, size) not in compiled:
            seconds += COMPILED * pace.compilation
        compiled.add((rows, size))
        modes = run.modes.number(spec.chunks)
        yield from [seconds / modes] * modes

    for window, spec in zip(window_seconds, run.source.specs, strict=True):
        if spec.held_out:
            yield PLANNED * window


def _forwards(run: CertificationRun, spec: WindowSpec) -> float:
    """Counts the forwards over a window that serving and reading a batch amounts to."""
    modes, size = run.modes, spec.chunks
    served = sum(modes.counts(size)[1:])
    slid = sum(slides / size + 1 for slides in modes.slides)
    repaired = sum(count for count in modes.counts(size) if count <= MOST_REPAIRED)
    forwards = {
        "survivor": slid,
        "orbit": float(ORDERS),
        "update": 2 * UPDATED,
        "fresh": 2 * len(modes.fresh_ranks) * served / size,
        "repair": 2 * REPAIRED * repaired / size,
        "near": STORED,
    }
    # Canonicals of the window and of what was there before, the promised windows and those that slid.
    whole = 6.0 + sum(count for point, count in forwards.items() if modes.has(point))
    return whole + MODE * modes.number(size)


def announcement(run: CertificationRun, seconds: float) -> str:
    """Returns the line that says how long a run takes, and why."""
    sizes, specs = run.source.sizes, run.source.specs
    remaining = [spec for number, spec in enumerate(specs) if not run.is_measured(number)]
    windows = [f"{count} of {chunks}" for chunks, count in zip(sizes.chunks, sizes.counts, strict=True)]
    modes = [run.modes.number(chunks) for chunks in sizes.chunks]
    shapes = {(len(spec.clusters), run.source.size(run.backbone, spec)) for spec in remaining}
    most = str(modes[0]) if len(modes) == 1 else f"{modes[0]} to {modes[-1]}"
    return (
        f"about {in_words(seconds)}: windows {', '.join(windows)} chunks, in {len(remaining)} batches; {most} modes of "
        f"serving each; programs to compile for {len(shapes)} {'shape' if len(shapes) == 1 else 'shapes'} of a batch"
    )
