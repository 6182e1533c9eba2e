"""block_product in XLA: a loop over blocks, each reading its one matrix."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def block_product(
    x: Float[Array, "rows D"], stack: Float[Array, "E D I"], which: Int[Array, " M"]
) -> Float[Array, "rows I"]:
    """Computes block m of x times `stack[which[m]]`, in float32, rounded once to x's dtype; all blocks."""

    def step(carry: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        rows, number = block
        matrix = jax.lax.dynamic_index_in_dim(stack, number, 0, keepdims=False)
        return carry, jnp.matmul(rows, matrix, preferred_element_type=jnp.float32).astype(x.dtype)

    _, out = jax.lax.scan(step, None, (x.reshape(len(which), -1, x.shape[1]), which))
    return out.reshape(len(x), -1)
