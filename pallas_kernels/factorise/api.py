"""factorise: checks and dispatch; factors of a sharded matrix, of sums, and of what was accumulated."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Num

from .._dispatch import choose
from .._target import platform
from ..errors import KernelShapeError
from . import derivative, reference

METHODS = ("randomised", "exact")
SIDES = ("tokens", "features")
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
      KernelShapeError: rank out of range, or unknown `method` or `orthonormal`.
      KernelUnavailableError: unknown or unavailable implementation.
    """
    choose("factorise", implementation)
    if method not in METHODS:
        raise KernelShapeError(f"factorise: got method {method!r}; expected one of {METHODS}")

    limit = min(matrix.shape[-2:])
    if not 1 <= rank <= limit:
        raise KernelShapeError(
            f"factorise: got rank {rank}; expected 1 to {limit} for a matrix of shape {matrix.shape}"
        )

    if orthonormal is None:
        orthonormal = "cholesky" if platform() == "gpu" else "qr"
    if orthonormal not in ORTHONORMAL:
        raise KernelShapeError(f"factorise: got orthonormal {orthonormal!r}; expected one of {ORTHONORMAL}")

    key = jax.random.key(0) if key is None else key
    if method == "exact":

        def find(matrix, key):
            return reference.exact(matrix, rank)
    else:

        def find(matrix, key):
            return reference.randomised(matrix, rank, key, oversample, iterations, orthonormal)

    return derivative.factors(matrix.astype(jnp.float32), key, find)


def factorise_sharded(
    matrix: Float[Array, "*batch T F"],
    rank: int,
    axis_name: str | tuple[str, ...],
    *,
    sharded: str = "tokens",
    key: Key[Array, ""] | None = None,
    oversample: int = OVERSAMPLE,
    iterations: int = ITERATIONS,
) -> tuple[Float[Array, "*batch T {rank}"], Float[Array, "*batch {rank} F"]]:
    """Returns `factorise`, inside `jax.shard_map`, of a matrix whose tokens or features lie over the mesh axis
    `axis_name`.

    One sum over that axis, of the Gram matrix of the other side: [F, F] float32 per matrix where tokens are sharded,
    [T, T] where features are. Being float32 it hides directions below 2e-4 of the largest singular value, which
    `factorise` finds.

    Args:
      matrix: what this device holds: some tokens with all features, or all tokens with some features.
      rank: M, from 1 to the size of the side that is whole.
      sharded: "tokens" or "features".
      key, oversample, iterations: as in `factorise`; the key must be the same on every device.

    Returns:
      u and v as from `factorise`; of the sharded side (u's tokens, v's features) only what this device holds.

    Raises:
      KernelShapeError: rank out of range, or an unknown side.
    """
    if sharded not in SIDES:
        raise KernelShapeError(f"factorise_sharded: got sharded {sharded!r}; expected one of {SIDES}")
    limit = matrix.shape[-1 if sharded == "tokens" else -2]
    if not 1 <= rank <= limit:
        raise KernelShapeError(f"factorise_sharded: got rank {rank}; expected 1 to {limit} for a part {matrix.shape}")
    key = jax.random.key(0) if key is None else key
    return reference.gram(matrix.astype(jnp.float32), rank, key, oversample, iterations, axis_name, sharded)


def merge(
    first: tuple[Num[Array, "*batch T _"], Num[Array, "*batch _ F"]],
    second: tuple[Num[Array, "*batch T _"], Num[Array, "*batch _ F"]],
    rank: int,
) -> tuple[Float[Array, "*batch T {rank}"], Float[Array, "*batch {rank} F"]]:
    """Returns the best rank-`rank` factors of u₁v₁ + u₂v₂, forming neither product; float32, as from `factorise`.

    Raises:
      KernelShapeError: a rank beyond the two ranks together, or beyond the matrix.
    """
    limit = min(first[0].shape[-1] + second[0].shape[-1], first[0].shape[-2], first[1].shape[-1])
    if not 1 <= rank <= limit:
        raise KernelShapeError(f"merge: got rank {rank}; expected 1 to {limit}")
    return reference.merge(first, second, rank)


def update(
    u: Num[Array, "*batch T _"],
    v: Num[Array, "*batch _ F"],
    delta: Float[Array, "*batch T F"],
    rank: int,
    *,
    method: str = "randomised",
    key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, "*batch T {rank}"], Float[Array, "*batch {rank} F"]]:
    """Returns factors of u v + delta at this rank: what a patch becomes when its deficit changes by delta.

    The sum is formed, since delta is at hand in full; `merge` takes a change that is thin itself. An orbit by
    accumulation is a sum of deficits divided by their number, which `factorise` takes; or, without keeping the sum,
    `update(u * (n / (n + 1)), v, delta / (n + 1), rank)` for deficit n + 1, which loses what each rank cuts off.

    Raises:
      KernelShapeError: rank out of range.
    """
    have = jnp.matmul(u.astype(jnp.float32), v.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return factorise(have + delta.astype(jnp.float32), rank, method=method, key=key)
