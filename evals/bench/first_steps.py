"""A user's first steps: what a session over images of ten sizes compiles, and what the next process finds compiled.

The same program, a loop of 50 steps with the trained model, runs in two processes one after the other, which share an
empty cache folder. Its images are noise: what is compiled depends on their sizes alone.

    python -m evals.bench.first_steps  # one process; prints its figures as JSON
"""

import collections
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.monitoring
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.models import load
from kvpatch_jax.utils.compiling import COMPILING

from .benchmark import Benchmark, BenchOptions, Sides

MODEL = Path(__file__).parents[1] / "trained" / "documents" / "qwen2_5_vl"
SIZES = (
    (224, 224), (280, 196), (336, 252), (252, 392), (448, 280),
    (308, 308), (420, 420), (196, 476), (364, 224), (392, 336),
)  # fmt: skip
"""Height and width of the images: 64 to 225 tokens of 28 by 28 pixels."""
QUESTIONS = ("unit of seed?", "unit of seed? unit of seed?", "unit of seed? unit of seed? unit of seed?")
STEPS, KEEP = 50, 3


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the loop in a first and in a second process."""
    steps = 3 if options.quick else STEPS
    yield Benchmark("first_steps.loop", f"{steps} steps, ten sizes", functools.partial(_processes, steps))


def _processes(steps: int) -> Sides:
    """Runs the loop in two processes; everything is a figure."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first process", "second process"):
            environment = os.environ | {"KVPATCH_CACHE": folder}
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
            command = [sys.executable, "-m", "evals.bench.first_steps", str(steps)]
            # What a process prints goes to a file: a full pipe would stop it.
            with tempfile.TemporaryFile("w+") as output:
                subprocess.run(command, env=environment, stdout=output, check=True)
                output.seek(0)
                result = json.loads(output.read().splitlines()[-1])
            for metric, value in result.items():
                if not isinstance(value, Mapping):
                    figures[name, metric] = [float(value)]
    for metric in ("first answer, s", "first answer, CPU s", "process to first answer, CPU s"):
        first, second = (figures[name, metric][0] for name in ("first process", "second process"))
        figures["second process", f"{metric} over first's"] = [second / first]
    return Sides({}, figures=lambda: figures)


def loop(steps: int) -> dict[str, Any]:
    """Runs the loop in this process: each step adds an image and asks.

    Returns:
      Seconds and CPU seconds from a loaded model to the first answer; how many programs were compiled or found, with
      their names; and the share of the tokens run that are padding.
    """
    programs = collections.Counter[str]()

    def heard(event: str, duration_secs: float, **about: str | int) -> None:
        if event == COMPILING:
            programs[str(about["fun_name"])] += 1

    jax.monitoring.register_event_duration_secs_listener(heard)
    backbone, pixels = load(MODEL), np.random.default_rng(0)
    tokens, padded, clocks = 0, 0, [(time.perf_counter(), time.process_time())]
    with (
        tempfile.TemporaryDirectory() as folder,
        kvp.ChunkStore(folder) as store,
        kvp.Session(backbone, store, keep=KEEP) as session,
    ):
        padding: Any = session.backbone
        for step in range(steps):
            session.add(pixels.integers(0, 255, (*SIZES[step % len(SIZES)], 3), np.uint8))
            assert session.ask(QUESTIONS[step % len(QUESTIONS)]).ids
            clocks.append((time.perf_counter(), time.process_time()))
            length = session.window.pieces[-1].entry.tokens
            tokens, padded = tokens + length, padded + padding.buckets.round_up(length)
    jax.monitoring.unregister_event_duration_listener(heard)

    (begin, cpu), (first, first_cpu), (last, _) = clocks[0], clocks[1], clocks[-1]
    figures = {"first answer, s": first - begin, "first answer, CPU s": first_cpu - cpu}
    # Imports and loading are in it, which no compiled program shortens.
    figures |= {"process to first answer, CPU s": first_cpu, "loop, s": last - begin}
    return figures | {"programs": programs.total(), "padding": 1 - tokens / padded, "names": programs}


if __name__ == "__main__":
    print(json.dumps(loop(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)))
