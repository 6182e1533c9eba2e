"""What one warm call of the public face takes: CPU time, and how many of our functions and files it enters.

Two checkouts are compared by running this in each, in turns. Counting needs no quiet machine; the least CPU time of
many calls hardly depends on what else runs.
"""

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvpatch_jax as kvp
from models import Buckets, load

from .. import small_task
from ..harness.environment import environment
from ..trained import MAIN, shipped
from .benchmark import Benchmark, Row, measured_row
from .timing import cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / name) for name in ("kvpatch_jax", "pallas_kernels", "models"))
QUESTION = "fill? b3"


def run(repeats: int) -> dict[str, Any]:
    """Measures each call: one row of CPU microseconds, one of functions and one of files entered."""
    backbone: Any = load(shipped(MAIN), dtype="float32", buckets=Buckets())
    _, pages = small_task.render(small_task.sample_contexts(np.random.default_rng(0), 64))
    rows: list[Row] = []

    with tempfile.TemporaryDirectory() as folder, kvp.ChunkStore(Path(folder) / "store") as store:
        calls = _operator_calls(backbone, pages) | _store_calls(backbone, pages, store, Path(folder) / "store")
        for name, call in calls.items():
            rows += _measure(name, call, 10 * repeats)

    # Each image is new to its session; the first ones fill the window and compile.
    images = itertools.cycle(pages)
    with kvp.Session(backbone, keep=4) as session:
        for _ in range(8):
            session.add(next(images))
        rows += _measure("Session.add", lambda: session.add(next(images)), 5 * repeats)
        rows += _measure("Session.ask", lambda: str(session.ask(QUESTION, steps=1)), 5 * repeats)

    return {"config": {"model": MAIN, "repeats": repeats}, "environment": environment(), "rows": rows}


def _operator_calls(backbone: Any, pages: np.ndarray) -> dict[str, Callable[[], object]]:
    """Returns calls that apply a patch of rank 8 and that splice it into a pool."""
    before, chunk = (kvp.make_chunk(backbone, [page]) for page in pages[:2])
    prompts = [backbone.embed(**backbone.prepare([page])) for page in pages[:2]]
    conditioned = kvp.patching.conditioned(backbone, prompts)[1]
    rows = {name: np.asarray(value)[:, 0] for name, value in conditioned.items()}
    patch = kvp.form_patch(chunk, rows, 8, (before.id,))
    pool = [kvp.pool.make_pool(backbone.layout, 64, 16, "float32")]
    slots = np.arange(16, 16 + chunk.length, dtype=np.int32)

    def splice() -> None:
        # The pool is donated, so each call takes what the last one returned.
        pool[0] = kvp.pool.splice(pool[0], slots, kvp.Placed(chunk, patch, 100, (before.id,)))
        jax.block_until_ready(pool[0])

    def apply() -> None:
        jax.block_until_ready(kvp.apply_patch(kvp.Placed(chunk, patch, 100, (before.id,))))

    return {"apply_patch": apply, "pool.splice": splice}


def _store_calls(
    backbone: Any, pages: np.ndarray, store: kvp.ChunkStore, root: Path
) -> dict[str, Callable[[], object]]:
    """Returns calls that put a new chunk, and that read one from memory and from the disk."""
    chunk, numbers, reads = kvp.make_chunk(backbone, [pages[2]]), itertools.count(), itertools.count()
    store.put(chunk)
    # Another store has nothing in memory, so what it reads for the first time comes from the disk.
    other = kvp.ChunkStore(root)

    def put() -> None:
        store.put(dataclasses.replace(chunk, id=f"page {next(numbers)}"))

    return {
        "store.put": put,
        "store.get, memory": lambda: store.get(chunk.id, chunk.backbone),
        "store.get, disk": lambda: other.get(f"page {next(reads)}", chunk.backbone),
    }


def _measure(name: str, call: Callable[[], object], count: int) -> list[Row]:
    """Returns the rows of one call, which is warm after its first."""
    call()
    spent = [1e6 * cpu_seconds(call) for _ in range(count)]
    functions, files = entered(call)
    return [
        measured_row("CPU microseconds, the least", spent, statistic=min, call=name),
        measured_row("functions entered", [functions], call=name),
        measured_row("files entered", [files], call=name),
    ]


def entered(call: Callable[[], object]) -> tuple[int, int]:
    """Counts our functions that one call enters, and their files. Comprehensions and lambdas are part of a function."""
    entered: set[tuple[str, str]] = set()

    def observe(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and not code.co_name.startswith("<"):
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(observe)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered), len({file for file, _ in entered})


BENCHMARK = Benchmark("calls", run, labels=("call",))
