"""Expected duration of a run: programs to compile, forwards, patches, and answers that are read.

Two forwards are timed before the run: of a window, and of a piece behind one. Everything else is counted in these, and
in compilations of the window's. `Progress` weighs the pace that is met more from a tenth of the work on.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from kvpatch_jax.plan import DeviceCosts

from ..console import in_words
from ..probes.window.image_sequence import PIECE, AgentLoop, bucket, prefilled
from ..probes.window.probe_images import of_tokens
from .certification_run import CertificationRun
from .mixtures import DRAWS
from .serving_modes import ORDERS
from .window_sources import WindowSpec

COMPILED, RECOMPILED = 60.0, 20.0
"""Compilations of a window's prefill that all programs amount to: for the first windows, for those of another shape."""
READ = 2.0
"""Forwards over a piece that joining a cache, and reading it, amounts to."""
PATCHED = 0.5
"""Forwards over a piece that forming a patch amounts to."""
REPAIRED = 3.0
"""Forwards over a piece that repairing one amounts to."""
BOUNDS = 6
"""Bounds that plans and mixtures are tested at."""


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
    """Times a batch that was not measured yet, of the least size: a window's prefill, and a piece's behind a window."""
    remaining = (spec for number, spec in enumerate(run.source.specs) if not run.is_measured(number))
    spec = next(remaining, run.source.specs[-1])
    rows, size = len(spec.clusters), run.source.size(run.backbone, spec)
    piece, axes = max(1, size // spec.chunks), run.backbone.layout.rope.axes
    positions = np.broadcast_to(np.arange(size, dtype=np.int32), (rows, size))
    if axes is not None:
        positions = np.repeat(positions[..., None], axes, axis=2)
    whole = run.backbone.embed(np.zeros((rows, size), np.int32), positions)
    tokens = run.backbone.embed(np.zeros((rows, piece), np.int32), positions[:, :piece])
    image, loop = of_tokens(run.backbone, tokens, "piece", "piece"), AgentLoop(run.backbone, size)
    loop.held = [(image, image.canonical)] * spec.chunks

    windows, pieces = [], []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(prefilled(run.backbone, whole, chunk=PIECE))
        middle = time.perf_counter()
        loop.prefill(image)
        windows.append(middle - began)
        pieces.append(time.perf_counter() - middle)

    # What a piece takes beyond its FLOPs is launching: padding its context, and bringing its KV to the host.
    costs = run.backbone.forward_costs
    flop = min(windows[1:]) / (rows * costs.flops(size))
    launch = max(0.0, min(pieces[1:]) - flop * rows * costs.flops(piece, size))
    return Pace(flop, launch, max(windows[0] - min(windows[1:]), 0.0))


def expected_steps(run: CertificationRun, pace: Pace) -> Iterator[float]:
    """Yields the expected seconds of each step: every mode of every batch, then every batch that is planned for."""
    compiled, planned = set[tuple[int, int]](), []
    costs, modes = run.backbone.forward_costs, run.modes
    for number, spec in enumerate(run.source.specs):
        rows, size = len(spec.clusters), run.source.size(run.backbone, spec)
        window = pace.launch + rows * pace.flop * costs.flops(size)
        piece = pace.launch + rows * pace.flop * costs.flops(max(1, size // spec.chunks), size)
        planned += [window + _planned_pieces(run, spec) * piece] if spec.held_out else []
        if run.is_measured(number):
            continue

        # Only the first batch of a size compiles.
        windows = 1.0 + ORDERS * modes.has("orbit")
        seconds = windows * window + _pieces(run, spec) * piece
        shape = rows, bucket(run.backbone, size)
        if shape not in compiled:
            seconds += (RECOMPILED if compiled else COMPILED) * pace.compilation
        compiled.add(shape)
        steps = modes.number(spec.chunks)
        yield from [seconds / steps] * steps

    yield from planned


def _pieces(run: CertificationRun, spec: WindowSpec) -> float:
    """Counts the forwards over one piece that serving and reading a batch amounts to."""
    modes, size = run.modes, spec.chunks
    ranks, served = len(modes.ranks), sum(modes.counts(size)[1:])
    forwards = {
        "survivor": float(sum(size + slides for slides in modes.slides)),
        "orbit": PATCHED * ranks,
        "update": 2 * size * (2 + PATCHED * (1 + ranks)),
        "fresh": 2 * len(modes.fresh_ranks) * served * (1 + PATCHED),
        "repair": 2 * REPAIRED * sum(modes.repaired(size)),
        "near": 10.0 * size,
    }
    # Canonicals of the window and of what was there before, the windows that are kept, and patches.
    shared = size + run.source.sizes.most + 3 * size + 2 * PATCHED * size
    return shared + sum(count for point, count in forwards.items() if modes.has(point)) + READ * modes.number(size)


def _planned_pieces(run: CertificationRun, spec: WindowSpec) -> float:
    """Counts the forwards over one piece that plans and mixtures of a batch amount to."""
    size, half = spec.chunks, BOUNDS / 2
    loaded, stored = size + run.source.sizes.most, 10.0 * size
    planned, mixtures = half * (2 * size + READ), half * DRAWS * (size * PATCHED + READ)
    return loaded + stored + planned + mixtures


def announcement(run: CertificationRun, seconds: float) -> str:
    """Returns the line that says how long a run takes, and why."""
    sizes, specs = run.source.sizes, run.source.specs
    remaining = [spec for number, spec in enumerate(specs) if not run.is_measured(number)]
    windows = [f"{count} of {chunks}" for chunks, count in zip(sizes.chunks, sizes.counts, strict=True)]
    modes = [run.modes.number(chunks) for chunks in sizes.chunks]
    shapes = {(len(spec.clusters), bucket(run.backbone, run.source.size(run.backbone, spec))) for spec in remaining}
    most = str(modes[0]) if len(modes) == 1 else f"{modes[0]} to {modes[-1]}"
    return (
        f"about {in_words(seconds)}: windows {', '.join(windows)} chunks, in {len(remaining)} batches; {most} modes of "
        f"serving each; programs to compile for {len(shapes)} {'shape' if len(shapes) == 1 else 'shapes'} of a batch"
    )
