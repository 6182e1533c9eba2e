"""Linear attention: outputs of tokens that read one state, and the transition S → M·S + B of all of them.

Per head, with a state S [Dk, Dv], a decay α and a writing strength β:

    S ← α_t S;  S ← S + k_t (β_t (v_t − Sᵀ k_t))ᵀ;  o_t = Sᵀ q_t

This is the gated delta rule (Yang et al., Gated Delta Networks, arXiv 2412.06464).

Blocks of C tokens are computed at once, in the WY form (arXiv 2406.06484 §3, 2412.06464 §3.3). With G_t the sum of
log α up to t, and S the state in front of a block,

    A_ts = k_t·k_s exp(G_t − G_s)  for s < t,    P_ts likewise of q_t and k_s  for s ≤ t,
    [U₀ | W] = (I + βA)⁻¹ β [V | exp(G)·K],      U = U₀ − W·S,
    o = exp(G)·Q·S + P·U,                        S ← exp(G_C)·S + (exp(G_C − G)·K)ᵀ·U.

M is what becomes of the unit matrix with V = 0, B of zeros: both take two more products, and share all else. B is
carried beside S, because S_out − M·S loses it where the state in front is larger.

Every exponent is a sum of log decays, so none is positive, and none is a difference of two sums: behind a strong decay
float32 would lose the weak ones that follow.
All is float32, with products of full precision. Memory: one block's, and one state per block for gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvpatch_jax.core import AnyArray

BLOCK = 64
"""Tokens that are computed at once, a power of two."""


class RuleOutput(NamedTuple):
    """What the rule makes of some tokens, in float32.

    Attributes:
      output: [B,T,K,Dv], Sᵀq behind each token, the state in front included.
      map: M of all tokens, [B,Dk,K,Dk]; None: not asked for.
      state: B, the state behind the tokens from one of zeros, [B,Dk,K,Dv].
      after: M·S + B, the state behind the tokens from the one in front, [B,Dk,K,Dv].
    """

    output: Float[Array, "B T K V"]
    map: Float[Array, "B D K D"] | None
    state: Float[Array, "B D K V"]
    after: Float[Array, "B D K V"]


def delta_rule(
    query: Float[AnyArray, "B T K D"],
    key: Float[AnyArray, "B T K D"],
    value: Float[AnyArray, "B T K V"],
    log_decay: Float[AnyArray, "B T K"],
    beta: Float[AnyArray, "B T K"],
    state: Float[AnyArray, "B D K V"] | None = None,
    *,
    counted: Bool[AnyArray, "B T"] | None = None,
    with_map: bool = True,
) -> RuleOutput:
    """Runs the rule over tokens, and computes their transition.

    Args:
      query, key: normalised and scaled by the caller.
      log_decay: log α ≤ 0. beta: writing strength.
      state: S in front of the tokens; None: zeros.
      counted: False for padding, which changes nothing whatever it holds; its outputs mean nothing.
      with_map: whether M is computed.
    """
    tokens, width = key.shape[1], value.shape[-1]
    inputs = [jnp.asarray(array, jnp.float32) for array in (query, key, value, log_decay, beta)]
    query, key, value, rate, beta = (array[..., None] if array.ndim == 3 else array for array in inputs)
    if counted is not None:
        there = jnp.asarray(counted)[..., None, None]
        key, value, rate, beta = (jnp.where(there, array, 0.0) for array in (key, value, rate, beta))

    # Heads go in front of tokens, and blocks in front of all: [n, B, K, C, ·].
    size = min(BLOCK, 1 << (tokens - 1).bit_length())
    room = ((0, 0), (0, -tokens % size), (0, 0), (0, 0))
    blocks = tuple(
        jnp.pad(array, room).reshape(len(array), -1, size, *array.shape[2:]).transpose(1, 0, 3, 2, 4)
        for array in (query, key, value, rate, beta)
    )

    # What the block's map is applied to: the state in front, one of zeros, and the unit matrix.
    zeros = jnp.zeros((key.shape[0], key.shape[2], key.shape[3], width), jnp.float32)
    carried = {"own": zeros}
    if state is not None:
        carried["after"] = jnp.asarray(state, jnp.float32).swapaxes(1, 2)
    if with_map:
        carried["map"] = jnp.broadcast_to(jnp.eye(key.shape[3]), (*zeros.shape[:3], key.shape[3]))
    if tokens == 1:
        carried, output = _one_token(carried, tuple(array[0] for array in blocks))
        output = output[None]
    else:
        carried, output = jax.lax.scan(jax.checkpoint(_one_block, prevent_cse=False), carried, blocks)

    output = output.transpose(1, 0, 3, 2, 4).reshape(key.shape[0], -1, key.shape[2], width)[:, :tokens]
    final = {name: array.swapaxes(1, 2) for name, array in carried.items()}
    return RuleOutput(output, final.get("map"), final["own"], final.get("after", final["own"]))


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def _one_token(carried: dict[str, Array], token: tuple[Array, ...]) -> tuple[dict[str, Array], Array]:
    """Applies the rule as it is written; arrays [B, K, 1, ·], states [B, K, Dk, ·]."""
    query, key, value, rate, beta = token
    updated = {}
    for name, held in carried.items():
        held = jnp.exp(rate) * held
        written = jnp.zeros_like(value[..., :1]) if name == "map" else value
        updated[name] = held + key.swapaxes(-1, -2) * (beta * (written - _product(key, held)))
    return updated, _product(query, updated.get("after", updated["own"]))


def _one_block(carried: dict[str, Array], tokens: tuple[Array, ...]) -> tuple[dict[str, Array], Array]:
    """Applies the rule to a block in the WY form; arrays [B, K, C, ·], states [B, K, Dk, ·]."""
    query, key, value, rate, beta = tokens
    lead = jnp.exp(jnp.cumsum(rate, -2))
    behind = jnp.exp(_sums_behind(rate))
    pairs = _product(jnp.stack((query, key)), key.swapaxes(-1, -2)) * jnp.exp(_sums_between(rate))
    size = key.shape[-2]
    reads = jnp.where(jnp.tri(size, dtype=bool), pairs[0], 0.0)

    lower = jnp.where(jnp.tri(size, k=-1, dtype=bool), beta * pairs[1], 0.0)
    solved = _product(_unit_inverse(lower), beta * jnp.concatenate((value, lead * key), -1))
    value, through = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]

    written = {name: (0.0 if name == "map" else value) - _product(through, held) for name, held in carried.items()}
    decay, columns = lead[..., -1, :, None], (behind * key).swapaxes(-1, -2)
    updated = {name: decay * held + _product(columns, written[name]) for name, held in carried.items()}

    front = "after" if "after" in carried else "own"
    return updated, _product(lead * query, carried[front]) + _product(reads, written[front])


def _sums_behind(rate: Array) -> Array:
    """Sums the log decays behind each token of [..., C, 1]."""
    later = jnp.concatenate((rate[..., 1:, :], jnp.zeros_like(rate[..., :1, :])), -2)
    return jax.lax.cumsum(later, rate.ndim - 2, reverse=True)


def _sums_between(rate: Array) -> Array:
    """Sums log decays of [..., C, 1] behind token s up to token t: [..., C (t), C (s)], zeros for t ≤ s."""
    later = jnp.tri(rate.shape[-2], k=-1, dtype=bool)
    return jnp.cumsum(jnp.where(later, rate, 0.0), -2)


def _unit_inverse(lower: Array) -> Array:
    """Inverts I + N for N strictly lower triangular, [..., C, C], C a power of two.

    Inverses of diagonal blocks are joined pair by pair: [[A, 0], [E, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹EA⁻¹, D⁻¹]]. As exact as
    forward substitution, and products alone; powers of N would grow beyond float32 where keys are alike.
    """
    size, leading = lower.shape[-1], lower.shape[:-2]
    inverse = jnp.ones((*leading, size, 1, 1), lower.dtype)
    width = 1
    while width < size:
        count = size // (2 * width)
        corners = lower.reshape(*leading, count, 2, width, count, 2, width)[..., 1, :, :, 0, :]
        corners = jnp.where(jnp.eye(count, dtype=bool)[:, None, :, None], corners, 0.0).sum(-2)
        halves = inverse.reshape(*leading, count, 2, width, width)
        first, second = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -_product(_product(second, corners), first)
        rows = jnp.concatenate((first, jnp.zeros_like(first)), -1), jnp.concatenate((corner, second), -1)
        inverse = jnp.concatenate(rows, -2)
        width *= 2
    return inverse[..., 0, :, :]
