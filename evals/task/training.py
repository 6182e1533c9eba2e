"""Training an instance on the documents drawing: initial parameters, loss and batches.

The loss is the cross-entropy of answers and nothing else. `trainer` runs it.
Axis letters: B contexts, N tokens of their questions, D width, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from kvpatch_jax.models.decoder.attention import GroupedAttention, LatentAttention
from kvpatch_jax.models.decoder.config import DecoderConfig
from kvpatch_jax.models.families.family import embed_tokens, pixels_of, placeholders

from .contexts import DIGITS, DOCUMENTS, ITEMS, SIZES, VALUES, Contexts, sample
from .instances import instance
from .layout import pack, prefix_of, tower_inputs
from .questions import KINDS, ask, value_shares
from .recipe import Recipe
from .vocabulary import parts_of, vocabulary

MORE_CONTEXTS = {"tiny": 4, "small": 2}
"""Contexts of a step by their size, as multiples of the recipe's batch."""
FEWER, START_RANGE = 0.15, 64
"""Share of the contexts that may lack some sheets, so that none is always there; positions at which contexts start."""
LETTER_LIKENESS = 0.35
"""Cosine of a letter's token at the start and what is seen of the letter; the rest is the same for all letters.

Below 1 its attention begins even over the letter's cells.
"""


class TrainingBatch(NamedTuple):
    """One training batch, as the host draws it.

    Attributes:
      arrays: for the jitted step. images: all that the processor made. size: of the contexts; batches of one size have
        one form.
      kinds: [N], of each token's question. asked: bool [B,N], answers that count. sees: bool [B,N], whether a token may
        look at the sheets.
    """

    arrays: dict[str, Any]
    images: dict[str, np.ndarray]
    size: str
    kinds: np.ndarray
    asked: np.ndarray
    sees: np.ndarray


def draw_batch(recipe: Recipe, step: int) -> TrainingBatch:
    """Draws the host side of one step, a function of the recipe and the step alone."""
    config, settings = instance(recipe.backbone)
    rng = np.random.default_rng([recipe.seed, step])
    name = recipe.size(step)
    count = recipe.batch * MORE_CONTEXTS.get(name, 1)
    contexts = sample(rng, count, SIZES[name], variety=recipe.variety(step))
    fewer = rng.random((count, 1)) < FEWER
    shown = ~(fewer & (rng.random((count, contexts.sheets)) < 1 / 3))
    questions = ask(contexts, rng, recipe.asked(step), shown)
    # Some questions of the page see it alone, as after the sheets slid out of the window.
    on_page = questions.kind != KINDS.index("sheet")
    sees = ~(on_page & (rng.random((count, len(on_page))) < recipe.window))
    sees = sees[:, questions.number]
    start = rng.integers(0, START_RANGE, count)

    prefix, images = prefix_of(config, settings, contexts.size), tower_inputs(config, settings, contexts)
    arrays = pack(prefix, questions.ids, questions.number, questions.step, shown=shown, sees=sees, start=start)
    shares = value_shares(contexts, questions, shown) * (step < recipe.proportions)
    arrays |= {"answer": questions.answer, "shares": shares, "pixel_values": pixels_of(images)}
    return TrainingBatch(arrays, images, name, questions.kind[questions.number], questions.answer >= 0, sees)


def image_plan(drawn: TrainingBatch, config: Any) -> dict[str, Array]:
    """Makes what the tower needs beside pixels, the same for every batch of one size."""
    plan = config.family.vision.plan(config, drawn.arrays["input_ids"], drawn.images)
    return {name: jnp.asarray(part) for name, part in plan.items() if name != "inputs"}


def loss_of(model: Any, batch: dict[str, Array], plan: dict[str, Array]) -> tuple[Array, Array]:
    """Computes the mean cross-entropy of all answers, and which of them are right [B,N].

    Where `batch["shares"]` [B,N,12] is not zero, it is the distribution over values that is asked for.
    """
    features = model.encode(batch["pixel_values"], plan)
    hidden, deepstack = embed_tokens(model.decoder, batch["input_ids"], features, placeholders(model.config))
    deepstack = None if deepstack is None else jnp.moveaxis(deepstack, 2, 0)
    hidden = model.decoder.run(hidden, batch["positions"], batch["mask"], deepstack=deepstack).hidden
    answer, shares = batch["answer"], batch["shares"]
    logits = model.decoder.logits(hidden[:, -answer.shape[1] :])

    asked, first = answer >= 0, vocabulary().first["value"]
    target = jax.nn.one_hot(jnp.where(asked, answer, 0), logits.shape[-1])
    distribution = jnp.zeros_like(target).at[..., first : first + VALUES].set(shares)
    target = jnp.where(jnp.any(shares > 0, axis=-1, keepdims=True), distribution, target)
    losses = optax.softmax_cross_entropy(logits, target)
    return jnp.sum(losses * asked) / jnp.maximum(jnp.sum(asked), 1), (jnp.argmax(logits, axis=-1) == answer) & asked


def make_optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """Makes AdamW under a warmed-up cosine; decay on matrices only."""
    # Few steps, as a test takes, warm up over half of them.
    warmup, low = min(recipe.warmup, recipe.steps // 2), 0.02 * recipe.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, warmup, recipe.steps, low)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01, mask=_matrices)
    )


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def initialise(recipe: Recipe) -> Any:
    """Draws a model: query kernels tied to key kernels, and tokens that start as the tower's features of their kind.

    Both are starts only: nothing of them is in the loss.
    """
    config, _ = instance(recipe.backbone)
    model = config.family.module(config, nnx.Rngs(recipe.seed))
    if not recipe.backbone.startswith("qwen2_5_vl"):
        # A tower that lets the cells of an image see each other starts with none of it.
        kernel = model.visual.blocks.output.kernel
        kernel[...] = jnp.zeros_like(kernel[...])

    table = jax.random.normal(jax.random.key(recipe.seed + 1), model.decoder.embedding.shape, jnp.float32)
    for group, features in _features_by_name(model, recipe).items():
        first = vocabulary().first[group]
        if group == "letter":
            features = LETTER_LIKENESS * features + (1 - LETTER_LIKENESS**2) ** 0.5 * table[first]
        table = table.at[first : first + len(features)].set(features)
    model.decoder.embedding[...] = table
    for stack in config.text.stacks:
        _tie_queries(getattr(model.decoder, stack.name).attention, config.text)
    return model


def _features_by_name(model: Any, recipe: Recipe, count: int = 64) -> dict[str, np.ndarray]:
    """Finds what the untrained tower makes of cells that show the same thing, of unit variance, by group of tokens."""
    config, settings = instance(recipe.backbone)
    rng = np.random.default_rng([recipe.seed, 2**31])
    contexts = sample(rng, count, SIZES["4"], variety=recipe.variety(0))
    prefix, images = prefix_of(config, settings, contexts.size), tower_inputs(config, settings, contexts)
    arrays = {"input_ids": np.tile(prefix.ids, (count, 1))}
    plan = image_plan(TrainingBatch(arrays, images, "4", *np.zeros((3, 0))), config)
    features = np.asarray(model.encode(jnp.asarray(pixels_of(images)), plan)[0])
    features = features.reshape(count, -1, features.shape[-1])

    # Sheets and page are centred apart, so that a mean over cells of one kind leaves the others' mean out.
    among = np.cumsum(prefix.ids == prefix.image_token) - 1
    entries = contexts.size.entries // contexts.sheets
    cells = [among[prefix.cells(place, entries)] for place in range(contexts.sheets)]
    sheet = features[:, np.concatenate(cells)].reshape(-1, features.shape[-1])
    page = features[:, among[prefix.cells(contexts.sheets, contexts.size.cells)]].reshape(-1, features.shape[-1])
    groups = _cells_by_group(contexts, sheet - sheet.mean(axis=0), page - page.mean(axis=0))

    means = {}
    for group, (cells, numbers) in groups.items():
        by_number = np.stack([cells[numbers == number].mean(axis=0) for number in range(numbers.max() + 1)])
        by_number = by_number - cells.mean(axis=0)
        means[group] = by_number / by_number.std(axis=1, keepdims=True)
    return means


def _cells_by_group(
    contexts: Contexts, sheet: np.ndarray, page: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns, by group of tokens, features [n,D] of cells and the number [n] of each one's token in the group."""
    code, both = contexts.page_code.ravel(), np.concatenate([sheet, page])
    on_sheets = contexts.sheet_item.reshape(len(contexts), -1)
    item = np.concatenate([on_sheets.ravel(), contexts.page_item.ravel()])
    widths = (on_sheets.shape[1], contexts.page_item.shape[1])
    document = np.concatenate([np.repeat(contexts.document, width) for width in widths])
    groups = {
        "letter": (page, code // DIGITS),
        "digit": (page, code % DIGITS),
        "code": (page, code),
        "value": (sheet, contexts.sheet_value.ravel()),
        "unit": (sheet, contexts.sheet_unit.ravel()),
        "item": (both, item + ITEMS * document),
    }
    first, second = parts_of(document, item)
    for number, kind in enumerate(DOCUMENTS):
        of_kind = document == number
        groups[f"first of {kind}"] = (both[of_kind], first[of_kind])
        groups[f"second of {kind}"] = (both[of_kind], second[of_kind])
    return groups


def _tie_queries(attention: GroupedAttention | LatentAttention, text: DecoderConfig) -> None:
    """Makes every query projection of a stack of layers a copy of what makes the keys it meets."""
    if isinstance(attention, GroupedAttention):
        assert attention.key is not None
        key = attention.key.kernel[...].reshape(-1, text.width, text.kv_heads, 1, text.head_dim)
        query = jnp.broadcast_to(key, (*key.shape[:3], text.heads // text.kv_heads, text.head_dim))
    else:
        latent = attention.latent
        down = attention.down.kernel[...]
        up = attention.up.kernel[...].reshape(-1, latent.latent, text.heads, latent.plain_dim + latent.value_dim)
        keys = jnp.einsum("LDC,LCNU->LDNU", down[..., : latent.latent], up[..., : latent.plain_dim])
        turning = jnp.broadcast_to(down[:, :, None, latent.latent :], (*keys.shape[:3], latent.rope_dim))
        query = jnp.concatenate([keys, turning], axis=-1)
    attention.query.kernel[...] = query.reshape(attention.query.kernel.shape)
