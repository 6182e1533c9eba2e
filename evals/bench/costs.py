"""What edits take on this device: seconds per launch, FLOP and byte of each kind, fitted, and tried on other sizes.

Every kind of edit is run by itself on a `PagedExecutor`, at several numbers of tokens after fronts of several lengths,
and timed until its arrays are there. Rates are fitted to half of the sizes, by least squares of the relative error with
no rate below zero, and predict the other half. Beside it: what planning itself takes, of windows of 256 chunks.
"""

import dataclasses
import datetime
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.plan import DeviceCosts, Rates
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.window import Costs, Edits, Entry, PagedExecutor, PatchNote, Window
from models import Buckets, ModelBackbone, load

from ..harness.environment import environment
from ..harness.tables import markdown_table
from . import costs_planning
from .benchmark import Benchmark
from .checkpoints import LARGE, random_backbone, tiny_config
from .loop_workload import text_tokens, with_buckets
from .window_loop import PAGE, canonical_of

MEDIUM = LARGE | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}
"""Qwen2's, with a twelfth of Qwen2-0.5B's parameters."""
TOKENS = (24, 64, 100, 160, 256, 384)
FRONTS = (64, 320, 896)
RANKS = (8, 32)
KINDS = ("Prefill", "Recompute", "Copy", "ApplyPatch", "Rotate", "Fetch")


class TimedEdits(NamedTuple):
    """A run of one kind of edit: its counts, and what it took (the median of its turns)."""

    kind: str
    tokens: int
    front: int
    rank: int
    bytes: int
    flops: int
    seconds: float


def run(
    *,
    repeats: int = 5,
    seed: int = 0,
    out: str | None = None,
    large: bool = False,
    quick: bool = False,
    checkpoint: str | None = None,
    busy: bool = False,
) -> dict[str, Any]:
    """Measures, fits, and with `out` writes `device_costs.json`, which plans read.

    Args:
      repeats: turns of each run.
      seed: of weights and tokens, and of which sizes are held out.
      large: a random model of Qwen2-0.5B's shape in place of one of a twelfth.
      checkpoint: the directory of a model in its place.
      quick: a tiny model and a few sizes: a preview, not a measurement.
      busy: counts CPU seconds of all threads in place of the clock's, which others on the machine spoil. They are the
        clock's where the program is pinned to one core of its own.
    """
    if checkpoint is not None:
        name, backbone = Path(checkpoint).name, load(checkpoint, buckets=Buckets())
    elif quick:
        name, backbone = "tiny", with_buckets(random_backbone(tiny_config("Qwen2ForCausalLM"), seed))
    else:
        raw, shape = (LARGE, "Qwen2-0.5B's shape") if large else (MEDIUM, "a twelfth of Qwen2-0.5B")
        name, backbone = f"random weights, {shape}", with_buckets(random_backbone(raw, seed))

    tokens, fronts = (TOKENS[:3], FRONTS[:1]) if quick else (TOKENS, FRONTS)
    with tempfile.TemporaryDirectory() as folder, ChunkStore(folder, tenant="costs") as store:
        timer = _EditTimer(backbone, store, max(tokens), max(fronts), repeats, seed, busy)
        timed: list[TimedEdits] = []
        for size, front in itertools.product(tokens, fronts):
            timed += timer.runs(size, front)

    fitted, held_out = split(timed, seed)
    kinds = {kind: fit(edits) for kind, edits in _by_kind(fitted).items()}
    device = str(jax.devices()[0].device_kind)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"{name}, {len(fitted)} runs, median of {repeats}{', CPU seconds' if busy else ''}"
    devices = DeviceCosts(device, today, kinds, source)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        devices.write(Path(out) / "device_costs.json")

    planning = []
    for count in (16,) if quick else (32, 256, 1024):
        planning += costs_planning.run(1 if quick else 4 * repeats, count)
    return {
        "config": {"seed": seed, "repeats": repeats, "quick": quick, "model": name, "busy": busy},
        "environment": environment(),
        "device": device,
        "kinds": {kind: list(rates) for kind, rates in kinds.items()},
        "errors": {kind: errors(devices, edits) for kind, edits in _by_kind(held_out).items()},
        "runs": [edits._asdict() | {"held_out": edits in held_out} for edits in timed],
        "planning": planning,
    }


class _EditTimer:
    """Times edits of chunks of several sizes on one executor."""

    def __init__(
        self,
        backbone: ModelBackbone,
        store: kvp.ChunkStore,
        tokens: int,
        front: int,
        repeats: int,
        seed: int,
        busy: bool,
    ):
        self.backbone, self.store, self.repeats = backbone, store, repeats
        self._clock = time.process_time if busy else time.perf_counter
        self._generator = np.random.default_rng([seed, 5])
        dtype = str(backbone.embed(np.zeros((1, 1), np.int32)).embeddings.dtype)
        pages = -(-front // PAGE) + 4 * -(-tokens // PAGE) + 8
        self.executor = PagedExecutor(backbone, pages, PAGE, dtype, store=store)
        self.empty = Window.empty(Costs.of(backbone, dtype), lead=1)

    def runs(self, size: int, front: int) -> Iterator[TimedEdits]:
        """Runs every kind of edit of a chunk of this size after a front of that size."""
        executor, id = self.executor, f"chunk {size}"

        def counted(kind: str, edits: Edits, seconds: Sequence[float], rank: int = 0) -> TimedEdits:
            # The first turn warms up. Edits of other kinds come along, and are not counted.
            own = [edit for edit in edits if type(edit).__name__ == kind]
            nbytes, flops = sum(edit.bytes for edit in own), sum(edit.flops for edit in own)
            return TimedEdits(kind, size, front, rank, nbytes, flops, statistics.median(seconds[1:]))

        def repeated(kind: str, changed: tuple[Window, Edits], undone: bool = True, rank: int = 0) -> TimedEdits:
            seconds = []
            for _ in range(self.repeats + 1):
                seconds.append(self._run(*changed))
                if undone:
                    executor.run(*changed[0].evict(id))
            return counted(kind, changed[1], seconds, rank)

        tokens = self._provide(id, size)
        executor.release("")
        before, edits = self.empty.append(Entry.of_tokens("front", self._provide("front", front), "front"))
        executor.run(before, edits)
        entry = Entry.of_tokens(id, tokens, id, kind="chunk")
        chunk = canonical_of(self.backbone, tokens, id)
        executor.provide(id, chunk=chunk)

        prefilled = before.append(entry)
        yield repeated("Prefill", prefilled)
        executor.run(*prefilled)
        conditioned = executor.read(prefilled[0], id)
        yield repeated("Recompute", prefilled[0].recompute(id), undone=False)

        # It rotates when a small chunk in front of it leaves.
        window, seconds, edits = prefilled[0], [], ()
        small = Entry.of_tokens("small", self._provide("small", 8), "small", kind="chunk")
        for _ in range(self.repeats + 1):
            inserted, placing = window.insert(small, id)
            self._run(inserted, placing)
            window, edits = inserted.evict("small")
            window = dataclasses.replace(window, evicted=())
            seconds.append(self._run(window, edits))
        yield counted("Rotate", edits, seconds)
        executor.run(*prefilled[0].evict(id))

        copied = before.append(entry, "bare", fetched=True)
        yield repeated("Copy", copied)
        for rank in RANKS:
            patch = kvp.form_patch(chunk, conditioned, min(rank, size), before.target())
            executor.provide(id, patch=patch)
            patched = before.append(entry, "patch", PatchNote.of(patch), fetched=True)
            yield repeated("ApplyPatch", patched, rank=min(rank, size))

        # From the store's memory, for it was put there. Placing alone is timed right after each turn, for it is the
        # larger part: what is left is a small difference, which medians of runs at different times would lose.
        self.store.put(chunk)
        fetched, seconds = before.append(entry, "bare"), []
        for _ in range(self.repeats + 1):
            executor.forget(id)
            whole = self._run(*fetched)
            executor.run(*fetched[0].evict(id))
            placing = self._run(*copied)
            executor.run(*fetched[0].evict(id))
            seconds.append(whole - placing)
        found = counted("Fetch", fetched[1], seconds)
        yield found._replace(seconds=max(found.seconds, 1e-7))

        executor.provide(id, tokens=tokens, chunk=chunk)
        executor.release("")
        executor.forget(id)

    def _run(self, window: Window, edits: Edits) -> float:
        begin = self._clock()
        self.executor.run(window, edits)
        jax.block_until_ready(self.executor.pool.vectors)
        return self._clock() - begin

    def _provide(self, id: str, size: int) -> Tokens:
        tokens = text_tokens(self.backbone, self._generator.integers(3, 290, (1, size)).astype(np.int32))
        self.executor.forget(id)
        self.executor.provide(id, tokens=tokens, content=id)
        return tokens


def split(timed: Sequence[TimedEdits], seed: int) -> tuple[list[TimedEdits], list[TimedEdits]]:
    """Draws half of the sizes of each kind to fit, and the other half to hold out."""
    generator, fitted, held_out = np.random.default_rng([seed, 6]), [], []
    for of_kind in _by_kind(timed).values():
        order = generator.permutation(len(of_kind))
        for place, index in enumerate(order):
            (fitted if place <= len(of_kind) // 2 else held_out).append(of_kind[index])
    return fitted, held_out


def _by_kind(timed: Sequence[TimedEdits]) -> dict[str, list[TimedEdits]]:
    """Groups runs by their kind, in the order of `KINDS`."""
    groups: dict[str, list[TimedEdits]] = {kind: [] for kind in KINDS}
    for edits in timed:
        groups[edits.kind].append(edits)
    return groups


def fit(timed: Sequence[TimedEdits]) -> Rates:
    """Fits seconds per launch, FLOP and byte, none below zero: least squares of the relative error.

    The best of all sets of rates that may be above zero; of equally good ones the first, which has fewest.
    """
    features = np.array([[1.0, edits.flops, edits.bytes] for edits in timed])
    scale = np.maximum(features.max(axis=0), 1e-30)
    seconds = np.array([edits.seconds for edits in timed])
    rows = features / scale / seconds[:, None]
    least, rates = np.inf, np.zeros(3)

    for count in range(1, 4):
        for chosen in itertools.combinations(range(3), count):
            columns = rows[:, list(chosen)]
            values = np.linalg.lstsq(columns, np.ones(len(timed)), rcond=None)[0]
            residual = float(np.square(columns @ values - 1).sum())
            if (values >= 0).all() and residual < least - 1e-9:
                least, rates = residual, np.zeros(3)
                rates[list(chosen)] = values

    return Rates(*(float(value) for value in rates / scale))


def errors(devices: DeviceCosts, timed: Sequence[TimedEdits]) -> dict[str, Any]:
    """Computes relative errors of the prediction of runs that were not fitted: median and largest."""
    if not timed:
        return {"runs": 0}
    relative = []
    for edits in timed:
        launch, flop, byte = devices.rates(edits.kind)
        relative.append(abs(launch + flop * edits.flops + byte * edits.bytes - edits.seconds) / edits.seconds)
    return {"runs": len(relative), "median": statistics.median(relative), "largest": max(relative)}


def table(result: Mapping[str, Any]) -> str:
    """Formats rates and errors by kind, and what planning takes, as Markdown."""
    lines = []
    for kind, rates in result["kinds"].items():
        error = result["errors"][kind]
        shown = [f"{error[name]:.0%}" if name in error else "–" for name in ("median", "largest")]
        lines.append([kind, *(f"{rate:.3g}" for rate in rates), str(error["runs"]), *shown])

    head = ["edit", "s per launch", "s per FLOP", "s per byte", "held-out runs", "median error", "largest"]
    fitted = markdown_table(head, lines)

    lines = []
    for row in result["planning"]:
        cpu = [f"{1e3 * row[column]:.2f}" for column in ("cpu", "cpu_high", "collected")]
        lines.append([row["name"], str(row["pieces"]), *cpu])

    head = ["planning", "pieces", "CPU ms, median", "95 %", "longest gc, ms"]
    return f"{fitted}\n\n{markdown_table(head, lines)}\n"


BENCHMARK = Benchmark("costs", run, table=table)
