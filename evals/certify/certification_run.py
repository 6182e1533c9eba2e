"""`CertificationRun`: what all measurements of one run share."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from models import ModelBackbone

from .journal import Journal
from .serving_modes import RANKS, ModeSet
from .window_sources import WindowSource

Step = Callable[[str], None]
"""Called with the name of each step that is done."""


@dataclasses.dataclass(frozen=True, eq=False)
class CertificationRun:
    """What is measured, and where progress is kept.

    Attributes:
      backbone: that is certified. source: of the windows. folder: for temporary files.
      ranks: of patches, ascending.
      journal: provides what an earlier run measured, and records what this one does.
      step: called for each mode of a batch, and for each batch that is planned for.
      skip: points that are not measured.
    """

    backbone: ModelBackbone
    source: WindowSource
    folder: Path
    ranks: tuple[int, ...] = RANKS
    journal: Journal = dataclasses.field(default_factory=Journal)
    step: Step = lambda name: None
    skip: frozenset[str] = frozenset()

    @property
    def modes(self) -> ModeSet:
        """Everything that windows are served in."""
        return ModeSet(self.ranks, self.source.sizes.chunks, self.skip)

    def is_measured(self, number: int) -> bool:
        """Returns whether the journal has a batch of windows."""
        return batch_name(number) in self.journal


def batch_name(number: int) -> str:
    """Returns the journal's name of a batch of windows."""
    return f"windows {number}"
