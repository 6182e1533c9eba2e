"""Opening the tensors of a checkpoint, whatever they are stored as."""

import os
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from .conversion import check_plain_tensors, find_conversion
from .safetensors_files import SafetensorsSource
from .source import TensorSource


def open_source(checkpoint: str | os.PathLike[str], dtype: DTypeLike = np.float32) -> TensorSource:
    """Opens the tensors of a checkpoint directory or a GGUF file, as the model names and needs them.

    Args:
      dtype: the type that quantised tensors are dequantised to.

    Raises:
      ConfigError: weights quantised in a way that is not read. WeightsError: as `SafetensorsSource`, or tensors that do
        not hold what the configuration says.
    """
    conversion = find_conversion(Path(checkpoint))
    return open_plain(checkpoint) if conversion is None else conversion.source(dtype)


def open_plain(directory: str | os.PathLike[str]) -> TensorSource:
    """Opens the tensors of a directory whose weights are not quantised.

    Raises:
      WeightsError: as `SafetensorsSource`, or tensors that only quantised checkpoints have.
    """
    source = SafetensorsSource(directory)
    check_plain_tensors(source.origin, source.tensors, "config.json has no quantization_config")
    return source


def as_source(given: TensorSource | str | os.PathLike[str]) -> TensorSource:
    """Returns a source as it is, a directory opened."""
    return open_source(given) if isinstance(given, str | os.PathLike) else given
