"""A batch of passages after their antecedents: canonical, conditioned KV and the reference, from two forwards.

Axis letters: B passages, A tokens of an antecedent, T tokens of a passage, n tokens that are read after it, L layers,
K KV heads, H head width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.repair import SplicedCache

KV = Mapping[str, Array]
CHECK_LAYER = 1


def placed(tokens: Tokens, start: int) -> Tokens:
    """Gives tokens the positions start, start+1, … in every row."""
    rows, count = tokens.embeddings.shape[:2]
    positions = np.repeat(np.arange(start, start + count, dtype=np.int32)[None], rows, axis=0)
    return tokens._replace(positions=positions)


def cut(kv: KV, start: int, count: int) -> dict[str, Array]:
    """Cuts the tokens start … start+count-1 from KV [L,B,T,K,H]."""
    return {name: value[:, :, start : start + count] for name, value in kv.items()}


class Passages:
    """Passages, each after its own antecedent.

    Attributes:
      chunk: the canonicals, a batch.
      front: KV of the antecedents, engine frame.
      conditioned: KV(B|A), phase-free.
      logits: a re-prefill's logits of the tokens after the passage, float32 [B,n,V].
      ids: the tokens after the passage, [B,n].
      checked: the passages' residual in context where repairs compare, at CHECK_LAYER [B,T,D].
    """

    def __init__(
        self,
        backbone: Any,
        front: KV,
        canonical: KV,
        ids: Int[np.ndarray, "B T"],
        behind: Int[np.ndarray, "B n"],
        text: Tokens | None = None,
    ):
        """Prefills the passages after their antecedents.

        Args:
          front, canonical: KV of the antecedents and of the passages alone, phase-free.
          ids, behind: the passages, and the tokens that are read after them.
          text: both, embedded already: passages that are images.
        """
        self.backbone, self.ids = backbone, np.asarray(behind)
        self.rows, self.length = ids.shape
        self.start = next(iter(front.values())).shape[2]
        self.front = self.rotate(front, 0)
        self.chunk = kvp.Chunk(
            kv=dict(canonical),
            local=np.arange(self.length, dtype=np.int32),
            span=self.length,
            length=self.length,
            id="passage",
            layout=backbone.layout,
            backbone=backbone.fingerprint,
        )
        if text is None:
            text = cast(Tokens, backbone.embed(np.concatenate([ids, behind], axis=1)))
        self.tokens = placed(text.take(0, self.length), self.start)
        self.after = placed(text.take(self.length, self.length + behind.shape[1]), self.start + self.length)

        asked = np.repeat(np.arange(self.length, self.length + behind.shape[1])[None], self.rows, axis=0)
        behind_front = placed(text, self.start)
        out = backbone.prefill(behind_front, context=self.front, logits=asked, hidden_at=(CHECK_LAYER,))
        self.logits = out.logits
        self.checked = out.hidden[CHECK_LAYER][:, : self.length]
        self.conditioned = cut(out.kv, 0, self.length)

    @property
    def antecedent(self) -> tuple[str, ...]:
        """Its one name: every row has its own."""
        return ("in front",)

    def rotate(self, kv: KV, start: int) -> dict[str, Array]:
        """Rotates phase-free KV to the engine frame, from `start` on."""
        count = next(iter(kv.values())).shape[2]
        return dict(kvp.to_engine(self.backbone.layout, kv, np.arange(count, dtype=np.int32), start))

    def cache(self, own: KV) -> dict[str, Array]:
        """Joins the antecedent and a passage's engine-frame KV to a cache."""
        return joined(dict(self.front), dict(own))

    def serve(self, patch: kvp.Patch | None = None, stale: bool = False) -> dict[str, Array]:
        """Makes the cache with the canonicals moved and patched."""
        return self.cache(
            kvp.apply_patch(kvp.Placed(self.chunk, patch, self.start, self.antecedent, allow_stale=stale))
        )

    def patch(self, rank: int, conditioned: KV | None = None) -> kvp.Patch:
        """Forms the passages' patch by a full SVD, of this conditioned KV or their own; lower ranks are its slices."""
        kv = self.conditioned if conditioned is None else dict(conditioned)
        return kvp.form_patch(self.chunk, kv, rank, self.antecedent, method="exact", dense=False)

    def splice(self) -> SplicedCache:
        """Makes what token repairs start from: the blind cache and the passages' tokens."""
        slots = np.repeat(np.arange(self.start, self.start + self.length)[None], self.rows, axis=0)
        return SplicedCache(self.tokens, self.serve(), jnp.asarray(slots), conditioned=self.conditioned)

    def read(self, cache: KV, behind: Tokens | None = None) -> Float[Array, "B n V"]:
        """Reads the text after a cache: its logits."""
        return self.backbone.prefill(self.after if behind is None else behind, context=cache, logits="all").logits

    def scored(self, logits: Float[Array, "B n V"]) -> list[dict[str, float]]:
        """Computes KL in nats, flips and loss of each passage, for an arm's logits."""
        return scores(self.logits, logits, self.ids)


@jax.jit
def joined(front: KV, own: KV) -> dict[str, Array]:
    """Joins KV along its tokens."""
    return {name: jnp.concatenate([front[name], own[name].astype(front[name].dtype)], axis=2) for name in front}


def scores(
    reference: Float[Array, "B n V"], logits: Float[Array, "B n V"], ids: Int[np.ndarray, "B n"]
) -> list[dict[str, float]]:
    """Averages over a row's n tokens: KL(reference‖logits), flips of the best token, loss on the tokens that follow."""
    columns = {name: np.asarray(value) for name, value in _scores(reference, logits, jnp.asarray(ids)).items()}
    return [{name: float(value[row]) for name, value in columns.items()} for row in range(len(ids))]


@jax.jit
def _scores(
    reference: Float[Array, "B n V"], logits: Float[Array, "B n V"], ids: Int[Array, "B n"]
) -> dict[str, Float[Array, " B"]]:
    found, expected = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    following = jnp.take_along_axis(found[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    return {
        "kl": (jnp.exp(expected) * (expected - found)).sum(-1).mean(-1),
        "flips": (reference.argmax(-1) != logits.argmax(-1)).astype(jnp.float32).mean(-1),
        "loss": -following.mean(-1),
    }
