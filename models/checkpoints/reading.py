"""Reading a checkpoint's tensors into nested parameters, and onto devices."""

import functools
import gc
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvpatch_jax.errors import WeightsError

from .entries import Expected, ParamPath, Params, TensorEntry
from .opening import as_source
from .planning import PlannedTensor, check_tensors, plan, resolve_ties, unpermuted
from .source import TensorSource

_PIECE = 1 << 22  # values read at once where two tensors are compared
_CACHED = 1 << 16  # values looked at at once

Region = tuple[tuple[int, int], ...]
"""A region of a parameter: where each axis starts and stops."""


def tensor_shapes(source: TensorSource | str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of a checkpoint, for families whose releases differ in names or shapes.

    Raises:
      WeightsError: as `open_source`.
    """
    return {name: info.shape for name, info in as_source(source).tensors.items()}


def same_tensors(source: TensorSource | str | os.PathLike[str], first: str, second: str) -> bool:
    """Whether two tensors of a checkpoint hold the same values. Read in pieces; ends at the first that differ.

    Raises:
      WeightsError: as `open_source`, or data that cannot be read.
    """
    source = as_source(source)
    if source.tensors[first] != source.tensors[second]:
        return False
    shape = source.tensors[first].shape
    if not shape:
        return np.array_equal(source.read(first), source.read(second))
    step = max(1, _PIECE // max(1, math.prod(shape[1:])))
    pieces = (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))
    return all(np.array_equal(source.read(first, (piece,)), source.read(second, (piece,))) for piece in pieces)


def load_weights(
    source: TensorSource | str | os.PathLike[str],
    entries: Sequence[TensorEntry],
    expected: Expected,
    dtype: DTypeLike | None = None,
    ignore: Sequence[str] = (),
    shardings: Mapping[ParamPath, jax.sharding.Sharding] | None = None,
) -> Params:
    """Read a checkpoint into nested parameters.

    Without `shardings` a parameter is read whole and handed to the default device. With them each shard is read by
    itself, only its own part of the file's tensors, and put on its devices before the next one is read. So beside what
    the devices hold, the host holds one shard of one parameter (of a stack of layers: all the layers' part in it) and
    one slice of a tensor.

    Args:
      source: the checkpoint's tensors, or a Hugging Face directory.
      entries: the family's map from tensors to parameters.
      expected: path to shape and type of every parameter of the model.
      dtype: type for floating parameters; None takes each parameter's expected one.
      ignore: regular expressions of tensor names that may be there and are not read.
      shardings: path to where each parameter goes; every one of `expected`.

    Returns:
      Nested dict of JAX arrays, one per path of `expected`. Stored float64, float32, float16 and bfloat16 are cast.

    Raises:
      WeightsError: a missing, unexpected, mis-shaped or mis-typed tensor, a damaged file, or no weights at all. It
        names the tensor or the file and what was expected.
    """
    source = as_source(source)
    tensors = resolve_ties(plan(entries, expected), source.tensors)
    check_tensors(source, tensors, expected, ignore)
    params: Params = {}
    for path, group in itertools.groupby(tensors, key=lambda tensor: tensor.path):
        leaf = expected[path]
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        kind = jnp.dtype(dtype) if floating and dtype is not None else leaf.dtype
        read = functools.partial(_fill, source, list(group), leaf.shape, kind)
        whole = tuple((0, size) for size in leaf.shape)
        value = jnp.asarray(read(whole)) if shardings is None else _place(leaf.shape, shardings[path], read)
        _put(params, path, value)
    return params


def _place(shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Region], np.ndarray]) -> jax.Array:
    """An array of which each distinct shard is read once, and has left the host before the next one is read.

    (`jax.make_array_from_callback` would hold all shards of this process at once, and read copies again.)
    """
    holders: dict[Region, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        region = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        holders.setdefault(region, []).append(device)
    put = lambda value, devices: jax.block_until_ready([jax.device_put(value, device) for device in devices])
    shards: list[jax.Array] = []
    for region, devices in holders.items():
        shards += put(read(region), devices)  # no name for what was read, which would keep it during the next read
        gc.collect(0)  # jax may let go of what it has copied only when Python collects (0.11.2: dozens of shards later)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _fill(
    source: TensorSource,
    tensors: Sequence[PlannedTensor],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    region: Region,
) -> np.ndarray:
    """A region of a parameter, out of the tensors that fill it."""
    value = np.empty([stop - start for start, stop in region], dtype)
    for tensor in tensors:
        depth = len(tensor.slot)
        if all(start <= number < stop for number, (start, stop) in zip(tensor.slot, region, strict=False)):
            slot = tuple(number - start for number, (start, _) in zip(tensor.slot, region, strict=False))
            value[slot] = _read(source, tensor, shape[depth:], region[depth:])
    return value


def _read(source: TensorSource, tensor: PlannedTensor, shape: tuple[int, ...], region: Region) -> np.ndarray:
    """A region of what a tensor fills, which is of this shape. No more than that region is read.

    Except where the parameter has axes of the file flattened together: then no region of it is one of the file's
    tensor, and all of what it needs is read.
    """
    flattened, permute = tensor.entry.file_shape is not None, tensor.entry.permute
    spans = tuple((0, size) for size in tensor.piece) if flattened else unpermuted(region, permute)
    whole = tensor.entry.part is None and spans == tuple((0, size) for size in tensor.file_shape)
    value = source.read(tensor.name, None if whole else _file_cut(tensor, spans))
    _check_finite(tensor.name, value)
    value = value if permute is None else value.transpose(permute)
    return value.reshape(shape)[tuple(slice(*span) for span in region)] if flattened else value


_EXPONENTS = {"float64": (8, 0x7FF << 52), "float32": (4, 0xFF << 23), "float16": (2, 0x1F << 10)}
_EXPONENTS |= {"bfloat16": (2, 0xFF << 7)}
"""By type: its width in bytes, and the bits of the exponent, which are all set in infinities and NaN alone."""


def _check_finite(name: str, value: np.ndarray) -> None:
    """Raises WeightsError for NaN or infinity. Looks at the bits, a piece in the cache at a time, without a cast."""
    width, exponent = _EXPONENTS.get(value.dtype.name, (0, 0))
    if not width:
        return
    bits = np.ascontiguousarray(value).reshape(-1).view(f"u{width}")
    mask = bits.dtype.type(exponent)
    for start in range(0, len(bits), _CACHED):
        piece = bits[start : start + _CACHED] & mask
        if piece.max(initial=0) == mask:
            place = np.unravel_index(start + int(np.argmax(piece == mask)), value.shape)
            found = value[place]
            raise WeightsError(
                f"tensor {name!r} holds {float(found)} at {[int(index) for index in place]}; expected finite numbers"
            )


def _file_cut(tensor: PlannedTensor, spans: Region) -> tuple[slice, ...]:
    """Where in the file's tensor these spans of the entry's piece of it lie."""
    part, starts = tensor.entry.part, [0] * len(spans)
    if part is not None:
        starts[part.axis] = part.start
    return tuple(slice(start + first, start + last) for start, (first, last) in zip(starts, spans, strict=True))


def _put(params: Params, path: ParamPath, value: jax.Array) -> None:
    for part in path[:-1]:
        params = params.setdefault(part, {})
    params[path[-1]] = value
