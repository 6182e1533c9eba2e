"""Training an instance for each modality by one recipe: the sheets task's, shorter, with cells that are taught names.

The loss is the cross-entropy of answers and that of naming what each cell shows by the tower's features (of words, by
the first layer's residuals): without it most steps would go into what is seen, which differs by modality. Nothing
teaches a page's cell what it absorbs.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from models import load

from ..sheets_task import training as sheets
from ..sheets_task.task import ADDRESSES, COLOURS, COLUMN_MARKS, GLYPHS, ROW_MARKS, SheetsContexts
from ..sheets_task.task_spec import TaskSpec
from ..sheets_task.training import SheetsRecipe, draw_batch
from ..small_task.instances import Instance
from ..small_task.training import TrainingBatch, TrainingTask, run_decoder, run_tower
from ..trained import MODALITY
from .task import FULL, SMALL
from .task_spec import MODALITIES, SOUND_VOCABULARY, VOCABULARY, WORDS_VOCABULARY, WordsSpec

GROUPS = {
    VOCABULARY.row: ROW_MARKS,
    VOCABULARY.column: COLUMN_MARKS,
    VOCABULARY.cell: ADDRESSES,
    VOCABULARY.glyph: GLYPHS,
    VOCABULARY.fill: COLOURS,
    VOCABULARY.stripe: COLOURS,
}
"""Words that name what a cell shows, by the first of each group: how many there are."""

LOOKING, LOOKING_STRENGTH = 8, 5.5
"""Pairs of a head, the fastest ones, that look one token back from the start, and how strongly."""
SMALL_QUESTIONS = {"page": 4, "sheet": 6, "chain": 8, "override": 1}
"""What is asked of small contexts."""


@dataclasses.dataclass(frozen=True)
class ModalityRecipe(SheetsRecipe):
    """Every training choice of every modality.

    backbone: the modality. tiny: steps with pages of four cells to begin with; full contexts after those.
    naming: weight of the loss of naming what cells show.
    decoder_of: the shipped instance whose decoder words begin with, behind a first layer of their own; "": none.
    query_scale: what the query projections, copies of the key projections, begin with less than these: a question then
      attends less to itself.
    """

    fewer: ClassVar[float] = 0.0
    """All sheets are there: of a clip none can be missing."""
    backbone: str = "images"
    steps: int = 650
    tiny: int = 450
    small: int = 0
    longer: int = 450
    proportions: int = 0
    naming: float = 0.5
    decoder_of: str = ""
    query_scale: float = 0.3
    learning_rate: float = 2e-3
    warmup: int = 30
    sheet: int = 6
    aggregate: int = 0
    whole: int = 0

    def size(self, step: int) -> str:
        """Returns which of `task.SIZES` the contexts of a step have."""
        return SMALL if step < self.tiny else FULL

    def asked(self, step: int) -> dict[str, int]:
        """Returns how many questions of each kind a step packs behind each context."""
        return SMALL_QUESTIONS if step < self.tiny else self.questions


def instance(modality: str) -> Instance:
    """Makes configuration and image settings of a modality's backbone."""
    return MODALITIES[modality].instance(modality)


def initialise(recipe: ModalityRecipe) -> Any:
    """Draws parameters as the sheets task does, with smaller query projections; words begin as entries of two."""
    spec = MODALITIES[recipe.backbone]
    model = sheets.initialise(recipe, spec)
    query = model.decoder.layers.attention.query.kernel
    query[...] = recipe.query_scale * query[...]
    if isinstance(spec, WordsSpec):
        if recipe.decoder_of:
            _take_decoder(model, load(MODALITY / recipe.decoder_of, dtype="float32").parameters["decoder"])
        _name_parts(model)
        _look_back(model)
    return model


def _take_decoder(model: Any, other: dict[str, Any]) -> None:
    """Puts another decoder's layers behind the first one, and its words where they are words here too."""
    decoder = model.decoder
    known = other["embedding"].shape[0]
    decoder.embedding[...] = decoder.embedding[...].at[:known].set(other["embedding"])
    decoder.head.kernel[...] = decoder.head.kernel[...].at[:, :known].set(other["head"]["kernel"])
    decoder.norm.weight[...] = other["norm"]["weight"]
    _, mine = nnx.split(decoder.layers)
    taken = jax.tree.map(lambda own, theirs: own.at[1:].set(theirs), nnx.to_pure_dict(mine), other["layers"])
    nnx.update(decoder.layers, nnx.State(taken))


def _name_parts(model: Any) -> None:
    """Makes the word of two colours begin as the mean of both colours' words, of unit variance."""
    table, words = model.decoder.embedding[...], WORDS_VOCABULARY
    fill, stripe = (table[first : first + COLOURS] for first in (words.fill, words.stripe))
    pairs = (fill[:, None] + stripe[None]).reshape(-1, table.shape[1])
    pairs = pairs / pairs.std(axis=1, keepdims=True)
    model.decoder.embedding[...] = table.at[words.pair : words.pair + len(pairs)].set(pairs)


def _look_back(model: Any) -> None:
    """Makes the heads of the first layer attend to the token before their own, and add just what they find there.

    Their queries are a bias that, turned by a token's position, is the keys' bias turned by the position before. An
    image's cell shows address and colours at once; of words each is a token, and an entry is two.
    """
    text, attention = model.config.text, model.decoder.layers.attention
    width, group = text.head_dim, text.heads // text.kv_heads
    frequency = text.rope.theta ** (-np.arange(LOOKING) * 2 / width)
    key, query = np.zeros((2, width), np.float32)
    key[:LOOKING] = LOOKING_STRENGTH
    query[:LOOKING] = LOOKING_STRENGTH * np.cos(frequency)
    query[width // 2 : width // 2 + LOOKING] = -LOOKING_STRENGTH * np.sin(frequency)
    for projection, bias, heads in ((attention.query, query, text.heads), (attention.key, key, text.kv_heads)):
        projection.bias[...] = projection.bias[...].at[0].set(np.tile(bias, heads))
    attention.query.kernel[...] = attention.query.kernel[...].at[0].set(0.0)

    # Values are rotated, and rotated back, so that a copy is exact, and nothing else is added.
    down = model.decoder.layers.mlp.down.kernel
    down[...] = down[...].at[0].set(0.0)
    value = jnp.linalg.qr(attention.value.kernel[...][0])[0]
    back = jnp.repeat(value.T.reshape(text.kv_heads, 1, width, -1), group, axis=1) / group
    attention.value.kernel[...] = attention.value.kernel[...].at[0].set(value)
    attention.output.kernel[...] = attention.output.kernel[...].at[0].set(back.reshape(-1, text.width))


def draw(recipe: ModalityRecipe, step: int) -> TrainingBatch:
    """Draws a step's batch, and with it which words name what each cell shows."""
    spec = MODALITIES[recipe.backbone]
    drawn = draw_batch(recipe, step, spec)
    drawn.batch["names"] = names_of(drawn.contexts, spec)
    if isinstance(spec, WordsSpec):
        drawn.batch["named_at"] = spec.last_words(drawn.contexts.size)
    return drawn


def names_of(contexts: SheetsContexts, spec: TaskSpec) -> dict[str, Int[np.ndarray, "B cells"]]:
    """Numbers by group of words (its first token) what every cell shows, sheets first; -1: nothing of that group."""
    entries, cells = contexts.size.entries, contexts.size.cells
    places = np.arange(len(contexts) * (entries + cells)).reshape(len(contexts), -1)
    sheet, page = places[:, :entries].ravel(), places[:, entries:].ravel()
    names = {}
    for first, (where, number) in spec.named(contexts, sheet, page).items():
        # An ink is a part of a glyph, which has a word of its own.
        if first in GROUPS:
            names[str(first)] = np.full(places.size, -1, np.int32)
            names[str(first)][where] = number
    return {first: numbers.reshape(places.shape) for first, numbers in names.items()}


def loss_of(
    model: Any, batch: dict[str, Any], plan: dict[str, Array] | None, recipe: ModalityRecipe
) -> tuple[Array, dict[str, Array]]:
    """Computes the loss of answers plus the weighted loss of naming; and parts for the curve.

    What names a cell is the tower's feature of it; of words, the residual of its last one behind the first layer.
    """
    loss, parts = sheets.loss_of(model, batch, plan, recipe)
    features = run_tower(model, batch, plan)
    if features is None:
        behind_first = run_decoder(model, batch, plan, (1,))[1][1]
        cells = behind_first[:, batch["named_at"]].reshape(-1, behind_first.shape[-1])
    else:
        cells = features[0]
    naming = naming_loss(model, cells, batch["names"])
    return loss + recipe.naming * naming, {**parts, "cells.naming": naming}


def naming_loss(model: Any, features: Float[Array, "n D"], names: dict[str, Int[Array, "B cells"]]) -> Float[Array, ""]:
    """Computes the mean cross-entropy of reading what cells show off the tower's features, against the embeddings."""
    scaled = features * jax.lax.rsqrt(jnp.mean(jnp.square(features), axis=-1, keepdims=True) + 1e-6)
    table, losses = model.decoder.embedding[...], []
    for first, numbers in names.items():
        number = numbers.reshape(-1)
        group = table[int(first) : int(first) + GROUPS[int(first)]]
        read = scaled @ group.T * scaled.shape[-1] ** -0.5
        there = number >= 0
        each = optax.softmax_cross_entropy_with_integer_labels(read, jnp.where(there, number, 0))
        losses.append(jnp.sum(each * there) / jnp.maximum(jnp.sum(there), 1))
    return jnp.mean(jnp.stack(losses))


MODALITY_TRAINING = TrainingTask(ModalityRecipe, SOUND_VOCABULARY.names, instance, initialise, draw, loss_of)
"""Every modality, to train on."""
