"""Training the small backbone on the sheets task: its recipe, initial parameters, loss and training batches.

The loss is the cross-entropy of answers and nothing else. Every training choice is a field of `SheetsRecipe` and is
written beside the weights.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from kvpatch_jax.errors import ConfigError
from models import load
from models.decoder.linear_attention import LinearAttention
from models.families.family import pixels_of

from ..small_task.prefix import branches, pack
from ..small_task.training import (
    TrainingBatch,
    TrainingRecipe,
    TrainingTask,
    image_plan,
    run_branches,
    run_decoder,
    start_linear,
    tie_queries,
)
from ..trained import SHEETS as TRAINED
from . import task
from .hybrid_start import take_weights
from .task_spec import SHEETS, TaskSpec

SHEETS_QWEN3_VL = TRAINED.with_name("sheets_qwen3_vl")
MORE_CONTEXTS = {"tiny": 4, "small": 2}
"""Contexts of a step by their size, as multiples of the recipe's batch."""
TINY_QUESTIONS = {"page": 4, "sheet": 4, "chain": 8, "override": 1}
"""What is asked of a page of four cells: an ink has one or two: asking for it teaches to look up one."""


@dataclasses.dataclass(frozen=True)
class SheetsRecipe(TrainingRecipe):
    """Every training choice of the sheets task.

    tiny, small: steps with such contexts (`task.SIZES`) to begin with.
    longer: from this step on, every second batch has 7 or 15 sheets in place of 3.
    proportions: steps at first in which an aggregate question asks how often the ink's cells have each fill, a
      distribution, in place of the most frequent one: whoever looks up one cell gains little by it.
    ink_likeness: cosine of an ink's token at the start and what is seen of the ink; the rest is the same for all inks.
      Below 1 its attention begins even over the cells of the ink.
    begin_with: the shipped instance of Qwen3-VL whose weights a hybrid begins with; "": none. The choices of starts
      below are then its own.
    named_by_sight: whether tokens that name something drawn start as the untrained tower's mean features of it.
    tied_init: whether query projections start as copies of the key projections of their group.
    cells_apart: whether a tower that lets an image's cells see each other (Qwen3-VL's) starts with none of it.
    """

    kinds: ClassVar[tuple[str, ...]] = task.KINDS
    fewer: ClassVar[float] = 0.15
    """Share of the contexts that may lack some sheets, so that none is always there."""
    steps: int = 1200
    batch: int = 8
    tiny: int = 400
    small: int = 250
    longer: int = 850
    proportions: int = 900
    begin_with: str = ""
    ink_likeness: float = 0.35
    named_by_sight: bool = True
    tied_init: bool = True
    cells_apart: bool = True
    start_range: int = 64
    page: int = 4
    sheet: int = 4
    chain: int = 16
    override: int = 3
    aggregate: int = 8
    whole: int = 4
    list: int = 1

    def asked(self, step: int) -> dict[str, int]:
        """Returns how many questions of each kind a step packs behind each context."""
        return TINY_QUESTIONS if step < self.tiny else self.questions

    def drawn(self, step: int) -> dict[str, Any]:
        """Returns what the contexts of a step are drawn with besides."""
        return {}

    def size(self, step: int) -> str:
        """Returns which of `task.SIZES` the contexts of a step have."""
        if step < self.tiny:
            return "tiny"
        if step < self.tiny + self.small:
            return "small"
        if step < self.longer or step % 2 == 0:
            return "4"
        return "8" if step % 4 == 1 else "16"


def initialise(recipe: SheetsRecipe, spec: TaskSpec = SHEETS) -> Any:
    """Draws parameters: query kernels tied to key kernels, and tokens that start as the tower's features of their kind.

    Both are starts only: nothing of them is in the loss. A recipe that begins with a trained transformer takes its
    weights instead.

    Raises:
      ConfigError: a backbone that is no hybrid is to begin with a transformer's weights.
    """
    config, _ = spec.instance(recipe.backbone)
    if recipe.begin_with and not config.text.layout.parts:
        raise ConfigError(f"begin_with: got {recipe.begin_with!r} for backbone {recipe.backbone!r}; expected a hybrid")
    model = config.family.module(config, nnx.Rngs(recipe.seed))
    if recipe.begin_with:
        take_weights(model, config.text, load(SHEETS_QWEN3_VL / recipe.begin_with, dtype="float32").parameters)
        return model

    if recipe.cells_apart and recipe.backbone in ("qwen3_vl", "qwen3_5"):
        kernel = model.visual.blocks.output.kernel
        kernel[...] = jnp.zeros_like(kernel[...])

    table = jax.random.normal(jax.random.key(recipe.seed + 1), model.decoder.embedding.shape, jnp.float32)
    if recipe.named_by_sight:
        for first, value in _features_by_name(model, recipe, spec).items():
            if first == spec.vocabulary.ink:
                like = recipe.ink_likeness
                value = like * value + (1 - like**2) ** 0.5 * table[first]
            table = table.at[first : first + len(value)].set(value)

    model.decoder.embedding[...] = table
    if recipe.tied_init:
        for stack in config.text.stacks:
            attention = getattr(model.decoder, stack.name).attention
            if isinstance(attention, LinearAttention):
                start_linear(attention)
            else:
                tie_queries(attention, config.text)
    return model


def _features_by_name(model: Any, recipe: SheetsRecipe, spec: TaskSpec, count: int = 64) -> dict[int, np.ndarray]:
    """Finds what the untrained tower makes of cells that show the same thing, of unit variance, by first token id."""
    config, settings = spec.instance(recipe.backbone)
    contexts = spec.sample(np.random.default_rng([recipe.seed, 2**31]), count, spec.sizes["4"], **recipe.drawn(0))
    ids, arrays = spec.inputs(config, settings, contexts)
    form = spec.form_of(config, settings, contexts.size)
    batch = {"input_ids": ids, "pixel_values": pixels_of(arrays)}
    plan = image_plan(TrainingBatch(batch, np.zeros(0), np.zeros(0), arrays), config)
    features = np.asarray(model.encode(jnp.asarray(batch["pixel_values"]), plan)[0])
    features = features.reshape(count, -1, features.shape[-1])

    # Whatever else is drawn on an image (a title) stands in front of its cells. Sheets and page are centred apart, so
    # that a mean over cells of one kind leaves the others' mean out.
    sheets, size, width = contexts.sheets, contexts.size, features.shape[-1]
    page_tokens = int((form.chunk_ids[-1] == form.image_token).sum())
    on_sheets = features[:, :-page_tokens].reshape(count, sheets, -1, width)
    sheet = on_sheets[:, :, -(size.entries // sheets) :].reshape(-1, width)
    page = features[:, -size.cells :].reshape(-1, width)

    # Means by what a cell shows, less the mean of all, each of unit variance.
    found = {}
    for first, (cells, label) in spec.named(contexts, sheet - sheet.mean(axis=0), page - page.mean(axis=0)).items():
        means = np.stack([cells[label == number].mean(axis=0) for number in range(label.max() + 1)])
        means = means - cells.mean(axis=0)
        found[first] = means / means.std(axis=1, keepdims=True)
    return found


def loss_of(
    model: Any, batch: dict[str, Array], plan: dict[str, Array], recipe: SheetsRecipe, spec: TaskSpec = SHEETS
) -> tuple[Array, dict[str, Array]]:
    """Computes the mean cross-entropy of all answer tokens; and parts for the curve.

    Where `batch["fills"]` [B,N,12] is not zero, it is the distribution over fills that is asked for.
    """
    answer = batch["answer"]
    hidden = run_branches(model, batch, plan) if "columns" in batch else run_decoder(model, batch, plan)[0]
    logits = model.decoder.logits(hidden[:, -answer.shape[1] :])
    asked = answer >= 0
    target = jax.nn.one_hot(jnp.where(asked, answer, 0), logits.shape[-1])

    if "fills" in batch:
        first = spec.vocabulary.fill
        fills = slice(first, first + task.COLOURS)
        some = jnp.any(batch["fills"] > 0, axis=-1, keepdims=True)
        target = jnp.where(some, jnp.zeros_like(target).at[..., fills].set(batch["fills"]), target)

    each = optax.softmax_cross_entropy(logits, target)
    loss = jnp.sum(each * asked) / jnp.maximum(jnp.sum(asked), 1)
    return loss, {"loss": loss, "right": (jnp.argmax(logits, axis=-1) == answer) & asked}


def draw_batch(recipe: SheetsRecipe, step: int, spec: TaskSpec = SHEETS) -> TrainingBatch:
    """Draws the host side of one step, a function of the recipe and the step alone."""
    config, settings = spec.instance(recipe.backbone)
    rng = np.random.default_rng([recipe.seed, step])
    name = recipe.size(step)
    count = recipe.batch * MORE_CONTEXTS.get(name, 1)
    contexts = spec.sample(rng, count, spec.sizes[name], **recipe.drawn(step))
    fewer = rng.random((count, 1)) < recipe.fewer
    shown = ~(fewer & (rng.random((count, contexts.sheets)) < 1 / 3))
    questions = spec.ask(contexts, rng, recipe.asked(step), shown)
    # Some questions of the page see it alone, as after the sheets slid out of the window.
    on_page = questions.kind != task.KINDS.index("sheet")
    sees = ~(on_page & (rng.random((count, len(on_page))) < recipe.window))
    sees = sees[:, questions.own]
    start = rng.integers(0, recipe.start_range, count)

    form = spec.form_of(config, settings, contexts.size)
    ids, arrays = spec.inputs(config, settings, contexts)
    batch = {
        **pack(form, questions.ids, questions.own, questions.step, shown=shown, sees=sees, start=start),
        "answer": questions.answer,
    }
    batch["input_ids"][:, : form.prefix_tokens] = ids
    if config.text.layout.parts:
        batch |= branches(form, questions.own)
    batch["pixel_values"] = pixels_of(arrays)
    if recipe.proportions:
        shares = task.fill_shares(contexts, questions, shown, spec.vocabulary.ink)
        batch["fills"] = shares * (step < recipe.proportions)
    return TrainingBatch(batch, questions.kind[questions.own], questions.answer >= 0, arrays, name, sees)


def training_of(spec: TaskSpec, recipe: type[SheetsRecipe]) -> TrainingTask:
    """Makes of a task of packed questions what the training program takes."""
    return TrainingTask(
        recipe,
        spec.vocabulary.names,
        spec.instance,
        functools.partial(initialise, spec=spec),
        functools.partial(draw_batch, spec=spec),
        functools.partial(loss_of, spec=spec),
    )


SHEETS_TRAINING = training_of(SHEETS, SheetsRecipe)
"""The sheets task, to train on."""
