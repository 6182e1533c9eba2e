"""Items of a batch: what is asked of what, told apart by content, in an order that lets chunks be formed once."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..cache import Text, chunk_id, digest_of, encoded, file_of, one_form, sort_of
from ..errors import AmbiguousTextError, InputError, KVPatchError
from ..utils.argument_names import OURS

STEPS = 32
"""Tokens of an answer at most, where neither the item nor the checkpoint says."""
_FIELDS = ("front", "question", "id", "order_free", "steps", "stop")


@dataclasses.dataclass(frozen=True, eq=False)
class BatchItem:
    """One question of a batch.

    Attributes:
      front: what stands in front of the question, in order: images and texts, or lists of them that make one chunk
        (frames). Each is a chunk, which other items share where they have the same. A str is a text, a `pathlib.Path`
        an image's file; what comes from JSON says so itself: `{"image": "page.png"}`, `{"text": "page.png"}`.
      question: a text, token ids, an image, or a list of them, as in front.
      id: a name that stands beside the answer; None for none.
      order_free: whether the order in front means nothing: it is then chosen so that items share the most.
      steps: tokens of the answer at most; None: as many as the checkpoint says, 32 where it does not.
      stop: token ids that end it; None for the backbone's own.
    """

    front: Sequence[Any]
    question: Any
    id: str | None = None
    order_free: bool = False
    steps: int | None = None
    stop: Sequence[int] | None = None


class ResolvedItem(NamedTuple):
    """An item whose content is known.

    Attributes:
      index: in the list of items. digest: of all that its answer depends on, and its id.
      front: ids of its chunks, in the order in which they are served. question: id of what is asked.
    """

    index: int
    id: str | None
    digest: str
    front: tuple[str, ...]
    question: str
    steps: int
    stop: tuple[int, ...] | None


class RejectedItem(NamedTuple):
    """An item that cannot be asked, and why."""

    index: int
    id: str | None
    digest: str
    error: KVPatchError


class ItemList(NamedTuple):
    """All items of a batch.

    Attributes:
      jobs, refused: between them every item. digest: of all items in their order.
      units: what each chunk and question shows, by its id: the items that `backbone.prepare` takes, unread.
    """

    jobs: list[ResolvedItem]
    refused: list[RejectedItem]
    digest: str
    units: dict[str, list[Any]]


def listed(items: Iterable[Any], backbone: str, steps: int = STEPS) -> ItemList:
    """Reads every item's content once, to its ids.

    Args:
      backbone: the fingerprint.
      steps: tokens of an answer at most, where an item does not say.

    Raises:
      InputError: what is no sequence of items.
    """
    if isinstance(items, str | bytes | os.PathLike | Mapping) or not isinstance(items, Iterable):
        raise InputError(f"answer_batch: items {items!r:.80}; expected a sequence of BatchItem or mappings")
    reader = _Reader(backbone, steps)
    jobs: list[ResolvedItem] = []
    refused: list[RejectedItem] = []
    for index, given in enumerate(items):
        name = None
        try:
            item = _item(given)
            name = item.id
            jobs.append(reader.job(index, item))
        except KVPatchError as error:
            told = [b"refused item", encoded(str(index)), type(error).__name__.encode(), _shown(error)]
            refused.append(RejectedItem(index, name, digest_of(told, size=16), error))
    digests = {each.index: each.digest for each in (*jobs, *refused)}
    whole = digest_of([b"items", *(encoded(digests[index]) for index in range(len(digests)))], size=16)
    return ItemList(_ordered(jobs, reader.free), refused, whole, reader.units)


def _shown(error: Exception) -> bytes:
    return str(error).encode("utf-8", "backslashreplace")


def _item(given: Any) -> BatchItem:
    """An item, checked but for what its images and texts hold."""
    if isinstance(given, Mapping):
        strangers = [name for name in given if name not in _FIELDS]
        if strangers or not {"front", "question"} <= set(given):
            what = f"field {strangers[0]!r:.80}" if strangers else f"only {sorted(map(str, given))}"
            ours = OURS.get(strangers[0]) if strangers and isinstance(strangers[0], str) else None
            hint = f"{ours!r}" if ours in _FIELDS else f"front, question and some of {_FIELDS[2:]}"
            raise InputError(f"item: {what}; expected {hint}")
        given = BatchItem(**given)
    if not isinstance(given, BatchItem):
        raise InputError(f"item: a {type(given).__name__}; expected a BatchItem, or a mapping of its fields")
    if isinstance(given.front, str | bytes | os.PathLike | Mapping | np.ndarray) or not isinstance(
        given.front, Sequence
    ):
        raise InputError(f"item: front {given.front!r:.80}; expected a sequence of images and texts")
    if given.id is not None and (not isinstance(given.id, str) or not given.id):
        raise InputError(f"item: id {given.id!r:.80}; expected a name, or None")
    encoded(given.id or "")
    if not isinstance(given.order_free, bool):
        raise InputError(f"item: order_free {given.order_free!r:.80}; expected True or False")
    steps = given.steps
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise InputError(f"item: steps {given.steps!r:.80}; expected a number of tokens, 1 or more, or None")
    if given.stop is not None:
        stop = given.stop
        whole = isinstance(stop, Sequence) and not isinstance(stop, str | bytes)
        if not whole or not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in stop):
            raise InputError(f"item: stop {stop!r:.80}; expected token ids, or None")
    return given


class _Reader:
    """Finds ids of contents, and of one path once."""

    def __init__(self, backbone: str, steps: int):
        self.backbone, self.steps = backbone, steps
        self.units: dict[str, list[Any]] = {}
        self.free: set[int] = set()
        self._paths: dict[str, str | KVPatchError] = {}

    def job(self, index: int, item: BatchItem) -> ResolvedItem:
        """An item's ids.

        Raises:
          ImageError, InputError: an image that cannot be read, a str that looks like a file, or no text or image.
        """
        front = tuple(self.unit(piece, f"front {place}") for place, piece in enumerate(item.front))
        question = self.unit(item.question, "question")
        stop = None if item.stop is None else tuple(item.stop)
        steps = self.steps if item.steps is None else item.steps
        told = (item.id, item.order_free, steps, stop)
        parts = [b"item", *(encoded(id) for id in (*front, question)), encoded(repr(told))]
        if item.order_free:
            self.free.add(index)
        return ResolvedItem(index, item.id, digest_of(parts, size=16), front, question, steps, stop)

    def unit(self, piece: Any, what: str) -> str:
        """The id of what makes one chunk or one question."""
        items = [_named_kind(each, what) for each in (piece if _is_list(piece) else [piece])]
        if not items:
            raise InputError(f"item: {what} is empty; expected images or texts")
        for each in items:
            try:
                sort = sort_of(each, f"item: {what}")
            except AmbiguousTextError as error:
                raise AmbiguousTextError(f'{error}; in JSON {{"image": ...}} or {{"text": ...}}') from None
            if sort == "text" and not each:
                raise InputError(f"item: {what} is an empty text; expected one with tokens")
        path = os.path.abspath(items[0]) if len(items) == 1 and isinstance(items[0], os.PathLike) else None
        known = None if path is None else self._paths.get(path)
        if isinstance(known, KVPatchError):
            raise known
        if known is None:
            known = self._read(items, path)
        self.units.setdefault(known, [Path(path)] if path is not None else list(items))
        return known

    def _read(self, items: Sequence[Any], path: str | None) -> str:
        try:
            found = chunk_id(self.backbone, *map(one_form, items))
        except KVPatchError as error:
            if path is not None:
                self._paths[path] = error
            raise
        if path is not None:
            self._paths[path] = found
        return found


def _named_kind(piece: Any, what: str) -> Any:
    """Converts `{"image": FILE}` to a path and `{"text": TEXT}` to a `Text`; anything else stays as it is."""
    if not isinstance(piece, Mapping):
        return piece
    kind, value = next(iter(piece.items())) if len(piece) == 1 else (None, None)
    if kind == "image" and isinstance(value, str):
        return file_of(value, f"item: {what}")
    if kind == "text" and isinstance(value, str):
        return Text(value)
    raise InputError(f'item: {what} {piece!r:.80}; expected {{"image": a file\'s name}} or {{"text": a text}}')


def _is_list(piece: Any) -> bool:
    """Whether a piece is a list of images and texts: token ids, which are lists too, are one piece."""
    if not isinstance(piece, list | tuple):
        return False
    return not piece or not all(isinstance(each, int | np.integer) for each in piece)


def _ordered(jobs: Sequence[ResolvedItem], free: set[int]) -> list[ResolvedItem]:
    """Chooses the order in front where it is free, the same for whoever has the same list of items.

    What most items have stands first, so that prefixes are shared the most (as FP-growth sorts its transactions: Han,
    Pei and Yin, SIGMOD 2000).
    """
    counts = collections.Counter(id for job in jobs for id in set(job.front))
    by_count = lambda id: (-counts[id], id)
    return [job._replace(front=tuple(sorted(job.front, key=by_count))) if job.index in free else job for job in jobs]


def shard_of(found: ItemList, index: int, count: int) -> tuple[list[ResolvedItem], list[RejectedItem]]:
    """The part of a batch that one of `count` processes answers, in the order in which chunks are formed once.

    Items with the same in front stay together: they are sorted by it, and cut into runs of about as many items.
    """
    jobs = sorted(found.jobs, key=lambda job: (job.front, job.index))
    begin, end = (-(-len(jobs) * part // count) for part in (index, index + 1))
    while 0 < begin < len(jobs) and jobs[begin].front == jobs[begin - 1].front:
        begin += 1
    while 0 < end < len(jobs) and jobs[end].front == jobs[end - 1].front:
        end += 1
    return jobs[begin:end], [each for each in found.refused if each.index % count == index]
