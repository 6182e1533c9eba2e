"""Items of a batch: questions and what precedes them, identified by content, in an order that shares prefixes."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..cache import chunk_id, digest_of, encoded, one_form, sort_of, unit_items
from ..errors import AmbiguousTextError, InputError, KVPatchError

STEPS = 32
"""Tokens of an answer at most, if neither the item nor the checkpoint says."""
_FIELDS = ("front", "question", "id", "order_free", "steps", "stop")


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
    """

    front: Sequence[Any]
    question: Any
    id: str | None = None
    order_free: bool = False
    steps: int | None = None
    stop: Sequence[int] | None = None


class ResolvedItem(NamedTuple):
    """Item whose contents are known.

    Attributes:
      index: in the list of items.
      id: its name, or None.
      digest: of all that its answer depends on, and its id.
      front: ids of its chunks, in the order in which they are served.
      question: id of the question.
      steps, stop: as of `BatchItem`, with defaults.
    """

    index: int
    id: str | None
    digest: str
    front: tuple[str, ...]
    question: str
    steps: int
    stop: tuple[int, ...] | None


class RejectedItem(NamedTuple):
    """Item that cannot be asked, and why."""

    index: int
    id: str | None
    digest: str
    error: KVPatchError


class ItemList(NamedTuple):
    """All items of a batch.

    Attributes:
      resolved, rejected: together all items.
      digest: of all items in their order.
      units: the contents of each chunk and question, by its id, as `backbone.prepare` takes them. Files are not read.
    """

    resolved: list[ResolvedItem]
    rejected: list[RejectedItem]
    digest: str
    units: dict[str, list[Any]]


def listed(items: Iterable[Any], backbone: str, steps: int = STEPS) -> ItemList:
    """Reads the contents of all items once, and returns their ids.

    Args:
      backbone: the fingerprint.
      steps: the default of the items.

    Raises:
      InputError: no sequence of items.
    """
    if isinstance(items, str | bytes | os.PathLike | Mapping) or not isinstance(items, Iterable):
        raise InputError(f"answer_batch: got items {items!r:.80}; expected a sequence of BatchItem or mappings")

    reader = _ContentReader(backbone)
    resolved: list[ResolvedItem] = []
    rejected: list[RejectedItem] = []
    order_free: set[int] = set()

    for index, given in enumerate(items):
        # An item that cannot be read fails alone. Its name stands in its line, if that could be read.
        name = None
        try:
            item = _checked_item(given)
            name = item.id
            front = tuple(reader.unit(piece, f"front {place}") for place, piece in enumerate(item.front))
            question = reader.unit(item.question, "question")
            stop = None if item.stop is None else tuple(item.stop)
            limit = steps if item.steps is None else item.steps
            options = encoded(repr((name, item.order_free, limit, stop)))
            digest = digest_of([b"item", *(encoded(id) for id in (*front, question)), options], size=16)
        except KVPatchError as error:
            message = str(error).encode("utf-8", "backslashreplace")
            parts = [b"refused item", encoded(str(index)), type(error).__name__.encode(), message]
            rejected.append(RejectedItem(index, name, digest_of(parts, size=16), error))
            continue

        resolved.append(ResolvedItem(index, name, digest, front, question, limit, stop))
        if item.order_free:
            order_free.add(index)

    # Items that cannot be asked are part of the batch: they get a line each, and shards have to agree.
    digests = {item.index: item.digest for item in (*resolved, *rejected)}
    digest = digest_of([b"items", *(encoded(digests[index]) for index in range(len(digests)))], size=16)

    # Frequent chunks go first where the order is free, so that prefixes are shared the most (as FP-growth sorts its
    # transactions: Han, Pei and Yin, SIGMOD 2000). The order depends on nothing but the list of items.
    counts: collections.Counter[str] = collections.Counter()
    for item in resolved:
        counts.update(set(item.front))

    for place, item in enumerate(resolved):
        if item.index in order_free:
            front = sorted(item.front, key=lambda id: (-counts[id], id))
            resolved[place] = item._replace(front=tuple(front))

    return ItemList(resolved, rejected, digest, reader.units)


def shard_of(items: ItemList, index: int, count: int) -> tuple[list[ResolvedItem], list[RejectedItem]]:
    """Returns the part of a batch that one of `count` processes answers, sorted by prefix.

    Items with the same prefix stay in one shard. Otherwise shards have about equally many items.
    """
    resolved = sorted(items.resolved, key=lambda item: (item.front, item.index))
    # Both ends of a shard move past the items of one prefix, so that neighbouring shards meet.
    ends = []
    for part in (index, index + 1):
        end = -(-len(resolved) * part // count)
        while 0 < end < len(resolved) and resolved[end].front == resolved[end - 1].front:
            end += 1
        ends.append(end)

    return resolved[ends[0] : ends[1]], [item for item in items.rejected if item.index % count == index]


def _checked_item(item: Any) -> BatchItem:
    """Returns an item whose fields have the right kinds. The contents of images and texts are not checked.

    Raises:
      InputError: an invalid item.
    """
    if isinstance(item, Mapping):
        unknown = [name for name in item if name not in _FIELDS]
        if unknown or not {"front", "question"} <= set(item):
            found = f"field {unknown[0]!r:.80}" if unknown else f"only {sorted(map(str, item))}"
            raise InputError(f"item: got {found}; expected front, question and some of {_FIELDS[2:]}")
        item = BatchItem(**item)

    if not isinstance(item, BatchItem):
        raise InputError(f"item: got a {type(item).__name__}; expected a BatchItem, or a mapping of its fields")

    single = isinstance(item.front, str | bytes | os.PathLike | Mapping | np.ndarray)
    if single or not isinstance(item.front, Sequence):
        raise InputError(f"item.front: got {item.front!r:.80}; expected a sequence of images and texts")
    if item.id is not None and (not isinstance(item.id, str) or not item.id):
        raise InputError(f"item.id: got {item.id!r:.80}; expected a name, or None")

    encoded(item.id or "")
    if not isinstance(item.order_free, bool):
        raise InputError(f"item.order_free: got {item.order_free!r:.80}; expected True or False")

    steps, stop = item.steps, item.stop
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InputError(f"item.steps: got {steps!r:.80}; expected a number of tokens, 1 or more, or None")

    if stop is not None:
        several = isinstance(stop, Sequence) and not isinstance(stop, str | bytes)
        if not several or not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in stop):
            raise InputError(f"item.stop: got {stop!r:.80}; expected token ids, or None")

    return item


class _ContentReader:
    """Reader of contents, which reads each file once.

    Attributes:
      units: what was read, as of `ItemList`.
    """

    def __init__(self, backbone: str):
        self.units: dict[str, list[Any]] = {}
        self._backbone = backbone
        self._ids: dict[str, str | KVPatchError] = {}

    def unit(self, piece: Any, field: str) -> str:
        """Returns the id of one chunk or one question.

        Raises:
          ImageError, InputError: an unreadable image, a str that looks like a file, or another kind of item. `field`
          is part of the message.
        """
        # JSON names the kind, {"image": FILE} or {"text": TEXT}, because a str alone may be either.
        items = unit_items(piece, f"item.{field}")
        if not items:
            raise InputError(f"item.{field}: got an empty list; expected images or texts")

        for item in items:
            try:
                sort = sort_of(item, f"item: {field}")
            except AmbiguousTextError as error:
                raise AmbiguousTextError(
                    f'{error}; in JSON {{"image": ...}}, {{"video": ...}} or {{"text": ...}}'
                ) from None
            if sort == "text" and not item:
                raise InputError(f"item.{field}: got an empty text; expected one with tokens")

        # Many items may name one file, which is then decoded once. Its error is remembered too.
        path = os.path.abspath(items[0]) if len(items) == 1 and isinstance(items[0], os.PathLike) else None
        found = None if path is None else self._ids.get(path)
        if found is None:
            try:
                found = chunk_id(self._backbone, *map(one_form, items))
            except KVPatchError as error:
                found = error
            if path is not None:
                self._ids[path] = found

        if isinstance(found, KVPatchError):
            raise found
        self.units.setdefault(found, items if path is None else [Path(path)])
        return found
