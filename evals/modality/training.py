"""Training an instance for each modality by one recipe: the sheets task's, shorter, with a tower that is taught names.

The loss is the cross-entropy of answers and, where a tower runs, that of naming what each cell shows by the tower's
features: without it most steps would go into what the tower sees, which differs by modality. Nothing teaches a page's
cell what it absorbs.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from ..sheets_task import training as sheets
from ..sheets_task.task import ADDRESSES, COLOURS, COLUMN_MARKS, GLYPHS, ROW_MARKS, SheetsContexts
from ..sheets_task.task_spec import TaskSpec
from ..sheets_task.training import SheetsRecipe, draw_batch
from ..small_task.instances import Instance
from ..small_task.training import TrainingBatch, TrainingTask, run_tower
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
LIKENESS = 0.6
"""Cosine at the start of a word for two things and the word for either."""
SMALL_QUESTIONS = {"page": 4, "sheet": 6, "chain": 8, "override": 1}
"""What is asked of small contexts."""


@dataclasses.dataclass(frozen=True)
class ModalityRecipe(SheetsRecipe):
    """Every training choice of every modality.

    backbone: the modality. tiny: steps with pages of four cells to begin with; full contexts after those.
    naming: weight of the loss of naming what cells show, where a tower runs.
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
    """Draws parameters as the sheets task does, with smaller query projections; of words, a start for facts of two."""
    spec = MODALITIES[recipe.backbone]
    model = sheets.initialise(recipe, spec)
    query = model.decoder.layers.attention.query.kernel
    query[...] = recipe.query_scale * query[...]
    if isinstance(spec, WordsSpec):
        _name_parts(model)
        _copy(model)
        _look_back(model)
    return model


def _name_parts(model: Any) -> None:
    """Makes the word of an address begin near its row's and its column's, that of two colours near both of theirs."""
    table, words = model.decoder.embedding[...], WORDS_VOCABULARY
    pairs = ((words.cell, words.row, ROW_MARKS, words.column, COLUMN_MARKS),)
    pairs += ((words.pair, words.fill, COLOURS, words.stripe, COLOURS),)
    for whole, first, rows, second, columns in pairs:
        parts = table[first : first + rows][:, None] + table[second : second + columns][None]
        own = table[whole : whole + rows * columns]
        value = LIKENESS * parts.reshape(own.shape) + (1 - 2 * LIKENESS**2) ** 0.5 * own
        table = table.at[whole : whole + rows * columns].set(value)
    model.decoder.embedding[...] = table


def _copy(model: Any) -> None:
    """Makes every head add, of what it attends to, about that itself, and the output head read it by the embedding."""
    text, decoder = model.config.text, model.decoder
    attention, groups = decoder.layers.attention, text.heads // text.kv_heads
    # Rotations, so that a copy is exact.
    attention.value.kernel[...] = jnp.linalg.qr(attention.value.kernel[...])[0]
    value = attention.value.kernel[...].reshape(-1, text.width, text.kv_heads, 1, text.head_dim)
    back = jnp.moveaxis(jnp.broadcast_to(value, (*value.shape[:3], groups, text.head_dim)), 1, -1)
    attention.output.kernel[...] = back.reshape(attention.output.kernel.shape) / groups
    decoder.head.kernel[...] = decoder.embedding[...].T * text.width**-0.5


def _look_back(model: Any) -> None:
    """Makes the heads of the first layer attend to the token before their own.

    Their queries are a bias that, turned by a token's position, is the keys' bias turned by the position before. An
    image's cell shows address and colours at once; of words each is a token, and an entry is two.
    """
    text, attention = model.config.text, model.decoder.layers.attention
    width = text.head_dim
    frequency = text.rope.theta ** (-np.arange(LOOKING) * 2 / width)
    key, query = np.zeros((2, width), np.float32)
    key[:LOOKING] = LOOKING_STRENGTH
    query[:LOOKING] = LOOKING_STRENGTH * np.cos(frequency)
    query[width // 2 : width // 2 + LOOKING] = -LOOKING_STRENGTH * np.sin(frequency)

    kernel = attention.query.kernel
    kernel[...] = kernel[...].at[0].set(0.0)
    for projection, bias, heads in ((attention.query, query, text.heads), (attention.key, key, text.kv_heads)):
        projection.bias[...] = projection.bias[...].at[0].set(np.tile(bias, heads))


def draw(recipe: ModalityRecipe, step: int) -> TrainingBatch:
    """Draws a step's batch, and with it which words name what each cell shows."""
    spec = MODALITIES[recipe.backbone]
    drawn = draw_batch(recipe, step, spec)
    if drawn.images:
        drawn.batch["names"] = names_of(drawn.contexts, spec)
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
    """Computes the loss of answers plus, where a tower runs, the weighted loss of naming; and parts for the curve."""
    loss, parts = sheets.loss_of(model, batch, plan, recipe)
    if "names" not in batch or not recipe.naming:
        return loss, parts
    features = run_tower(model, batch, plan)
    assert features is not None
    naming = naming_loss(model, features[0], batch["names"])
    return loss + recipe.naming * naming, {**parts, "tower.naming": naming}


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
