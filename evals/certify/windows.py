"""The windows that a certificate is measured on, and their batches.

A window is a lead and some chunks. Of each size the earlier half of the windows calibrates the bounds and the later
half is held out, which is decided before anything is computed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone

from ..harness.lines import BatchedPiece, Contents, PackedQuestions, Question, packed

SEED = 40961
"""Of what is drawn: windows, and mixtures of modes."""
LEAD = "The following is looked at from the first to the last."
LEAD_WORDS = 4
"""Words of a small vocabulary that are the lead where the sentence has unknown ones."""


class Window(NamedTuple):
    """Names of a window's chunks and, the last to leave at the end, of what was there before; and what is asked."""

    pieces: tuple[str, ...]
    before: tuple[str, ...]
    questions: tuple[Question, ...]


class PlannedBatch(NamedTuple):
    """Windows of one shape, with their numbers among all windows; and the batch's number among those of its half."""

    windows: list[Window]
    clusters: list[int]
    held_out: bool
    number: int

    @property
    def chunks(self) -> int:
        """Chunks of each window."""
        return len(self.windows[0].pieces)


@dataclasses.dataclass(frozen=True, eq=False)
class WindowBatch:
    """A batch of windows: the pinned lead, the chunks, what was there before, and the number of each window."""

    backbone: ModelBackbone
    lead: BatchedPiece
    pieces: tuple[BatchedPiece, ...]
    older: tuple[BatchedPiece, ...]
    questions: PackedQuestions
    clusters: np.ndarray

    @property
    def room(self) -> int:
        """Tokens that every window of the batch is padded to, with one piece more than it shows."""
        largest = sorted((piece.size for piece in (*self.older, *self.pieces)), reverse=True)
        return self.lead.size + sum(largest[: len(self.pieces) + 1])


@dataclasses.dataclass(frozen=True, eq=False)
class WindowSet:
    """All windows that are measured; of each size those that calibrate come first.

    Attributes:
      shown, asked: in words, what they show and what is asked behind them.
      batch: windows of the least size in one forward; larger ones are fewer, so that a forward has as many tokens.
    """

    contents: Contents
    windows: Sequence[Window]
    shown: str
    asked: str
    batch: int

    @functools.cached_property
    def by_size(self) -> dict[int, list[Window]]:
        """The windows by their number of chunks, ascending."""
        by_size: dict[int, list[Window]] = {}
        for window in sorted(self.windows, key=lambda window: len(window.pieces)):
            by_size.setdefault(len(window.pieces), []).append(window)
        return by_size

    @property
    def fewest(self) -> tuple[int, int]:
        """Windows for calibration and held out, of the size that has the fewest."""
        return halved(min(map(len, self.by_size.values())))

    @property
    def digest(self) -> str:
        """A digest of all that is shown and asked: 16 hexadecimal digits."""
        total = hashlib.blake2b(repr([window.questions for window in self.windows]).encode(), digest_size=8)
        for name in (name for window in self.windows for name in (*window.pieces, *window.before)):
            value = self.contents.values[name]
            total.update(value.read_bytes() if isinstance(value, Path) else repr(np.asarray(value).tolist()).encode())
        return total.hexdigest()

    def rows(self, chunks: int) -> int:
        """Returns how many windows of a size are in one forward."""
        return max(1, self.batch * min(self.by_size) // chunks)

    def batches(self) -> Iterator[PlannedBatch]:
        """Yields all windows in batches of one shape, of one half."""
        first, numbers = 0, {False: itertools.count(), True: itertools.count()}
        for chunks, windows in self.by_size.items():
            groups: dict[Any, list[int]] = {}
            for row, window in enumerate(windows):
                held_out = row >= halved(len(windows))[0]
                groups.setdefault((held_out, *self.contents.shape(*window.pieces, *window.before)), []).append(row)
            for (held_out, *_), rows in groups.items():
                for part in itertools.batched(rows, self.rows(chunks)):
                    clusters, number = [first + row for row in part], next(numbers[held_out])
                    yield PlannedBatch([windows[row] for row in part], clusters, held_out, number)
            first += len(windows)

    def load(self, planned: PlannedBatch) -> WindowBatch:
        """Prefills the pieces of a batch; the last window is repeated up to a power of two, and does not count."""
        count, backbone, chunks = len(planned.windows), self.contents.backbone, planned.chunks
        repeated = min(self.rows(chunks), 1 << (count - 1).bit_length()) - count
        windows = planned.windows + planned.windows[-1:] * repeated
        clusters = np.array(planned.clusters + planned.clusters[-1:] * repeated)
        mark = hashlib.blake2b(clusters.tobytes(), digest_size=8).hexdigest()
        pieces = []
        for place, names in enumerate(zip(*((*window.pieces, *window.before) for window in windows), strict=True)):
            pieces.append(self.contents.batch(names, f"piece {place}", f"{mark} piece {place}"))
        lengths = [[len(question.ids) for question in window.questions] for window in self.windows]
        longest = [max(place) for place in itertools.zip_longest(*lengths, fillvalue=0)]
        questions = packed([window.questions for window in windows], longest)
        questions.valid[count:] = False
        lead = Contents(backbone, {"lead": lead_ids(backbone)}).batch(["lead"] * len(windows), "lead", LEAD)
        return WindowBatch(backbone, lead, tuple(pieces[:chunks]), tuple(pieces[chunks:]), questions, clusters)


def halved(count: int) -> tuple[int, int]:
    """Divides a number of windows into those for calibration and those held out."""
    return (count + 1) // 2, count // 2


def lead_ids(backbone: ModelBackbone) -> list[int]:
    """Returns the tokens of the lead, a sentence; of a vocabulary that lacks its words, the first words that it has."""
    with contextlib.suppress(InputError):
        if ids := np.asarray(backbone.prepare([Text(LEAD)])["input_ids"])[0].tolist():
            return ids
    words = sorted(backbone.tokenizer.get_vocab().items(), key=lambda word: word[1])
    return [number for word, number in words if word.isalnum()][:LEAD_WORDS]
