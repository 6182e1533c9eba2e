"""How many windows of which sizes are measured, in which batches, and which of them are held out."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvpatch_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class CertifiedSizes:
    """How many windows of which sizes are measured.

    Attributes:
      chunks: of a window, ascending.
      counts: windows of each size, half of them held out.
      batch: windows of the least size in one forward; larger ones are fewer, so that a forward has as many tokens.

    Raises:
      InputError: sizes that do not ascend or are below 3, or another number of counts.
    """

    chunks: tuple[int, ...] = (4,)
    counts: tuple[int, ...] = (64,)
    batch: int = 32

    def __post_init__(self) -> None:
        if not self.chunks or self.chunks[0] < 3 or list(self.chunks) != sorted(set(self.chunks)):
            raise InputError(f"--chunks: got {self.chunks}; expected ascending numbers >= 3, such as 4,8,16")
        if len(self.counts) != len(self.chunks) or min(self.counts) < 2:
            raise InputError(
                f"--n: got {len(self.counts)} numbers, {self.counts}; expected one, or {len(self.chunks)}, all >= 2"
            )

    @property
    def most(self) -> int:
        """Chunks of the largest window, and of what was there before each window."""
        return self.chunks[-1]

    @property
    def fewest(self) -> tuple[int, int]:
        """The least number of windows of one size: for calibration, held out."""
        return halves(min(self.counts))

    def up_to(self, count: int) -> "CertifiedSizes":
        """Returns these sizes with at most so many windows of each."""
        return dataclasses.replace(self, counts=tuple(min(own, count) for own in self.counts))

    def batch_of(self, chunks: int) -> int:
        """Returns how many windows of a size are in one forward."""
        return max(1, self.batch * self.chunks[0] // chunks)

    def batches(self) -> Iterator["PlannedBatch"]:
        """Yields every batch of every size."""
        first = 0
        for chunks, count in zip(self.chunks, self.counts, strict=True):
            for side, start, numbers in batches_of(count, self.batch_of(chunks)):
                yield PlannedBatch(chunks, bool(side), start, first + numbers)
            first += count


class PlannedBatch(NamedTuple):
    """A batch of windows before their content is chosen.

    Attributes:
      chunks: of a window. held_out: whether the windows are held out.
      start: the first one's number among those of its size and half. clusters: their numbers among all windows.
    """

    chunks: int
    held_out: bool
    start: int
    clusters: np.ndarray


def halves(count: int) -> tuple[int, int]:
    """Returns how many windows are for calibration, and how many are held out."""
    return (count + 1) // 2, count // 2


def batches_of(count: int, batch: int) -> Iterator[tuple[int, int, Int[np.ndarray, " B"]]]:
    """Yields every batch of `count` windows: its half, its first window's number there, the numbers of its windows."""
    first = 0
    for side, windows in enumerate(halves(count)):
        for start in range(0, windows, batch):
            yield side, start, first + np.arange(start, min(start + batch, windows))
        first += windows
