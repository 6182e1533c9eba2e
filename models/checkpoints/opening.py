"""Opening a checkpoint directory, whatever its tensors are stored as."""

import os

from .source import SafetensorsSource, TensorSource


def open_source(directory: str | os.PathLike[str]) -> TensorSource:
    """Opens the tensors of a checkpoint directory, as the model names and needs them.

    Raises:
      WeightsError: as `SafetensorsSource`.
    """
    return SafetensorsSource(directory)


def as_source(given: TensorSource | str | os.PathLike[str]) -> TensorSource:
    """A source as it is, a directory opened."""
    return open_source(given) if isinstance(given, str | os.PathLike) else given
