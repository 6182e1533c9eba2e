"""One question behind one context: what re-prefill answers, and how far every arm is from it.

Axis letters: n tokens of an answer, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpatch_jax.window.padding import padded_tokens

from .arms import question_tokens
from .contexts import HostKV, MeasuredContext, on_device

AnswerIds = tuple[int, ...]


class ArmAnswer(NamedTuple):
    """What one arm answers.

    Attributes:
      ids: of the greedy answer, a stop token at its end included.
      kl_first: KL(re-prefill ‖ arm) of the first token, in nats.
      kl: the same, the mean over the tokens of re-prefill's answer, each with the ones before it as input.
      first: the arm's first token.
    """

    ids: AnswerIds
    kl_first: float
    kl: float
    first: int


class AnswerReader:
    """Asks one question over caches of one context.

    Attributes:
      answer: re-prefill's greedy answer, a stop token at its end included.
      tokens: the question, at its place behind the context.
    """

    def __init__(self, context: MeasuredContext, question: Int[np.ndarray, " q"], steps: int):
        """Reads re-prefill's answer.

        Args:
          steps: tokens of an answer at most.
        """
        self.context, self.question, self.steps = context, question, steps
        self.tokens = question_tokens(context, question)
        self.answer = self._generated(context.reference)
        forced = np.concatenate([question, np.asarray(self.answer[:-1], np.int32)])
        self._forced = question_tokens(context, forced)
        self._reference = self._logits(context.reference)

    def read(self, cache: HostKV | None) -> ArmAnswer:
        """Asks the question over an arm's cache; None stands for re-prefill's."""
        count = len(self.answer)
        if cache is None:
            return ArmAnswer(self.answer, 0.0, 0.0, self.answer[0])

        divergence, best = (np.asarray(found)[:count] for found in _compared(self._reference, self._logits(cache)))
        # Where every token of re-prefill's answer is the best one here too, greedy decoding writes the same.
        same = best.tolist() == list(self.answer)
        ids = self.answer if same else self._generated(cache)
        return ArmAnswer(ids, float(divergence[0]), float(divergence.mean()), int(best[0]))

    def _generated(self, cache: HostKV) -> AnswerIds:
        """Decodes greedily up to a stop token."""
        backbone = self.context.backbone
        length = self.tokens.embeddings.shape[1]
        padded = padded_tokens(self.tokens, self.context.buckets.round_up(length))
        ids = backbone.generate(padded, self.steps, on_device(cache), lengths=[length])[0].tolist()
        stop = next((place for place, token in enumerate(ids) if token in backbone.stop_tokens), len(ids) - 1)
        return tuple(ids[: stop + 1])

    def _logits(self, cache: HostKV) -> Float[Array, "n V"]:
        """Reads the logits of re-prefill's answer, token by token; as many as an answer may have, the last repeated."""
        places = len(self.question) - 1 + np.minimum(np.arange(self.steps), len(self.answer) - 1)
        padded = padded_tokens(self._forced, self.context.buckets.round_up(self._forced.embeddings.shape[1]))
        return self.context.backbone.prefill(padded, on_device(cache), logits=places[None].astype(np.int32)).logits[0]

    def text(self, ids: AnswerIds) -> str:
        """Returns an answer in words, without the token that ended it."""
        stops = self.context.backbone.stop_tokens
        return self.context.backbone.text([token for token in ids if token not in stops]).strip()


@jax.jit
def _compared(
    reference: Float[Array, "n V"], found: Float[Array, "n V"]
) -> tuple[Float[Array, " n"], Int[Array, " n"]]:
    """Computes KL(reference ‖ found) in nats and the best token of each place."""
    expected, other = jax.nn.log_softmax(reference), jax.nn.log_softmax(found)
    divergence = (jnp.exp(expected) * (expected - other)).sum(-1)
    return jnp.maximum(divergence, 0.0), found.argmax(-1).astype(jnp.int32)
