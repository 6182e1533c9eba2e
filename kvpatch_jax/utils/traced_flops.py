"""FLOPs of a program, counted from its trace: compilers count the body of a loop once, however often it runs.

Matrix products and convolutions are counted, at 2 operations per multiplication and addition; elementwise work and
factorisations are not. A loop of known length counts that often, of a branch the most expensive side. A grouped product
counts each row once (`jax.lax.ragged_dot`: what its kernel on TPUs does), and a kernel its own cost estimate.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from ..errors import InputError


def traced_flops(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Counts the FLOPs of one call; inside `shard_map` those of one device.

    Nothing is computed or compiled. What a jitted program computes and does not return is left out, as compilers do.

    Args:
      arguments, options: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
      InputError: a loop whose length depends on values, with products inside.
    """
    return _jaxpr_flops(jax.make_jaxpr(function)(*arguments, **options).jaxpr)


def _jaxpr_flops(jaxpr: Jaxpr) -> int:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if name == "ragged_dot_general":
        # Each row of the left side meets the matrix of its group, and no other.
        return 2 * math.prod(equation.outvars[0].aval.shape) * equation.invars[0].aval.shape[-1]
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        features = parameters["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(equation.outvars[0].aval.shape) * (math.prod(kernel) // kernel[features])
    if parameters.get("cost_estimate") is not None:
        return parameters["cost_estimate"].flops

    # The programs that the equation calls.
    leaves = jax.tree.leaves(list(parameters.values()), is_leaf=lambda leaf: isinstance(leaf, Jaxpr))
    programs = [getattr(leaf, "jaxpr", leaf) for leaf in leaves if isinstance(leaf, Jaxpr | ClosedJaxpr)]
    if name in ("jit", "pjit"):
        programs = [partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0] for program in programs]
    inner = [_jaxpr_flops(program) for program in programs]
    if name == "cond":
        return max(inner)
    if name == "while" and any(inner):
        raise InputError(
            "traced_flops: got a loop of a length that depends on values, with products; expected loops of known length"
        )
    return sum(inner) * (parameters["length"] if name == "scan" else 1)
