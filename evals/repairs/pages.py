"""A scene's reused page as splices: one row per context, or one per question.

Axis letters: B contexts, Q questions, S keys of the prefix.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvpatch_jax.repair import Repaired, SplicedCache

from ..small_task import scenes
from ..small_task.reader import VISIBLE, SceneReader
from ..small_task.scenes import Answers
from ..small_task.sequences import QUESTION_TOKENS

QUESTIONS = {"page": 2, "legend": 2, "chain": 4, "aggregate": 3, "override": 1}


class RepairPages:
    """Splices of a scene's page, and how its questions are read from what repairs leave.

    Args:
      reader: the scene and its questions.
      splice: what repairs start from, where the page was not reused in one piece; None: the page as it was cached.
    """

    def __init__(self, reader: SceneReader, splice: SplicedCache | None = None):
        self.reader = reader
        backbone, page = reader.scene.backbone, reader.page
        self.questions = reader.questions.answer.shape[1]
        self._asked: dict[str, SplicedCache] = {}
        if splice is not None:
            self.splice = splice
            return
        hidden = backbone.prefill(page.alone, hidden_at=tuple(range(1, backbone.layout.layers))).hidden
        # One row per context: what repairs start from that no question is needed for.
        self.splice = page.splice().replace(hidden=hidden, front=page.tokens.take(0, page.slots.start))

    def asked(self, probe: str) -> SplicedCache:
        """Returns one row per question, which the question follows; it sees what it sees in a probe."""
        if probe not in self._asked:
            self._asked[probe] = self._widened(probe)
        return self._asked[probe]

    def _widened(self, probe: str) -> SplicedCache:
        scene, count = self.reader.scene, self.questions
        ids, positions, mask, _ = scenes.question_arrays(scene, self.reader.questions, probe == VISIBLE, None)
        rows = len(ids) * count
        own = scene.backbone.embed(
            ids.reshape(rows, QUESTION_TOKENS), positions.reshape(rows, QUESTION_TOKENS, *positions.shape[2:])
        )
        # Every token of a question sees the same keys of the prefix.
        keys = mask.shape[-1] - ids.shape[1]
        seen = mask[:, 0, ::QUESTION_TOKENS, :keys].reshape(rows, keys)
        splice = self.splice.replace(hidden=None, front=None, conditioned=None, recorded=None)
        wide = splice.replace(
            tokens=jax.tree.map(functools.partial(_repeated, count=count), splice.tokens),
            cache={name: _repeated(value, count, 1) for name, value in splice.cache.items()},
            slots=_repeated(splice.slots, count),
        )
        return wide.replace(question=own, seen=jnp.asarray(seen))

    def read(self, repaired: Repaired, probe: str) -> Answers:
        """Asks every question over a repaired cache of its context."""
        return self.reader.read(dict(repaired.cache), probe)

    def read_asked(self, repaired: Repaired, probe: str) -> Answers:
        """Asks every question over its own repaired cache."""
        splice, backbone = self.asked(probe), self.reader.scene.backbone
        seen = splice.seen if repaired.visible is None else repaired.visible
        assert splice.question is not None
        assert seen is not None
        rows, keys = seen.shape
        own = jnp.broadcast_to(jnp.tril(jnp.ones((QUESTION_TOKENS, QUESTION_TOKENS), bool)), (rows, 1, 2, 2))
        mask = jnp.concatenate([jnp.broadcast_to(seen[:, None, None], (rows, 1, QUESTION_TOKENS, keys)), own], axis=-1)
        logits = backbone.prefill(splice.question, dict(repaired.cache), mask).logits[:, -1]
        return Answers(scenes.log_probabilities(logits).reshape(-1, self.questions, logits.shape[-1]))


def _repeated(value: Any, count: int, axis: int = 0) -> Array:
    return jnp.repeat(jnp.asarray(value), count, axis=axis)


def question_logits(reader: SceneReader, cache: Any) -> np.ndarray:
    """Reads the logits of every question's answer over a cache, [B,Q,V]; log-probabilities are logits of the same
    distribution.
    """
    return reader.read(dict(cache), VISIBLE).log_probabilities
