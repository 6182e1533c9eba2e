"""Building blocks shared by every tower and decoder: linear maps, RMS norm, gated MLP.

Parameters may carry leading axes (a stack of layers); a block is then used on one slice of the stack inside a scan.
Axis letters as everywhere: D and E widths.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError
from pallas_kernels._target import platform

from .mesh_axes import spread_tokens
from .stacks import InStack

BLOCK_TOKENS = 4096
"""Tokens that an MLP takes at a time: its inner width is several times the model's."""


TABLE_SCALE = 0.02
"""Standard deviation of drawn embeddings and learned positions."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, dtype: DTypeLike) -> Array:
    """Returns normal values of one standard deviation, drawn in float32."""
    return (scale * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


CPU_ROWS = 4
"""Rows from which XLA multiplies bfloat16 matrices on a CPU as they are; for fewer it makes float32 copies."""


def product(x: Float[Array, "*lead D"], kernel: Any, transposed: bool = False) -> Float[Array, "*lead E"]:
    """Multiplies the last axis by a matrix [D,E] (`transposed`: that lies as [E,D]); sums in float32, no copy."""
    lead, one_token = x.shape[:-1], x.size == x.shape[-1] and platform() == "cpu"
    if one_token and x.dtype == jnp.bfloat16:
        # Padded to where XLA makes no float32 copy of the whole matrix.
        x = jnp.pad(x.reshape(1, -1), ((0, CPU_ROWS - 1), (0, 0)))
    elif one_token:
        # A product of a vector compiles to nothing else.
        x = x.reshape(-1)

    axes = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))

    def multiply(x: Array, kernel: Array) -> Array:
        return jax.lax.dot_general(x, kernel.astype(x.dtype), axes, preferred_element_type=jnp.float32)

    y = kernel.product(x, multiply) if isinstance(kernel, InStack) else multiply(x, kernel)
    if not one_token:
        return y
    return (y[0] if y.ndim == 2 else y).reshape(*lead, -1)


def in_blocks(
    function: Callable[[Array], Array], x: Float[Array, "*lead D"], tokens: int = BLOCK_TOKENS
) -> Float[Array, "*lead D"]:
    """Returns `function`, which takes every token by itself, over about `tokens` tokens at a time, in equal blocks.

    Tokens are [T,D], or [B,T,D] of which each block has all rows.
    """
    if x.ndim == 2:
        return in_blocks(lambda x: function(x[0])[None], x[None], tokens)[0] if len(x) > tokens else function(x)

    B, T, D = x.shape
    count = -(-B * T // tokens)
    if count == 1 or T == 1:
        return function(x)

    size = -(-T // count)
    blocks = jnp.pad(x, ((0, 0), (0, size * count - T), (0, 0))).reshape(B, count, size, D)
    done = jax.lax.map(function, jnp.moveaxis(blocks, 1, 0))
    return jnp.moveaxis(done, 0, 1).reshape(B, size * count, D)[:, :T]


class Linear(nnx.Module):
    """y = x · kernel (+ bias), kernel [*lead, in, out]; products accumulate in float32 or wider."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        rngs: nnx.Rngs,
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
        scale: float = 1.0,
    ):
        self.kernel = nnx.Param(normal(rngs, (*lead, inputs, outputs), scale * inputs**-0.5, dtype))
        self.bias = nnx.Param(jnp.zeros((*lead, outputs), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead E"]:
        """Applies to the last axis: [..., in] to [..., out]."""
        y = product(x, self.kernel[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis; statistics in float32, the weight applied after the cast back.

    With `weight="wide"` the weight is applied in float32, before the cast; with "offset" so is 1 + weight (Gemma); with
    "none" there is none.
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float,
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
        weight: str = "after",
    ):
        drawn = (jnp.zeros if weight == "offset" else jnp.ones)((*lead, width), dtype)
        self.weight = None if weight == "none" else nnx.Param(drawn)
        self.epsilon, self.form = epsilon, weight

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """Normalises [..., D]."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        if self.weight is None:
            return wide.astype(x.dtype)
        if self.form != "after":
            own = self.weight[...].astype(jnp.float32)
            return (wide * (1.0 + own if self.form == "offset" else own)).astype(x.dtype)
        return wide.astype(x.dtype) * self.weight[...].astype(x.dtype)


_GELU = functools.partial(jax.nn.gelu, approximate=False)


def _gelu_tanh(x: Array) -> Array:
    """Computes x (1 + tanh(u)) / 2 as x · sigmoid(2u): 1 + tanh(u) cancels where u is far below 0, and a norm behind it
    (Gemma 4's inputs of layers) would divide by what is left.
    """
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _GELU,
    "gelu_python": _GELU,
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"), _gelu_tanh),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}
"""The activations of transformers' `ACT2FN` that are built, by its names."""


def check_activation(name: str, key: str) -> None:
    """Raises ConfigError where the activation that `key` names is not built."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"{key}: got {name!r}; expected one of {sorted(ACTIVATIONS)}")


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) · up(x)), as every family's language tower and Qwen2.5-VL's vision tower use it."""

    def __init__(
        self,
        width: int,
        intermediate: int,
        *,
        bias: bool,
        rngs: nnx.Rngs,
        activation: str = "silu",
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
    ):
        self.gate = Linear(width, intermediate, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.up = Linear(width, intermediate, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.down = Linear(intermediate, width, bias=bias, rngs=rngs, lead=lead, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """Applies to [..., D]."""
        x = spread_tokens(x, self.up.kernel.shape[-1])
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * self.up(x))
