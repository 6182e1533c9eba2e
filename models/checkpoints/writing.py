"""Writing parameters as `model.safetensors` under Hugging Face's names."""

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from .entries import PlannedTensor, TensorEntry, flatten_params, plan
from .safetensors_files import SINGLE_FILE


def save_weights(directory: str | os.PathLike[str], params: Mapping[str, Any], entries: Sequence[TensorEntry]) -> Path:
    """Writes parameters as `model.safetensors` under Hugging Face's names, in the type they have.

    The file appears whole or not at all. Returns its path.

    Raises:
      WeightsError: a parameter that no entry covers.
    """
    flat = flatten_params(params)
    expected = {path: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for path, leaf in flat.items()}
    values: dict[str, np.ndarray] = {}

    for path, group in itertools.groupby(plan(entries, expected), key=lambda tensor: tensor.path):
        leaf = np.asarray(flat[path])
        for tensor in group:
            part = tensor.entry.part
            # Pieces of a fused tensor come one by one, each with an entry of its own.
            if part is not None:
                fused = values.setdefault(tensor.name, np.zeros(tensor.file_shape, leaf.dtype))
                cut = (*[slice(None)] * part.axis, slice(part.start, part.stop))
                fused[cut] = _to_file(np.asarray(leaf[tensor.slot]), tensor)
            else:
                values[tensor.name] = _to_file(np.asarray(leaf[tensor.slot]), tensor)

    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{SINGLE_FILE}.partial"

    try:
        save_file(values, partial, metadata={"format": "pt"})
        os.replace(partial, root / SINGLE_FILE)
    finally:
        partial.unlink(missing_ok=True)

    return root / SINGLE_FILE


def _to_file(value: np.ndarray, tensor: PlannedTensor) -> np.ndarray:
    permute = tensor.entry.permute
    if permute is None:
        # NumPy makes a single number an array of one.
        return np.ascontiguousarray(value).reshape(tensor.piece)
    permuted = value.reshape([tensor.piece[axis] for axis in permute])
    return np.ascontiguousarray(permuted.transpose(np.argsort(permute)))
