"""Strict reading and writing of Hugging Face weight directories (`model.safetensors`, alone or sharded with an index).

A family says where each tensor goes with a list of `TensorEntry`; everything else (which tensors must be there, in
which shape) follows from the parameters the model expects. Every header is checked before the first byte of data is
read, so a bad checkpoint raises one typed error and leaves nothing half loaded.
"""

import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvpatch_jax.errors import WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PIECE = 1 << 22  # values read at once where two tensors are compared
_CACHED = 1 << 16  # values looked at at once
_FLOATING = ("F64", "F32", "F16", "BF16")
_INTEGER = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")

ParamPath = tuple[str, ...]
Params = dict[str, Any]
Expected = Mapping[ParamPath, jax.ShapeDtypeStruct]
Region = tuple[tuple[int, int], ...]  # of a parameter: where each axis starts and stops


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a fused tensor: entries start … stop-1 of the `size` that the file's tensor has along `axis`."""

    start: int
    stop: int
    size: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one kind of tensor of a Hugging Face file goes.

    Attributes:
      pattern: the tensor's name; `{layer}` (any name in braces) stands for a number.
      path: where the parameter is in the nested parameters. A part `{layer}` takes the number, if not stacked.
      permute: axes of the file's tensor in the parameter's order, as for `numpy.transpose`; None leaves them.
      stack: the tensors of all numbers are one parameter, on leading axes in the order of the braces.
      file_shape: the tensor's shape in the file, where the parameter has its (permuted) axes flattened together.
      tied_to: name of the tensor to read where this one is absent (an output head tied to the embedding).
      part: the parameter is a piece of the file's tensor (fused projections); `permute` is for that piece.
      offset: with `stack`, the number that the first brace starts from (a stack of layers 3, 4, …).
    """

    pattern: str
    path: ParamPath
    permute: tuple[int, ...] | None = None
    stack: bool = False
    file_shape: tuple[int, ...] | None = None
    tied_to: str | None = None
    part: Part | None = None
    offset: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """Names in braces, in order."""
        return tuple(field for _, field, _, _ in string.Formatter().parse(self.pattern) if field)


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of the file as a parameter needs it: name, shape there, and which slot of the parameter it fills.

    `piece` is the shape of what is read of it: all of it, or the entry's part.
    """

    name: str
    file_shape: tuple[int, ...]
    piece: tuple[int, ...]
    entry: TensorEntry
    path: ParamPath
    slot: tuple[int, ...]


def weight_index(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """Tensor name to the file that holds it.

    Raises:
      WeightsError: no safetensors weights there, an index that cannot be read or names a file that is not there, or a
        damaged file.
    """
    root = Path(directory)
    if not root.is_dir():
        raise WeightsError(f"{root} is not a directory; expected one with {SINGLE_FILE} or {INDEX_FILE}")
    if (root / INDEX_FILE).is_file():
        return _sharded_index(root)
    if (root / SINGLE_FILE).is_file():
        return {name: root / SINGLE_FILE for name in _headers(root / SINGLE_FILE)}
    others = sorted(path.name for path in root.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    found = f"found {', '.join(others)}, which is not read" if others else "found no weights"
    raise WeightsError(f"{root}: {found}; expected {SINGLE_FILE} or {INDEX_FILE}")


def _sharded_index(root: Path) -> dict[str, Path]:
    path = root / INDEX_FILE
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["weight_map"].items()
        index = {str(name): root / str(file) for name, file in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f'{path} is not an index: expected JSON with "weight_map": {error}') from error
    present: dict[str, Path] = {}
    for file in sorted(set(index.values())):
        if file.parent != root or file.name in ("", ".", ".."):
            raise WeightsError(f"{path} names the file {str(file)!r}; expected a plain file name beside it")
        if not file.is_file():
            raise WeightsError(f"{path} names {file.name}, which is not in {root}")
        present |= {name: file for name in _headers(file)}
    for name, file in index.items():
        if present.get(name) != file:
            raise WeightsError(f"{path} says tensor {name!r} is in {file.name}; it is not there")
    return present


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is damaged, cut short or not a safetensors file: {error}") from error


def _headers(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to (shape, stored type) of every tensor in a file, without reading its data."""
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def tensor_shapes(directory: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor of a checkpoint, for families whose releases differ in names or shapes.

    Raises:
      WeightsError: as `weight_index`.
    """
    files = sorted(set(weight_index(directory).values()))
    return {name: shape for file in files for name, (shape, _) in _headers(file).items()}


def same_tensors(directory: str | os.PathLike[str], first: str, second: str) -> bool:
    """Whether two tensors of a checkpoint hold the same values. Read in pieces; ends at the first that differ.

    Raises:
      WeightsError: as `weight_index`, or data that cannot be read.
    """
    index = weight_index(directory)
    with _open(index[first]) as one, _open(index[second]) as other:
        parts = one.get_slice(first), other.get_slice(second)
        shape = parts[0].get_shape()
        if shape != parts[1].get_shape() or parts[0].get_dtype() != parts[1].get_dtype():
            return False
        step = max(1, _PIECE // max(1, math.prod(shape[1:])))
        try:
            pieces = (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))
            return all(np.array_equal(*(part[piece] for part in parts)) for piece in pieces)
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"tensors {first!r} and {second!r} cannot be read: {error}") from error


def _plan(entries: Sequence[TensorEntry], expected: Expected) -> list[_Tensor]:
    """Every tensor that must be in the file. Raises WeightsError where entries and parameters do not match."""
    tensors: list[_Tensor] = []
    filled: set[ParamPath] = set()
    for entry in entries:
        for path, numbers in _targets(entry, expected):
            if path in filled:
                raise WeightsError(f"two entries fill the parameter {'.'.join(path)}; second: {entry.pattern!r}")
            filled.add(path)
            tensors += _tensors_of(entry, path, expected[path], numbers)
    unfilled = sorted(set(expected) - filled)
    if unfilled:
        raise WeightsError(f"no entry fills the parameter {'.'.join(unfilled[0])} ({len(unfilled)} in all)")
    return tensors


def _targets(entry: TensorEntry, expected: Expected) -> Iterator[tuple[ParamPath, dict[str, int]]]:
    """Parameters an entry fills, with the numbers in their paths: one, or one per number where the path has braces."""
    braces = re.compile(r"\\\{(\w+)\\\}")
    rules = [re.compile(braces.sub(r"(?P<\1>\\d+)", re.escape(part))) for part in entry.path]
    found = False
    for path in expected:
        matches = [rule.fullmatch(part) for rule, part in zip(rules, path, strict=False)]
        if len(path) == len(rules) and all(matches):
            found = True
            yield path, {field: int(n) for match in matches if match for field, n in match.groupdict().items()}
    if not found:
        raise WeightsError(f"entry {entry.pattern!r} fills {'.'.join(entry.path)}, which the model does not have")


def _tensors_of(
    entry: TensorEntry, path: ParamPath, leaf: jax.ShapeDtypeStruct, numbers: dict[str, int]
) -> Iterator[_Tensor]:
    depth = len(entry.fields) if entry.stack else 0
    lead, inner = leaf.shape[:depth], leaf.shape[depth:]
    fits = len(lead) == depth and len(entry.permute or ()) in (0, len(entry.file_shape or inner))
    piece = tuple(entry.file_shape or (_unpermuted(inner, entry.permute) if fits else ()))
    file_shape = _whole(piece, entry.part)
    if not fits or file_shape is None or math.prod(piece) != math.prod(inner):
        raise WeightsError(f"entry {entry.pattern!r} does not fit the parameter {'.'.join(path)} of shape {leaf.shape}")
    for slot in itertools.product(*map(range, lead)):
        if entry.stack:
            named = (slot[0] + entry.offset, *slot[1:]) if slot else slot
            numbers = dict(zip(entry.fields, named, strict=True))
        yield _Tensor(entry.pattern.format(**numbers), file_shape, piece, entry, path, slot)


def _whole(piece: tuple[int, ...], part: Part | None) -> tuple[int, ...] | None:
    """Shape of the file's tensor that a piece is cut from; None where the piece does not fit its part."""
    if part is None:
        return piece
    if part.axis >= len(piece) or piece[part.axis] != part.stop - part.start or part.stop > part.size:
        return None
    return (*piece[: part.axis], part.size, *piece[part.axis + 1 :])


def _cut(part: Part) -> tuple[slice, ...]:
    return (*[slice(None)] * part.axis, slice(part.start, part.stop))


def _unpermuted[T](axes: Sequence[T], permute: tuple[int, ...] | None) -> tuple[T, ...]:
    return tuple(axes) if permute is None else tuple(axes[axis] for axis in np.argsort(permute))


def load_weights(
    directory: str | os.PathLike[str],
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
      directory: a Hugging Face directory.
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
    index = weight_index(directory)
    tensors = _resolve_ties(_plan(entries, expected), index)
    headers = {name: header for file in sorted(set(index.values())) for name, header in _headers(file).items()}
    _check(Path(directory), tensors, headers, expected, ignore)
    params: Params = {}
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in sorted(set(index.values()))}
        for path, group in itertools.groupby(tensors, key=lambda tensor: tensor.path):
            leaf, sources = expected[path], [(files[index[tensor.name]], tensor) for tensor in group]
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            kind = jnp.dtype(dtype) if floating and dtype is not None else leaf.dtype
            read = functools.partial(_fill, sources, leaf.shape, kind)
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
    sources: Sequence[tuple[Any, _Tensor]], shape: tuple[int, ...], dtype: DTypeLike, region: Region
) -> np.ndarray:
    """A region of a parameter, out of the (file, tensor) pairs that fill it."""
    value = np.empty([stop - start for start, stop in region], dtype)
    for file, tensor in sources:
        depth = len(tensor.slot)
        if all(start <= number < stop for number, (start, stop) in zip(tensor.slot, region, strict=False)):
            slot = tuple(number - start for number, (start, _) in zip(tensor.slot, region, strict=False))
            value[slot] = _read(file, tensor, shape[depth:], region[depth:])
    return value


def _resolve_ties(tensors: list[_Tensor], index: Mapping[str, Path]) -> list[_Tensor]:
    return [
        dataclasses.replace(tensor, name=tensor.entry.tied_to)
        if tensor.name not in index and tensor.entry.tied_to is not None
        else tensor
        for tensor in tensors
    ]


def _check(
    root: Path,
    tensors: Sequence[_Tensor],
    headers: Mapping[str, tuple[tuple[int, ...], str]],
    expected: Expected,
    ignore: Sequence[str],
) -> None:
    for tensor in tensors:
        place = ".".join(tensor.path)
        if tensor.name not in headers:
            raise WeightsError(
                f"{root}: tensor {tensor.name!r} is missing; expected shape {tensor.file_shape} for {place}"
            )
        shape, stored = headers[tensor.name]
        if shape != tensor.file_shape:
            raise WeightsError(
                f"{root}: tensor {tensor.name!r} has shape {shape}; expected {tensor.file_shape} for {place}"
            )
        floating = jnp.issubdtype(expected[tensor.path].dtype, jnp.floating)
        allowed = _FLOATING if floating else _INTEGER
        if stored not in allowed:
            raise WeightsError(
                f"{root}: tensor {tensor.name!r} has type {stored}; expected one of {', '.join(allowed)}"
            )
    known = {tensor.name for tensor in tensors}
    skip = [re.compile(pattern) for pattern in ignore]
    extra = sorted(name for name in headers if name not in known and not any(rule.fullmatch(name) for rule in skip))
    if extra:
        raise WeightsError(
            f"{root}: tensor {extra[0]!r} is unexpected ({len(extra)} in all); this model has no such parameter"
        )


def _read(file: Any, tensor: _Tensor, shape: tuple[int, ...], region: Region) -> np.ndarray:
    """A region of what a tensor fills, which is of this shape. No more than that region is read.

    Except where the parameter has axes of the file flattened together: then no region of it is one of the file's
    tensor, and all of what it needs is read.
    """
    flattened, permute = tensor.entry.file_shape is not None, tensor.entry.permute
    spans = tuple((0, size) for size in tensor.piece) if flattened else _unpermuted(region, permute)
    try:
        whole = tensor.entry.part is None and spans == tuple((0, size) for size in tensor.file_shape)
        value = file.get_tensor(tensor.name) if whole else file.get_slice(tensor.name)[_file_cut(tensor, spans)]
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"tensor {tensor.name!r} cannot be read: {error}") from error
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


def _file_cut(tensor: _Tensor, spans: Region) -> tuple[slice, ...]:
    """Where in the file's tensor these spans of the entry's piece of it lie."""
    part, starts = tensor.entry.part, [0] * len(spans)
    if part is not None:
        starts[part.axis] = part.start
    return tuple(slice(start + first, start + last) for start, (first, last) in zip(starts, spans, strict=True))


def _put(params: Params, path: ParamPath, value: jax.Array) -> None:
    for part in path[:-1]:
        params = params.setdefault(part, {})
    params[path[-1]] = value


def flatten_params(params: Mapping[str, Any], prefix: ParamPath = ()) -> dict[ParamPath, Any]:
    """Nested parameters as path to leaf."""
    flat: dict[ParamPath, Any] = {}
    for name, value in params.items():
        path = (*prefix, str(name))
        flat |= flatten_params(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


def save_weights(directory: str | os.PathLike[str], params: Mapping[str, Any], entries: Sequence[TensorEntry]) -> Path:
    """Write parameters as `model.safetensors` under Hugging Face's names, in the type they have.

    A parameter tied to another tensor is left out. The file appears whole or not at all. Returns its path.

    Raises:
      WeightsError: a parameter that no entry covers, or an entry whose parameter is not there.
    """
    flat = flatten_params(params)
    expected = {path: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for path, leaf in flat.items()}
    values: dict[str, np.ndarray] = {}
    for path, group in itertools.groupby(_plan(entries, expected), key=lambda tensor: tensor.path):
        leaf = np.asarray(flat[path])
        for tensor in group:
            part = tensor.entry.part
            if part is not None:
                fused = values.setdefault(tensor.name, np.zeros(tensor.file_shape, leaf.dtype))
                fused[_cut(part)] = _to_file(leaf[tensor.slot], tensor)
            elif tensor.entry.tied_to is None:
                values[tensor.name] = _to_file(leaf[tensor.slot], tensor)
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{SINGLE_FILE}.partial"
    try:
        save_file(values, partial, metadata={"format": "pt"})
        os.replace(partial, root / SINGLE_FILE)
    finally:
        partial.unlink(missing_ok=True)
    return root / SINGLE_FILE


def _to_file(value: np.ndarray, tensor: _Tensor) -> np.ndarray:
    permute = tensor.entry.permute
    if permute is None:
        return np.ascontiguousarray(value.reshape(tensor.piece))
    permuted = value.reshape([tensor.piece[axis] for axis in permute])
    return np.ascontiguousarray(permuted.transpose(np.argsort(permute)))
