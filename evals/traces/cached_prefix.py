"""Prompts computed behind a cached prefix. Axis letters: L layers, S keys, K KV heads, H head width, V vocabulary."""

import numpy as np
from jaxtyping import Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Buckets
from kvpatch_jax.window.padding import padded_tokens
from models import ModelBackbone

from ..measure.contexts import BLOCK, BLOCK_ABOVE, HostKV, cut, on_device


def computed_behind(
    backbone: ModelBackbone, prompt: Tokens, before: HostKV | None
) -> tuple[Float[np.ndarray, " V"], HostKV, HostKV]:
    """Computes the tokens of a prompt behind KV of its first ones, padded to buckets, so that few lengths compile.

    Args:
      prompt: on the host.
      before: engine frame [L,1,S,K,H]; None: all tokens are computed.

    Returns:
      The last token's logits, phase-free KV of the tokens computed, and the KV of the whole prompt, engine frame.
    """
    buckets, count = backbone.buckets or Buckets(), len(prompt.embeddings[0])
    hit = 0 if before is None else next(iter(before.values())).shape[2]
    size = buckets.round_up(count - hit)
    rest = padded_tokens(prompt.take(hit, count), size)
    many = size > BLOCK_ABOVE and rest.ahead is None
    rows = np.array([[count - hit - 1]], np.int32)
    out = backbone.prefill(rest, on_device(before), logits=rows, chunk=BLOCK if many else None)
    placed = kvp.to_engine(backbone.layout, dict(out.kv), np.asarray(rest.positions), 0)
    own = cut({name: np.asarray(value) for name, value in placed.items()}, slice(count - hit))
    kv = own if before is None else {name: np.concatenate([before[name], own[name]], axis=2) for name in own}
    computed = cut({name: np.asarray(value) for name, value in out.kv.items()}, slice(count - hit))
    return np.asarray(out.logits)[0, 0].astype(np.float32), computed, kv
