"""Items of a batch: questions and what precedes them, identified by content, in an order that shares prefixes."""

import collections
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache import chunk_id, digest_of, encoded, one_form, sort_of, unit_items
from ..errors import InputError, KVPatchError
from ..utils.kinds import expect_kind, is_whole

STEPS = 32
"""Tokens of an answer at most, if neither the item nor the checkpoint says."""


@dataclasses.dataclass(frozen=True, eq=False)
class BatchItem:
    """One question of a batch.

    Attributes:
      front: what precedes the question, in order: images and texts, or lists of them that make one chunk (frames). Each
        is a chunk, which items share if their contents are equal. A str is a text, a `pathlib.Path` the file of an
        image, or by its suffix of a video or sound; a `Video` or `Audio` is one. JSON names the kind, as any part of a
        message does (`cache.part_item`): `{"image": "page.png"}`, `{"text": "page.png"}`,
        `{"video": "clip.mp4", "fps": 1}`, `{"audio": "said.wav"}`.
      question: a text, token ids, an image, or a list of them, as in `front`.
      id: a name that is written beside the answer, or None.
      order_free: whether the order of `front` has no meaning. It is then chosen so that items share the most.
      steps: the largest number of tokens of the answer. None: the checkpoint's, or 32.
      stop: token ids that end the answer. None: the backbone's own.

    Raises:
      InputError: a field of another kind. Images and texts are read by `answer_batch`.
    """

    front: Sequence[Any]
    question: Any
    id: str | None = None
    order_free: bool = False
    steps: int | None = None
    stop: Sequence[int] | None = None

    def __post_init__(self) -> None:
        steps, stop = self.steps, [] if self.stop is None else self.stop
        for field, valid, expected in (
            ("front", isinstance(self.front, list | tuple), "a list of images and texts"),
            ("id", self.id is None or (isinstance(self.id, str) and self.id != ""), "a name, or None"),
            ("steps", steps is None or is_whole(steps, 1), "a number of tokens, 1 or more, or None"),
            (
                "stop",
                stop is None or (isinstance(stop, list | tuple) and all(is_whole(id, 0) for id in stop)),
                "token ids, or None",
            ),
        ):
            if not valid:
                raise InputError(f"item.{field}: got {getattr(self, field)!r:.80}; expected {expected}")
        encoded(self.id or "")


@dataclasses.dataclass(eq=False)
class BatchJob:
    """An item whose contents were read, or the error of reading them.

    Attributes:
      index: in the list of items.
      item: the item; None if it is none.
      digest: of all that the answer depends on, and the item's name.
      front: ids of the chunks, in the order in which they are served.
      question: id of the question.
      error: why the item cannot be asked, or None.
    """

    index: int
    item: BatchItem | None = None
    digest: str = ""
    front: tuple[str, ...] = ()
    question: str = ""
    error: KVPatchError | None = None


def read_items(items: Iterable[Any], backbone: str, steps: int) -> tuple[list[BatchJob], dict[str, list[Any]]]:
    """Reads the contents of all items, and orders the chunks of those whose order is free.

    Args:
      backbone: the fingerprint.
      steps: the default length of an answer.

    Returns:
      The jobs by index, and the contents of each chunk and question by its id. Files are named, not loaded.

    Raises:
      InputError: no sequence of items, or an empty one. InputError: every item has a str that looks like a
      file.
    """
    if isinstance(items, str | bytes | os.PathLike | Mapping) or not isinstance(items, Iterable):
        raise InputError(f"answer_batch: got items {items!r:.80}; expected a sequence of BatchItem or mappings")

    @functools.cache
    def id_of_file(path: str) -> str:
        return chunk_id(backbone, one_form(Path(path)))

    def id_of(piece: Any, field: str) -> str:
        parts = unit_items(piece, f"item.{field}")
        for part in parts:
            try:
                sort_of(part, f"item: {field}")
            except InputError as error:
                if not isinstance(part, str):
                    raise
                # JSON names the kind, because a str alone may be either.
                expected = '{"image": ...}, {"video": ...} or {"text": ...}'
                raise InputError(f"{error}; in JSON {expected}") from None
        # Many items may name one file, which is decoded once.
        if len(parts) == 1 and isinstance(parts[0], os.PathLike):
            parts = [Path(os.path.abspath(parts[0]))]
            id = id_of_file(str(parts[0]))
        else:
            id = chunk_id(backbone, *map(one_form, parts))
        contents.setdefault(id, parts)
        return id

    contents, jobs = dict[str, list[Any]](), list[BatchJob]()
    for index, value in enumerate(items):
        job = BatchJob(index)
        jobs.append(job)
        try:
            job.item = item = _item_of(value)
            job.front = tuple(id_of(piece, f"front {place}") for place, piece in enumerate(item.front))
            job.question = id_of(item.question, "question")
            options = (item.id, item.order_free, item.steps or steps, None if item.stop is None else tuple(item.stop))
            digested = [b"item", *map(encoded, (*job.front, job.question, repr(options)))]
        except KVPatchError as error:
            job.error = error
            message = str(error).encode("utf-8", "backslashreplace")
            digested = [b"refused item", encoded(str(index)), type(error).__name__.encode(), message]
        job.digest = digest_of(digested, size=16)

    if not jobs:
        raise InputError("answer_batch: got no items; expected at least one")
    if all(job.error is not None for job in jobs):
        # Such as file names as strings: an error of the call, whose answers would all be this error.
        raise InputError(f"answer_batch: got {len(jobs)} invalid items: {jobs[0].error}")

    # Frequent chunks go first where the order is free, so that prefixes are shared the most (as FP-growth sorts its
    # transactions: Han, Pei and Yin, SIGMOD 2000). The order depends on nothing but the list of items.
    readable = [job for job in jobs if job.error is None]
    counts = collections.Counter(id for job in readable for id in set(job.front))
    for job in readable:
        if job.item is not None and job.item.order_free:
            job.front = tuple(sorted(job.front, key=lambda id: (-counts[id], id)))
    return jobs, contents


def shard_of(jobs: Sequence[BatchJob], index: int, count: int) -> list[BatchJob]:
    """Returns the part of a batch that one of `count` processes answers, sorted by prefix.

    Items with the same prefix stay in one shard. Otherwise shards have about equally many items.
    """
    readable = sorted((job for job in jobs if job.error is None), key=lambda job: (job.front, job.index))
    # Both ends of a shard move past the items of one prefix, so that neighbouring shards meet.
    ends = []
    for part in (index, index + 1):
        end = -(-len(readable) * part // count)
        while 0 < end < len(readable) and readable[end].front == readable[end - 1].front:
            end += 1
        ends.append(end)
    refused = [job for job in jobs if job.error is not None and job.index % count == index]
    return refused + readable[ends[0] : ends[1]]


def _item_of(value: Any) -> BatchItem:
    """Returns an item, made of a mapping of its fields if it is one. Raises InputError for another value."""
    if not isinstance(value, Mapping):
        expect_kind(value, BatchItem, "item", "a BatchItem, or a mapping of its fields")
        return value
    fields = [field.name for field in dataclasses.fields(BatchItem)]
    if not {"front", "question"} <= set(value) <= set(fields):
        expected = f"front, question and some of {fields[2:]}"
        raise InputError(f"item: got the fields {list(value)!r:.80}; expected {expected}")
    return BatchItem(**value)
