"""factorise: checks and dispatch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from .._dispatch import choose
from ..errors import KernelShapeError
from . import reference

METHODS = ("randomised", "exact")
OVERSAMPLE = 32
ITERATIONS = 3


def factorise(
    matrix: Float[Array, "*batch T F"],
    rank: int,
    *,
    method: str = "randomised",
    key: Key[Array, ""] | None = None,
    oversample: int = OVERSAMPLE,
    iterations: int = ITERATIONS,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*batch T {rank}"], Float[Array, "*batch {rank} F"]]:
    """Thin factors of each matrix: u [..., T, M] and v [..., M, F] with u v ≈ matrix, both float32.

    u carries the singular values (U·S, falling from left to right) and v's rows are orthonormal, so a smaller rank is a
    slice. Rows of zeros in the matrix give rows in u that are zero to rounding.

    Args:
      matrix: any float dtype; computed in float32.
      rank: M, from 1 to min(T, F).
      method: "randomised" (deterministic by `key`) or "exact" (full SVD).
      key: a typed PRNG key; None means `jax.random.key(0)`.
      oversample, iterations: of the randomised range finder.
      implementation: None (best available) or "xla".

    Raises:
      KernelShapeError: rank out of range, or unknown method.
      KernelUnavailableError: unknown or unavailable implementation.
    """
    choose("factorise", implementation)
    if method not in METHODS:
        raise KernelShapeError(f"factorise: method {method!r}; expected one of {METHODS}")
    limit = min(matrix.shape[-2:])
    if not 1 <= rank <= limit:
        raise KernelShapeError(f"factorise: rank {rank}; expected 1 to {limit} for a matrix of shape {matrix.shape}")
    matrix = matrix.astype(jnp.float32)
    if method == "exact":
        return reference.exact(matrix, rank)
    key = jax.random.key(0) if key is None else key
    return reference.randomised(matrix, rank, key, oversample, iterations)
