"""What a window's edits take on this device, for plans: seconds per launch, FLOP and byte of each kind.

Every kind of edit runs by itself on a `PagedExecutor`, at several numbers of tokens behind fronts of several lengths.
Rates are fitted to half of the sizes, by least squares of the relative error with no rate below zero, and predict the
other half. With --out, `device_costs.json` is what `plan(..., costs=DeviceCosts.read(...))` takes.
"""

import dataclasses
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
from kvpatch_jax.plan import DeviceCosts, Rates
from kvpatch_jax.window import Costs, Edits, Entry, PagedExecutor, PatchNote, Window
from models import ModelBackbone
from models.random_weights import random_backbone

from .benchmark import Benchmark, BenchOptions, Sides
from .operators import MEDIUM, TINY
from .shapes import random_ids, with_buckets

TOKENS, FRONTS, RANKS, TURNS = (24, 64, 100, 160, 256, 384), (64, 320, 896), (8, 32), 5
PAGE = 16


class TimedEdits(NamedTuple):
    """A run of one kind of edit: what it counts, and its seconds, the median of its turns."""

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
        timer = EditTimer(
            backbone, store, max(size for size, _ in sizes), max(front for _, front in sizes), options.seed
        )
        timed_edits = [edits for size, front in sizes for edits in timer.runs(size, front)]

    kinds, figures, generator = {}, {}, np.random.default_rng(options.seed)
    for kind in dict.fromkeys(edits.kind for edits in timed_edits):
        runs = [edits for edits in timed_edits if edits.kind == kind]
        order = generator.permutation(len(runs))
        kinds[kind] = rates = fit([runs[index] for index in order[: len(runs) // 2 + 1]])
        errors = []
        for index in order[len(runs) // 2 + 1 :]:
            run = runs[index]
            predicted = rates.launch + rates.flop * run.flops + rates.byte * run.bytes
            errors.append(abs(predicted / run.seconds - 1))
        figures |= {(kind, f"s per {unit}"): [rate] for unit, rate in rates._asdict().items()}
        figures[kind, "held-out error"] = errors

    if options.out is not None:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        today, device = datetime.datetime.now(datetime.UTC).date().isoformat(), str(jax.devices()[0].device_kind)
        about = f"random weights, {name}, {len(timed_edits)} runs, median of {TURNS}"
        DeviceCosts(device, today, kinds, about).write(Path(options.out) / "device_costs.json")
    return Sides({}, figures=lambda: figures)


def fit(runs: Sequence[TimedEdits]) -> Rates:
    """Fits seconds per launch, FLOP and byte, none below zero: least squares of the relative error."""
    features = np.array([[1.0, edits.flops, edits.bytes] for edits in runs])
    scale = np.maximum(features.max(axis=0), 1e-30)
    seconds = np.array([edits.seconds for edits in runs])
    rates, _ = nnls(features / scale / seconds[:, None], np.ones(len(runs)))
    return Rates(*(float(value) for value in rates / scale))


class EditTimer:
    """Times edits of chunks of several sizes on one executor."""

    def __init__(self, backbone: ModelBackbone, store: kvp.ChunkStore, tokens: int, front: int, seed: int):
        self.backbone, self.store, self.seed = backbone, store, seed
        dtype = str(backbone.embed(np.zeros((1, 1), np.int32)).embeddings.dtype)
        pages = -(-front // PAGE) + 4 * -(-tokens // PAGE) + 8
        self.executor = PagedExecutor(backbone, pages, PAGE, dtype, store=store)
        self.empty = Window.empty(Costs.of(backbone, dtype), lead=1)

    def runs(self, size: int, front: int) -> Iterator[TimedEdits]:
        """Runs every kind of edit of a chunk of this size behind a front of that size."""
        executor, id = self.executor, f"chunk {size}"
        tokens = self._provide(id, size)
        executor.release("")
        before, edits = self.empty.append(Entry.of_tokens("front", self._provide("front", front), "front"))
        executor.run(before, edits)
        entry = Entry.of_tokens(id, tokens, id, kind="chunk")
        kv = {name: value[:, 0] for name, value in self.backbone.prefill(tokens).kv.items()}
        local = np.arange(size, dtype=np.float32)
        layout, fingerprint = self.backbone.layout, self.backbone.fingerprint
        chunk = kvp.Chunk(kv, local, size, size, id, layout, fingerprint, content=id)
        executor.provide(id, chunk=chunk)

        prefilled, copied = before.append(entry), before.append(entry, "bare", fetched=True)
        yield self._repeated("Prefill", prefilled, id)
        executor.run(*prefilled)
        conditioned = executor.read(prefilled[0], id)
        yield self._repeated("Recompute", prefilled[0].recompute(id))
        yield self._rotation(prefilled[0], id)
        executor.run(*prefilled[0].evict(id))
        yield self._repeated("Copy", copied, id)
        for rank in RANKS:
            patch = kvp.form_patch(chunk, conditioned, min(rank, size), before.target())
            executor.provide(id, patch=patch)
            yield self._repeated("ApplyPatch", before.append(entry, "patch", PatchNote.of(patch), fetched=True), id)

        yield self._fetch(chunk, before.append(entry, "bare"), copied, id)
        executor.release("")
        executor.forget(id)

    def _rotation(self, window: Window, id: str) -> TimedEdits:
        """Times the rotation of a chunk when a small one in front of it leaves."""
        seconds, edits = [], ()
        small = Entry.of_tokens("small", self._provide("small", 8), "small", kind="chunk")
        for _ in range(TURNS + 1):
            inserted, placing = window.insert(small, id)
            self._run(inserted, placing)
            window, edits = inserted.evict("small")
            window = dataclasses.replace(window, evicted=())
            seconds.append(self._run(window, edits))
        return _counted("Rotate", edits, seconds)

    def _fetch(self, chunk: kvp.Chunk, fetched: Any, copied: Any, id: str) -> TimedEdits:
        """Times a fetch from the store's memory, less a copy right behind it: the difference of medians would be lost.

        The chunk was put there, so nothing is read from the disk.
        """
        self.store.put(chunk)
        seconds = []
        for _ in range(TURNS + 1):
            self.executor.forget(id)
            whole = self._run(*fetched)
            self.executor.run(*fetched[0].evict(id))
            seconds.append(max(1e-7, whole - self._run(*copied)))
            self.executor.run(*fetched[0].evict(id))
        return _counted("Fetch", fetched[1], seconds)

    def _repeated(self, kind: str, changed: tuple[Window, Edits], evicted: str | None = None) -> TimedEdits:
        seconds = []
        for _ in range(TURNS + 1):
            seconds.append(self._run(*changed))
            if evicted is not None:
                self.executor.run(*changed[0].evict(evicted))
        return _counted(kind, changed[1], seconds)

    def _run(self, window: Window, edits: Edits) -> float:
        begin = time.perf_counter()
        self.executor.run(window, edits)
        jax.block_until_ready(self.executor.pool.vectors)
        return time.perf_counter() - begin

    def _provide(self, id: str, size: int) -> Tokens:
        tokens = self.backbone.embed(**self.backbone.prepare([random_ids(size, self.seed)]))
        self.executor.forget(id)
        self.executor.provide(id, tokens=tokens, content=id)
        return tokens


def _counted(kind: str, edits: Edits, seconds: Sequence[float]) -> TimedEdits:
    # The first turn warms up. Edits of other kinds come along, and are not counted.
    counted = [edit for edit in edits if type(edit).__name__ == kind]
    nbytes, flops = sum(edit.bytes for edit in counted), sum(edit.flops for edit in counted)
    return TimedEdits(kind, nbytes, flops, statistics.median(seconds[1:]))
