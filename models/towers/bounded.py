"""Linear maps whose inputs and outputs are cut to bounds that a checkpoint brings: Gemma 4's towers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..checkpoints import ParamPath, TensorEntry
from ..decoder.layers import normal, product
from ..decoder.weights import TRANSPOSE

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class BoundedLinear(nnx.Module):
    """y = clip(clip(x) · kernel), kernel [*lead, in, out]; without `bounded` y = x · kernel."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bounded: bool,
        rngs: nnx.Rngs,
        lead: tuple[int, ...] = (),
        dtype: DTypeLike = jnp.float32,
    ):
        self.kernel = nnx.Param(normal(rngs, (*lead, inputs, outputs), inputs**-0.5, dtype))
        for name in BOUNDS:
            bound = jnp.full(lead, jnp.inf if name.endswith("max") else -jnp.inf, dtype)
            setattr(self, name, nnx.Param(bound) if bounded else None)

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead E"]:
        """Applies to the last axis: [..., in] to [..., out]."""
        x = self._cut(x, "input")
        return self._cut(product(x, self.kernel[...]).astype(x.dtype), "output")

    def _cut(self, x: Array, side: str) -> Array:
        least, most = getattr(self, f"{side}_min"), getattr(self, f"{side}_max")
        return x if least is None else jnp.clip(x, least[...].astype(x.dtype), most[...].astype(x.dtype))


def clip_to(x: Array, bound: float) -> Array:
    """Returns `x` within ± `bound`, or within what its type holds where that is less."""
    most = min(bound, float(jnp.finfo(x.dtype).max))
    return jax.lax.clamp(jnp.asarray(-most, x.dtype), x, jnp.asarray(most, x.dtype))


def bounded_entries(name: str, path: ParamPath, bounded: bool) -> list[TensorEntry]:
    """Returns the kernel and the bounds of a map in a stack of layers; `name` holds `{layer}`."""
    kernel = TensorEntry(f"{name}.linear.weight", (*path, "kernel"), permute=TRANSPOSE, stack=True)
    bounds = [TensorEntry(f"{name}.{bound}", (*path, bound), stack=True) for bound in BOUNDS]
    return [kernel, *(bounds if bounded else ())]
