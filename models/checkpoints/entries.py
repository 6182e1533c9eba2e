"""Where each tensor of a checkpoint goes: a family's list of `TensorEntry`, and what a model needs of it."""

import dataclasses
import itertools
import math
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kvpatch_jax.errors import WeightsError

ParamPath = tuple[str, ...]
Params = dict[str, Any]
Expected = Mapping[ParamPath, jax.ShapeDtypeStruct]

TRANSPOSE = (1, 0)
"""A linear map's weight, [out, in] in files, as [in, out]."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a fused tensor: entries start … stop-1 of the `size` that the file's tensor has along `axis`."""

    start: int
    stop: int
    size: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one kind of tensor of a Hugging Face file goes, if the model has the parameter.

    Attributes:
      pattern: the tensor's name; `{layer}` (any name in braces) stands for a number.
      path: where the parameter is in the nested parameters. With the same braces in it, each number has a parameter of
        its own; without them the tensors of all numbers are stacked on leading axes, in the order of the braces.
      permute: axes of the file's tensor in the parameter's order, as for `numpy.transpose`; None leaves them.
      file_shape: the tensor's shape in the file, where the parameter has its (permuted) axes flattened together.
      part: the parameter is a piece of the file's tensor (fused projections); `permute` is for that piece.
      numbers: of a stack, the numbers of the first brace; None counts from 0.
      infinite: infinities are allowed (bounds that cut nothing).
    """

    pattern: str
    path: ParamPath
    permute: tuple[int, ...] | None = None
    file_shape: tuple[int, ...] | None = None
    part: Part | None = None
    numbers: tuple[int, ...] | None = None
    infinite: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """Names in braces, in order."""
        return tuple(field for _, field, _, _ in string.Formatter().parse(self.pattern) if field)

    @property
    def stack(self) -> bool:
        """Whether the tensors of all numbers are one parameter."""
        return bool(self.fields) and not any("{" in part for part in self.path)


def module_entries(prefix: str, path: ParamPath, names: Mapping[str, str]) -> list[TensorEntry]:
    """Maps linear maps and norms by their names: ours (the path behind `path`, with dots) → the file's behind `prefix`.

    Parameters that a model lacks (biases, optional modules) are left out when the entries meet it.
    """
    entries = []
    for ours, theirs in names.items():
        place, name = (*path, *ours.split(".")), f"{prefix}.{theirs}".removeprefix(".")
        entries += [
            TensorEntry(f"{name}.weight", (*place, "kernel"), TRANSPOSE),
            TensorEntry(f"{name}.weight", (*place, "weight")),
            TensorEntry(f"{name}.bias", (*place, "bias")),
        ]
    return entries


def fused_entries(name: str, path: ParamPath, rows: Mapping[str, int]) -> list[TensorEntry]:
    """Maps linear maps (name → rows) that lie one behind the other in one tensor of the file."""
    entries, start, size = [], 0, sum(rows.values())
    for ours, count in rows.items():
        piece, start = Part(start, start + count, size), start + count
        entries.append(TensorEntry(f"{name}.weight", (*path, ours, "kernel"), TRANSPOSE, part=piece))
        entries.append(TensorEntry(f"{name}.bias", (*path, ours, "bias"), part=piece))
    return entries


def flatten_params(params: Mapping[str, Any], prefix: ParamPath = ()) -> dict[ParamPath, Any]:
    """Returns nested parameters as path to leaf."""
    flat: dict[ParamPath, Any] = {}
    for name, value in params.items():
        path = (*prefix, str(name))
        flat |= flatten_params(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


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


def plan(entries: Iterable[TensorEntry], expected: Expected) -> list[PlannedTensor]:
    """Returns every tensor that must be in the file, parameter by parameter.

    Raises:
      WeightsError: a parameter with no entry or with two, or an entry whose shape does not fit its parameter.
    """
    by_path: dict[ParamPath, TensorEntry] = {}
    for entry in entries:
        if entry.path in by_path:
            raise WeightsError(f"parameter {'.'.join(entry.path)}: got a second entry {entry.pattern!r}; expected one")
        by_path[entry.path] = entry
    numbered = {path: entry for path, entry in by_path.items() if entry.fields and not entry.stack}

    tensors: list[PlannedTensor] = []
    for path, leaf in expected.items():
        entry, numbers = by_path.get(path), dict[str, int]()
        for pattern, candidate in numbered.items():
            found = _numbers_in(pattern, path)
            if found is not None:
                entry, numbers = candidate, found
        if entry is None:
            raise WeightsError(f"parameter {'.'.join(path)}: got no entry; expected one that fills it")
        tensors += _tensors_of(entry, path, leaf.shape, numbers)
    return tensors


def _numbers_in(pattern: ParamPath, path: ParamPath) -> dict[str, int] | None:
    """Returns what the braces of a path's pattern stand for in a path; None where the path does not fit."""
    if len(pattern) != len(path):
        return None
    rules = [re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(part)) for part in pattern]
    match = re.fullmatch(r"\.".join(rules), ".".join(path))
    return None if match is None else {name: int(number) for name, number in match.groupdict().items()}


def _tensors_of(
    entry: TensorEntry, path: ParamPath, shape: tuple[int, ...], numbers: dict[str, int]
) -> Iterator[PlannedTensor]:
    """Yields the file's tensors that a parameter is made of, one for each slot of its stack."""
    depth = len(entry.fields) if entry.stack else 0
    lead, inner = shape[:depth], shape[depth:]
    fits = len(lead) == depth and len(entry.permute or ()) in (0, len(entry.file_shape or inner))
    piece = tuple(entry.file_shape or (unpermuted(inner, entry.permute) if fits else ()))

    # The shape of the file's tensor that the piece is cut from.
    part, file_shape = entry.part, piece
    if part is not None:
        fits = fits and part.axis < len(piece) and piece[part.axis] == part.stop - part.start
        file_shape = (*piece[: part.axis], part.size, *piece[part.axis + 1 :])
    if not fits or math.prod(piece) != math.prod(inner):
        raise WeightsError(
            f"entry {entry.pattern!r}: got a shape that does not fit; expected {shape} for the parameter "
            f"{'.'.join(path)}"
        )

    for slot in itertools.product(*map(range, lead)):
        if slot:
            first = slot[0] if entry.numbers is None else entry.numbers[slot[0]]
            numbers = dict(zip(entry.fields, (first, *slot[1:]), strict=True))
        yield PlannedTensor(entry.pattern.format(**numbers), file_shape, piece, entry, path, slot)


def unpermuted[T](axes: Sequence[T], permute: tuple[int, ...] | None) -> tuple[T, ...]:
    """Returns what belongs to a parameter's axes, in the order that the file's tensor has them."""
    return tuple(axes) if permute is None else tuple(axes[axis] for axis in np.argsort(permute))
