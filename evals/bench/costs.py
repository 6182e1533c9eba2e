"""What edits take on this device: seconds per launch, FLOP and byte of each kind, fitted, and tried on other sizes.

Every kind of edit is run by itself on a `PagedExecutor`, at several numbers of tokens behind several fronts, and timed
until its arrays are there. Rates are fitted to half of the sizes, by least squares of the relative error with no rate
below zero, and predict the other half. Beside it: what planning itself takes, of windows of 256 chunks.
"""

import dataclasses
import datetime
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.plan import DeviceCosts, Rates
from kvpatch_jax.window import Costs, Edit, Edits, Entry, PagedExecutor, PatchNote, Window
from models import Buckets, ModelBackbone, load

from ..results.environment import environment
from . import costs_planning
from .checkpoints import LARGE, random_backbone, tiny_config
from .window_material import span, text_tokens, wait, with_buckets

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
PAGE = 16


class Timed(NamedTuple):
    """A run of one kind of edit: what it counted as, and what it took (the median of its turns)."""

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
      repeats: turns of each run. seed: of weights and tokens, and of which sizes are held out.
      large: a random model of Qwen2-0.5B's shape in place of one of a twelfth. checkpoint: the directory of one.
      quick: a tiny model and a few sizes: shows that it runs.
      busy: counts CPU seconds of all threads in place of the clock's, which others on the machine spoil. They are the
        clock's where the program is pinned to one core that is its own.
    """
    name, backbone = _backbone(seed, large, quick, checkpoint)
    tokens, fronts = (TOKENS[:3], FRONTS[:1]) if quick else (TOKENS, FRONTS)
    with tempfile.TemporaryDirectory() as folder, kvp.ChunkStore(folder, tenant="costs") as store:
        bench = _Bench(backbone, store, max(tokens), max(fronts), repeats, seed, busy)
        timed = [each for size, front in itertools.product(tokens, fronts) for each in bench.runs(size, front)]
    fitted, held_out = split(timed, seed)
    kinds = {kind: fit([each for each in fitted if each.kind == kind]) for kind in KINDS}
    device = str(jax.devices()[0].device_kind)
    counts = (16,) if quick else (32, 256, 1024)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    devices = DeviceCosts(
        device, today, kinds, f"{name}, {len(fitted)} runs, median of {repeats}{', CPU seconds' if busy else ''}"
    )
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        devices.write(Path(out) / "device_costs.json")
    return {
        "config": {"seed": seed, "repeats": repeats, "quick": quick, "model": name, "busy": busy},
        "environment": environment(),
        "device": device,
        "kinds": {kind: list(rates) for kind, rates in kinds.items()},
        "errors": {kind: errors(devices, [each for each in held_out if each.kind == kind]) for kind in KINDS},
        "runs": [each._asdict() | {"held_out": each in held_out} for each in timed],
        "planning": [row for count in counts for row in costs_planning.run(1 if quick else 4 * repeats, count)],
    }


def _backbone(seed: int, large: bool, quick: bool, checkpoint: str | None) -> tuple[str, ModelBackbone]:
    if checkpoint is not None:
        return Path(checkpoint).name, load(checkpoint, buckets=Buckets())
    if quick:
        return "tiny", with_buckets(random_backbone(tiny_config("Qwen2ForCausalLM"), seed))
    raw, name = (LARGE, "Qwen2-0.5B's shape") if large else (MEDIUM, "a twelfth of Qwen2-0.5B")
    return f"random weights, {name}", with_buckets(random_backbone(raw, seed))


class _Bench:
    """One executor, and chunks of several sizes."""

    def __init__(
        self, backbone: ModelBackbone, store: Any, tokens: int, front: int, repeats: int, seed: int, busy: bool
    ):
        self.backbone, self.repeats = backbone, repeats
        self._clock = time.process_time if busy else time.perf_counter
        self._generator = np.random.default_rng([seed, 5])
        dtype = str(backbone.embed(np.zeros((1, 1), np.int32)).embeddings.dtype)
        pages = -(-front // PAGE) + 4 * -(-tokens // PAGE) + 8
        self.executor = PagedExecutor(backbone, pages, PAGE, dtype, store=store)
        self.empty = Window.empty(Costs.of(backbone, dtype), lead=1)
        self._store = store

    def runs(self, size: int, front: int) -> Iterator[Timed]:
        """Runs every kind of edit of a chunk of this size behind a front of that size."""
        executor, id = self.executor, f"chunk {size}"
        tokens = self._chunk(id, size)
        before = self._place(self.empty, "front", self._tokens(front))
        entry = Entry.of_tokens(id, tokens, id, kind="chunk")
        again = lambda window: window.evict(id)

        chunk = self._canonical(id, tokens)
        executor.provide(id, chunk=chunk)
        prefilled = before.append(entry)
        yield self._timed("Prefill", size, front, before, prefilled, again)
        executor.run(*prefilled)
        conditioned = executor.read(prefilled[0], id)
        yield self._timed("Recompute", size, front, prefilled[0], prefilled[0].recompute(id), None)
        yield self._rotated(size, front, prefilled[0], id)
        executor.run(*prefilled[0].evict(id))

        copied = before.append(entry, "bare", fetched=True)
        yield self._timed("Copy", size, front, before, copied, again)
        for rank in RANKS:
            patch = kvp.form_patch(chunk, conditioned, min(rank, size), before.target())
            executor.provide(id, patch=patch)
            changed = before.append(entry, "patch", PatchNote.of(patch), fetched=True)
            yield self._timed("ApplyPatch", size, front, before, changed, again, min(rank, size))
        yield self._fetched(size, front, before, entry, chunk, tokens, copied)
        executor.release("")
        executor.forget(id)

    def _timed(
        self,
        kind: str,
        size: int,
        front: int,
        before: Window,
        changed: tuple[Window, Edits],
        undo: Callable[[Window], tuple[Window, Edits]] | None,
        rank: int = 0,
    ) -> Timed:
        """Times a run of edits, undone between turns; what is returned counts those of the kind alone."""
        window, edits = changed
        seconds = []
        for turn in range(self.repeats + 1):
            taken = self._clocked(window, edits)
            if turn:
                seconds.append(taken)
            if undo is not None:
                self.executor.run(*undo(window))
        return self._counted(kind, size, front, rank, edits, statistics.median(seconds))

    def _rotated(self, size: int, front: int, window: Window, id: str) -> Timed:
        """Times that a chunk turns as a small one in front of it leaves."""
        small = self._tokens(8)
        self._chunk("small", 8, small)
        entry = Entry.of_tokens("small", small, "small", kind="chunk")
        seconds, edits = [], ()
        for turn in range(self.repeats + 1):
            there, placing = window.insert(entry, id)
            self.executor.run(there, placing)
            wait(self.executor.pools)
            window, edits = there.evict("small")
            window = dataclasses.replace(window, evicted=())
            taken = self._clocked(window, edits)
            if turn:
                seconds.append(taken)
        return self._counted("Rotate", size, front, 0, edits, statistics.median(seconds))

    def _fetched(
        self,
        size: int,
        front: int,
        before: Window,
        entry: Entry,
        chunk: kvp.Chunk,
        tokens: Tokens,
        copied: tuple[Window, Edits],
    ) -> Timed:
        """Times a canonical from the store (from its memory, for it was put there) and placed; less the placing.

        Placing alone is timed right after each turn, for it is the larger part: what is left is a small difference,
        which two medians of runs at different times would lose.
        """
        self._store.put(chunk)
        seconds, (window, edits) = [], before.append(entry, "bare")
        for turn in range(self.repeats + 1):
            self.executor.forget(entry.id)
            whole = self._clocked(window, edits)
            self.executor.run(*window.evict(entry.id))
            placing = self._clocked(*copied)
            self.executor.run(*window.evict(entry.id))
            if turn:
                seconds.append(whole - placing)
        self.executor.provide(entry.id, tokens=tokens, chunk=chunk)
        return self._counted("Fetch", size, front, 0, edits, max(statistics.median(seconds), 1e-7))

    def _clocked(self, window: Window, edits: Edits) -> float:
        begin = self._clock()
        self.executor.run(window, edits)
        wait(self.executor.pools)
        return self._clock() - begin

    def _counted(self, kind: str, size: int, front: int, rank: int, edits: Sequence[Edit], seconds: float) -> Timed:
        own = [edit for edit in edits if type(edit).__name__ == kind]
        nbytes, flops = sum(edit.bytes for edit in own), sum(edit.flops for edit in own)
        return Timed(kind, size, front, rank, nbytes, flops, seconds)

    def _place(self, window: Window, id: str, tokens: Tokens) -> Window:
        self.executor.release("")
        self.executor.forget(id)
        self.executor.provide(id, tokens=tokens, content=id)
        window, edits = window.append(Entry.of_tokens(id, tokens, id))
        self.executor.run(window, edits)
        return window

    def _canonical(self, id: str, tokens: Tokens) -> kvp.Chunk:
        kv = {name: value[:, 0] for name, value in self.backbone.prefill(tokens).kv.items()}
        local = np.asarray(tokens.positions, np.float32)[0]
        about = self.backbone.layout, self.backbone.fingerprint
        return kvp.Chunk(kv, local, span(tokens), len(local), id, *about, content=id)

    def _chunk(self, id: str, size: int, tokens: Tokens | None = None) -> Tokens:
        tokens = self._tokens(size) if tokens is None else tokens
        self.executor.forget(id)
        self.executor.provide(id, tokens=tokens, content=id)
        return tokens

    def _tokens(self, size: int) -> Tokens:
        return text_tokens(self.backbone, self._generator.integers(3, 290, (1, size)).astype(np.int32))


def split(timed: Sequence[Timed], seed: int) -> tuple[list[Timed], list[Timed]]:
    """Half of the sizes of each kind to fit, the other half held out."""
    generator, fitted, held_out = np.random.default_rng([seed, 6]), [], []
    for kind in KINDS:
        own = [each for each in timed if each.kind == kind]
        order = generator.permutation(len(own))
        for place, index in enumerate(order):
            (fitted if place <= len(own) // 2 else held_out).append(own[index])
    return fitted, held_out


def fit(timed: Sequence[Timed]) -> Rates:
    """Fits seconds per launch, FLOP and byte, none below zero: least squares of the relative error.

    The best of all sets of rates that may be above zero; of equally good ones the first, which has fewest.
    """
    features = np.array([[1.0, each.flops, each.bytes] for each in timed])
    scale = np.maximum(features.max(axis=0), 1e-30)
    seconds = np.array([each.seconds for each in timed])
    rows = features / scale / seconds[:, None]
    best, found = np.inf, np.zeros(3)
    for count in range(1, 4):
        for chosen in itertools.combinations(range(3), count):
            values = np.linalg.lstsq(rows[:, list(chosen)], np.ones(len(timed)), rcond=None)[0]
            residual = float(np.square(rows[:, list(chosen)] @ values - 1).sum())
            if (values >= 0).all() and residual < best - 1e-9:
                best, found = residual, np.zeros(3)
                found[list(chosen)] = values
    return Rates(*(float(value) for value in found / scale))


def errors(devices: DeviceCosts, timed: Sequence[Timed]) -> dict[str, Any]:
    """Relative errors of what is predicted of runs that were not fitted: median and largest."""
    if not timed:
        return {"runs": 0}
    found = []
    for each in timed:
        launch, flop, byte = devices.rates(each.kind)
        found.append(abs(launch + flop * each.flops + byte * each.bytes - each.seconds) / each.seconds)
    return {"runs": len(found), "median": statistics.median(found), "largest": max(found)}


def table(result: Mapping[str, Any]) -> str:
    """Rates and errors by kind, and what planning takes."""
    lines = [
        "| edit | s per launch | s per FLOP | s per byte | held-out runs | median error | largest |",
        "|" + "---|" * 7,
    ]
    for kind, rates in result["kinds"].items():
        own = result["errors"][kind]
        wrong = [f"{own[word]:.0%}" if word in own else "–" for word in ("median", "largest")]
        lines.append(
            f"| {kind} | {' | '.join(f'{rate:.3g}' for rate in rates)} | {own['runs']} | {' | '.join(wrong)} |"
        )
    head = "| planning | pieces | CPU ms, median | 95 % | least | longest gc, ms | seconds on the clock |"
    lines += ["", head, "|" + "---|" * 7]
    for row in result["planning"]:
        cpu = " | ".join(f"{1e3 * row[word]:.2f}" for word in ("cpu", "cpu_high", "cpu_low", "collected"))
        shown = f"{cpu} | {row['seconds']:.4f}"
        lines.append(f"| {row['name']} | {row['pieces']} | {shown} |")
    return "\n".join(lines) + "\n"
