"""FLOPs of a program, counted from its jaxpr: compilers count the body of a loop once, however often it runs.

Matrix products and convolutions are counted, at 2 operations per multiplication and addition; elementwise work is not.
A loop of known length counts that often, of a branch the most expensive side. A grouped product counts each row once
(`jax.lax.ragged_dot`: what its kernel on TPUs does), and a kernel its own cost estimate.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def count_flops(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Counts the operations of one call.

    Args:
      arguments, options: arrays or their shapes; the function is traced, not run.

    Raises:
      ValueError: a loop whose length depends on values, with products inside.
    """
    return _jaxpr(jax.make_jaxpr(function)(*arguments, **options).jaxpr)


def _jaxpr(jaxpr: Jaxpr) -> int:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation: Any) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if name == "ragged_dot_general":
        rows, columns = equation.outvars[0].aval.shape
        return 2 * rows * columns * equation.invars[0].aval.shape[1]
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        features = equation.params["dimension_numbers"].rhs_spec[0]
        products = math.prod(kernel) // kernel[features]
        return 2 * math.prod(equation.outvars[0].aval.shape) * products
    if equation.params.get("cost_estimate") is not None:
        return equation.params["cost_estimate"].flops

    inside = [_jaxpr(inner) for inner in _inner(equation)]
    if name == "cond":
        return max(inside)
    if name == "while" and sum(inside):
        raise ValueError(
            "count_flops: got a loop of a length that depends on values, with products; expected loops of known length"
        )
    return sum(inside) * (equation.params["length"] if name == "scan" else 1)


def _inner(equation: Any) -> Iterator[Jaxpr]:
    """Yields the programs inside an equation."""
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, Jaxpr)):
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
