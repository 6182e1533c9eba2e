"""The small backbone: its recipe, configuration, initial parameters, losses and training batches.

`evals.train` runs it. Every training choice is a field of `Recipe` and is written beside the weights.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from kvpatch_jax.rope import Rope
from models.attention import GroupedAttention
from models.decoder import DecoderConfig
from models.qwen2_5_vl import Qwen25VL, Qwen25VLConfig
from models.vision_qwen2_5 import VisionConfig

from . import sequences, small_task
from .small_task import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every training choice.

    window: share of the page questions that see only the page (the legends have slid out of the window).
    auxiliary: weight of the auxiliary loss, which reads each image token against the token embeddings.
    tied_init: whether query projections start as copies of the key projections of their group.
    """

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
        return {kind: getattr(self, kind) for kind in small_task.KINDS}


def small_config() -> Qwen25VLConfig:
    """The small backbone: Qwen2.5-VL's architecture at 1.4 M parameters, KV width 128."""
    text = DecoderConfig(
        vocabulary=len(VOCABULARY),
        width=128,
        layers=6,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=256,
        rope=Rope(1e4, 64, sections=(1, 9, 22), order="blocked", angles="exact"),
        attention_bias=True,
    )
    vision = VisionConfig(
        depth=2,
        width=64,
        heads=2,
        intermediate=128,
        output_width=128,
        patch=small_task.PATCH,
        merge=small_task.MERGE,
        temporal=small_task.TEMPORAL,
        window=small_task.CELL_PIXELS,
        full_layers=(),
    )
    return Qwen25VLConfig(
        text=text,
        vision=vision,
        image_token=VOCABULARY.image,
        video_token=VOCABULARY.video,
        vision_start_token=VOCABULARY.vision_start,
        vision_end_token=VOCABULARY.vision_end,
        end_tokens=(VOCABULARY.end,),
    )


def initialise(config: Qwen25VLConfig, recipe: Recipe) -> Qwen25VL:
    """Fresh parameters: unit embeddings, cell tokens as the mean of their row and tag, tied query and key kernels."""
    model = Qwen25VL(config, nnx.Rngs(recipe.seed))
    table = jax.random.normal(jax.random.key(recipe.seed + 1), model.decoder.embedding.shape, jnp.float32)
    row = table[VOCABULARY.row : VOCABULARY.row + small_task.ROWS]
    tag = table[VOCABULARY.tag : VOCABULARY.tag + small_task.CELLS]
    cell = ((row[:, None] + tag[None]) * 0.5**0.5).reshape(-1, table.shape[1])
    model.decoder.embedding[...] = table.at[VOCABULARY.cell :].set(cell)
    if recipe.tied_init:
        attention, text = model.decoder.layers.attention, config.text
        assert isinstance(attention, GroupedAttention)
        key = attention.key.kernel[...].reshape(text.layers, text.width, text.kv_heads, 1, text.head_dim)
        query = jnp.broadcast_to(key, (*key.shape[:3], text.heads // text.kv_heads, text.head_dim))
        attention.query.kernel[...] = query.reshape(attention.query.kernel.shape)
    return model


# What each tap must tell: (layer, label, first token of the group, size of the group).
AUXILIARY = (
    (0, "seen", VOCABULARY.row, VOCABULARY.cell - VOCABULARY.row),
    (0, "tag", VOCABULARY.tag, small_task.CELLS),
    (2, "seen", VOCABULARY.row, VOCABULARY.cell - VOCABULARY.row),
    (2, "bound", VOCABULARY.glyph, small_task.GLYPHS),
    (2, "cell", VOCABULARY.cell, small_task.ROWS * small_task.CELLS),
    (6, "fill", VOCABULARY.fill, small_task.COLOURS),
    (6, "stripe", VOCABULARY.stripe, small_task.COLOURS),
)


def _read(hidden: Array, embedding: Array, labels: Array, first: int, size: int) -> Array:
    """Mean cross-entropy of reading `labels` (-1: nothing) off hidden states against part of the embedding table."""
    scaled = hidden * jax.lax.rsqrt(jnp.mean(jnp.square(hidden), axis=-1, keepdims=True) + 1e-6)
    logits = scaled @ embedding[first : first + size].T * hidden.shape[-1] ** -0.5
    there = labels >= 0
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(there, labels - first, 0))
    return jnp.sum(loss * there) / jnp.maximum(jnp.sum(there), 1)


def forward(model: Qwen25VL, batch: dict[str, Array], plan: dict[str, Array]) -> tuple[Array, dict[int, Array]]:
    """Logits [B,Q,V] at the questions' last tokens, and the residuals at the auxiliary taps."""
    hidden = model.embed(batch["input_ids"], batch["patches"], plan)
    taps = tuple(sorted({layer for layer, *_ in AUXILIARY}))
    state = model.decoder.run(hidden, batch["positions"], batch["mask"], hidden_at=taps)
    return model.decoder.logits(state.hidden[:, batch["asked"]]), state.taps


def loss_of(model: Qwen25VL, batch: dict[str, Array], labels: dict[str, Array], plan, weight: float):
    """Question cross-entropy plus `weight` times the mean auxiliary loss; and parts for the curve."""
    logits, taps = forward(model, batch, plan)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["answer"])
    total = jnp.maximum(jnp.sum(batch["weight"]), 1)
    question = jnp.sum(each * batch["weight"]) / total
    table = model.decoder.embedding[...]
    prefix = sequences.PREFIX_TOKENS
    reads = {
        f"{layer}.{name}": _read(taps[layer][:, :prefix], table, labels[name], first, size)
        for layer, name, first, size in AUXILIARY
    }
    loss = question + weight * sum(reads.values()) / len(reads)
    right = (jnp.argmax(logits, axis=-1) == batch["answer"]) * batch["weight"]
    return loss, {"loss": question, "right": right, **reads}


def draw_batch(recipe: Recipe, step: int, split: str = "train"):
    """The host side of one step, a function of the seed and the step alone: packed batch, labels, question kinds."""
    rng = np.random.default_rng([recipe.seed, step, 0 if split == "train" else 1])
    contexts = small_task.sample_contexts(rng, recipe.batch)
    contexts = contexts.reordered(rng.permuted(contexts.order, axis=1))
    many = rng.choice(small_task.LEGENDS + 1, p=[0.08, 0.08, 0.14, 0.70], size=recipe.batch)
    shown = rng.permuted(np.arange(small_task.LEGENDS) < many[:, None], axis=1)
    by_storage = np.zeros_like(shown)
    by_storage[np.arange(recipe.batch)[:, None], contexts.order] = shown
    questions = small_task.ask(contexts, rng, recipe.questions, by_storage)
    on_page = questions.kind != small_task.KINDS.index("legend")
    sees = ~(on_page & (rng.random(on_page.shape) < recipe.window))
    batch = sequences.pack(
        contexts,
        questions,
        patches=sequences.context_patches(contexts, split),
        shown=shown,
        sees_legends=sees,
        start=rng.integers(0, recipe.start_range, recipe.batch),
    )
    return batch.arrays(), sequences.cell_labels(contexts, shown), questions.kind


def image_grids(count: int) -> np.ndarray:
    """The (time, height, width) patch grids of `count` contexts' images, in packing order."""
    shapes = [sequences.LEGEND_SHAPE] * small_task.LEGENDS + [sequences.PAGE_SHAPE]
    one = np.array([[1, rows * small_task.MERGE, columns * small_task.MERGE] for rows, columns in shapes])
    return np.tile(one, (count, 1))


def make_optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW under a warmed-up cosine; decay on matrices only."""
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


def make_tokenizer() -> Any:
    """A word-level tokenizer over the task's vocabulary, words apart by white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(VOCABULARY.names)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[reportAttributeAccessIssue]
    return tokenizer
