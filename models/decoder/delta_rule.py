"""Linear attention: outputs of tokens that read one state, and the transition S → M·S + B of all of them.

Per head, with a state S [Dk, Dv], a decay α and a writing strength β:

    S ← α_t S;  S ← S + k_t (β_t (v_t − Sᵀ k_t))ᵀ;  o_t = Sᵀ q_t

This is the gated delta rule (Yang et al., Gated Delta Networks, arXiv 2412.06464), with α a vector over Dk Kimi Delta
Attention (arXiv 2510.26692), and without the correction, S ← α_t S + k_t v_tᵀ, Mamba-2 (arXiv 2405.21060).

Blocks of C tokens are computed at once, in the WY form (arXiv 2406.06484 §3, 2412.06464 §3.3). With G_t the sum of
log α up to t, and S the state in front of a block,

    A_ts = Σ_d k_td k_sd exp(G_td − G_sd)  for s < t,    P_ts likewise of q_t and k_s  for s ≤ t,
    [U₀ | W] = (I + βA)⁻¹ β [V | K⊙exp(G)],              U = U₀ − W·S,
    o = (Q⊙exp(G))·S + P·U,                              S ← exp(G_C)⊙S + (K⊙exp(G_C − G))ᵀ·U.

M is what becomes of the unit matrix with V = 0, B of zeros: both take two more products, and share all else. B is
carried beside S, because S_out − M·S loses it where the state in front is larger.

Every exponent is a sum of log decays, so none is positive, and none is a difference of two sums: behind a strong decay
float32 would lose the weak ones that follow. A decay per channel does not factor out of A and P: within `SUB_BLOCK`
tokens they are sums over [c, c, Dk], beyond that products of keys that decay to the border between.
All is float32, with products of full precision. Memory: one block's, and one state per block for gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvpatch_jax.core import AnyArray
from kvpatch_jax.errors import InputError, ShapeError
from kvpatch_jax.utils.kinds import is_whole

SUB_BLOCK = 16
"""Tokens whose pairs are summed channel by channel, where each channel has a decay."""


class RuleOutput(NamedTuple):
    """What a rule of linear attention makes of some tokens, in float32.

    Attributes:
      output: [B,T,K,Dv], Sᵀq behind each token, the state in front included.
      map: M of all tokens: [B,Dk,K,Dk]; without β [B,Dk,K,1] (a decay per channel) or [B,1,K,1]; None: not asked for.
      state: B, the state behind the tokens from one of zeros, [B,Dk,K,Dv].
      after: M·S + B, the state behind the tokens from the one in front, [B,Dk,K,Dv].
    """

    output: Float[Array, "B T K V"]
    map: Float[Array, "B _ K _"] | None
    state: Float[Array, "B D K V"]
    after: Float[Array, "B D K V"]


def delta_rule(
    query: Float[AnyArray, "B T K D"],
    key: Float[AnyArray, "B T K D"],
    value: Float[AnyArray, "B T K V"],
    log_decay: Float[AnyArray, "B T K"] | Float[AnyArray, "B T K D"],
    beta: Float[AnyArray, "B T K"] | None,
    state: Float[AnyArray, "B D K V"] | None = None,
    *,
    counted: Bool[AnyArray, "B T"] | None = None,
    block: int = 64,
    with_map: bool = True,
) -> RuleOutput:
    """Runs a rule of linear attention over tokens, and computes their transition.

    Args:
      query, key: normalised and scaled by the caller.
      log_decay: log α ≤ 0, one per head or one per channel of the key.
      beta: writing strength; None: no correction, S ← α S + k vᵀ.
      state: S in front of the tokens; None: zeros.
      counted: False for padding, which changes nothing whatever it holds; its outputs mean nothing.
      block: tokens that are computed at once, a power of two.
      with_map: whether M is computed.

    Raises:
      ShapeError: arrays do not fit each other, or there are no tokens. InputError: a block that is no power of two.
    """
    _check(query, key, value, log_decay, beta, state, counted, block)
    tokens, width = key.shape[1], value.shape[-1]
    query, key, value, rate = (jnp.asarray(array, jnp.float32) for array in (query, key, value, log_decay))
    rate = rate[..., None] if rate.ndim == 3 else rate
    beta = None if beta is None else jnp.asarray(beta, jnp.float32)[..., None]
    if counted is not None:
        there = jnp.asarray(counted)[..., None, None]
        key, value, rate = (jnp.where(there, array, 0.0) for array in (key, value, rate))
        beta = None if beta is None else jnp.where(there, beta, 0.0)

    # Heads go in front of tokens, and blocks in front of all: [n, B, K, C, ·].
    size = min(block, 1 << (tokens - 1).bit_length())
    short = -tokens % size
    inputs = (query, key, value, rate) if beta is None else (query, key, value, rate, beta)
    inputs = tuple(jnp.pad(array, ((0, 0), (0, short), (0, 0), (0, 0))) for array in inputs)
    blocks = tuple(
        array.reshape(array.shape[0], -1, size, *array.shape[2:]).transpose(1, 0, 3, 2, 4) for array in inputs
    )

    # What the block's map is applied to: the state in front, one of zeros, and the unit matrix.
    zeros = jnp.zeros((key.shape[0], key.shape[2], key.shape[3], width), jnp.float32)
    carried = {"own": zeros}
    if state is not None:
        carried["after"] = jnp.asarray(state, jnp.float32).swapaxes(1, 2)
    if with_map and beta is not None:
        carried["map"] = jnp.broadcast_to(jnp.eye(key.shape[3]), (*zeros.shape[:3], key.shape[3]))
    if tokens == 1:
        carried, output = _one_token(carried, tuple(array[0] for array in blocks))
        output = output[None]
    else:
        carried, output = jax.lax.scan(jax.checkpoint(_one_block, prevent_cse=False), carried, blocks)

    output = output.transpose(1, 0, 3, 2, 4).reshape(key.shape[0], -1, key.shape[2], width)[:, :tokens]
    map_ = carried.get("map")
    if with_map and map_ is None:
        map_ = jnp.exp(rate.sum(1))[..., None]
    final = {name: array.swapaxes(1, 2) for name, array in carried.items()}
    map_ = map_ if map_ is None else map_.swapaxes(1, 2)
    return RuleOutput(output, map_, final["own"], final.get("after", final["own"]))


def _check(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    log_decay: AnyArray,
    beta: AnyArray | None,
    state: AnyArray | None,
    counted: AnyArray | None,
    block: int,
) -> None:
    """Refuses arrays that do not fit each other."""
    if not is_whole(block, 1) or block & (block - 1):
        raise InputError(f"delta_rule: got block {block!r:.80}; expected a power of two")

    if key.ndim != 4 or not key.shape[1] or value.shape[:-1] != key.shape[:-1]:
        raise ShapeError(
            f"delta_rule: got key {key.shape}, value {value.shape}; expected [B,T,K,Dk] and [B,T,K,Dv] of tokens"
        )
    heads = key.shape[:3]
    expected = {
        "query": (query, (key.shape,)),
        "log_decay": (log_decay, (heads, key.shape)),
        "beta": (beta, (heads,)),
        "state": (state, ((heads[0], key.shape[3], heads[2], value.shape[-1]),)),
        "counted": (counted, (heads[:2],)),
    }
    for name, (array, shapes) in expected.items():
        if array is not None and array.shape not in shapes:
            raise ShapeError(f"delta_rule: got {name} {array.shape}; expected {' or '.join(map(str, shapes))}")


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def _one_token(carried: dict[str, Array], token: tuple[Array, ...]) -> tuple[dict[str, Array], Array]:
    """Applies the rule as it is written; arrays [B, K, 1, ·], states [B, K, Dk, ·]."""
    query, key, value, rate = token[:4]
    decay, column = jnp.exp(rate).swapaxes(-1, -2), key.swapaxes(-1, -2)

    updated = {}
    for name, held in carried.items():
        held = decay * held
        written = jnp.zeros_like(value[..., :1]) if name == "map" else value
        if len(token) == 5:
            written = token[4] * (written - _product(key, held))
        updated[name] = held + column * written
    return updated, _product(query, updated.get("after", updated["own"]))


def _one_block(carried: dict[str, Array], tokens: tuple[Array, ...]) -> tuple[dict[str, Array], Array]:
    """Applies the rule to a block in the WY form; arrays [B, K, C, ·], states [B, K, Dk, ·]."""
    query, key, value, rate = tokens[:4]
    lead = jnp.exp(jnp.cumsum(rate, -2))
    behind = jnp.exp(_sums_behind(rate))
    pairs = _pairs(jnp.stack((query, key)), key, rate)
    size = key.shape[-2]
    reads = jnp.where(jnp.tri(size, dtype=bool), pairs[0], 0.0)

    if len(tokens) == 5:
        lower = jnp.where(jnp.tri(size, k=-1, dtype=bool), tokens[4] * pairs[1], 0.0)
        solved = _product(_unit_inverse(lower), tokens[4] * jnp.concatenate((value, lead * key), -1))
        value, through = solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]
    else:
        through = None

    written = {}
    for name, held in carried.items():
        own = 0.0 if name == "map" else value
        written[name] = own if through is None else own - _product(through, held)
    decay, columns = lead[..., -1, :, None], (behind * key).swapaxes(-1, -2)
    updated = {name: decay * held + _product(columns, written[name]) for name, held in carried.items()}

    front = "after" if "after" in carried else "own"
    return updated, _product(lead * query, carried[front]) + _product(reads, written[front])


def _sums_behind(rate: Array) -> Array:
    """Sums the log decays behind each token of [..., C, ·]."""
    later = jnp.concatenate((rate[..., 1:, :], jnp.zeros_like(rate[..., :1, :])), -2)
    return jax.lax.cumsum(later, rate.ndim - 2, reverse=True)


def _sums_between(rate: Array) -> Array:
    """Sums log decays of [..., C, E] behind token s up to token t: [..., C (t), C (s), E], zeros for t ≤ s."""
    later = jnp.tri(rate.shape[-2], k=-1, dtype=bool)[..., None]
    return jnp.cumsum(jnp.where(later, rate[..., :, None, :], 0.0), -3)


def _pairs(left: Array, key: Array, rate: Array) -> Array:
    """Computes Σ_d left_td key_sd exp(G_td − G_sd) for s ≤ t: [..., C, C]; other entries mean nothing."""
    if rate.shape[-1] == 1:
        return _product(left, key.swapaxes(-1, -2)) * jnp.exp(_sums_between(rate)[..., 0])

    # [..., n, c, D]: sub-blocks.
    size, width = key.shape[-2:]
    inner = min(size, SUB_BLOCK)
    left, key, rate = (array.reshape(*array.shape[:-2], -1, inner, width) for array in (left, key, rate))
    near = (left[..., :, None, :] * key[..., None, :, :] * jnp.exp(_sums_between(rate))).sum(-1)
    count = size // inner
    if count == 1:
        return near[..., 0, :, :]

    # Sums from behind sub-block j up to the front of sub-block i.
    between = jnp.roll(_sums_between(rate.sum(-2)), 1, -3)
    arriving = key[..., None, :, :, :] * jnp.exp(_sums_behind(rate)[..., None, :, :, :] + between[..., None, :])
    arriving = arriving.reshape(*arriving.shape[:-3], size, width)
    far = _product(left * jnp.exp(jnp.cumsum(rate, -2)), arriving.swapaxes(-1, -2))
    far = far.reshape(*far.shape[:-1], count, inner)
    same = jnp.eye(count, dtype=bool)[:, None, :, None]
    return jnp.where(same, near[..., None, :], far).reshape(*far.shape[:-4], size, size)


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
