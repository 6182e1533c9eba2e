"""FLOPs of a program, counted from the matrix products of its trace."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from ..errors import InputError


def traced_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """Counts the FLOPs of all matrix products of a function, two for each multiplication with its addition.

    Nothing is computed or compiled: the function is traced, and what a scan repeats counts as often as it runs. What a
    jitted program computes and does not return is left out, as compilers do. What is no product (softmax, norms,
    rotations, factorisations) is not counted. Of branches the dearest counts.

    Args:
      arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
      InputError: products inside a loop whose length is not known before it runs.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """Counts the FLOPs of a traced program; see `traced_flops`."""
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)
    if name in ("ragged_dot", "ragged_dot_general"):
        # Each row of the left side meets the matrix of its group, and no other.
        left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2 * math.prod(out) * left[-1]
    if name == "conv_general_dilated":
        numbers, kernel = parameters["dimension_numbers"], equation.invars[1].aval.shape
        outputs = kernel[numbers.rhs_spec[0]]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // outputs

    programs = list(_programs(parameters))
    if name in ("jit", "pjit"):
        programs = [partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0] for program in programs]
    inner = [jaxpr_flops(program) for program in programs]
    if name == "scan":
        return parameters["length"] * sum(inner)
    if name == "cond":
        return max(inner, default=0)
    if name == "while" and any(inner):
        raise InputError("traced_flops: got matrix products in a loop of unknown length; expected scans")
    if name == "pallas_call":
        return math.prod(parameters["grid_mapping"].grid) * sum(inner)
    if name == "shard_map":
        return parameters["mesh"].size * sum(inner)
    return sum(inner)


def _programs(parameters: dict[str, Any]) -> Iterator[Jaxpr]:
    """Yields the programs that an equation calls."""
    for value in parameters.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
