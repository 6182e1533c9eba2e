"""A batch of passages after their antecedents: canonical, conditioned KV and the reference, from two forwards.

Axis letters: B passages, A tokens of an antecedent, T tokens of a passage, n tokens that are read after it, L layers,
K KV heads, H head width, V vocabulary.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens

from ..arms.reused_page import KV, ReusedPage, chunk_of, cut, joined
from ..small_task.prefix import Prefix

CHECK_LAYER = 1
"""The layer at which token repairs compare reused with recomputed KV."""


def placed(tokens: Tokens, start: int) -> Tokens:
    """Gives tokens the positions start, start+1, … in every row."""
    rows, count = tokens.embeddings.shape[:2]
    positions = np.repeat(np.arange(start, start + count, dtype=np.int32)[None], rows, axis=0)
    return tokens._replace(positions=positions)


class Passages:
    """Passages, each after its own antecedent, and the text that is read after them.

    Attributes:
      page: what the arms of `evals.arms` reuse: antecedent and passage are the chunks, `contexts` are these passages.
      start: the position of a passage's first token, which is the length of its antecedent.
      conditioned: KV(B|A), phase-free.
      logits: a re-prefill's logits of the tokens after the passage, float32 [B,n,V].
      ids: the tokens after the passage, [B,n].
      after: the same, embedded.
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
        end = self.start + self.length
        if text is None:
            text = cast(Tokens, backbone.embed(np.concatenate([ids, behind], axis=1)))
        self.after = placed(text.take(self.length, self.length + behind.shape[1]), end)

        # One forward over passage and text gives the reference and the conditioned KV.
        front_engine = self.rotate(front, 0)
        asked = np.repeat(np.arange(self.length, self.length + behind.shape[1])[None], self.rows, axis=0)
        out = backbone.prefill(placed(text, self.start), context=front_engine, logits=asked)
        self.logits = out.logits
        self.conditioned = cut(out.kv, slice(self.length))

        own = text.take(0, self.length)
        # No arm runs the antecedent again, so its embeddings may be zeros.
        embeddings = jnp.pad(own.embeddings, [(0, 0), (self.start, 0), (0, 0)])
        prefix = placed(Tokens(embeddings, np.zeros(embeddings.shape[:2], np.int32), None), 0)
        reference = joined([front_engine, self.rotate(self.conditioned, self.start)])
        sizes = (self.start, self.length)
        locals_ = tuple(np.arange(size, dtype=np.int32) for size in sizes)
        self.page = ReusedPage(
            backbone=backbone,
            contexts=self,
            form=Prefix(locals_, locals_, image_token=-1),
            # Every row has its own text, so that all rows of a batch go by one name.
            chunks=(
                chunk_of(backbone, front, locals_[0], "in front"),
                chunk_of(backbone, canonical, locals_[1], "passage"),
            ),
            starts=(np.int32(0), np.int32(self.start)),
            tokens=prefix,
            alone=placed(own, 0),
            conditioned=joined([dict(front), self.conditioned]),
            reference=reference,
            front=reference,
        )

    def __len__(self) -> int:
        return self.rows

    @property
    def chunk(self) -> kvp.Chunk:
        """The canonicals, a batch."""
        return self.page.page

    @property
    def most(self) -> int:
        """The largest rank that a patch of these passages can have."""
        return min(self.length, *(channel.features for channel in self.backbone.layout.channels))

    def rotate(self, kv: KV, start: int) -> KV:
        """Rotates phase-free KV to the engine frame, from `start` on."""
        count = next(iter(kv.values())).shape[2]
        return dict(kvp.to_engine(self.backbone.layout, kv, np.arange(count, dtype=np.int32), start))

    def patch(self, rank: int, conditioned: KV | None = None) -> kvp.Patch:
        """Forms the passages' patch by a full SVD, of this conditioned KV or their own."""
        kv = self.conditioned if conditioned is None else conditioned
        return kvp.form_patch(self.chunk, kv, rank, self.page.antecedent, method="exact", dense=False)

    def read(self, cache: KV, behind: Tokens | None = None) -> Float[Array, "B n V"]:
        """Reads the text after a cache: its logits."""
        return self.backbone.prefill(self.after if behind is None else behind, context=cache, logits="all").logits

    def scored(self, logits: Float[Array, "B n V"]) -> list[dict[str, float]]:
        """Computes KL in nats, flips and loss of each passage, for an arm's logits."""
        return scores(self.logits, logits, self.ids)


def scores(
    reference: Float[Array, "B n V"], logits: Float[Array, "B n V"], ids: Int[np.ndarray, "B n"]
) -> list[dict[str, float]]:
    """Averages over a row's n tokens: KL(reference‖logits), flips of the best token, loss on the tokens that follow."""
    columns = jax.tree.map(np.asarray, _scores(reference, logits, jnp.asarray(ids)))
    rows = []
    for row in range(len(ids)):
        rows.append({name: float(value[row]) for name, value in columns.items()})
    return rows


@jax.jit
def _scores(
    reference: Float[Array, "B n V"], logits: Float[Array, "B n V"], ids: Int[Array, "B n"]
) -> dict[str, Float[Array, " B"]]:
    found, expected = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    # A token's logits name the token after it: the last one's have nothing to be scored on.
    following = jnp.take_along_axis(found[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    return {
        "kl": (jnp.exp(expected) * (expected - found)).sum(-1).mean(-1),
        "flips": (reference.argmax(-1) != logits.argmax(-1)).astype(jnp.float32).mean(-1),
        "loss": -following.mean(-1),
    }
