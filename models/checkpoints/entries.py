"""Where each tensor of a checkpoint goes: a family's list of `TensorEntry`."""

import dataclasses
import string
from collections.abc import Mapping
from typing import Any

import jax

ParamPath = tuple[str, ...]
Params = dict[str, Any]
Expected = Mapping[ParamPath, jax.ShapeDtypeStruct]


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
      numbers: with `stack`, all numbers of the first brace, where they do not follow one another.
      inner: with `stack`, the number that the second brace starts from (experts 64, 65, …).
    """

    pattern: str
    path: ParamPath
    permute: tuple[int, ...] | None = None
    stack: bool = False
    file_shape: tuple[int, ...] | None = None
    tied_to: str | None = None
    part: Part | None = None
    offset: int = 0
    numbers: tuple[int, ...] | None = None
    inner: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """Names in braces, in order."""
        return tuple(field for _, field, _, _ in string.Formatter().parse(self.pattern) if field)


def flatten_params(params: Mapping[str, Any], prefix: ParamPath = ()) -> dict[ParamPath, Any]:
    """Returns nested parameters as path to leaf."""
    flat: dict[ParamPath, Any] = {}
    for name, value in params.items():
        path = (*prefix, str(name))
        flat |= flatten_params(value, path) if isinstance(value, Mapping) else {path: value}
    return flat
