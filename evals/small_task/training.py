"""Training a small backbone: its recipe, initial parameters, losses and training batches.

`evals.train` runs it; `evals.instances` has the configurations. Every training choice is a field of `SmallTaskRecipe`
and is written beside the weights.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from models.decoder.attention import GroupedAttention, LatentAttention
from models.decoder.config import DecoderConfig
from models.families.family import embed_tokens, placeholders

from . import sequences, task
from .instances import instance
from .sequences import form_of
from .task import VOCABULARY


@dataclasses.dataclass(frozen=True)
class SmallTaskRecipe:
    """Every training choice.

    backbone: one of `evals.instances`.
    window: share of the page questions that see only the page (the legends have slid out of the window).
    auxiliary: weight of the auxiliary loss, which reads each image token against the token embeddings.
    tied_init: whether query projections start as copies of the key projections of their group.
    """

    backbone: str = "qwen2_5_vl"
    seed: int = 0
    steps: int = 1800
    batch: int = 16
    learning_rate: float = 1.5e-3
    warmup: int = 60
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    window: float = 0.5
    auxiliary: float = 0.5
    tied_init: bool = True
    start_range: int = 64
    page: int = 3
    legend: int = 3
    chain: int = 8
    aggregate: int = 5
    override: int = 4

    @property
    def questions(self) -> dict[str, int]:
        """How many questions of each kind are packed behind each context."""
        return {kind: getattr(self, kind) for kind in task.KINDS}


def initialise(config: Any, recipe: SmallTaskRecipe) -> Any:
    """Draws parameters: unit embeddings, cell tokens as the mean of their row and tag, tied query and key kernels."""
    model = config.family.module(config, nnx.Rngs(recipe.seed))
    table = jax.random.normal(jax.random.key(recipe.seed + 1), model.decoder.embedding.shape, jnp.float32)
    # A cell's token names its row and its tag: it starts as their mean, of unit variance again.
    row = table[VOCABULARY.row : VOCABULARY.row + task.ROWS]
    tag = table[VOCABULARY.tag : VOCABULARY.tag + task.CELLS]
    cell = ((row[:, None] + tag[None]) * 0.5**0.5).reshape(-1, table.shape[1])
    model.decoder.embedding[...] = table.at[VOCABULARY.cell :].set(cell)

    if recipe.tied_init:
        for stack in (model.decoder.dense_layers, model.decoder.layers):
            if stack is not None:
                tie_queries(stack.attention, config.text)

    return model


def tie_queries(attention: GroupedAttention | LatentAttention, text: DecoderConfig) -> None:
    """Makes every query projection of a stack of layers a copy of what makes the keys it meets."""
    if isinstance(attention, GroupedAttention):
        key = attention.key.kernel[...].reshape(-1, text.width, text.kv_heads, 1, text.head_dim)
        query = jnp.broadcast_to(key, (*key.shape[:3], text.heads // text.kv_heads, text.head_dim))
    else:
        latent = attention.latent
        down = attention.down.kernel[...]
        up = attention.up.kernel[...].reshape(-1, latent.latent, text.heads, latent.plain_dim + latent.value_dim)
        plain = jnp.einsum("LDC,LCNU->LDNU", down[..., : latent.latent], up[..., : latent.plain_dim])
        turning = jnp.broadcast_to(down[:, :, None, latent.latent :], (*plain.shape[:3], latent.rope_dim))
        query = jnp.concatenate([plain, turning], axis=-1)
    attention.query.kernel[...] = query.reshape(attention.query.kernel.shape)


# What each tap must tell: (layer, label, first token of the group, size of the group).
AUXILIARY = (
    (0, "seen", VOCABULARY.row, VOCABULARY.cell - VOCABULARY.row),
    (0, "tag", VOCABULARY.tag, task.CELLS),
    (2, "seen", VOCABULARY.row, VOCABULARY.cell - VOCABULARY.row),
    (2, "bound", VOCABULARY.glyph, task.GLYPHS),
    (2, "cell", VOCABULARY.cell, task.ROWS * task.CELLS),
    (6, "fill", VOCABULARY.fill, task.COLOURS),
    (6, "stripe", VOCABULARY.stripe, task.COLOURS),
)


def _read(hidden: Array, embedding: Array, labels: Array, first: int, size: int) -> Array:
    """Mean cross-entropy of reading `labels` (-1: nothing) off hidden states against part of the embedding table."""
    # As a final norm without weights would, so that every layer is read at one scale.
    scaled = hidden * jax.lax.rsqrt(jnp.mean(jnp.square(hidden), axis=-1, keepdims=True) + 1e-6)
    logits = scaled @ embedding[first : first + size].T * hidden.shape[-1] ** -0.5
    there = labels >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(there, labels - first, 0))
    return jnp.sum(loss * there) / jnp.maximum(jnp.sum(there), 1)


def forward(model: Any, batch: dict[str, Array], plan: dict[str, Array]) -> tuple[Array, dict[int, Array]]:
    """Computes logits [B,Q,V] at the questions' last tokens, and the residuals at the auxiliary taps."""
    features = model.encode(batch["pixel_values"], plan)
    hidden, deepstack = embed_tokens(model.decoder, batch["input_ids"], features, placeholders(model.config))
    taps = tuple(sorted({layer for layer, *_ in AUXILIARY}))
    state = model.decoder.run(
        hidden,
        batch["positions"],
        batch["mask"],
        hidden_at=taps,
        deepstack=None if deepstack is None else jnp.moveaxis(deepstack, 2, 0),
    )
    return model.decoder.logits(state.hidden[:, batch["asked"]]), state.taps


def loss_of(model: Any, batch: dict[str, Array], labels: dict[str, Array], plan, weight: float):
    """Computes the question cross-entropy plus `weight` times the mean auxiliary loss; and parts for the curve."""
    logits, taps = forward(model, batch, plan)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["answer"])
    total = jnp.maximum(jnp.sum(batch["weight"]), 1)
    question = jnp.sum(each * batch["weight"]) / total
    table = model.decoder.embedding[...]
    prefix = labels["seen"].shape[1]
    reads = {
        f"{layer}.{name}": _read(taps[layer][:, :prefix], table, labels[name], first, size)
        for layer, name, first, size in AUXILIARY
    }
    loss = question + weight * sum(reads.values()) / len(reads)
    right = (jnp.argmax(logits, axis=-1) == batch["answer"]) * batch["weight"]
    return loss, {"loss": question, "right": right, **reads}


class SmallTaskBatch(NamedTuple):
    """One training batch: packed arrays, auxiliary labels, question kinds [B,Q], and all that the processor made."""

    batch: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    kinds: np.ndarray
    images: dict[str, np.ndarray]


def draw_batch(recipe: SmallTaskRecipe, step: int, split: str = "train") -> SmallTaskBatch:
    """Draws the host side of one step, a function of the recipe and the step alone."""
    config, settings = instance(recipe.backbone)
    form = form_of(config, settings)
    rng = np.random.default_rng([recipe.seed, step, 0 if split == "train" else 1])
    contexts = task.sample_contexts(rng, recipe.batch)
    # Every order, and now and then fewer legends, so that no legend is always there and none always first.
    contexts = contexts.reordered(rng.permuted(contexts.order, axis=1))
    many = rng.choice(task.LEGENDS + 1, p=[0.08, 0.08, 0.14, 0.70], size=recipe.batch)
    shown = rng.permuted(np.arange(task.LEGENDS) < many[:, None], axis=1)
    by_storage = np.zeros_like(shown)
    by_storage[np.arange(recipe.batch)[:, None], contexts.order] = shown
    questions = task.ask(contexts, rng, recipe.questions, by_storage)
    # Some questions of the page see it alone, as after the legends slid out of the window.
    on_page = questions.kind != task.KINDS.index("legend")
    sees = ~(on_page & (rng.random(on_page.shape) < recipe.window))
    images = config.family.vision.process(sequences.context_images(form, contexts, split), settings)
    batch = sequences.pack(
        form,
        questions,
        pixel_values=images["pixel_values"],
        shown=shown,
        sees_legends=sees,
        start=rng.integers(0, recipe.start_range, recipe.batch),
    )
    return SmallTaskBatch(batch.arrays(), sequences.cell_labels(form, contexts, shown), questions.kind, images)


def image_plan(recipe: SmallTaskRecipe) -> dict[str, Array]:
    """Makes what the tower needs beside the pixels, the same for every batch of this recipe."""
    config, _ = instance(recipe.backbone)
    drawn = draw_batch(recipe, 0)
    plan = config.family.vision.plan(config, drawn.batch["input_ids"], drawn.images)
    return jax.tree.map(jnp.asarray, plan)


def make_optimiser(recipe: Any) -> optax.GradientTransformation:
    """Makes AdamW under a warmed-up cosine; decay on matrices only. `recipe`: of either version of the task."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, recipe.warmup, recipe.steps, 0.02 * recipe.learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        optax.adamw(
            schedule,
            b2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        ),
    )


def make_tokenizer(names: Sequence[str] = VOCABULARY.names) -> Any:
    """Makes a word-level tokenizer over a task's vocabulary (this one's), words apart by white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[reportAttributeAccessIssue]
    return tokenizer
