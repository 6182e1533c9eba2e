"""What a window's edits take on this device, for plans: seconds per launch, FLOP and byte of each kind.

Every kind of edit runs by itself on a `PagedExecutor`, at several numbers of tokens behind fronts of several lengths.
Rates are fitted to half of the sizes, by least squares of the relative error with no rate below zero, and predict the
other half. With --out, `device_costs.json` is what `plan(..., costs=DeviceCosts.read(...))` takes.
"""

import datetime
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.optimize import nnls

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.plan import DeviceCosts, Rates
from kvpatch_jax.window import Costs, Edits, Entry, PagedExecutor, PatchNote, Window
from models import ModelBackbone
from models.random_weights import random_backbone

from .benchmark import Benchmark, BenchOptions, Sides
from .operators import MEDIUM, TINY
from .shapes import random_ids, with_buckets

TOKENS, FRONTS, RANKS, TURNS = (24, 64, 100, 160, 256, 384), (64, 320, 896), (8, 32), 5
PAGE = 16


class EditRun(NamedTuple):
    """A run of one kind of edit: the bytes and FLOPs that it counts, and its seconds, the median of its turns."""

    kind: str
    bytes: int
    flops: int
    seconds: float


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the rates of edits, which have no peers."""
    name, raw = ("tiny", TINY) if options.quick else ("a twelfth of Qwen2-0.5B", MEDIUM)
    yield Benchmark("costs.rates", name, functools.partial(_rates, name, raw, options))


def _rates(name: str, raw: dict[str, Any], options: BenchOptions) -> Sides:
    """Measures, fits and writes the rates; each is a figure."""
    backbone = with_buckets(random_backbone(raw, options.seed))
    sizes = list(itertools.product(*((TOKENS[:3], FRONTS[:1]) if options.quick else (TOKENS, FRONTS))))
    with tempfile.TemporaryDirectory() as folder, kvp.ChunkStore(folder, tenant="costs") as store:
        timer = EditTimer(backbone, store, options.seed)
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


def fit(runs: Sequence[EditRun]) -> Rates:
    """Fits seconds per launch, FLOP and byte, none below zero: least squares of the relative error."""
    features = np.array([[1.0, run.flops, run.bytes] for run in runs])
    scale = np.maximum(features.max(axis=0), 1e-30)
    seconds = np.array([run.seconds for run in runs])
    rates, _ = nnls(features / scale / seconds[:, None], np.ones(len(runs)))
    return Rates(*(float(value) for value in rates / scale))


class EditTimer:
    """Times edits of chunks of several sizes on one executor, each of which it undoes."""

    def __init__(self, backbone: ModelBackbone, store: kvp.ChunkStore, seed: int):
        self.backbone, self.store, self.seed = backbone, store, seed
        dtype = str(backbone.embed(np.zeros((1, 1), np.int32)).embeddings.dtype)
        pages = -(-max(FRONTS) // PAGE) + 4 * -(-max(TOKENS) // PAGE) + 8
        self.executor = PagedExecutor(backbone, pages, PAGE, dtype, store=store)
        self.empty = Window.empty(Costs.of(backbone, dtype), lead=1)

    def runs(self, size: int, front: int) -> Iterator[EditRun]:
        """Runs every kind of edit of a chunk of this size behind a front of that size."""
        executor, id = self.executor, f"chunk {size}"
        executor.release("")
        window, edits = self.empty.append(self._entry("front", front)[0])
        executor.run(window, edits)
        entry, tokens = self._entry(id, size)
        kv = {name: value[:, 0] for name, value in self.backbone.prefill(tokens).kv.items()}
        local, fingerprint = np.arange(size, dtype=np.float32), self.backbone.fingerprint
        chunk = kvp.Chunk(kv, local, size, size, id, self.backbone.layout, fingerprint, content=id)
        executor.provide(id, chunk=chunk)

        prefilled, copied = window.append(entry), window.append(entry, "bare", fetched=True)
        yield _repeated("Prefill", prefilled, functools.partial(self._placed, prefilled, id))
        self._seconds(prefilled)
        conditioned = executor.read(prefilled[0], id)
        recomputed = prefilled[0].recompute(id)
        yield _repeated("Recompute", recomputed, functools.partial(self._seconds, recomputed))

        # A chunk rotates when a small one in front of it leaves.
        inserted = prefilled[0].insert(self._entry("small", 8)[0], id)
        closed = inserted[0].evict("small")
        yield _repeated("Rotate", closed, lambda: (self._seconds(inserted), self._seconds(closed))[1])
        executor.run(*prefilled[0].evict(id))

        yield _repeated("Copy", copied, functools.partial(self._placed, copied, id))
        for rank in RANKS:
            patch = kvp.form_patch(chunk, conditioned, min(rank, size), window.target())
            executor.provide(id, patch=patch)
            patched = window.append(entry, "patch", PatchNote.of(patch), fetched=True)
            yield _repeated("ApplyPatch", patched, functools.partial(self._placed, patched, id))

        # A fetch is from the store's memory, where the chunk was put.
        self.store.put(chunk)
        fetched = window.append(entry, "bare")
        yield _repeated("Fetch", fetched, functools.partial(self._fetched, fetched, copied, id))
        executor.release("")
        executor.forget(id)

    def _seconds(self, changed: tuple[Window, Edits]) -> float:
        """Times edits."""
        begin = time.perf_counter()
        self.executor.run(*changed)
        jax.block_until_ready(self.executor.pool.vectors)
        return time.perf_counter() - begin

    def _placed(self, changed: tuple[Window, Edits], id: str) -> float:
        """Times edits that place a piece, and evicts it."""
        seconds = self._seconds(changed)
        self.executor.run(*changed[0].evict(id))
        return seconds

    def _fetched(self, fetched: tuple[Window, Edits], copied: tuple[Window, Edits], id: str) -> float:
        """Times a fetch and a copy, less a copy right behind them: a difference of medians would be lost in noise."""
        self.executor.forget(id)
        return max(1e-7, self._placed(fetched, id) - self._placed(copied, id))

    def _entry(self, id: str, size: int) -> tuple[Entry, Tokens]:
        """Draws the tokens of a piece and provides them."""
        tokens = self.backbone.embed(**self.backbone.prepare([random_ids(size, self.seed)]))
        self.executor.forget(id)
        self.executor.provide(id, tokens=tokens, content=id)
        return Entry.of_tokens(id, tokens, id, kind="text" if id == "front" else "chunk"), tokens


def _repeated(kind: str, changed: tuple[Window, Edits], turn: Callable[[], float]) -> EditRun:
    """Takes the turns of one kind; the first one warms up. Edits of other kinds come along, and are not counted."""
    seconds = [turn() for _ in range(TURNS + 1)][1:]
    edits = [edit for edit in changed[1] if type(edit).__name__ == kind]
    nbytes, flops = sum(edit.bytes for edit in edits), sum(edit.flops for edit in edits)
    return EditRun(kind, nbytes, flops, statistics.median(seconds))
