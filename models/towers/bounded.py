"""Linear maps whose inputs and outputs are cut to bounds that a checkpoint brings: Gemma 4's towers."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..checkpoints import TRANSPOSE, ParamPath, TensorEntry
from ..decoder.layers import normal, product

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


def bounded_entries(prefix: str, path: ParamPath, names: Mapping[str, str]) -> list[TensorEntry]:
    """Maps the kernels and the bounds of maps by their names: ours → the file's behind `prefix`."""
    entries = []
    for ours, theirs in names.items():
        place, name = (*path, *ours.split(".")), f"{prefix}.{theirs}"
        entries.append(TensorEntry(f"{name}.linear.weight", (*place, "kernel"), TRANSPOSE))
        entries += [TensorEntry(f"{name}.{bound}", (*place, bound), infinite=True) for bound in BOUNDS]
    return entries
