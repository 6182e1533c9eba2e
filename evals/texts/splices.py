"""Texts as splices: a chunk that was prefilled alone, reused behind other text, and what is read after it.

Axis letters: B contexts, R prompts of one context, A tokens whose logits are read in each, Q = R · A questions, L
layers, S keys, T tokens of the chunk, W tokens of a prompt, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax import to_engine
from kvpatch_jax.backbone import KV, Tokens
from kvpatch_jax.cache import Text
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import Repaired, SplicedCache

from ..harness.datasets import QuestionTable, question_mask, repeated_rows, row_per_question

Ids = Int[np.ndarray, " _"]


class TextAnswers:
    """Next-token distributions.

    Attributes:
      log_probabilities: [B,Q,V].
      predicted: the most likely tokens [B,Q].
    """

    def __init__(self, log_probabilities: Float[Array, "B Q V"]):
        self.log_probabilities = log_probabilities
        self.predicted = np.asarray(log_probabilities.argmax(-1))

    def divergence_from(self, reference: "TextAnswers") -> Float[np.ndarray, "B Q"]:
        """Computes KL(reference ‖ this) in nats."""
        return np.asarray(_divergence(reference.log_probabilities, self.log_probabilities))


@jax.jit
def _divergence(expected: Float[Array, "B Q V"], actual: Float[Array, "B Q V"]) -> Float[Array, "B Q"]:
    return (jnp.exp(expected) * (expected - actual)).sum(-1)


@jax.jit
def _log_softmax(logits: Float[Array, "B A V"]) -> Float[Array, "B A V"]:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


class TextBatch:
    """Contexts of one length with their prompts; see `harness.datasets.Batch`.

    Args:
      splice, reference, clusters, questions: as a batch has them.
      prompts: token ids of each context's prompts, padded at their ends [B,R,W].
      read_at: the tokens of each prompt whose logits answer, [B,R,A].
      question: the first so many tokens of every prompt, which methods that choose by the question see; None: prompts
        differ in length, and there are no such methods.
      answers: makes answers of log-probabilities [B,Q,V].
    """

    def __init__(
        self,
        backbone: Any,
        splice: SplicedCache,
        reference: KV,
        clusters: Int[np.ndarray, " B"],
        questions: QuestionTable,
        prompts: Int[np.ndarray, "B R W"],
        read_at: Int[np.ndarray, "B R A"],
        question: int | None = None,
        answers: Callable[[Array], Any] = TextAnswers,
    ):
        self.backbone, self.splice, self.reference = backbone, splice, reference
        self.clusters, self.questions = clusters, questions
        self.prompts, self.read_at, self.question, self._answers = prompts, read_at, question, answers

    def read(self, cache: KV, visible: Bool[Array, "B S"] | None = None) -> Any:
        """Reads every prompt after its context's cache."""
        rows = repeated_rows(dict(cache), self.prompts.shape[1], axis=1)
        return self._read(rows, repeated_rows(visible, self.prompts.shape[1]))

    def asked(self) -> SplicedCache:
        """Returns a splice with a row per prompt, which follows it and sees all of it.

        Raises:
          InputError: prompts differ in length.
        """
        if self.question is None:
            raise InputError("asked: got prompts of several lengths; expected a data set whose prompts have one length")
        question = self._prompt_tokens(self.splice.cache).take(0, self.question)
        return row_per_question(self.splice, self.prompts.shape[1], question)

    def read_asked(self, repaired: Repaired) -> Any:
        """Reads every prompt after its own cache."""
        return self._read(repaired.cache, repaired.visible)

    def _prompt_tokens(self, cache: KV) -> Tokens:
        rows = self.prompts.reshape(-1, self.prompts.shape[2])
        return placed(self.backbone.embed(rows), next(iter(cache.values())).shape[2])

    def _read(self, cache: KV, visible: Bool[Array, "R S"] | None) -> Any:
        mask = None if visible is None else question_mask(visible, self.prompts.shape[2])
        at = self.read_at.reshape(-1, self.read_at.shape[2])
        logits = self.backbone.prefill(self._prompt_tokens(cache), dict(cache), mask, logits=at).logits
        return self._answers(_log_softmax(logits).reshape(len(self.prompts), -1, logits.shape[-1]))


def placed(tokens: Tokens, start: int) -> Tokens:
    """Gives tokens the positions start, start+1, … in every row."""
    rows, count = tokens.embeddings.shape[:2]
    positions = np.repeat(np.arange(start, start + count, dtype=np.int32)[None], rows, axis=0)
    return tokens._replace(positions=positions)


def encode(backbone: Any, text: str) -> Ids:
    """Turns a text into token ids, without a start token."""
    return np.asarray(backbone.ids(text), np.int32)


def start_tokens(backbone: Any) -> Ids:
    """Returns what the tokenizer puts in front of every prompt: a start token, or nothing."""
    ids = np.asarray(backbone.prepare([Text("text")])["input_ids"])[0]
    return ids[: len(ids) - len(backbone.ids("text"))].astype(np.int32)


def spliced(
    backbone: Any,
    lead: Ids,
    front: Int[np.ndarray, "B A"],
    chunk: Int[np.ndarray, "B T"],
    base: int | None = None,
) -> tuple[SplicedCache, KV]:
    """Prefills chunks behind the lead alone, and splices them where they stand: behind the lead and other text.

    Args:
      lead: tokens that begin every prompt, an instruction or a start token; may be empty.
      front: text between lead and chunk.
      base: how many of the lead's tokens chunks are prefilled behind; None: all.

    Returns:
      The splice, with what a re-prefill leaves of the chunk recorded; and the whole re-prefilled cache, in the engine
      frame.
    """
    leads = np.repeat(lead[None], len(chunk), axis=0)
    own = leads[:, :base]
    start, behind = own.shape[1], len(lead) + front.shape[1]
    tokens = placed(backbone.embed(np.concatenate([leads, front, chunk], axis=1)), 0)
    kv = backbone.prefill(tokens).kv
    alone = backbone.prefill(placed(backbone.embed(np.concatenate([own, chunk], axis=1)), 0)).kv

    positions = np.arange(behind + chunk.shape[1], dtype=np.int32)
    reference = to_engine(backbone.layout, kv, positions, 0)
    canonical = {name: value[:, :, start:] for name, value in alone.items()}
    blind = to_engine(backbone.layout, canonical, positions[: chunk.shape[1]], behind)
    recorded = {name: value[:, :, behind:] for name, value in kv.items()}
    splice = SplicedCache(
        tokens.take(behind, len(positions)),
        {name: jnp.concatenate([reference[name][:, :, :behind], value], axis=2) for name, value in blind.items()},
        jnp.asarray(np.repeat(positions[None, behind:], len(chunk), axis=0)),
        front=tokens.take(0, behind),
        recorded=recorded,
    )
    return splice, dict(reference)
