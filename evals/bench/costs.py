"""What an executor's actions take on this device, for plans: seconds per launch, FLOP and byte of each kind.

Every kind of action runs by itself on an `Executor`, at several numbers of tokens behind fronts of several lengths.
Rates are fitted to half of the sizes, by least squares of the relative error with no rate below zero, and predict the
other half. With --out, `device_costs.json` is what `plan(..., costs=DeviceCosts.read(...))` takes.
"""

import datetime
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.optimize import nnls

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.models import Buckets, ModelBackbone
from kvpatch_jax.models.random_weights import random_backbone
from kvpatch_jax.plan import DeviceCosts, Rates
from kvpatch_jax.window import BARE, ActionKind, Entry, Executor, PatchNote, Service, Step, Window, total

from .benchmark import Benchmark, BenchOptions, Sides
from .operators import MEDIUM, TINY
from .shapes import random_ids

TOKENS, FRONTS, RANKS, TURNS = (24, 64, 100, 160, 256, 384), (64, 320, 896), (8, 32), 5
PAGE = 16


class ActionRun(NamedTuple):
    """A run of one kind of action: the bytes and FLOPs that it counts, and its seconds, the median of its turns."""

    kind: ActionKind
    bytes: int
    flops: int
    seconds: float


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the rates of actions, which have no peers."""
    name, raw = ("tiny", TINY) if options.quick else ("a twelfth of Qwen2-0.5B", MEDIUM)
    yield Benchmark("costs.rates", name, functools.partial(_rates, name, raw, options))


def _rates(name: str, raw: dict[str, Any], options: BenchOptions) -> Sides:
    """Measures, fits and writes the rates; each is a figure."""
    backbone = random_backbone(raw, options.seed).with_buckets(Buckets())
    sizes = list(itertools.product(*((TOKENS[:3], FRONTS[:1]) if options.quick else (TOKENS, FRONTS))))
    with tempfile.TemporaryDirectory() as folder, kvp.ChunkStore(folder, tenant="costs") as store:
        timer = ActionTimer(backbone, store, options.seed)
        runs = [run for tokens, front in sizes for run in timer.runs(tokens, front)]

    kinds, figures, generator = {}, {}, np.random.default_rng(options.seed)
    for kind in dict.fromkeys(run.kind for run in runs):
        shuffled = [run for run in runs if run.kind == kind]
        generator.shuffle(shuffled)
        half = len(shuffled) // 2 + 1
        kinds[kind] = rates = fit(shuffled[:half])
        errors = []
        for run in shuffled[half:]:
            predicted = rates.launch + rates.flop * run.flops + rates.byte * run.bytes
            errors.append(abs(predicted / run.seconds - 1))
        figures |= {(kind, f"s per {unit}"): [rate] for unit, rate in rates._asdict().items()}
        figures[kind, "held-out error"] = errors

    if options.out is not None:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        today, device = datetime.datetime.now(datetime.UTC).date().isoformat(), str(jax.devices()[0].device_kind)
        about = f"random weights, {name}, {len(runs)} runs, median of {TURNS}"
        DeviceCosts(device, today, kinds, about).write(Path(options.out) / "device_costs.json")
    return Sides({}, figures=lambda: figures)


def fit(runs: Sequence[ActionRun]) -> Rates:
    """Fits seconds per launch, FLOP and byte, none below zero: least squares of the relative error."""
    features = np.array([[1.0, run.flops, run.bytes] for run in runs])
    scale = np.maximum(features.max(axis=0), 1e-30)
    seconds = np.array([run.seconds for run in runs])
    rates, _ = nnls(features / scale / seconds[:, None], np.ones(len(runs)))
    return Rates(*(float(value) for value in rates / scale))


class ActionTimer:
    """Times actions on chunks of several sizes on one executor, which then goes back to where it was."""

    def __init__(self, backbone: ModelBackbone, store: kvp.ChunkStore, seed: int):
        self.backbone, self.store, self.seed = backbone, store, seed
        dtype = str(backbone.embed(np.zeros((1, 1), np.int32)).embeddings.dtype)
        pages = -(-max(FRONTS) // PAGE) + 4 * -(-max(TOKENS) // PAGE) + 8
        self.executor = Executor(backbone, pages, PAGE, dtype, store=store)

    def runs(self, size: int, front: int) -> Iterator[ActionRun]:
        """Runs every kind of action on a chunk of this size behind a front of that size."""
        executor, id = self.executor, f"chunk {size}"
        executor.release("")
        window = Window.empty(self.backbone, lead=1).append(self._entry("front", front)[0])
        executor.run(window)
        entry, tokens = self._entry(id, size)
        kv = {name: value[:, 0] for name, value in self.backbone.prefill(tokens).kv.items()}
        local, fingerprint = np.arange(size, dtype=np.float32), self.backbone.fingerprint
        chunk = kvp.Chunk(kv, local, size, size, id, self.backbone.layout, fingerprint, content=id)
        executor.provide(id, chunk=chunk)

        prefilled, placed = window.append(entry), window.append(entry, BARE)
        yield self._repeated("prefill", window, prefilled)
        executor.run(prefilled)
        conditioned = executor.read(prefilled, id)
        # A chunk rotates when a small one in front of it comes in, and again when it leaves.
        inserted = prefilled.insert(self._entry("small", 8)[0], id)
        yield self._repeated("rotate", inserted, prefilled)

        yield self._repeated("copy", window, placed)
        for rank in RANKS:
            patch = kvp.form_patch(chunk, conditioned, min(rank, size), window.target(), force=True)
            executor.provide(id, patch=patch)
            yield self._repeated("patch", window, window.append(entry, Service("patch", PatchNote.of(patch))))

        # A fetch is from the store's memory, where the chunk was put.
        self.store.put(chunk)
        yield self._fetches(window, placed)
        executor.release("")
        executor.forget(id)

    def _repeated(self, kind: ActionKind, before: Window, after: Window) -> ActionRun:
        """Takes the turns from one window to another; the first one warms up. Other kinds are not counted."""
        turns = []
        for _ in range(TURNS + 1):
            self.executor.run(before)
            turns.append(self._timed(after))
        return _median(kind, turns[1:])

    def _fetches(self, before: Window, placed: Window) -> ActionRun:
        """Times a fetch and a copy, less a copy right behind them: a difference of medians would be lost in noise."""
        turns = []
        for _ in range(TURNS + 1):
            self.executor.run(before)
            self.executor.forget(placed.ids[-1])
            step, both = self._timed(placed)
            self.executor.run(before)
            turns.append((step, max(1e-7, both - self._timed(placed)[1])))
        return _median("fetch", turns[1:])

    def _timed(self, window: Window) -> tuple[Step, float]:
        """Runs a window. Returns what was done, and seconds."""
        begin = time.perf_counter()
        step = self.executor.run(window)
        jax.block_until_ready(self.executor.pools)
        return step, time.perf_counter() - begin

    def _entry(self, id: str, size: int) -> tuple[Entry, Tokens]:
        """Draws the tokens of a piece and provides them."""
        tokens = self.backbone.embed(**self.backbone.prepare([random_ids(size, self.seed)]))
        self.executor.forget(id)
        self.executor.provide(id, tokens=tokens, content=id)
        return Entry.of_tokens(id, tokens, id, kind="text" if id == "front" else "chunk"), tokens


def _median(kind: ActionKind, turns: Sequence[tuple[Step, float]]) -> ActionRun:
    """Returns the median of turns that did the same."""
    _, nbytes, flops = total(turns[0][0], kind)
    return ActionRun(kind, nbytes, flops, statistics.median(seconds for _, seconds in turns))
