"""`answer_batch`: many questions over images and texts that they share, each chunk formed once, answers as JSONL."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..backbone import Backbone, Tokens, check_tokens
from ..core import Buckets
from ..errors import AmbiguousTextError, ConfigError, InputError, KVPatchError
from ..patching import Rank
from ..session import check_backbone, check_rank, float_dtype
from ..window import PatchStore, padded_tokens
from .batch_file import FORMAT, VERSION, AnswerFile, Line, shard_path
from .batch_items import STEPS, BatchItem, ItemList, ResolvedItem, listed, shard_of
from .batch_patches import BatchPatchCache, Place, QuestionPrefix, context_of, stacked

DATA = "data"
"""The axis of a mesh that rows lie over."""
WAVE = 4
"""Fronts that are formed together, for each row of a forward."""


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """What `answer_batch` did.

    Attributes:
      path: of the answers. items: of this shard. answered, failed: now. before: found answered in the file.
      canonicals, conditioned: forwards of chunks alone, and behind those in front of them.
      again: forwards behind others whose patch was stored, made for the sake of what stands behind them.
      found_canonicals, found_patches: in the store, and so without a forward. patches: formed.
      questions: forwards of questions, `batch` rows each.
      unstored: canonicals and commits of patches that the store had no room for.
    """

    path: Path
    items: int
    answered: int = 0
    failed: int = 0
    before: int = 0
    canonicals: int = 0
    conditioned: int = 0
    again: int = 0
    found_canonicals: int = 0
    found_patches: int = 0
    patches: int = 0
    questions: int = 0
    unstored: int = 0

    @property
    def forwards(self) -> int:
        """Forwards of chunks, those of questions apart."""
        return self.canonicals + self.conditioned + self.again


def answer_batch(
    backbone: Backbone,
    store: PatchStore | None,
    items: Iterable[BatchItem | Mapping[str, Any]],
    *,
    out: str | os.PathLike[str],
    rank: Rank = 32,
    dtype: jax.typing.DTypeLike | None = None,
    shard: tuple[int, int] = (0, 1),
    mesh: Mesh | None = None,
    batch: int = 8,
    retry: bool = False,
) -> BatchReport:
    """Answers questions greedily over chunks that items share, and writes a line of JSON for each.

        items = [BatchItem([page, Text("a note")], "How many rows?", steps=16), …]
        report = kvp.answer_batch(backbone, store, items, out="answers.jsonl")
        lines = kvp.batch.read_answers("answers.jsonl")

    Every distinct chunk is prefilled alone once, and once behind each distinct list of chunks in front of it; none of
    them where the store has what came of it. Items are served alike whether it was formed now or stored: the chunk in
    front as it is, each other one by its canonical and a patch, which is approximate (and said so in each line).

    An item that cannot be read, or whose chunks cannot be prefilled, gets a line with its error, and the others go on.
    What is wrong with the batch itself (a full disk, a device out of memory) ends the run; the same call goes on from
    the lines that were written, `batch` answers at a time. A line that was cut off is written again.

    Args:
      store: where canonicals and patches are kept and looked for, such as `ChunkStore`; None keeps them in memory.
      items: `BatchItem`s, or mappings of its fields. All of them, whatever the shard.
      out: file of the answers. Each shard of several has its own: `answers.00002-of-00008.jsonl`.
      rank, dtype: of the patches, as `form_patch` takes them.
      shard: (index, count): which part of the items is answered here. Answers do not depend on it.
      mesh: devices that share the work: rows lie over its axis "data". The backbone lies over this mesh too, or over
        none (its parameters are then copied to every device).
      batch: questions in one forward, whatever its part is filled with.
      retry: ask items again that failed before.

    Returns:
      What was done; the answers are in the file.

    Raises:
      AmbiguousTextError: every item has a str that looks like a file. InputError: no items, a shard or batch that is
      none, or a file with answers of other items, another backbone, rank or dtype, or that another run writes to; a
      backbone or store that is none. RankError, DtypeError: what is none.
      ConfigError: a mesh without "data", or another than the backbone's.
    """
    check_backbone(backbone, store, "answer_batch")
    check_rank(rank, "answer_batch", 1)
    dtype = None if dtype is None else float_dtype(dtype, "answer_batch")
    if not isinstance(retry, bool):
        raise InputError(f"answer_batch: retry {retry!r:.80}; expected True or False")
    shard_path(out, 0, 1)
    _check_numbers(shard, batch)
    index, count = shard
    placing, width, backbone = _placing(backbone, mesh)
    batch = -(-batch // width) * width
    found = listed(items, backbone.fingerprint, getattr(backbone, "answer_tokens", None) or STEPS)
    if not found.jobs and not found.refused:
        raise InputError("answer_batch: no items; expected at least one")
    if not found.jobs and all(isinstance(each.error, AmbiguousTextError) for each in found.refused):
        # A list of files as strings is an error of the call, and would be a file full of lines that say so.
        raise AmbiguousTextError(f"answer_batch: none of {len(found.refused)} items: {found.refused[0].error}")
    jobs, refused = shard_of(found, index, count)

    header = _header(found, backbone, rank, dtype, shard)
    digests = {each.index: each.digest for each in (*jobs, *refused)}
    file = AnswerFile(shard_path(out, index, count), header, digests, retry)
    try:
        before = len(file.done)
        lines = [_line(each, error=each.error) for each in refused if each.index not in file.done]
        if lines:
            file.add(lines)
        forming = BatchPatchCache(backbone, store, found.units, rank, dtype, width, placing)
        asking = _Asking(backbone, found, forming, placing, batch, file)
        asking.failed = len(lines)
        asking.run([job for job in jobs if job.index not in file.done])
    finally:
        file.close()
    done = {"answered": asking.answered, "failed": asking.failed, "before": before, "questions": asking.forwards}
    return BatchReport(file.path, len(digests), **done, **forming.counts)


def _check_numbers(shard: Any, batch: Any) -> None:
    whole = lambda value: isinstance(value, int) and not isinstance(value, bool)
    fine = isinstance(shard, tuple | list) and len(shard) == 2 and all(map(whole, shard))
    if not fine or not 0 <= shard[0] < shard[1]:
        raise InputError(f"answer_batch: shard {shard!r:.80}; expected (index, count), the index below the count")
    if not whole(batch) or not 1 <= batch < 1 << 30:
        raise InputError(f"answer_batch: batch {batch!r:.80}; expected how many questions run together, 1 or more")


def _header(found: ItemList, backbone: Backbone, rank: Any, dtype: Any, shard: tuple[int, int]) -> Line:
    """The first line: all that answers depend on."""
    ranks = dict(rank) if isinstance(rank, Mapping) else int(rank)
    return {
        "format": FORMAT,
        "version": VERSION,
        "items": len(found.jobs) + len(found.refused),
        "digest": found.digest,
        "backbone": backbone.fingerprint,
        "rank": ranks,
        "dtype": None if dtype is None else np.dtype(dtype).name,
        "shard": list(shard),
    }


def _line(item: Any, *, error: KVPatchError | None = None, **more: Any) -> Line:
    """The line of an item."""
    found = {"item": item.index, "id": item.id, "digest": item.digest} | more
    if error is not None:
        message = str(error).encode("utf-8", "backslashreplace").decode()
        found |= {"error": type(error).__name__, "message": message[:2000]}
    return found


def _placing(backbone: Backbone, mesh: Mesh | None) -> tuple[Place, int, Backbone]:
    """How host arrays get to the devices, how many rows lie apart, and the backbone as it lies over the mesh.

    Raises:
      ConfigError: a mesh without the axis "data", or another than the backbone's own.
    """
    if mesh is None:
        return (lambda value, axis: jax.numpy.asarray(value)), 1, backbone
    if not isinstance(mesh, Mesh) or DATA not in mesh.axis_names:
        found = tuple(mesh.axis_names) if isinstance(mesh, Mesh) else f"a {type(mesh).__name__}"
        raise ConfigError(f"answer_batch: mesh with axes {found}; expected one called {DATA!r}")
    own: Mesh | None = getattr(backbone, "mesh", None)
    if own is not None and (own.axis_names != mesh.axis_names or (own.devices != mesh.devices).any()):
        raise ConfigError(f"answer_batch: mesh {mesh}; expected the backbone's, {own}")
    if own is not None:
        mesh = own
    else:
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        whole: Any = backbone
        backbone = whole.replaced(jax.device_put(whole.parameters, NamedSharding(mesh, PartitionSpec())))

    def place(value: Any, axis: int) -> Any:
        spec = PartitionSpec(*(None,) * axis, DATA)
        return jax.device_put(value, NamedSharding(mesh, spec))

    return place, mesh.shape[DATA], backbone


class _Key(NamedTuple):
    """What rows of one forward have in common."""

    tokens: int
    keys: int
    steps: int
    stop: tuple[int, ...] | None
    deepstack: bool


class _Row(NamedTuple):
    """A question that waits for others of its size."""

    job: ResolvedItem
    tokens: Tokens
    length: int
    front: QuestionPrefix


class _Asking:
    """Questions in batches of one size each."""

    def __init__(
        self, backbone: Backbone, found: ItemList, forming: BatchPatchCache, place: Place, batch: int, file: AnswerFile
    ):
        self.backbone, self.found, self.forming, self.place = backbone, found, forming, place
        self.batch, self.file = batch, file
        self.buckets = getattr(backbone, "buckets", None) or Buckets()
        # Layers that see a window count places from the keys' own order: their rows are padded nowhere.
        self.padded = not any(backbone.forward_costs.window)
        self.waiting: dict[_Key, list[_Row]] = {}
        self.answered = self.failed = self.forwards = 0

    def run(self, jobs: list[ResolvedItem]) -> None:
        """Answers jobs that are sorted by what stands in front."""
        fronts = list(dict.fromkeys(job.front for job in jobs))
        by_front = collections.defaultdict(list)
        for job in jobs:
            by_front[job.front].append(job)
        last = {id: place for place, front in enumerate(fronts) for id in front}
        size = WAVE * self.forming.rows
        for begin in range(0, len(fronts), size):
            wave = fronts[begin : begin + size]
            following = fronts[begin + size] if begin + size < len(fronts) else None
            self.forming.ensure(wave, following)
            for front in wave:
                self._ask(front, by_front.pop(front))
            self.forming.let_go({id for id, place in last.items() if place >= begin + size})
        for key in list(self.waiting):
            self._flush(key)

    def _ask(self, ids: tuple[str, ...], jobs: list[ResolvedItem]) -> None:
        """Puts the questions behind one front to those that wait."""
        try:
            front = self.forming.front(ids)
        except KVPatchError as error:
            self._fail(jobs, error)
            return
        for job in jobs:
            try:
                prompt = self.backbone.prepare(list(self.found.units[job.question]))
                tokens = self.backbone.embed(**prompt)
                check_tokens(tokens, "question")
            except KVPatchError as error:
                self._fail([job], error)
                continue
            length = tokens.embeddings.shape[1]
            key = _Key(length, front.tokens, 1 << (job.steps - 1).bit_length(), job.stop, tokens.deepstack is not None)
            if self.padded:
                key = key._replace(tokens=self.buckets.round_up(length), keys=self.buckets.round_up(front.tokens))
            rows = self.waiting.setdefault(key, [])
            rows.append(_Row(job, padded_tokens(tokens, key.tokens).shift(front.span), length, front))
            if len(rows) == self.batch:
                self._flush(key)

    def _fail(self, jobs: list[ResolvedItem], error: KVPatchError) -> None:
        self.failed += len(jobs)
        self.file.add([_line(job, error=error) for job in jobs])

    def _flush(self, key: _Key) -> None:
        """Runs the questions of one size that wait, and writes their answers."""
        rows = self.waiting.pop(key)
        try:
            ids = self._generated(key, [*rows, *[rows[-1]] * (self.batch - len(rows))])
        except KVPatchError as error:
            if len(rows) == 1:
                self._fail([rows[0].job], error)
                return
            for row in rows:  # which of them it is, each alone tells
                self.waiting[key] = [row]
                self._flush(key)
            return
        self.answered += len(rows)
        self.file.add([self._answer(row, ids[place]) for place, row in enumerate(rows)])

    def _generated(self, key: _Key, rows: list[_Row]) -> np.ndarray:
        tokens = stacked([row.tokens for row in rows], self.place)
        lengths = np.asarray([row.length for row in rows], np.int32)
        context, mask = None, None
        if key.keys:
            context = context_of([row.front.kv for row in rows], key.keys, self.place)
        if key.keys and self.padded:
            seen = np.zeros((len(rows), 1, key.tokens, key.keys + key.tokens), bool)
            seen[..., key.keys :] = np.tri(key.tokens, dtype=bool)
            for place, row in enumerate(rows):
                seen[place, ..., : row.front.tokens] = True
            mask = self.place(seen, 0)
        steps = max(row.job.steps for row in rows)
        self.forwards += 1
        generate: Any = self.backbone.generate
        return np.asarray(generate(tokens, steps, context, mask, lengths=lengths, stop=key.stop))

    def _answer(self, row: _Row, ids: np.ndarray) -> Line:
        """The line of an answer: what stands in front of the first stop token."""
        backbone: Any = self.backbone
        stops = getattr(backbone, "stop_tokens", ()) if row.job.stop is None else row.job.stop
        own = ids[: row.job.steps]
        stopped = np.flatnonzero(np.isin(own, stops))
        own = own[: int(stopped[0])] if len(stopped) else own
        numbers = [int(each) for each in own]
        text = backbone.text(numbers) if getattr(backbone, "tokenizer", None) is not None else None
        fidelity = "exact" if row.front.exact else "approximate"
        return _line(row.job, answer=text, ids=numbers, ended=bool(len(stopped)), fidelity=fidelity)
