"""Reading contexts: every image prefilled alone, and packed questions asked over a cache of them.

Axis letters: B contexts, Q questions, T tokens of the prefix, M tokens of all questions, n of one, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import KV, Tokens, joined
from kvpatch_jax.core import AnyArray
from kvpatch_jax.models import ModelBackbone

from ..harness.datasets import QuestionTable, question_mask, repeated_rows
from ..harness.lines import divergence
from .contexts import Contexts
from .layout import Prefix, prefix_of, tower_inputs, within_question
from .questions import Questions


def image_tokens(
    backbone: ModelBackbone, contexts: Contexts, arrays: Mapping[str, np.ndarray] | None = None
) -> tuple[Prefix, Tokens, list[Tokens]]:
    """Embeds contexts: their prefix, its tokens from position 0, and each image's tokens from its own start.

    Args:
      arrays: what `tower_inputs` makes of them; None: it is made here.
    """
    config, settings, count = backbone.config, backbone.image_config, len(contexts)
    prefix = prefix_of(config, settings, contexts.size, contexts.drawing)
    if arrays is None:
        arrays = tower_inputs(config, settings, contexts)
    positions, _ = prefix.positions(np.ones((count, prefix.chunks), bool), np.zeros(count, int))
    tokens = backbone.embed(np.tile(prefix.ids, (count, 1)), positions, **arrays)

    images = []
    for where, local in zip(prefix.slices, prefix.chunk_local, strict=True):
        # Features that a tower adds to deeper layers (Qwen3-VL's DeepStack) belong to the image as well.
        at_zero = jnp.asarray(np.broadcast_to(local, (count, *local.shape)))
        images.append(tokens.take(where.start, where.stop)._replace(positions=at_zero))
    return prefix, tokens, images


def place(layout: kvp.KVLayout, prefix: Prefix, pieces: Sequence[KV], start: int) -> dict[str, Any]:
    """Puts the images' phase-free KV behind one another from a position on: a cache in the engine frame."""
    starts = start + np.cumsum([0, *prefix.spans[:-1]])
    places = zip(pieces, prefix.chunk_local, starts.tolist(), strict=True)
    return dict(joined(*[kvp.to_engine(layout, kv, local, at) for kv, local, at in places]))


def question_table(questions: Questions, kinds: np.ndarray | None = None) -> QuestionTable:
    """Says which of packed questions count; the right answer is 1. kinds: their numbers, in place of their own."""
    expected = questions.answer >= 0
    valid = np.stack([expected[:, tokens].any(axis=1) for tokens in questions.columns()], axis=1)
    kinds = questions.kind if kinds is None else kinds
    return QuestionTable(np.broadcast_to(kinds, valid.shape), valid, np.ones(valid.shape, int))


class TaskAnswers:
    """TaskAnswers to packed questions.

    A question of several tokens is right where all of them are, as greedy decoding would have it; its KL is their sum.
    """

    def __init__(self, log_probabilities: Float[np.ndarray, "B M V"], questions: Questions):
        self.log_probabilities, self.questions = log_probabilities, questions

    @property
    def predicted(self) -> Int[np.ndarray, "B Q"]:
        """1 where a question is answered right, else 0."""
        expected = self.questions.answer
        right = (self.log_probabilities.argmax(axis=-1) == expected) | (expected < 0)
        return np.stack([right[:, tokens].all(axis=1) for tokens in self.questions.columns()], axis=1).astype(int)

    def divergence_from(self, reference: "TaskAnswers") -> Float[np.ndarray, "B Q"]:
        """Computes KL(reference ‖ this) per question, in nats."""
        by_token = divergence(reference.log_probabilities, self.log_probabilities)
        by_token = np.where(self.questions.answer >= 0, by_token, 0.0)
        return np.stack([by_token[:, tokens].sum(axis=1) for tokens in self.questions.columns()], axis=1)


def read(
    backbone: ModelBackbone,
    questions: Questions,
    positions: Int[np.ndarray, "B M *axes"],
    cache: KV,
    visible: Bool[AnyArray, "B T"] | None = None,
) -> TaskAnswers:
    """Asks all questions over a cache in the engine frame; each sees the cache and its own tokens.

    Args:
      positions: of the questions' tokens. visible: keys of the cache that questions see; None: all.
    """
    if backbone.layout.parts:
        # Linear attention knows of no mask: every question is a row of its own.
        count = len(questions.kind)
        return read_rows(backbone, questions, positions, repeated_rows(dict(cache), count, axis=1))

    tokens, (count, length) = backbone.embed(questions.ids, positions), questions.ids.shape
    keys = next(iter(cache.values())).shape[2]
    seen = np.ones((count, keys), bool) if visible is None else np.asarray(visible)
    seen = np.broadcast_to(seen[:, None], (count, length, keys))
    among = np.broadcast_to(within_question(questions.number), (count, length, length))
    mask = np.concatenate([seen, among], axis=2)[:, None]
    return TaskAnswers(_log_probabilities(backbone.prefill(tokens, cache, mask, logits="all").logits), questions)


def read_rows(
    backbone: ModelBackbone,
    questions: Questions,
    positions: Int[np.ndarray, "B M *axes"],
    cache: KV,
    visible: Bool[AnyArray, "R T"] | None = None,
) -> TaskAnswers:
    """Asks every question over a row of its own, the rows R of a context's questions behind one another."""
    columns, count = questions.columns(), len(questions.ids)
    answers = np.zeros((*questions.ids.shape, backbone.config.text.vocabulary), np.float32)
    for length in sorted({len(tokens) for tokens in columns}):
        numbers = [number for number, tokens in enumerate(columns) if len(tokens) == length]
        packed = np.stack([columns[number] for number in numbers])
        rows = (np.arange(count)[:, None] * len(columns) + numbers).reshape(-1)
        ids, places = (
            value[:, packed].reshape(len(rows), length, *value.shape[2:]) for value in (questions.ids, positions)
        )
        mask = None if visible is None else question_mask(np.asarray(visible)[rows], length)
        context = {name: value[:, rows] for name, value in cache.items()}
        logits = backbone.prefill(backbone.embed(ids, places), context, mask, logits="all").logits
        answers[:, packed.reshape(-1)] = _log_probabilities(logits).reshape(count, packed.size, -1)
    return TaskAnswers(answers, questions)


def _log_probabilities(logits: Any) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))
