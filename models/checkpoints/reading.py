"""Reading a checkpoint's tensors into nested parameters, and onto devices."""

import fnmatch
import functools
import gc
import itertools
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.errors import WeightsError

from .entries import Expected, ParamPath, Params, PlannedTensor, TensorEntry, plan, unpermuted
from .filling import Spans, check_finite, convert, pieces
from .naming import SILENT
from .source import NUMPY_TYPES, TensorSource

_JOB = 8 << 20
"""Bytes of a parameter that one thread fills at a time."""
_ALIGNMENT = 64
"""Bytes: XLA's CPU client takes host memory that begins on a multiple of it as it stands."""
_THREADS = 16
"""More do not make memory any faster."""

_SHOWN = 8
"""Names in a message."""
_FLOATING = ("F64", "F32", "F16", "BF16")
_INTEGER = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


class UnknownTensorWarning(UserWarning):
    """Tensors of a checkpoint that its model does not read. The model is read without them."""


def tensor_shapes(source: TensorSource) -> dict[str, tuple[int, ...]]:
    """Returns name to shape of every tensor of a checkpoint, for families whose releases differ in names or shapes."""
    return {name: info.shape for name, info in source.tensors.items()}


def same_tensors(source: TensorSource, first: str, second: str) -> bool:
    """Returns whether two tensors of a checkpoint hold the same values."""
    same = source.tensors[first] == source.tensors[second]
    return same and np.array_equal(source.read(first), source.read(second))


def load_weights(
    source: TensorSource,
    entries: Sequence[TensorEntry],
    expected: Expected,
    ignore: Collection[str] = (),
    shardings: Mapping[ParamPath, jax.sharding.Sharding] | None = None,
) -> Params:
    """Reads a checkpoint into nested parameters.

    Threads fill one parameter at a time, piece by piece: each piece is read, looked at (NaN, infinities), cast and put
    into its place while it is in the cache. On a CPU that memory becomes the parameter. Elsewhere it is on its way to
    the device while the next parameter is filled, so that the host holds two of them.

    With `shardings` each shard is filled by itself, out of its own part of the file's tensors, and put on its devices
    before the next one is. So beside what the devices hold, the host holds one shard of one parameter (of a stack of
    layers: all the layers' part in it) and one piece per thread.

    Args:
      source: the checkpoint's tensors.
      entries: the family's map from tensors to parameters.
      expected: path to shape and type of every parameter of the model.
      ignore: patterns (`fnmatch`) of tensor names that may be there and are not read.
      shardings: path to where each parameter goes; every one of `expected`.

    Returns:
      Nested dict of JAX arrays, one per path of `expected`. Stored float64, float32, float16 and bfloat16 are cast.

    Raises:
      WeightsError: missing, mis-shaped or mis-typed tensors, a number that is not finite, a damaged file or one that is
        written to meanwhile. It names the tensors or the file and what was expected.

    Warns:
      UnknownTensorWarning: tensors that the model does not read, all in one.
    """
    tensors = plan(entries, expected)
    _check_tensors(source, tensors, expected)
    _warn_of_others(source, {tensor.name for tensor in tensors}, ignore)

    params: Params = {}
    previous = None
    with ThreadPoolExecutor(_threads()) as pool:
        for path, group in itertools.groupby(tensors, key=lambda tensor: tensor.path):
            leaf = expected[path]
            read = functools.partial(_filled, pool, source, list(group), leaf.shape, leaf.dtype)
            if shardings is None:
                # The parameter before this one is waited for, so that the host holds two at most.
                value = jax.device_put(read(tuple((0, size) for size in leaf.shape)))
                jax.block_until_ready(previous)
                previous = value
            else:
                value = _placed(leaf.shape, shardings[path], read)

            inner = params
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = value
    return params


def _check_tensors(source: TensorSource, tensors: Sequence[PlannedTensor], expected: Expected) -> None:
    """Raises WeightsError for tensors that are missing, or one of another shape or kind than planned."""
    for tensor in tensors:
        found = source.tensors.get(tensor.name)
        if found is None:
            continue
        if found.shape != tensor.file_shape:
            raise WeightsError(
                f"{source.origin}: got tensor {tensor.name!r} of shape {found.shape}; expected {tensor.file_shape} for "
                f"{'.'.join(tensor.path)}"
            )
        allowed = _FLOATING if jnp.issubdtype(expected[tensor.path].dtype, jnp.floating) else _INTEGER
        if found.dtype not in allowed:
            raise WeightsError(
                f"{source.origin}: got tensor {tensor.name!r} of type {found.dtype}; expected one of "
                f"{', '.join(allowed)}"
            )

    missing = {tensor.name: tensor for tensor in tensors if tensor.name not in source.tensors}
    if missing:
        first = next(iter(missing.values()))
        raise WeightsError(
            f"{source.origin}: got no tensor {_listed(missing)}; expected all of the model's, the first of shape "
            f"{first.file_shape} for {'.'.join(first.path)}. The file has {_listed(source.tensors)}"
        )


def _warn_of_others(source: TensorSource, known: Collection[str], ignore: Collection[str]) -> None:
    """Warns of tensors that the model does not read, unless `ignore` or what every file may have explains them."""
    others = source.tensors.keys() - known
    # A layer that predicts further tokens stands behind the model's, under whatever number.
    predicting = [f"{name.partition('.eh_proj.')[0]}.*" for name in others if ".eh_proj." in name]
    for pattern in (*SILENT, *predicting, *ignore):
        others = {name for name in others if not fnmatch.fnmatchcase(name, pattern)}
    if others:
        warnings.warn(
            f"{source.origin}: got tensors that this model does not read: {_listed(sorted(others))}. The model is read "
            "without them; load(…, ignore=[…]) with their names or patterns says that this is right",
            UnknownTensorWarning,
            skip_file_prefixes=(str(Path(__file__).parents[1]),),
        )


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (", ".join(shown[:_SHOWN]) or "none") + more


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _THREADS)


def _placed(shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Spans], np.ndarray]) -> jax.Array:
    """Returns an array of which each distinct shard is read once, and has left the host before the next one is read.

    (`jax.make_array_from_callback` would hold all shards of this process at once, and read copies again.)
    """

    holders: dict[Spans, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        region = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        holders.setdefault(region, []).append(device)

    def put(value, devices):
        return jax.block_until_ready([jax.device_put(value, device) for device in devices])

    shards: list[jax.Array] = []
    for region, devices in holders.items():
        # No name for what was read, which would keep it during the next read. jax may free what it has copied only
        # when Python collects (0.11.2: dozens of shards later).
        shards += put(read(region), devices)
        gc.collect(0)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _filled(
    pool: ThreadPoolExecutor,
    source: TensorSource,
    tensors: Sequence[PlannedTensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
    region: Spans,
) -> np.ndarray:
    """Returns a region of a parameter of this shape, filled with the tensors that it is made of."""
    value = _aligned_zeros([stop - start for start, stop in region], dtype)
    jobs: list[Callable[[], None]] = []
    for tensor in tensors:
        depth = len(tensor.slot)
        if all(start <= number < stop for number, (start, stop) in zip(tensor.slot, region, strict=False)):
            slot = tuple(number - start for number, (start, _) in zip(tensor.slot, region, strict=False))
            jobs += _jobs(source, tensor, shape[depth:], region[depth:], value[(*slot, ...)])

    # A small parameter is not worth a thread.
    for done in (map if value.nbytes < _JOB else pool.map)(lambda job: job(), jobs):
        assert done is None
    return value


def _aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns zeros at an address that XLA's CPU client makes an array of without a copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


def _jobs(
    source: TensorSource, tensor: PlannedTensor, shape: tuple[int, ...], region: Spans, out: np.ndarray
) -> Iterator[Callable[[], None]]:
    """Yields what fills `out`, a region of what a tensor fills, which is of this shape. No more than that region is
    read.

    Except where the parameter has axes of the file flattened together: then no region of it is one of the file's
    tensor, and all of what it needs is read.
    """
    permute = tensor.entry.permute
    if tensor.entry.file_shape is not None:

        def fill_flattened() -> None:
            value = np.zeros(tensor.piece, out.dtype)
            _copy(source, tensor, tuple((0, size) for size in tensor.piece), value)
            value = value if permute is None else value.transpose(permute)
            out[...] = value.reshape(shape)[tuple(slice(*span) for span in region)]

        yield fill_flattened
        return

    spans = unpermuted(region, permute)
    out = out if permute is None else out.transpose(np.argsort(permute))
    if not spans or out.nbytes <= _JOB:
        yield functools.partial(_copy, source, tensor, spans, out)
        return

    (first, last), *inner = spans
    step = max(1, len(out) * _JOB // out.nbytes)

    for start in range(first, last, step):
        part = out[start - first : start - first + step]
        span = (start, min(start + step, last))
        yield functools.partial(_copy, source, tensor, (span, *inner), part)


def _copy(source: TensorSource, tensor: PlannedTensor, spans: Spans, out: np.ndarray) -> None:
    """Copies a region of a tensor, or of the entry's piece of it, into an array of its shape, which holds zeros."""
    part, first = tensor.entry.part, [start for start, _ in spans]
    shifts = [part.start if part is not None and axis == part.axis else 0 for axis in range(len(spans))]
    dtype = NUMPY_TYPES[source.tensors[tensor.name].dtype]
    turned, room = out.ndim > 1 and out.strides[-1] > out.strides[-2], np.empty(0, dtype)
    for piece in pieces(spans, dtype.itemsize, turned):
        place = out[(*(slice(start - at, stop - at) for (start, stop), at in zip(piece, first, strict=True)), ...)]
        region = tuple(slice(start + shift, stop + shift) for (start, stop), shift in zip(piece, shifts, strict=True))
        if place.dtype == dtype and place.flags.c_contiguous:
            value = source.read(tensor.name, region, place)
        else:
            room = room if room.size >= place.size else np.empty(place.size, dtype)
            value = source.read(tensor.name, region, room[: place.size].reshape(place.shape))
        check_finite(value, tuple(cut.start for cut in region), tensor.name, tensor.entry.infinite)
        if value is not place:
            convert(value, place)
