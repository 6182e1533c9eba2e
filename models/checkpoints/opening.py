"""Opening a checkpoint directory, whatever its tensors are stored as."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from .ggml import GgufHeader, GgufSource, find_gguf, read_config, read_header, tensor_places
from .quantised import DequantisedSource, Quantisation, check_plain_tensors, find_quantisation
from .safetensors_files import SafetensorsSource
from .source import TensorSource


def open_source(directory: str | os.PathLike[str], dtype: DTypeLike = np.float32) -> TensorSource:
    """Opens the tensors of a checkpoint directory or a GGUF file, as the model names and needs them.

    Args:
      dtype: the type that quantised tensors are dequantised to.

    Raises:
      ConfigError: weights quantised in a way that is not read. WeightsError: as `SafetensorsSource`, or tensors that do
        not hold what the configuration says.
    """
    path = find_gguf(Path(directory))
    if path is not None:
        header = read_header(path)
        return open_gguf(header, read_config(header), dtype)
    return open_safetensors(directory, find_quantisation(Path(directory)), dtype)


def open_gguf(header: GgufHeader, config: Mapping[str, Any], dtype: DTypeLike) -> TensorSource:
    """Opens the tensors of a GGUF file whose header, and the configuration that follows from it, were read.

    Raises:
      WeightsError: tensors that do not go with the configuration.
    """
    return GgufSource(header, tensor_places(header, config), dtype)


def open_safetensors(
    directory: str | os.PathLike[str], quantisation: Quantisation | None, dtype: DTypeLike
) -> TensorSource:
    """Opens the tensors of a directory, of which it is known whether and how they are quantised.

    Raises:
      WeightsError: as `open_source`.
    """
    source = SafetensorsSource(directory)
    if quantisation is not None:
        return DequantisedSource(source, quantisation, dtype)
    check_plain_tensors(source.origin, source.tensors, "config.json has no quantization_config")
    return source


def as_source(given: TensorSource | str | os.PathLike[str]) -> TensorSource:
    """Returns a source as it is, a directory opened."""
    return open_source(given) if isinstance(given, str | os.PathLike) else given
