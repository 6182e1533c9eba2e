"""Items of a batch: questions and what precedes them, identified by content, in an order that shares prefixes."""

import collections
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache import chunk_id, digest_of, encoded, sort_of, unit_items
from ..errors import InputError, KVPatchError
from ..utils.kinds import expect_kind, is_whole


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

    Raises:
      InputError: a field of another kind. Images and texts are read by `answer_batch`.
    """

    front: Sequence[Any]
    question: Any
    id: str | None = None
    order_free: bool = False
    steps: int | None = None

    def __post_init__(self) -> None:
        expect_kind(self.front, list | tuple, "item.front", "a list of images and texts")
        expect_kind(self.id, str | None, "item.id", "a name, or None")
        if self.steps is not None and not is_whole(self.steps, 1):
            raise InputError(f"item.steps: got {self.steps!r:.80}; expected a number of tokens, 1 or more, or None")
        encoded(self.id or "")


@dataclasses.dataclass(eq=False)
class BatchJob:
    """An item whose contents were read, or the error of reading them.

    Attributes:
      index: in the list of items.
      id, steps: of the item.
      digest: of all that the answer depends on, and the item's name.
      front: ids of the chunks, in the order in which they are served.
      question: id of the question.
      error: why the item cannot be asked, or None.
    """

    index: int
    id: str | None = None
    steps: int = 0
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
      InputError: no sequence of items, an empty one, or none that can be read: a str that looks like a file's name, ….
    """
    if isinstance(items, str | bytes | os.PathLike | Mapping) or not isinstance(items, Iterable):
        raise InputError(f"answer_batch: got items {items!r:.80}; expected a sequence of BatchItem or mappings")

    # Many items may name one file, which is decoded once.
    id_of_file = functools.cache(functools.partial(chunk_id, backbone))

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
        if len(parts) == 1 and isinstance(parts[0], os.PathLike):
            parts = [Path(os.path.abspath(parts[0]))]
            id = id_of_file(parts[0])
        else:
            id = chunk_id(backbone, *parts)
        contents.setdefault(id, parts)
        return id

    contents, jobs, free = dict[str, list[Any]](), list[BatchJob](), list[BatchJob]()
    for index, value in enumerate(items):
        job = BatchJob(index)
        jobs.append(job)
        try:
            item = _item_of(value)
            job.id, job.steps = item.id, item.steps or steps
            job.front = tuple(id_of(piece, f"front {place}") for place, piece in enumerate(item.front))
            job.question = id_of(item.question, "question")
            options = repr((job.id, item.order_free, job.steps))
            job.digest = digest_of([b"item", *map(encoded, (*job.front, job.question, options))], size=16)
            free += [job] if item.order_free else []
        except KVPatchError as error:
            job.error = error
            message = f"{index} {type(error).__name__} {error}".encode("utf-8", "backslashreplace")
            job.digest = digest_of([b"refused item", message], size=16)

    if not jobs:
        raise InputError("answer_batch: got no items; expected at least one")
    if all(job.error is not None for job in jobs):
        # Such as file names as strings: an error of the call, whose answers would all be this error.
        raise InputError(f"answer_batch: got {len(jobs)} invalid items: {jobs[0].error}")

    # Frequent chunks go first where the order is free, so that prefixes are shared the most (as FP-growth sorts its
    # transactions: Han, Pei and Yin, SIGMOD 2000). The order depends on nothing but the list of items.
    counts = collections.Counter(id for job in jobs if job.error is None for id in set(job.front))
    for job in free:
        job.front = tuple(sorted(job.front, key=lambda id: (-counts[id], id)))
    return jobs, contents


def shard_of(jobs: Sequence[BatchJob], index: int, count: int) -> list[BatchJob]:
    """Returns the part of a batch that one of `count` processes answers, sorted by prefix.

    Items with the same prefix stay in one shard. Otherwise shards have about equally many items.
    """
    readable = sorted((job for job in jobs if job.error is None), key=lambda job: (job.front, job.index))
    shards: dict[tuple[str, ...], int] = {}
    for place, job in enumerate(readable):
        shards.setdefault(job.front, place * count // len(readable))
    refused = [job for job in jobs if job.error is not None and job.index % count == index]
    return refused + [job for job in readable if shards[job.front] == index]


def _item_of(value: Any) -> BatchItem:
    """Returns an item, made of a mapping of its fields if it is one. Raises InputError for another value."""
    if not isinstance(value, Mapping):
        expect_kind(value, BatchItem, "item", "a BatchItem, or a mapping of its fields")
        return value
    fields = [field.name for field in dataclasses.fields(BatchItem)]
    if not {"front", "question"} <= set(value) <= set(fields):
        raise InputError(f"item: got the fields {list(value)!r:.80}; expected front, question and some of {fields[2:]}")
    return BatchItem(**value)
