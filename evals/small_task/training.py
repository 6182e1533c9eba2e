"""Training a small backbone: what every task's training shares, and the small task's recipe, loss and batches.

`evals.train` runs it; `instances` has the configurations. Every training choice is a field of a recipe and is written
beside the weights.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from kvpatch_jax.core import compose, to_engine, transition_of
from models.decoder.attention import GroupedAttention, LatentAttention
from models.decoder.config import DecoderConfig
from models.decoder.linear_attention import LinearAttention
from models.families.family import embed_tokens, placeholders

from . import sequences, task
from .instances import Instance, instance
from .task import VOCABULARY

# ---------------------------------------------------------------------------------------- what all tasks share


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """Training choices of every task; each task's recipe adds its own, and how many questions it asks of each kind.

    backbone: name of the architecture. window: share of the page's questions that see only the page (what is in front
    has slid out of the window).
    """

    kinds: ClassVar[tuple[str, ...]]
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

    @property
    def questions(self) -> dict[str, int]:
        """How many questions of each kind are packed behind each context."""
        return {kind: getattr(self, kind) for kind in self.kinds}


class TrainingBatch(NamedTuple):
    """One training batch, as the host draws it.

    batch: packed arrays, for the jitted step. kinds: of each answer, [N] or [B,N]. asked: bool [B,N], answers that
    count. images: all that the processor made. size: name of the contexts' size; batches of one size have one form.
    sees: bool [B,N], whether they may look at what is in front of the page; None: the curve does not tell them apart.
    """

    batch: dict[str, Any]
    kinds: np.ndarray
    asked: np.ndarray
    images: dict[str, np.ndarray]
    size: str = ""
    sees: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class TrainingTask:
    """A task as the training program takes it.

    Attributes:
      recipe: class of its recipes. words: its vocabulary, by token id.
      instance: makes configuration and image settings of a backbone, by name.
      initialise: draws a recipe's parameters. draw: draws a step's batch, a function of recipe and step alone.
      loss: computes the loss of (model, batch, plan, recipe), and parts for the curve: "right" [B,N], "loss", others.
    """

    recipe: type[TrainingRecipe]
    words: Sequence[str]
    instance: Callable[[str], Instance]
    initialise: Callable[[Any], Any]
    draw: Callable[[Any, int], TrainingBatch]
    loss: Callable[[Any, dict[str, Any], dict[str, Array], Any], tuple[Array, dict[str, Array]]]


def image_plan(drawn: TrainingBatch, config: Any) -> dict[str, Array]:
    """Makes what the tower needs beside pixels, the same for every batch of one size."""
    plan = config.family.vision.plan(config, drawn.batch["input_ids"], drawn.images)
    return {name: jnp.asarray(part) for name, part in plan.items() if name != "inputs"}


def tie_queries(attention: GroupedAttention | LatentAttention, text: DecoderConfig) -> None:
    """Makes every query projection of a stack of layers a copy of what makes the keys it meets."""
    if isinstance(attention, GroupedAttention):
        assert attention.key is not None
        key = attention.key.kernel[...].reshape(-1, text.width, text.kv_heads, 1, text.head_dim)
        query = jnp.broadcast_to(key, (*key.shape[:3], text.heads // text.kv_heads, text.head_dim))
        if text.attention_gate:
            # A head's query and its gate lie side by side; the gate starts as it was drawn.
            gate = attention.query.kernel[...].reshape(-1, text.width, text.heads, 2, text.head_dim)[..., 1, :]
            query = jnp.stack([query.reshape(gate.shape), gate], axis=-2)
    else:
        latent = attention.latent
        down = attention.down.kernel[...]
        up = attention.up.kernel[...].reshape(-1, latent.latent, text.heads, latent.plain_dim + latent.value_dim)
        plain = jnp.einsum("LDC,LCNU->LDNU", down[..., : latent.latent], up[..., : latent.plain_dim])
        turning = jnp.broadcast_to(down[:, :, None, latent.latent :], (*plain.shape[:3], latent.rope_dim))
        query = jnp.concatenate([plain, turning], axis=-1)
    attention.query.kernel[...] = query.reshape(attention.query.kernel.shape)


def run_decoder(
    model: Any, batch: dict[str, Array], plan: dict[str, Array], hidden_at: tuple[int, ...] = ()
) -> tuple[Array, dict[int, Array]]:
    """Runs tower and decoder over a batch; returns the last residual [B,T,D], and those that enter some layers."""
    features = model.encode(batch["pixel_values"], plan)
    hidden, deepstack = embed_tokens(model.decoder, batch["input_ids"], features, placeholders(model.config))
    deepstack = None if deepstack is None else jnp.moveaxis(deepstack, 2, 0)
    state = model.decoder.run(hidden, batch["positions"], batch["mask"], hidden_at=hidden_at, deepstack=deepstack)
    return state.hidden, state.taps


def start_linear(attention: LinearAttention) -> None:
    """Sets where the linear attention of a stack of layers starts: with little added to the residual, queries as copies
    of keys, a convolution that passes a token's own input most of all, and decays from 0.001 to 0.1 over the heads.

    What such a layer reads is normed, so that it would add as much where nothing that it knows is asked for, and tokens
    could no longer be told by what they show. The decays are those that Mamba-2 and the gated delta rule start from
    (arXiv 2405.21060, 2412.06464), with a rate of 1 for all heads: what stands a page's length in front would be
    forgotten at the rates drawn there.
    """
    attention.query.kernel[...] = jnp.copy(attention.key.kernel[...])
    for taps in (attention.key_taps, attention.value_taps):
        taps[...] = (0.2 * taps[...]).at[..., -1].add(1.0)
    attention.query_taps[...] = jnp.copy(attention.key_taps[...])
    attention.output.kernel[...] = 0.2 * attention.output.kernel[...]
    decay = jnp.geomspace(1e-3, 1e-1, attention.decay_bias.shape[-1])
    attention.decay_bias[...] = jnp.broadcast_to(jnp.log(jnp.expm1(decay)), attention.decay_bias.shape)


def run_branches(model: Any, batch: dict[str, Array], plan: dict[str, Array]) -> Array:
    """Runs tower and decoder where layers have linear attention; returns the questions' last residual [B,N,D].

    A mask means nothing to such a layer. So the prefix is run in two stretches, what is in front of the page and the
    page, each of which leaves its own transition, and every question is a row of its own behind the rows of the prefix
    and the transition of what it sees: of both stretches composed, or of the page alone. `batch` has the arrays of
    `prefix.branches` beside what `prefix.pack` makes.

    Axis letters: B contexts, T tokens of the prefix, F of them in front of the page, N packed tokens of Q questions of
    n tokens at most.
    """
    decoder, layout = model.decoder, model.config.text.layout
    features = model.encode(batch["pixel_values"], plan)
    hidden, _ = embed_tokens(decoder, batch["input_ids"], features, placeholders(model.config))
    positions, mask, columns = batch["positions"], batch["mask"][:, 0], batch["columns"]
    count, questions = len(hidden), len(columns)
    prefix = hidden.shape[1] - batch["rows"].shape[0]
    front = prefix - batch["page"].shape[0]

    # The page's last token sees whatever is there of the prefix.
    there = mask[:, prefix - 1, :prefix]
    first = decoder.run(
        hidden[:, :front], positions[:, :front], mask[:, None, :front, :front], filled=there[:, :front]
    ).kv
    before = to_engine(layout, first, positions[:, :front], 0)
    second = decoder.run(
        hidden[:, front:prefix], positions[:, front:prefix], mask[:, None, front:prefix, :prefix], context=before
    ).kv
    page = to_engine(layout, second, positions[:, front:prefix], 0)

    # What each question sees: [L, B·Q, …].
    place = prefix + jnp.maximum(columns, 0)
    sees = jnp.any(mask[:, place[:, 0], :front], axis=-1)[..., None, None, None]
    composed, context = compose(transition_of(first), transition_of(second)), {}
    for channel in layout.channels:
        name = channel.name
        if channel.rows is None:
            context[name] = jnp.repeat(jnp.concatenate([before[name], page[name]], axis=2), questions, axis=1)
        else:
            seen = jnp.where(sees, composed[name][:, :, None], page[name][:, :, None])
            context[name] = seen.reshape(len(seen), count * questions, *seen.shape[3:])

    def by_question(array: Array) -> Array:
        return array.reshape(count * questions, columns.shape[1], *array.shape[3:])

    own = jnp.broadcast_to(jnp.tri(columns.shape[1], dtype=bool), (count, *columns.shape, columns.shape[1]))
    allowed = by_question(jnp.concatenate([mask[:, place, :prefix], own], axis=-1))
    filled = by_question(jnp.broadcast_to(columns >= 0, (count, *columns.shape)))
    found = decoder.run(
        by_question(hidden[:, place]),
        by_question(positions[:, place]),
        allowed[:, None],
        context=context,
        filled=filled,
    )
    return found.hidden.reshape(count, -1, hidden.shape[-1])[:, batch["rows"]]


def make_optimiser(recipe: TrainingRecipe) -> optax.GradientTransformation:
    """Makes AdamW under a warmed-up cosine; decay on matrices only."""
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


# ---------------------------------------------------------------------------------------------- the small task


@dataclasses.dataclass(frozen=True)
class SmallTaskRecipe(TrainingRecipe):
    """Every training choice of the small task.

    auxiliary: weight of the auxiliary loss, which reads each image token against the token embeddings.
    tied_init: whether query projections start as copies of the key projections of their group.
    start_range: contexts start at a random position below this.
    """

    kinds: ClassVar[tuple[str, ...]] = task.KINDS
    auxiliary: float = 0.5
    tied_init: bool = True
    start_range: int = 64
    page: int = 3
    legend: int = 3
    chain: int = 8
    aggregate: int = 5
    override: int = 4


def initialise(recipe: SmallTaskRecipe) -> Any:
    """Draws parameters: unit embeddings, cell tokens as the mean of their row and tag, tied query and key kernels."""
    config, _ = instance(recipe.backbone)
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


def loss_of(
    model: Any, batch: dict[str, Any], plan: dict[str, Array], recipe: SmallTaskRecipe
) -> tuple[Array, dict[str, Array]]:
    """Computes the question cross-entropy plus the weighted mean auxiliary loss; and parts for the curve.

    The auxiliary loss reads batch["labels"] [B,T] (-1: nothing) off residuals of the prefix, against a part of the
    embedding table.
    """
    hidden, taps = run_decoder(model, batch, plan, tuple(sorted({layer for layer, *_ in AUXILIARY})))
    logits = model.decoder.logits(hidden[:, batch["asked"]])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["answer"])
    question = jnp.sum(each * batch["weight"]) / jnp.maximum(jnp.sum(batch["weight"]), 1)

    table, reads = model.decoder.embedding[...], {}
    for layer, name, first, size in AUXILIARY:
        labels = batch["labels"][name]
        residual = taps[layer][:, : labels.shape[1]]
        # As a final norm without weights would, so that every layer is read at one scale.
        scaled = residual * jax.lax.rsqrt(jnp.mean(jnp.square(residual), axis=-1, keepdims=True) + 1e-6)
        read = scaled @ table[first : first + size].T * residual.shape[-1] ** -0.5
        there = labels >= 0
        loss = optax.softmax_cross_entropy_with_integer_labels(read, jnp.where(there, labels - first, 0))
        reads[f"{layer}.{name}"] = jnp.sum(loss * there) / jnp.maximum(jnp.sum(there), 1)

    right = (jnp.argmax(logits, axis=-1) == batch["answer"]) * batch["weight"]
    whole = question + recipe.auxiliary * sum(reads.values()) / len(reads)
    return whole, {"loss": question, "right": right, **reads}


def draw_batch(recipe: SmallTaskRecipe, step: int, split: str = "train") -> TrainingBatch:
    """Draws the host side of one step, a function of the recipe and the step alone."""
    config, settings = instance(recipe.backbone)
    form = sequences.form_of(config, settings)
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
    start = rng.integers(0, recipe.start_range, recipe.batch)

    images = config.family.vision.process(sequences.context_images(form, contexts, split), settings)
    batch = {
        **sequences.pack_questions(form, questions, shown=shown, sees_legends=sees, start=start),
        "pixel_values": images["pixel_values"],
        "labels": sequences.cell_labels(form, contexts, shown),
    }
    return TrainingBatch(batch, questions.kind, questions.valid, images)


SMALL_TRAINING = TrainingTask(SmallTaskRecipe, VOCABULARY.names, instance, initialise, draw_batch, loss_of)
"""The small task, to train on."""
