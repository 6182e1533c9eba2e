"""factorise: checks and dispatch; factors of sums."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Num

from .._dispatch import Case, dispatch
from .._target import platform
from ..errors import KernelError
from . import derivative, reference

METHODS = ("randomised", "exact")
ORTHONORMAL = ("qr", "cholesky")
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
    orthonormal: str | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "*batch T {rank}"], Float[Array, "*batch {rank} F"]]:
    """Computes thin factors of each matrix: u [..., T, M] and v [..., M, F] with u v ≈ matrix, both float32.

    u carries the singular values (U·S, falling from left to right) and v's rows are orthonormal, so a smaller rank is a
    slice. Rows of zeros in the matrix give rows in u that are zero to rounding. Directions down to about 1e-6 of the
    largest singular value are found; below is float32's rounding. Can be differentiated, zero matrices too.

    Args:
      matrix: any float dtype; computed in float32.
      rank: M, from 1 to min(T, F).
      method: "randomised" (deterministic by `key`) or "exact" (full SVD).
      key: a typed PRNG key; None means `jax.random.key(0)`.
      oversample, iterations: of the randomised range finder.
      orthonormal: what its iterations orthogonalise by: "qr", or "cholesky" (shifted CholeskyQR2, matrix products
        mostly). None: "cholesky" on a GPU, "qr" elsewhere.
      implementation: None (best available) or "xla".

    Raises:
      KernelError: rank out of range, or unknown `method` or `orthonormal`.
      KernelUnavailableError: unknown or unavailable implementation.
    """
    dispatch(Case("factorise"), implementation, str, kernels=())
    if method not in METHODS:
        raise KernelError(f"factorise: got method {method!r}; expected one of {METHODS}")

    limit = min(matrix.shape[-2:])
    if not 1 <= rank <= limit:
        raise KernelError(f"factorise: got rank {rank}; expected 1 to {limit} for a matrix of shape {matrix.shape}")

    if orthonormal is None:
        orthonormal = "cholesky" if platform() == "gpu" else "qr"
    if orthonormal not in ORTHONORMAL:
        raise KernelError(f"factorise: got orthonormal {orthonormal!r}; expected one of {ORTHONORMAL}")

    key = jax.random.key(0) if key is None else key
    if method == "exact":

        def find(matrix, key):
            return reference.exact(matrix, rank)
    else:

        def find(matrix, key):
            return reference.randomised(matrix, rank, key, oversample, iterations, orthonormal)

    return derivative.factors(matrix.astype(jnp.float32), key, find)


def merge(
    first: tuple[Num[Array, "*batch T _"], Num[Array, "*batch _ F"]],
    second: tuple[Num[Array, "*batch T _"], Num[Array, "*batch _ F"]],
    rank: int,
) -> tuple[Float[Array, "*batch T {rank}"], Float[Array, "*batch {rank} F"]]:
    """Returns the best rank-`rank` factors of u₁v₁ + u₂v₂, forming neither product; float32, as from `factorise`.

    Raises:
      KernelError: a rank beyond the two ranks together, or beyond the matrix.
    """
    limit = min(first[0].shape[-1] + second[0].shape[-1], first[0].shape[-2], first[1].shape[-1])
    if not 1 <= rank <= limit:
        raise KernelError(f"merge: got rank {rank}; expected 1 to {limit}")
    return reference.merge(first, second, rank)
