"""The task as a data set of the harness: batches of contexts whose page is reused behind its sheets.

Every image is prefilled alone from position 0 and served `MOVED` positions further on behind the others, so that sheets
and page all stand where nothing of them was computed. Axis letters: B contexts, Q questions, T tokens of the page.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

import kvpatch_jax as kvp
from kvpatch_jax.backbone import KV
from kvpatch_jax.core import AnyArray, fold, transition_of
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.repair import Repaired, SplicedCache

from ..harness import datasets
from .contexts import SIZES, Contexts, sample
from .layout import tower_inputs
from .preparation import prepared
from .questions import KINDS, Questions, ask
from .reading import TaskAnswers, image_tokens, place, question_table, read, read_rows
from .vocabulary import check_words

MOVED = 37
ASKED = {"page": 4, "sheet": 4, "chain": 8, "override": 2, "aggregate": 5, "list": 2}
"""Questions of each context, by kind."""
QUESTION_TOKENS = 2
"""Tokens that methods choose by: a list question is the asking word and the first code."""


UNSEEN, ALIKE = "unseen", "alike"
"""Probes of contexts of size "4": in faces that training never draws; documents that all look alike, of one face, black
on white. Other probes are names of sizes."""


@functools.lru_cache(maxsize=4)
def drawn(drawing: str, probe: str, number: int, count: int, seed: int) -> tuple[Contexts, Questions]:
    """Draws a batch of contexts and what is asked of them."""
    size = SIZES["4" if probe in (UNSEEN, ALIKE) else probe]
    rng = np.random.default_rng([seed, number, size.sheets])
    variety = 0.0 if probe == ALIKE else 1.0
    contexts = sample(rng, count, size, unseen=probe == UNSEEN, variety=variety, drawing=drawing)
    return contexts, ask(contexts, rng, ASKED)


@functools.lru_cache(maxsize=4)
def _inputs(config: Any, settings: Any, *batch: Any) -> dict[str, np.ndarray]:
    """Renders a batch for a tower, once for all instances of an architecture."""
    return tower_inputs(config, settings, drawn(*batch)[0])


class TaskBatch:
    """One batch of contexts, prefilled; see `harness.datasets.Batch`.

    Args:
      arrays: the contexts rendered for the backbone's tower; None: they are rendered here.
      clusters: numbers of the contexts.
    """

    def __init__(
        self,
        backbone: ModelBackbone,
        contexts: Contexts,
        asked: Questions,
        arrays: Mapping[str, np.ndarray] | None = None,
        clusters: np.ndarray | None = None,
    ):
        self.backbone, self.contexts, self.packed = backbone, contexts, asked
        self.clusters = np.arange(len(contexts)) if clusters is None else clusters
        layout, count = backbone.layout, len(contexts)
        self.prefix, tokens, images = image_tokens(backbone, contexts, arrays)

        # Every image alone; of the page the residuals too, which some methods keep.
        hidden_at = () if layout.parts else tuple(range(1, layout.layers))
        alone = [backbone.prefill(image).kv for image in images[:-1]]
        page = backbone.prefill(images[-1], hidden_at=hidden_at)
        self.alone = (*alone, page.kv)

        # All of them as one prompt. Of a hybrid a forward per image alone tells the image's own transition.
        if layout.parts:
            self.conditioned = tuple(kvp.patching.conditioned(backbone, images))
        else:
            kv = backbone.prefill(tokens).kv
            self.conditioned = tuple(
                {name: value[:, :, where] for name, value in kv.items()} for where in self.prefix.slices
            )
        self.reference = place(layout, self.prefix, self.conditioned, MOVED)

        moved, behind = self.prefix.positions(np.ones((count, self.prefix.chunks), bool), np.full(count, MOVED))
        self.positions = self.prefix.positions_behind(behind, asked.step)
        served, where = tokens._replace(positions=jnp.asarray(moved)), self.prefix.page
        self.splice = SplicedCache(
            served.take(where.start, where.stop),
            place(layout, self.prefix, self.alone, MOVED),
            jnp.asarray(np.broadcast_to(np.arange(where.start, where.stop), (count, where.stop - where.start))),
            front=served.take(0, where.start),
            recorded=self.conditioned[-1],
            hidden=page.hidden if hidden_at else None,
            canonical=page.kv,
            before=fold([transition_of(kv) for kv in self.alone[:-1]]) if layout.parts else None,
        )

        self.questions = question_table(asked)

    def read(self, cache: KV, visible: Bool[AnyArray, "B S"] | None = None) -> TaskAnswers:
        """TaskAnswers every question over one cache per context."""
        return read(self.backbone, self.packed, self.positions, cache, visible)

    def asked(self) -> SplicedCache:
        """Returns a splice with a row per question, which sees all of the cache."""
        first = np.stack([columns[:QUESTION_TOKENS] for columns in self.packed.columns()])
        ids, positions = (
            value[:, first].reshape(-1, QUESTION_TOKENS, *value.shape[2:])
            for value in (self.packed.ids, self.positions)
        )
        return datasets.row_per_question(self.splice, len(first), self.backbone.embed(ids, positions))

    def read_asked(self, repaired: Repaired) -> TaskAnswers:
        """TaskAnswers every question over its own row of a repaired cache."""
        return read_rows(self.backbone, self.packed, self.positions, repaired.cache, repaired.visible)


class TaskDataset:
    """The task in one drawing; see `harness.datasets.Dataset`.

    Attributes:
      name: of the drawing.
      kinds: of questions. probes: names of the contexts measured.
    """

    kinds = KINDS
    groups: ClassVar[Mapping[str, Sequence[str]]] = {**{kind: [kind] for kind in KINDS}, "all": KINDS}

    def __init__(self, name: str, probes: tuple[str, ...]):
        self.name, self.probes = name, probes

    def batch(self, backbone: ModelBackbone, probe: str, number: int, size: int, seed: int) -> TaskBatch:
        """Draws one batch of contexts and prefills what is reused."""
        check_words(backbone.tokenizer, self.name)
        batch = (self.name, probe, number, size, seed)
        contexts, questions = drawn(*batch)
        arrays = _inputs(backbone.config, backbone.image_config, *batch)
        # Batches are as large as the first, but for the last one: numbers of contexts need only be distinct.
        clusters = number * 100_000 + np.arange(size)
        return TaskBatch(backbone, contexts, questions, arrays, clusters)

    def prepare(self, backbone: ModelBackbone, run: datasets.Run) -> dict[str, dict[str, Any]]:
        """Fits what methods need ahead, on contexts that are not measured; settings by method."""
        probe = (run.probes or self.probes)[0]

        def draw(number: int, size: int) -> TaskBatch:
            return self.batch(backbone, probe, number, size, run.seed)

        return prepared(draw, backbone, run.methods)  # pyright: ignore[reportArgumentType]


DOCUMENTS = TaskDataset("documents", ("4", "8", "16", UNSEEN, ALIKE))
"""Bills, charts and screens set in real faces."""
PLAIN = TaskDataset("plain", ("4", "8", "16"))
"""The plain drawing, for instances that were trained on it."""
