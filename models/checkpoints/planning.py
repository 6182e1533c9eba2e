"""Which tensors a model needs for its parameters, and whether a checkpoint has them: all that is settled by names.

Nothing here reads data.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.errors import WeightsError

from .entries import Expected, ParamPath, TensorEntry
from .source import TensorInfo, TensorSource

_FLOATING = ("F64", "F32", "F16", "BF16")
_INTEGER = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file as a parameter needs it: name, shape there, and which slot of the parameter it fills.

    `piece` is the shape of what is read of it: all of it, or the entry's part.
    """

    name: str
    file_shape: tuple[int, ...]
    piece: tuple[int, ...]
    entry: TensorEntry
    path: ParamPath
    slot: tuple[int, ...]


def plan(entries: Sequence[TensorEntry], expected: Expected) -> list[PlannedTensor]:
    """Returns every tensor that must be in the file. Raises WeightsError where entries and parameters do not match."""
    tensors: list[PlannedTensor] = []
    filled: set[ParamPath] = set()
    braces = re.compile(r"\\\{(\w+)\\\}")
    for entry in entries:
        # A part of the path in braces stands for any number, so that the entry fills a parameter for each.
        rules = [re.compile(braces.sub(r"(?P<\1>\\d+)", re.escape(part))) for part in entry.path]
        found = False
        for path in expected:
            matches = [rule.fullmatch(part) for rule, part in zip(rules, path, strict=False)]
            if len(path) != len(rules) or not all(matches):
                continue
            if path in filled:
                raise WeightsError(f"parameter {'.'.join(path)}: got a second entry {entry.pattern!r}; expected one")

            found = True
            filled.add(path)
            numbers: dict[str, int] = {}
            for match in matches:
                if match:
                    numbers |= {field: int(number) for field, number in match.groupdict().items()}
            tensors += _tensors_of(entry, path, expected[path], numbers)

        if not found:
            raise WeightsError(
                f"entry {entry.pattern!r}: got {'.'.join(entry.path)}; expected a parameter that the model has"
            )

    unfilled = sorted(set(expected) - filled)
    if unfilled:
        raise WeightsError(
            f"parameter {'.'.join(unfilled[0])}: got no entry ({len(unfilled)} such in all); expected one that fills it"
        )
    return tensors


def _tensors_of(
    entry: TensorEntry, path: ParamPath, leaf: jax.ShapeDtypeStruct, numbers: dict[str, int]
) -> Iterator[PlannedTensor]:
    """Yields the file's tensors that a parameter is made of, one for each slot of its stack."""
    depth = len(entry.fields) if entry.stack else 0
    lead, inner = leaf.shape[:depth], leaf.shape[depth:]
    fits = len(lead) == depth and len(entry.permute or ()) in (0, len(entry.file_shape or inner))
    piece = tuple(entry.file_shape or (unpermuted(inner, entry.permute) if fits else ()))

    # The shape of the file's tensor that the piece is cut from.
    part, file_shape = entry.part, piece
    if part is not None:
        fits = fits and part.axis < len(piece) and part.stop <= part.size
        fits = fits and piece[part.axis] == part.stop - part.start
        file_shape = (*piece[: part.axis], part.size, *piece[part.axis + 1 :])
    if not fits or math.prod(piece) != math.prod(inner):
        raise WeightsError(
            f"entry {entry.pattern!r}: got a shape that does not fit; expected {leaf.shape} for the parameter "
            f"{'.'.join(path)}"
        )

    for slot in itertools.product(*map(range, lead)):
        if entry.stack:
            first = slot[0] + entry.offset if entry.numbers is None else entry.numbers[slot[0]]
            named = (first, *(number + entry.inner for number in slot[1:]))
            numbers = dict(zip(entry.fields, named, strict=True))
        yield PlannedTensor(entry.pattern.format(**numbers), file_shape, piece, entry, path, slot)


def unpermuted[T](axes: Sequence[T], permute: tuple[int, ...] | None) -> tuple[T, ...]:
    """Returns what belongs to a parameter's axes, in the order that the file's tensor has them."""
    return tuple(axes) if permute is None else tuple(axes[axis] for axis in np.argsort(permute))


def resolve_ties(tensors: Sequence[PlannedTensor], present: Mapping[str, TensorInfo]) -> list[PlannedTensor]:
    """Returns the same tensors, those that are absent and tied to another under that one's name."""
    resolved = []
    for tensor in tensors:
        if tensor.name not in present and tensor.entry.tied_to is not None:
            tensor = dataclasses.replace(tensor, name=tensor.entry.tied_to)
        resolved.append(tensor)
    return resolved


def check_tensors(
    source: TensorSource, tensors: Sequence[PlannedTensor], expected: Expected, ignore: Sequence[str]
) -> None:
    """Raises WeightsError for a tensor that is missing, of another shape or kind than planned, or not expected."""
    for tensor in tensors:
        place = ".".join(tensor.path)
        if tensor.name not in source.tensors:
            raise WeightsError(
                f"{source.origin}: got no tensor {tensor.name!r}; expected shape {tensor.file_shape} for {place}"
            )

        found = source.tensors[tensor.name]
        if found.shape != tensor.file_shape:
            raise WeightsError(
                f"{source.origin}: got tensor {tensor.name!r} of shape {found.shape}; expected {tensor.file_shape} for "
                f"{place}"
            )

        floating = jnp.issubdtype(expected[tensor.path].dtype, jnp.floating)
        allowed = _FLOATING if floating else _INTEGER
        if found.dtype not in allowed:
            raise WeightsError(
                f"{source.origin}: got tensor {tensor.name!r} of type {found.dtype}; expected one of "
                f"{', '.join(allowed)}"
            )

    known = {tensor.name for tensor in tensors}
    rest = source.tensors.keys() - known
    for pattern in ignore:
        rest = {name for name in rest if not re.fullmatch(pattern, name)}
    extra = sorted(rest)
    if extra:
        raise WeightsError(
            f"{source.origin}: got tensor {extra[0]!r} ({len(extra)} such in all); expected only parameters that this "
            "model has"
        )
