"""Training of the tower in three stages, minutes on one core; no gradient goes through the decoder.

Letters: all blocks but the last read single slots, and their residual is a fixed code of the letter and of the slot's
place (their attention stays at zero). Pieces: the last block and the connector read cells of such residuals, of all
seen faces, and give the decoder's embeddings. The connector is set by least squares before and after.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from models.attention import Mask, attention
from models.towers.common import PlainBlock, scan_blocks

from . import pages
from .pieces import GLYPHS, LETTERS, Pieces
from .tower import Tower

LETTER_WIDTH = 192
"""Channels of the residual stream that name the letter; the others name its place."""


@dataclasses.dataclass(frozen=True)
class TowerRecipe:
    """Every training choice.

    pieces: token ids below this are drawn, where they can be. named, piece_named: weight of finding the nearest
    letter's code, or piece's embedding, in the loss. sharpness, piece_sharpness: of distances in it, in units of the
    targets' spread. plain: share of slots that stay black on white without noise. thumbnails: share of a batch of
    cells that are whole pages, shrunk. variants: drawings of every glyph in every face and size that cells are put
    together of. ridge: of least squares, as a share of the features' mean energy. fitted: cells that it is fitted to.
    """

    pieces: int = 2048
    width: int = 256
    depth: int = 3
    heads: int = 4
    intermediate: int = 512
    seed: int = 0
    letter_steps: int = 5000
    letter_batch: int = 256
    piece_steps: int = 3000
    piece_batch: int = 192
    learning_rate: float = 1.5e-3
    warmup: int = 40
    weight_decay: float = 0.02
    beta2: float = 0.98
    clip: float = 1.0
    named: float = 0.5
    sharpness: float = 8.0
    piece_named: float = 0.2
    piece_sharpness: float = 40.0
    plain: float = 0.4
    thumbnails: float = 0.01
    variants: int = 1
    ridge: float = 3e-4
    fitted: int = 24_000


def schedule(recipe: TowerRecipe, steps: int) -> optax.Schedule:
    """Makes the learning rate: warm-up, over at most half of the steps, then a cosine to zero."""
    return optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, min(recipe.warmup, steps // 2), steps)


class Slots:
    """Glyphs of all faces and sizes, drawn once: ink [sheets, glyphs, 16, 16], and pages shrunk to tiles."""

    def __init__(self, recipe: TowerRecipe, pieces: Pieces, fonts: Sequence[Path]):
        self.rng = np.random.default_rng(recipe.seed)
        drawn = itertools.product(map(str, fonts), pages.SIZES)
        self.sheets = np.stack([pages.glyphs(font, size) for font, size in drawn])
        self.thumbnails = np.stack([self._thumbnail(pieces) for _ in range(192)])

    def _thumbnail(self, pieces: Pieces) -> UInt8[np.ndarray, "slots S S"]:
        from PIL import Image

        lines = int(self.rng.integers(1, pages.COLUMNS + 1))
        rows = pieces.letters[self.rng.integers(len(pieces.letters), size=lines * pages.COLUMNS)]
        whole = Image.fromarray(pages.laid_out(pages.cells(self.sheets[self.rng.integers(len(self.sheets))], rows)))
        tile = np.asarray(whole.resize((pages.CELL, pages.CELL), Image.Resampling.LANCZOS))
        return pages.slots_of(tile[None])[0]

    def batch(self, count: int) -> tuple[UInt8[np.ndarray, "n S S"], Int[np.ndarray, " n"]]:
        """Draws slots with any glyph in them, moved by up to a pixel, and the glyphs' numbers."""
        glyph = self.rng.integers(len(GLYPHS), size=count)
        ink = self.sheets[self.rng.integers(len(self.sheets), size=count), glyph]
        return self._moved(ink), glyph.astype(np.int32)

    def _moved(self, ink: np.ndarray) -> np.ndarray:
        padded = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
        down, across = self.rng.choice(3, p=(0.2, 0.6, 0.2), size=(2, len(ink)))
        rows, columns = (move[:, None] + np.arange(pages.SLOT) for move in (down, across))
        return padded[np.arange(len(ink))[:, None, None], rows[:, :, None], columns[:, None, :]]

    def every(self) -> UInt8[np.ndarray, "n S S"]:
        """Returns every glyph of every sheet once, moved: sheet by sheet."""
        return self._moved(self.sheets.reshape(-1, pages.SLOT, pages.SLOT))


def pixels(key: Array, ink: UInt8[Array, "n H W"], plain: float) -> Float[Array, "n 3 H W"]:
    """Varies slots: colours, inverted or not, blur, weight, noise; a share of them stays black on white."""
    keys = jax.random.split(key, 7)
    count = len(ink)

    def draw(key: Array, low: float, high: float, *shape: int) -> Array:
        return jax.random.uniform(key, (count, *shape), minval=low, maxval=high)

    share = ink.astype(jnp.float32) / 255
    blurred = (share + jnp.roll(share, 1, 1) + jnp.roll(share, 1, 2) + jnp.roll(share, (1, 1), (1, 2))) / 4
    blur = jnp.maximum(draw(keys[0], -1.0, 0.6, 1, 1), 0)
    weight = draw(keys[1], 0.6, 1.5, 1, 1)
    varied = jnp.maximum((1 - blur) * share + blur * blurred, 1e-6) ** weight
    dark, light = draw(keys[2], -1.0, -0.35, 3, 1, 1), draw(keys[3], 0.35, 1.0, 3, 1, 1)
    inverted = draw(keys[4], 0.0, 1.0, 1, 1, 1) < 0.3
    ink_colour, paper = jnp.where(inverted, light, dark), jnp.where(inverted, dark, light)
    image = varied[:, None] * ink_colour + (1 - varied[:, None]) * paper
    noise = 0.05 * jax.random.normal(keys[5], (count, 1, *ink.shape[1:]))
    as_is = draw(keys[6], 0.0, 1.0, 1, 1, 1) < plain
    return jnp.clip(jnp.where(as_is, (1 - 2 * share)[:, None], image + noise), -1, 1)


def letter_codes(recipe: TowerRecipe) -> Float[np.ndarray, "V slots D"]:
    """Draws fixed codes of every glyph at every place: signs of both."""
    rng = np.random.default_rng([recipe.seed, 1])
    letters = rng.choice((-1.0, 1.0), size=(len(GLYPHS), 1, LETTER_WIDTH))
    places = rng.choice((-1.0, 1.0), size=(1, LETTERS, recipe.width - LETTER_WIDTH))
    both = (len(GLYPHS), LETTERS)
    whole = [np.broadcast_to(part, (*both, part.shape[-1])) for part in (letters, places)]
    return np.concatenate(whole, axis=-1).astype(np.float32)


def run_blocks(tower: Tower, hidden: Float[Array, "n T D"], first: int, last: int) -> Float[Array, "n T D"]:
    """Runs some of the tower's blocks."""
    config = tower.visual.config
    scale = (config.width // config.heads) ** -0.5

    def step(block: PlainBlock, hidden: Array) -> Array:
        mixed = attention(*block.project(hidden), Mask(), scale=scale)
        return block.update(hidden, mixed.reshape(hidden.shape))

    return scan_blocks(tower.visual.blocks, step, hidden, first, last)


def read_slots(tower: Tower, slots: Float[Array, "n 3 S S"], places: Int[Array, " n"]) -> Float[Array, "n D"]:
    """Returns what all blocks but the last make of single slots at these places of a cell."""
    visual = tower.visual
    hidden = visual.patch_embedding(slots.reshape(len(slots), 1, -1)) + visual.position_embedding[...][places][:, None]
    return run_blocks(tower, hidden, 0, visual.config.depth - 1)[:, 0]


def features(tower: Tower, residuals: Float[Array, "n slots D"]) -> Float[Array, "n wide"]:
    """Returns what the connector takes, of cells of such residuals."""
    depth = tower.visual.config.depth
    norm = tower.visual.final_norm
    assert norm is not None  # SigLIP has one
    hidden = norm(run_blocks(tower, residuals, depth - 1, depth))
    return hidden.reshape(len(hidden), -1)


def found_by_distance(
    read: Float[Array, "n D"], table: Float[Array, "V D"], right: Int[Array, " n"], sharpness: float
) -> tuple[Array, Array]:
    """Computes the cross-entropy of finding the right row of a table by distance, and how often it is the nearest."""
    logits = (read @ table.T - jnp.square(table).sum(-1) / 2) * sharpness
    named = optax.softmax_cross_entropy_with_integer_labels(logits, right).mean()
    return named, (logits.argmax(-1) == right).mean()


class Stages:
    """The tower's parameters, and the stages that train them one after the other."""

    def __init__(self, recipe: TowerRecipe, config: Any, pieces: Pieces, slots: Slots, table: np.ndarray, newline: int):
        """Draws the tower.

        Args:
          table: the decoder's embeddings.
          newline: the token that a shrunk page is read as.
        """
        self.recipe, self.pieces, self.slots = recipe, pieces, slots
        graph, state = nnx.split(Tower(config, nnx.Rngs(recipe.seed)))
        self.graph, self.state = graph, cast(Any, state)
        self.codes = jnp.asarray(letter_codes(recipe))
        self.table = jnp.asarray(table[list(pieces.ids)])
        centred = self.table - self.table.mean(0)
        self.spread = float(jnp.square(centred).sum(-1).mean())
        self.newline = pieces.places[newline]
        self.key = jax.random.key(recipe.seed)

        self._shut(self.state)

    def tower(self, state: Any = None) -> Tower:
        """Returns the tower with these parameters, or the present ones."""
        return nnx.merge(self.graph, self.state if state is None else state)

    def _shut(self, tree: Any) -> Any:
        """Sets what attention adds to zero in all blocks but the last, of parameters or of gradients; returns them.

        These blocks read single slots and must not attend to others: their attention adds nothing, and stays so.
        """
        output = tree["visual"]["blocks"]["output"]
        for part in ("kernel", "bias"):
            output[part][...] = output[part][...].at[: self.recipe.depth - 1].set(0)
        return tree

    def letters(self) -> Iterator[dict[str, float]]:
        """Trains the blocks that read letters; yields the numbers of every step."""
        recipe = self.recipe

        def loss(state, key, ink, glyph):
            at, vary = jax.random.split(key)
            places = jax.random.randint(at, glyph.shape, 0, LETTERS)
            read = read_slots(self.tower(state), pixels(vary, ink, recipe.plain), places)
            missed = jnp.square(read - self.codes[glyph, places]).mean()
            letters = self.codes[:, 0, :LETTER_WIDTH]
            named, right = found_by_distance(read[:, :LETTER_WIDTH], letters, glyph, recipe.sharpness / LETTER_WIDTH)
            return missed + recipe.named * named, {"letters.missed": missed, "letters.right": right}

        def batch(step):
            return jax.random.fold_in(self.key, step), *self.slots.batch(recipe.letter_batch)

        for state, numbers in self._descend(self.state, loss, recipe.letter_steps, batch, self._shut):
            self.state = state
            yield numbers

    def _descend(
        self,
        moving: Any,
        loss: Callable[..., tuple[Array, dict[str, Array]]],
        steps: int,
        batch: Callable[[int], tuple[Any, ...]],
        change: Callable[[Any], Any] | None = None,
    ) -> Iterator[tuple[Any, dict[str, float]]]:
        """Trains parameters by AdamW with warm-up and a cosine to zero; yields them and the numbers of every step.

        Args:
          moving: the parameters, which are donated.
          loss: of parameters and a batch, with the numbers that are reported.
          batch: draws the batch of a step.
          change: of the gradients, before the optimiser sees them.
        """
        recipe = self.recipe
        # Weight decay is for matrices: norms and biases have no scale to lose.
        matrices = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
        optimiser = optax.chain(
            optax.clip_by_global_norm(recipe.clip),
            optax.adamw(schedule(recipe, steps), b2=recipe.beta2, weight_decay=recipe.weight_decay, mask=matrices),
        )

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(moving, moments, *batch):
            (_, parts), gradients = jax.value_and_grad(loss, has_aux=True)(moving, *batch)
            gradients = gradients if change is None else change(gradients)
            updates, moments = optimiser.update(gradients, moments, moving)
            return optax.apply_updates(moving, updates), moments, parts

        moments = optimiser.init(moving)
        for step in range(steps):
            moving, moments, parts = update(moving, moments, *batch(step))
            yield moving, {name: float(value) for name, value in parts.items()}

    def residuals(self) -> tuple[np.ndarray, np.ndarray]:
        """Computes residuals of every glyph of every face and size at every place, and of shrunk pages; in float16.

        Returns [variants · sheets, glyphs, slots, D] and [pages, slots, D].
        """
        recipe = self.recipe

        @jax.jit
        def read(state, key, ink, places):
            return read_slots(self.tower(state), pixels(key, ink, recipe.plain), places).astype(jnp.float16)

        def read_all(ink: np.ndarray, places: np.ndarray, number: int) -> np.ndarray:
            parts, size = [], 8192
            for first in range(0, len(ink), size):
                part, at = ink[first : first + size], places[first : first + size]
                room = size - len(part)
                key = jax.random.fold_in(self.key, 1_000_000 + number + first)
                made = read(self.state, key, np.pad(part, ((0, room), (0, 0), (0, 0))), np.pad(at, (0, room)))
                parts.append(np.asarray(made)[: len(part)])
            return np.concatenate(parts)

        bank = []
        for variant in range(recipe.variants):
            ink = self.slots.every()
            by_place = []
            for place in range(LETTERS):
                number = (variant * LETTERS + place) * 10_000_000
                by_place.append(read_all(ink, np.full(len(ink), place), number))
            bank.append(np.stack(by_place, axis=1).reshape(len(self.slots.sheets), len(GLYPHS), LETTERS, -1))

        tiles = self.slots.thumbnails
        places = np.tile(np.arange(LETTERS), len(tiles))
        shrunk = read_all(tiles.reshape(-1, *tiles.shape[-2:]), places, 7).reshape(len(tiles), LETTERS, -1)
        return np.concatenate(bank), shrunk

    def cells(self, bank: np.ndarray, shrunk: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Composes cells of these pieces from residuals of one face each; the first ones are shrunk pages."""
        rng, letters = self.slots.rng, self.pieces.letters[chosen]
        cells = bank[rng.integers(len(bank), size=len(chosen))[:, None], letters, np.arange(LETTERS)]
        few = round(len(chosen) * self.recipe.thumbnails)
        cells[:few] = shrunk[rng.integers(len(shrunk), size=few)]
        chosen[:few] = self.newline
        return cells

    def address_slots(self) -> None:
        """Initialises the last block as random features of neighbouring letters, and the connector at zero.

        Its heads attend from every slot to the slots one, two, three, … places on, round the cell, by the places'
        codes; its MLP mixes what they read at random. A connector fitted to that names most pieces before training.
        """
        recipe, last = self.recipe, self.recipe.depth - 1
        rng = np.random.default_rng([recipe.seed, 2])
        places = np.asarray(self.codes)[0, :, LETTER_WIDTH:]
        head, codes = recipe.width // recipe.heads, places.shape[1]
        shape = (recipe.width, recipe.heads, head)
        query, key, value = (np.zeros(shape, np.float32) for _ in range(3))

        for number in range(recipe.heads):
            on = places[(np.arange(LETTERS) + number + 1) % LETTERS]
            query[LETTER_WIDTH:, number, :codes] = np.linalg.pinv(places) @ on
            key[LETTER_WIDTH:, number, :codes] = np.eye(codes)
            value[:LETTER_WIDTH, number] = rng.normal(size=(LETTER_WIDTH, head)) * (1.5 * LETTER_WIDTH**-0.5)

        blocks = self.state["visual"]["blocks"]
        inner, outer = blocks["mlp"]["inner"], blocks["mlp"]["outer"]

        def mixed(shape: tuple[int, int], scale: float) -> np.ndarray:
            return rng.normal(size=shape) * (scale * shape[0] ** -0.5)

        for part, kernel in {
            "query": query.reshape(recipe.width, -1),
            "key": key.reshape(recipe.width, -1),
            "value": value.reshape(recipe.width, -1),
            "output": mixed((recipe.width, recipe.width), 1.0),
        }.items():
            blocks[part]["kernel"][...] = blocks[part]["kernel"][...].at[last].set(kernel)

        inner["kernel"][...] = inner["kernel"][...].at[last].set(mixed((recipe.width, recipe.intermediate), 1.5))
        inner["bias"][...] = inner["bias"][...].at[last].set(0.5 * rng.normal(size=recipe.intermediate))
        outer["kernel"][...] = outer["kernel"][...].at[last].set(mixed((recipe.intermediate, recipe.width), 8.0))
        connector = self.state["projector"]["kernel"]
        connector[...] = jnp.zeros_like(connector[...])

    def pieces_stage(self, bank: np.ndarray, shrunk: np.ndarray) -> Iterator[dict[str, float]]:
        """Trains the last block, the final norm and the connector; yields the numbers of every step."""
        recipe, last = self.recipe, self.recipe.depth - 1
        plain = nnx.to_pure_dict(self.state)
        visual = plain["visual"]
        moving: Any = {
            "projector": plain["projector"],
            "final_norm": visual["final_norm"],
            "last": jax.tree.map(lambda leaf: leaf[last], visual["blocks"]),
        }
        still = {name: value for name, value in visual.items() if name not in ("final_norm", "blocks")}
        still["blocks"] = jax.tree.map(lambda leaf: leaf[:last], visual["blocks"])

        def loss(moving, still, cells, chosen):
            tower = self.tower(self._together(moving, still))
            read = tower.projector(features(tower, cells.astype(jnp.float32)))
            missed = jnp.square(read - self.table[chosen]).sum(-1).mean() / self.spread
            named, right = found_by_distance(read, self.table, chosen, recipe.piece_sharpness / self.spread)
            return missed + recipe.piece_named * named, {"pieces.missed": missed, "pieces.right": right}

        def batch(step):
            chosen = self.slots.rng.integers(len(self.pieces.ids), size=recipe.piece_batch).astype(np.int32)
            return still, self.cells(bank, shrunk, chosen), chosen

        # The state is put together once, at the end: the tree of all parameters is not needed between steps.
        for parameters, numbers in self._descend(moving, loss, recipe.piece_steps, batch):
            moving = parameters
            yield numbers
        self.state = self._together(moving, still)

    def _together(self, moving: Mapping[str, Any], still: Mapping[str, Any]) -> Any:
        append = functools.partial(jax.tree.map, lambda first, last: jnp.concatenate([first, last[None]]))
        blocks = append(still["blocks"], moving["last"])
        plain = {
            "visual": {**still, "blocks": blocks, "final_norm": moving["final_norm"]},
            "projector": moving["projector"],
        }
        state = jax.tree.map(lambda leaf: leaf, self.state)
        nnx.replace_by_pure_dict(state, plain)
        return state

    def fit_connector(self, bank: np.ndarray, shrunk: np.ndarray) -> dict[str, float]:
        """Sets the connector by least squares, with a ridge towards the trained one; returns the losses."""
        recipe, size = self.recipe, 2048
        plain = nnx.to_pure_dict(self.state)
        kernel = plain["projector"]["kernel"]

        @jax.jit
        def sums(state, cells, chosen):
            tower = self.tower(state)
            wide = features(tower, cells.astype(jnp.float32))
            left = self.table[chosen] - tower.projector(wide)
            return wide.T @ wide, wide.T @ left, jnp.square(left).sum()

        wide, missed, count = len(kernel), 0.0, 0
        gram, cross = np.zeros((wide, wide)), np.zeros(kernel.shape)
        while count < recipe.fitted:
            chosen = self.slots.rng.integers(len(self.pieces.ids), size=size).astype(np.int32)
            own = sums(self.state, self.cells(bank, shrunk, chosen), chosen)
            gram, cross = gram + np.asarray(own[0], np.float64), cross + np.asarray(own[1], np.float64)
            missed, count = missed + float(own[2]), count + size

        ridge = recipe.ridge * np.trace(gram) / wide
        change = np.linalg.solve(gram + ridge * np.eye(wide), cross)
        plain["projector"]["kernel"] = kernel + jnp.asarray(change, jnp.float32)
        nnx.replace_by_pure_dict(self.state, plain)
        after = missed - 2 * np.sum(change * cross) + np.sum(change * (gram @ change))
        return {"fit.missed_before": missed / count / self.spread, "fit.missed": float(after) / count / self.spread}
