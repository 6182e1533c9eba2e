"""Linear attention: outputs of tokens that read one state, and the transition S → M·S + B of all of them.

Per head, with a state S [Dk, Dv], a decay α and a writing strength β (float32 throughout):

    S ← α_t S;  S ← S + k_t (β_t (v_t − Sᵀ k_t))ᵀ;  o_t = Sᵀ q_t

This is the gated delta rule (Yang et al., Gated Delta Networks, arXiv 2412.06464), with α a vector over Dk Kimi Delta
Attention (arXiv 2510.26692), and without the correction, S ← α_t S + k_t v_tᵀ, Mamba-2 (arXiv 2405.21060).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

HIGHEST = jax.lax.Precision.HIGHEST


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
    query: Float[Array, "B T K D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K V"],
    log_decay: Float[Array, "B T K"] | Float[Array, "B T K D"],
    beta: Float[Array, "B T K"] | None,
    state: Float[Array, "B D K V"] | None = None,
    *,
    counted: Bool[Array, "B T"] | None = None,
    block: int = 64,
    with_map: bool = True,
) -> RuleOutput:
    """Runs a rule of linear attention over tokens, and computes their transition.

    Args:
      query, key: normalised and scaled by the caller.
      log_decay: log α ≤ 0, one per head or one per channel of the key.
      beta: writing strength; None: no correction, S ← α S + k vᵀ.
      state: S in front of the tokens; None: zeros.
      counted: tokens that are none (padding) change nothing, and their outputs are Sᵀq of the state there.
      block: tokens that are worked on at once.
      with_map: whether M is computed.
    """
    del block
    batch, _, heads, width = key.shape
    query, key, value, log_decay = (array.astype(jnp.float32) for array in (query, key, value, log_decay))
    rate = log_decay[..., None] if log_decay.ndim == 3 else log_decay
    strength = jnp.ones(key.shape[:3], jnp.float32) if beta is None else beta.astype(jnp.float32)
    if counted is not None:
        strength = jnp.where(counted[..., None], strength, 0.0)
        rate = jnp.where(counted[..., None, None], rate, 0.0)

    zeros = jnp.zeros((batch, width, heads, value.shape[-1]), jnp.float32)
    unit = jnp.ones((batch, rate.shape[-1], heads, 1), jnp.float32)
    if beta is not None:
        unit = jnp.broadcast_to(jnp.eye(width)[:, None], (batch, width, heads, width))
    before = zeros if state is None else state.astype(jnp.float32)

    def step(carry: tuple[Array, ...], token: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        q, k, v, decay, strength = token
        decay = jnp.exp(decay).swapaxes(1, 2)[..., None]

        def written(held: Array, v: Array | float) -> Array:
            held = held * decay
            read = 0.0 if beta is None else jnp.einsum("bdkv,bkd->bkv", held, k, precision=HIGHEST)
            return held + jnp.einsum("bkd,bkv->bdkv", k, strength[..., None] * (v - read), precision=HIGHEST)

        map_, own, held = carry
        map_ = map_ * decay if beta is None else written(map_, 0.0) if with_map else map_
        held = written(held, v)
        return (map_, written(own, v), held), jnp.einsum("bdkv,bkd->bkv", held, q, precision=HIGHEST)

    tokens = tuple(jnp.moveaxis(array, 1, 0) for array in (query, key, value, rate, strength))
    (map_, own, after), output = jax.lax.scan(step, (unit, zeros, before), tokens)
    return RuleOutput(jnp.moveaxis(output, 0, 1), map_ if with_map else None, own, after)
