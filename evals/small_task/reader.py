"""The small task's questions about a reused page, read with the legends in view and with the page alone in the window.

Chosen tokens and a question are one prefill: a chosen token stands at its place in the page, sees the true legends, the
page's tokens in front of it and the other chosen ones afresh, and the question sees the fresh ones in place of the
blind. That is recomputing them in the cache, without a copy of the cache for every question. Axis letters: B contexts,
Q questions, G questions of one prefill, T tokens of the page, S keys of the prefix, N chosen tokens, L layers.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.backbone import Tokens
from models import ModelBackbone

from ..arms.query_aware import marks_of, mean_over_heads
from ..arms.reused_page import KV, ReusedPage
from . import scenes
from .scenes import Answers, Scene
from .sequences import QUESTION_TOKENS
from .task import KINDS, Questions

VISIBLE, EVICTED = "repair.visible", "repair.evicted"
ROOM = 102
"""Tokens of one prefill, about: with more questions at once the mask between them would be most of the work."""


class SceneReader:
    """Reads a scene's questions from the caches of arms (an `evals.datasets.PageReader`).

    Args:
      scene: the contexts.
      questions: those asked, [B, Q].
      page: the scene's page reused, where it is there already.
    """

    kinds: tuple[str, ...] = KINDS
    probes = (VISIBLE, EVICTED)
    groups = (None,)
    """All questions are of one length."""

    def __init__(self, scene: Scene, questions: Questions, page: ReusedPage | None = None):
        self.scene, self.questions = scene, questions
        self.page = scenes.reused_page(scene) if page is None else page

    def read(self, cache: KV, probe: str = VISIBLE) -> Answers:
        """Asks every question over an engine-frame cache of the prefix."""
        return scenes.read(self.scene, cache, self.questions, sees_legends=probe == VISIBLE)

    def asked(self, probe: str) -> Questions:
        """Returns the questions that a probe counts: none about a legend once the legends have left the window."""
        if probe == VISIBLE:
            return self.questions
        about_page = self.questions.kind != KINDS.index("legend")
        return dataclasses.replace(self.questions, valid=self.questions.valid & about_page)

    # -------------------------------------------------------------------------------- questions that choose tokens

    def attention(self, group: None, cache: KV) -> Float[np.ndarray, "L B Q T"]:
        """Measures what attention the page's tokens receive from each question at each layer.

        Probabilities over all that the question sees, the mean over heads, summed over the question's tokens.
        """
        backbone = self.scene.backbone
        ids, positions, mask, _ = scenes.question_arrays(self.scene, self.questions, True, None)
        tokens = backbone.embed(ids, positions)
        received = received_attention(backbone, tokens, cache, mask)[..., self.scene.page]
        return received.reshape(*received.shape[:2], -1, QUESTION_TOKENS, received.shape[-1]).sum(axis=3)

    def read_entries(self, group: None, cache: KV, index: Int[np.ndarray, "B Q N"]) -> Float[np.ndarray, "B Q V"]:
        """Asks every question over the legends and its own entries of the page alone."""
        backbone, page = self.scene.backbone, self.scene.page
        ids, positions, mask, asked = scenes.question_arrays(self.scene, self.questions, True, None)
        mask = np.array(mask)
        mask[:, 0, :, page] &= np.repeat(marks_of(index, page.stop - page.start), QUESTION_TOKENS, axis=1)
        tokens = backbone.embed(ids, positions)
        wanted = np.broadcast_to(asked, (len(ids), len(asked)))
        logits = backbone.prefill(tokens, cache, mask, logits=wanted).logits
        return scenes.log_probabilities(logits)

    def read_recomputed(self, group: None, cache: KV, index: Int[np.ndarray, "B Q N"]) -> Float[np.ndarray, "B Q V"]:
        """Asks every question over the cache with its own chosen tokens run again in context."""
        backbone, page = self.scene.backbone, self.scene.page
        ids, positions, _, _ = scenes.question_arrays(self.scene, self.questions, True, None)
        asking, own = backbone.embed(ids, positions), self.page.tokens.take(page.start, page.stop)
        count, length = index.shape[1], index.shape[2] + QUESTION_TOKENS
        size = max(1, ROOM // length)
        size = -(-count // -(-count // size))
        answers = []

        for first in range(0, count, size):
            # The last group repeats questions, so that all groups are of one shape.
            numbers = np.minimum(np.arange(first, first + size), count - 1)
            chosen = index[:, numbers]
            tokens = _joined_tokens(own, asking, chosen, numbers)
            wanted = np.broadcast_to(length * (np.arange(size) + 1) - 1, (len(ids), size))
            logits = backbone.prefill(tokens, cache, _group_mask(chosen, page, length), logits=wanted).logits
            answers.append(scenes.log_probabilities(logits)[:, : count - first])

        return np.concatenate(answers, axis=1)

    def joined_answers(self, parts: Sequence[np.ndarray]) -> Answers:
        """Wraps the answers of the one group."""
        return Answers(parts[0])

    def rerun_flops(self, index: Int[np.ndarray, "B Q N"]) -> float:
        """Counts the FLOPs of recomputing one question's tokens, the mean over questions."""
        page, depth = self.scene.page, self.scene.backbone.layout.layers
        chosen = marks_of(index, page.stop - page.start).reshape(-1, page.stop - page.start)
        slots = np.broadcast_to(np.arange(page.start, page.stop), chosen.shape)
        return self.page.costs.rerun(np.broadcast_to(chosen, (depth, *chosen.shape)), slots)


def received_attention(
    backbone: ModelBackbone, tokens: Tokens, cache: KV, mask: Bool[np.ndarray, "B 1 M S"]
) -> Float[np.ndarray, "L B M S"]:
    """Measures which attention every entry receives from each token of a question at each layer, over heads' mean."""
    layers = range(backbone.layout.layers)
    return np.asarray(backbone.attention(tokens, cache, jnp.asarray(mask), layers=layers, reduce=mean_over_heads))


def _joined_tokens(
    own: Tokens, asking: Tokens, chosen: Int[np.ndarray, "B G N"], numbers: Int[np.ndarray, " G"]
) -> Tokens:
    """Returns each question's chosen tokens, then the question itself: [B, G·(N + 2), …]."""
    rows = np.arange(len(chosen))[:, None, None]
    places = numbers[:, None] * QUESTION_TOKENS + np.arange(QUESTION_TOKENS)

    def join(of_page: Array, of_questions: Array) -> Array:
        both = jnp.concatenate([jnp.asarray(of_page)[rows, chosen], jnp.asarray(of_questions)[:, places]], axis=2)
        return both.reshape(both.shape[0], -1, *both.shape[3:])

    positions = [np.asarray(own.positions)[rows, chosen], np.asarray(asking.positions)[:, places]]
    positions = np.concatenate(positions, axis=2)
    deepstack = None

    if own.deepstack is not None:
        # A question has no features of deeper layers.
        none = jnp.zeros((*asking.embeddings.shape[:2], *own.deepstack.shape[2:]), own.deepstack.dtype)
        deepstack = join(own.deepstack, none if asking.deepstack is None else asking.deepstack)

    flat = positions.reshape(len(chosen), -1, *positions.shape[3:])
    return Tokens(join(own.embeddings, asking.embeddings), flat, deepstack)


def _group_mask(chosen: Int[np.ndarray, "B G N"], page: slice, length: int) -> Bool[np.ndarray, "B 1 T S"]:
    """Makes the mask of one prefill over [prefix, chosen tokens, questions]: no question's tokens see another's."""
    B, G, N = chosen.shape
    tokens = page.stop - page.start
    kept = np.broadcast_to(~marks_of(chosen, tokens)[:, :, None], (B, G, length, tokens)).copy()
    # A chosen token sees the page's tokens in front of it; the question sees all of the page.
    kept[:, :, :N] &= np.arange(tokens) <= chosen[..., None]
    prefix = np.concatenate([np.ones((B, G, length, page.start), bool), kept], axis=3).reshape(B, G * length, page.stop)
    among = np.kron(np.eye(G, dtype=bool), np.tri(length, dtype=bool))
    return np.concatenate([prefix, np.broadcast_to(among, (B, *among.shape))], axis=2)[:, None]
