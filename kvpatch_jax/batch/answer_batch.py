"""`answer_batch`: many questions over shared images and texts, each chunk prefilled once, with answers as JSONL."""

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
from ..window import PatchStore
from .batch_file import FORMAT, VERSION, AnswerFile, Line, shard_path
from .batch_items import STEPS, BatchItem, RejectedItem, ResolvedItem, listed, shard_of
from .batch_patches import BatchPatchCache, Place, QuestionPrefix, joined_context, stacked

DATA_AXIS = "data"
"""The axis of a mesh over which rows are split."""
WAVE = 4
"""Prefixes that are formed together, for each row of a forward."""


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Options of `answer_batch`.

    Attributes:
      rank, dtype: of the patches, as of `form_patch`.
      shard: (index, count): the part of the items that is answered here. Answers do not depend on it.
      mesh: devices that share the work: rows are split over its axis "data". The backbone lies over this mesh too, or
        over none, and its parameters are then copied to every device.
      batch: the number of questions in one forward, also where fewer are left.
      retry: ask items again that failed before.

    Raises:
      InputError: an invalid shard, batch or retry. RankError, DtypeError: an invalid rank or dtype. ConfigError: a mesh
      without the axis "data".
    """

    rank: Rank = 32
    dtype: jax.typing.DTypeLike | None = None
    shard: tuple[int, int] = (0, 1)
    mesh: Mesh | None = None
    batch: int = 8
    retry: bool = False

    def __post_init__(self) -> None:
        check_rank(self.rank, "answer_batch", 1)
        if self.dtype is not None:
            object.__setattr__(self, "dtype", float_dtype(self.dtype, "answer_batch"))
        if not isinstance(self.retry, bool):
            raise InputError(f"answer_batch: got retry {self.retry!r:.80}; expected True or False")

        pair = isinstance(self.shard, tuple | list) and len(self.shard) == 2
        whole = pair and all(isinstance(number, int) and not isinstance(number, bool) for number in self.shard)
        if not whole or not 0 <= self.shard[0] < self.shard[1]:
            expected = "(index, count), the index below the count"
            raise InputError(f"answer_batch: got shard {self.shard!r:.80}; expected {expected}")
        if not isinstance(self.batch, int) or isinstance(self.batch, bool) or not 1 <= self.batch < 1 << 30:
            raise InputError(f"answer_batch: got batch {self.batch!r:.80}; expected a number of questions, 1 or more")

        if self.mesh is not None and (not isinstance(self.mesh, Mesh) or DATA_AXIS not in self.mesh.axis_names):
            named = isinstance(self.mesh, Mesh)
            found = f"a mesh with axes {self.mesh.axis_names}" if named else f"a {type(self.mesh).__name__}"
            raise ConfigError(f"answer_batch: got {found}; expected a mesh with an axis {DATA_AXIS!r}")


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """Counts of what `answer_batch` did.

    Attributes:
      path: of the answers.
      items: of this shard.
      answered, failed: by this call.
      before: items that the file had already.
      canonicals: forwards of chunks alone.
      conditioned: forwards of chunks after their antecedent.
      again: of these, forwards whose patch was stored, for the sake of the chunks that follow.
      found_canonicals, found_patches: read from the store instead of a forward.
      patches: formed.
      questions: forwards of questions, `batch` rows each.
      unstored: canonicals and commits of patches for which the store had no room.
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
        """Forwards of chunks, without those of questions."""
        return self.canonicals + self.conditioned + self.again


def answer_batch(
    backbone: Backbone,
    store: PatchStore | None,
    items: Iterable[BatchItem | Mapping[str, Any]],
    *,
    out: str | os.PathLike[str],
    config: BatchConfig | None = None,
    **options: Any,
) -> BatchReport:
    """Answers questions greedily over chunks that items share, and writes a line of JSON for each.

        items = [BatchItem([page, Text("a note")], "How many rows?", steps=16), …]
        report = kvp.answer_batch(backbone, store, items, out="answers.jsonl")
        lines = kvp.batch.read_answers("answers.jsonl")

    Every distinct chunk is prefilled once alone, and once after each distinct antecedent, unless the store has the
    results. Items are served alike in both cases: the first chunk as it is, and each other one by its canonical and a
    patch, which is approximate (and marked so in each line).

    An item that cannot be read, or whose chunks cannot be prefilled, gets a line with its error, and the others
    continue. An error of the batch itself (a full disk, a device out of memory) ends the run. The same call then
    continues after the lines that were written, `batch` answers at a time. A line that was cut off is written again.

    Args:
      backbone: of `models.load`.
      store: of canonicals and patches, such as `ChunkStore`. None keeps them in memory.
      items: `BatchItem`s, or mappings of its fields. All of them, whatever the shard.
      out: file of the answers. Each of several shards has its own: `answers.00002-of-00008.jsonl`.
      config: a `BatchConfig`. None: the default.
      options: fields of `config` to override, as in `answer_batch(..., rank=16, batch=32)`.

    Returns:
      Counts of what was done. The answers are in the file.

    Raises:
      InputError: no items, an invalid backbone, store or option, or a file with answers of other items, another
      backbone, rank or dtype, or that another run writes to. AmbiguousTextError: every item has a str that looks like a
      file. ConfigError: another mesh than the backbone's. As `BatchConfig`.
    """
    # Everything is refused before the file of answers is created.
    check_backbone(backbone, store, "answer_batch")
    if config is not None and not isinstance(config, BatchConfig):
        raise InputError(f"answer_batch: got config {config!r:.80}; expected a BatchConfig, or None")

    config = dataclasses.replace(config or BatchConfig(), **options)
    shard_path(out, 0, 1)
    place, width, backbone = _over_mesh(backbone, config.mesh)

    found = listed(items, backbone.fingerprint, getattr(backbone, "answer_tokens", None) or STEPS)
    if not found.resolved and not found.rejected:
        raise InputError("answer_batch: got no items; expected at least one")
    if not found.resolved and all(isinstance(item.error, AmbiguousTextError) for item in found.rejected):
        # A list of file names as strings is an error of the call. Its answers would all be this error.
        raise AmbiguousTextError(f"answer_batch: got {len(found.rejected)} invalid items: {found.rejected[0].error}")

    # The header has everything that answers depend on.
    header = {
        "format": FORMAT,
        "version": VERSION,
        "items": len(found.resolved) + len(found.rejected),
        "digest": found.digest,
        "backbone": backbone.fingerprint,
        "rank": dict(config.rank) if isinstance(config.rank, Mapping) else int(config.rank),
        "dtype": None if config.dtype is None else np.dtype(config.dtype).name,
        "shard": list(config.shard),
    }

    # Lines of an earlier run stay. Items are identified by the digest of all that their answers depend on.
    jobs, rejected = shard_of(found, *config.shard)
    digests = {item.index: item.digest for item in (*jobs, *rejected)}

    with AnswerFile(shard_path(out, *config.shard), header, digests, config.retry) as file:
        before = len(file.done)
        lines = [_line(item, error=item.error) for item in rejected if item.index not in file.done]
        if lines:
            file.add(lines)

        # A forward has as many rows for each device.
        batch = -(-config.batch // width) * width
        cache = BatchPatchCache(backbone, store, found.units, config.rank, config.dtype, place, width)
        run = _BatchRun(backbone, found.units, cache, batch, file)
        run.answer([job for job in jobs if job.index not in file.done])

    return BatchReport(
        path=file.path,
        items=len(digests),
        answered=run.answered,
        failed=run.failed + len(lines),
        before=before,
        questions=run.forwards,
        **cache.counts,
    )


def _over_mesh(backbone: Backbone, mesh: Mesh | None) -> tuple[Place, int, Backbone]:
    """Returns a function that places host arrays, the number of row groups, and the backbone over the mesh.

    Raises:
      ConfigError: another mesh than the backbone's own.
    """
    if mesh is None:
        return (lambda value, axis: jax.numpy.asarray(value)), 1, backbone

    own: Mesh | None = getattr(backbone, "mesh", None)
    # Its axis "tensor" may be split where devices outnumber KV heads.
    if own is not None and (
        own.shape.get(DATA_AXIS) != mesh.shape[DATA_AXIS] or list(own.devices.flat) != list(mesh.devices.flat)
    ):
        raise ConfigError(f"answer_batch: got mesh {mesh}; expected the backbone's, {own}")

    if own is not None:
        mesh = own
    else:
        # Parameters are copied to every device. A mesh with explicit axes would need annotations in the model.
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        model: Any = backbone
        backbone = model.replaced(jax.device_put(model.parameters, NamedSharding(mesh, PartitionSpec())))

    def place(value: Any, axis: int) -> Any:
        spec = PartitionSpec(*(None,) * axis, DATA_AXIS)
        return jax.device_put(value, NamedSharding(mesh, spec))

    return place, mesh.shape[DATA_AXIS], backbone


def _line(item: ResolvedItem | RejectedItem, *, error: KVPatchError | None = None, **fields: Any) -> Line:
    """Returns the line of an item."""
    line = {"item": item.index, "id": item.id, "digest": item.digest} | fields
    if error is not None:
        message = str(error).encode("utf-8", "backslashreplace").decode()
        line |= {"error": type(error).__name__, "message": message[:2000]}
    return line


class _ForwardSize(NamedTuple):
    """Sizes and options that the questions of one forward have in common."""

    tokens: int
    keys: int
    steps: int
    stop: tuple[int, ...] | None
    deepstack: bool


class _QuestionRow(NamedTuple):
    """Question that waits for others of its size."""

    job: ResolvedItem
    tokens: Tokens
    length: int
    prefix: QuestionPrefix


class _BatchRun:
    """Run over the items of a shard, which answers questions of one size together.

    Attributes:
      answered, failed: items so far.
      forwards: of questions.
    """

    def __init__(
        self, backbone: Backbone, units: Mapping[str, list[Any]], cache: BatchPatchCache, batch: int, file: AnswerFile
    ):
        self.answered = self.failed = self.forwards = 0
        self._backbone, self._units, self._cache = backbone, units, cache
        self._batch, self._file = batch, file
        self._buckets = getattr(backbone, "buckets", None) or Buckets()
        # Layers with an attention window count distances in the order of the keys, so their rows are not padded.
        self._padded = not any(backbone.forward_costs.window)
        self._waiting: dict[_ForwardSize, list[_QuestionRow]] = {}

    def answer(self, jobs: list[ResolvedItem]) -> None:
        """Answers jobs, sorted by prefix."""
        # Jobs are sorted, so each prefix is met once, and a chunk is released after the last prefix with it.
        by_prefix = collections.defaultdict(list)
        for job in jobs:
            by_prefix[job.front].append(job)
        prefixes = list(by_prefix)
        last_use: dict[str, int] = {}
        for place, prefix in enumerate(prefixes):
            last_use |= dict.fromkeys(prefix, place)

        # In waves, so that the chunks and patches of few prefixes are in memory.
        size = WAVE * self._cache.rows
        for begin in range(0, len(prefixes), size):
            end = begin + size
            self._cache.ensure(prefixes[begin:end], prefixes[end] if end < len(prefixes) else None)
            for prefix in prefixes[begin:end]:
                self._queue(prefix, by_prefix[prefix])
            self._cache.release({id for id, place in last_use.items() if place >= end})

        for size in list(self._waiting):
            self._flush(size)

    def _queue(self, ids: tuple[str, ...], jobs: list[ResolvedItem]) -> None:
        """Queues the questions after one prefix, and answers those whose forward is full."""
        # A chunk that failed fails all its items; a question only its own.
        try:
            prefix = self._cache.prefix(ids)
        except KVPatchError as error:
            self._fail(jobs, error)
            return
        for job in jobs:
            try:
                prompt = self._backbone.prepare(list(self._units[job.question]))
                tokens = self._backbone.embed(**prompt)
                check_tokens(tokens, "question")
            except KVPatchError as error:
                self._fail([job], error)
                continue

            # Lengths in buckets and steps in powers of two make few programs, and let more questions share one.
            length, keys = tokens.embeddings.shape[1], prefix.tokens
            if self._padded:
                length, keys = self._buckets.round_up(length), self._buckets.round_up(keys)
            steps = 1 << (job.steps - 1).bit_length()
            size = _ForwardSize(length, keys, steps, job.stop, tokens.deepstack is not None)
            row = _QuestionRow(job, tokens.pad(length).shift(prefix.span), tokens.embeddings.shape[1], prefix)
            rows = self._waiting.setdefault(size, [])
            rows.append(row)
            if len(rows) == self._batch:
                self._flush(size)

    def _fail(self, jobs: list[ResolvedItem], error: KVPatchError) -> None:
        """Writes the same error for some jobs."""
        self.failed += len(jobs)
        self._file.add([_line(job, error=error) for job in jobs])

    def _flush(self, size: _ForwardSize) -> None:
        """Runs the waiting questions of one size, and writes their answers."""
        # The last row fills up the forward, so that its program has one size.
        rows = self._waiting.pop(size)
        try:
            ids = self._generate(size, [*rows, *[rows[-1]] * (self._batch - len(rows))])
        except KVPatchError as error:
            if len(rows) == 1:
                self._fail([rows[0].job], error)
                return
            # Each alone, to find out which of them fails.
            for row in rows:
                self._waiting[size] = [row]
                self._flush(size)
            return

        self.answered += len(rows)
        backbone: Any = self._backbone
        lines = []

        for row, generated in zip(rows, ids, strict=False):
            # The answer ends before the first stop token.
            stops = getattr(backbone, "stop_tokens", ()) if row.job.stop is None else row.job.stop
            generated = generated[: row.job.steps]
            stopped = np.flatnonzero(np.isin(generated, stops))
            answer = [int(token) for token in (generated[: int(stopped[0])] if len(stopped) else generated)]
            text = backbone.text(answer) if getattr(backbone, "tokenizer", None) is not None else None
            fidelity = "exact" if row.prefix.exact else "approximate"
            lines.append(_line(row.job, answer=text, ids=answer, ended=bool(len(stopped)), fidelity=fidelity))

        self._file.add(lines)

    def _generate(self, size: _ForwardSize, rows: list[_QuestionRow]) -> np.ndarray:
        """Returns the token ids of answers, [rows, steps]."""
        place = self._cache.place
        tokens = stacked([row.tokens for row in rows], place)
        lengths = np.asarray([row.length for row in rows], np.int32)
        context, mask = None, None
        if size.keys:
            context = joined_context([row.prefix.kv for row in rows], size.keys, place)

        if size.keys and self._padded:
            # Questions attend to themselves causally, and to their prefix without its padding.
            seen = np.zeros((len(rows), 1, size.tokens, size.keys + size.tokens), bool)
            seen[..., size.keys :] = np.tri(size.tokens, dtype=bool)
            for number, row in enumerate(rows):
                seen[number, ..., : row.prefix.tokens] = True
            mask = place(seen, 0)

        steps = max(row.job.steps for row in rows)
        self.forwards += 1
        backbone: Any = self._backbone
        return np.asarray(backbone.generate(tokens, steps, context, mask, lengths=lengths, stop=size.stop))
