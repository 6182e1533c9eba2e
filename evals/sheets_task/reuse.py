"""A context of the sheets task whose every image is reused: prefilled alone, moved to its place, mended or not.

The patches are formed with the first sheet at position 0 and served `MOVED` positions further on, so that sheets and
page all stand where nothing of them was computed. Axis letters: B contexts, T tokens of the prefix or of the page, N
tokens of the questions, Q questions, R rows (one question of one context each), L layers, S keys.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.ops import flatten_heads
from kvpatch_jax.repair import SplicedCache, fraction_to_count, repair_everywhere
from models import ModelBackbone

from ..probes.by_question import mean_attention
from ..results.costs import ArmCost, ChunkCosts
from ..rules import RULES
from ..small_task.prefix import positions_behind, prefix_positions, within_own
from . import task
from .material import SHEETS
from .task import Contexts, Questions

MOVED = 37
KV = dict[str, Array]


class Reuse:
    """A batch of contexts and their questions: the chunks, what re-prefill gives, and caches for every arm.

    Attributes:
      chunks: the canonicals, the page last. tokens: the prefix where it is served. conditioned: phase-free KV of the
      prefix, prefilled whole, {channel: [L,B,T,K,H]}. engine: the same in the engine frame.
    """

    material = SHEETS

    def __init__(self, backbone: ModelBackbone, contexts: Contexts, questions: Questions):
        self.backbone, self.contexts, self.questions = backbone, contexts, questions
        config, count = backbone.config, len(contexts)
        self.form = self.material.form_of(config, backbone.image_config, contexts.size)
        images = config.family.vision.process(self.material.images(contexts), backbone.image_config)
        ids = np.tile(self.form.ids, (count, 1))
        shown = np.ones((count, self.form.chunks), bool)
        positions, _ = prefix_positions(self.form, shown, np.zeros(count, int))
        at_zero = backbone.embed(ids, positions, **images)
        self.chunks = [self._canonical(at_zero, place) for place in range(self.form.chunks)]
        self.conditioned = dict(backbone.prefill(at_zero).kv)

        moved, behind = prefix_positions(self.form, shown, np.full(count, MOVED))
        self.tokens = at_zero._replace(positions=jnp.asarray(moved))
        self.engine = dict(kvp.to_engine(backbone.layout, self.conditioned, moved, 0))
        self.behind = positions_behind(self.form, behind, questions.step)

    def _canonical(self, tokens: Tokens, place: int) -> kvp.Chunk:
        """Prefills one image alone, at position 0."""
        where = self.form.slices[place]
        local = np.broadcast_to(self.form.chunk_local[place], (len(self.contexts), *self.form.chunk_local[place].shape))
        alone = Tokens(tokens.embeddings[:, where], jnp.asarray(local), None)
        name = f"{place}:" + "-".join(map(str, self.contexts.ink_seed[:2].tolist()))
        return kvp.Chunk(
            kv=self.backbone.prefill(alone).kv,
            local=self.form.chunk_local[place],
            span=self.form.spans[place],
            length=self.form.sizes[place],
            id=name,
            layout=self.backbone.layout,
            backbone=self.backbone.fingerprint,
            content=name,
        )

    @property
    def page(self) -> kvp.Chunk:
        """The page's canonical."""
        return self.chunks[-1]

    @functools.cached_property
    def delta(self) -> KV:
        """The page's deficit, phase-free."""
        page = self.cut(self.conditioned, -1)
        return {name: jnp.asarray(page[name]) - jnp.asarray(value) for name, value in self.page.kv.items()}

    @functools.cached_property
    def costs(self) -> ChunkCosts:
        """What the arms' costs are shares of."""
        page, width = self.form.page, self.tokens.embeddings.shape[-1]
        return ChunkCosts(self.backbone.forward_costs, self.backbone.layout, page.stop - page.start, page.start, width)

    def cut(self, kv: Mapping[str, Any], place: int) -> KV:
        """A chunk's part of the prefix's KV."""
        return {name: value[:, :, self.form.slices[place]] for name, value in kv.items()}

    # ------------------------------------------------------------------------------------------------- caches

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def patch(self, place: int, rank: int) -> kvp.Patch:
        """Forms the patch of a chunk behind all in front of it; smaller ranks are slices of the largest."""
        if rank < max(RULES.arms.ranks):
            whole = self.patch(place, max(RULES.arms.ranks))
            return kvp.truncate(whole, {name: min(rank, have) for name, have in whole.ranks.items() if have})
        chunk, antecedent = self.chunks[place], tuple(other.id for other in self.chunks[:place])
        true = self.cut(self.conditioned, place)
        return kvp.form_patch(chunk, true, rank, antecedent, method="exact", dense=False)

    def cache(self, patches: Mapping[int, kvp.Patch] | None = None) -> KV:
        """Makes a cache of the prefix of moved canonicals, in the engine frame; some with their patches."""
        starts, given = MOVED + np.cumsum([0, *self.form.spans[:-1]]), patches or {}
        placed = []
        for place, (chunk, start) in enumerate(zip(self.chunks, starts, strict=True)):
            antecedent = tuple(other.id for other in self.chunks[:place])
            placed.append(dict(kvp.apply_patch(chunk, given.get(place), int(start), antecedent)))
        return {name: jnp.concatenate([piece[name] for piece in placed], axis=2) for name in placed[0]}

    def splice(self) -> SplicedCache:
        """Makes what token repairs of the page start from: the cache of moved canonicals."""
        page, count = self.form.page, len(self.contexts)
        slots = jnp.asarray(np.tile(np.arange(page.start, page.stop), (count, 1)))
        own = self.tokens.take(page.start, page.stop)
        return SplicedCache(own, self.cache(), slots, conditioned=self.cut(self.conditioned, -1))

    def random_tokens(self, budget: float) -> tuple[ArmCost, KV]:
        """Recomputes tokens drawn at random."""
        splice, page = self.splice(), self.form.page
        count = fraction_to_count(budget, page.stop - page.start)
        drawn = [
            np.random.default_rng([int(seed), 1]).permutation(page.stop - page.start)[:count]
            for seed in self.contexts.ink_seed
        ]
        repaired = repair_everywhere(self.backbone, splice, jnp.asarray(np.sort(drawn, axis=1)))
        return self.costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots)), dict(repaired.cache)

    # ------------------------------------------------------------------------------------------------ reading

    def read(self, cache: KV) -> Float[np.ndarray, "B N V"]:
        """Asks all questions over a cache of the prefix; log-probabilities behind every token."""
        ids = self.questions.ids
        tokens = self.backbone.embed(ids, self.behind)
        seen = np.ones((*ids.shape, self.form.prefix_tokens), bool)
        own = np.broadcast_to(within_own(self.questions.own), (len(ids), *[ids.shape[1]] * 2))
        mask = np.concatenate([seen, own], axis=2)[:, None]
        logits = self.backbone.prefill(tokens, cache, mask, logits="all").logits
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))

    def read_by_question(self, budgets: tuple[float, ...]) -> dict[float, tuple[ArmCost, Float[np.ndarray, "B N V"]]]:
        """Recomputes, for each question alone, the page's tokens that it attends to most, and asks it.

        As `evals.probes.by_question` reads InfoFlow KV: attention over the cache of moved canonicals, summed over the
        question's tokens and over the layers that the rules name; tokens recomputed at all layers.
        """
        splice, page = self.splice(), self.form.page
        size = page.stop - page.start
        depth = self.backbone.layout.layers
        first, last = (round(share * depth) for share in RULES.arms.query_layers)
        band = slice(min(first, depth - 1), max(first, last) + 1)
        found: dict[float, tuple[ArmCost, np.ndarray]] = {}
        shape = (*self.questions.ids.shape, self.backbone.config.text.vocabulary)
        said = {budget: np.zeros(shape, np.float32) for budget in budgets}
        for columns in self._alike():
            received = self._received(columns, dict(splice.cache))[band].sum(axis=0)  # [B, Q, T]
            for budget in budgets:
                count = max(1, fraction_to_count(budget, size))
                index = np.sort(np.argsort(-received, axis=-1, kind="stable")[..., :count], axis=-1)
                said[budget][:, columns.reshape(-1)] = self._recomputed(splice, columns, index)
        for budget in budgets:
            count = max(1, fraction_to_count(budget, size))
            reading = self.costs.reading(2, page.stop, min(band.stop, depth))
            again = self.costs.forward.flops(count, page.start + size // 2)
            cost = ArmCost(inputs=size, serving=self.costs.rotation, question=reading + again, forming=self.costs.alone)
            found[budget] = cost, said[budget]
        return found

    def _alike(self) -> list[Int[np.ndarray, "Q N"]]:
        """Columns of the questions' tokens, questions of one length together."""
        own = self.questions.own
        spans = [np.flatnonzero(own == number) for number in range(own.max() + 1)]
        sizes = sorted({len(span) for span in spans})
        return [np.stack([span for span in spans if len(span) == size]) for size in sizes]

    def _received(self, columns: Int[np.ndarray, "Q N"], cache: KV) -> Float[np.ndarray, "L B Q T"]:
        """Attention that the page's tokens receive from each question, the mean over heads."""
        flat, (count, length) = columns.reshape(-1), columns.shape
        ids, positions = self.questions.ids[:, flat], self.behind[:, flat]
        tokens = self.backbone.embed(ids, positions)
        own = np.kron(np.eye(count, dtype=bool), np.tri(length, dtype=bool))
        seen = np.ones((len(flat), self.form.prefix_tokens), bool)
        mask = np.broadcast_to(np.concatenate([seen, own], axis=1), (len(ids), 1, len(flat), seen.shape[1] + len(flat)))
        layers = tuple(range(self.backbone.layout.layers))
        run = self.backbone.prefill(tokens, cache, mask, hidden_at=layers)
        turned = kvp.to_engine(self.backbone.layout, dict(run.kv), positions, 0)
        keys = {name: jnp.concatenate([cache[name], turned[name]], axis=2) for name in turned}
        hidden = tuple(run.hidden[layer] for layer in layers)
        found = mean_attention(self.backbone, hidden, jnp.asarray(positions), keys, jnp.asarray(mask))
        page = np.asarray(found)[..., self.form.page]
        return page.reshape(*page.shape[:2], count, length, -1).sum(axis=3)

    def _recomputed(
        self, splice: SplicedCache, columns: Int[np.ndarray, "Q N"], index: Int[np.ndarray, "B Q n"]
    ) -> Float[np.ndarray, "B M V"]:
        """Reads every question over a cache of its own, in which its own tokens are recomputed: one row each."""
        (count, length), rows = columns.shape, len(self.contexts)
        by_row = lambda value, axis=0: jnp.repeat(jnp.asarray(value), count, axis=axis)
        own = Tokens(by_row(splice.tokens.embeddings), by_row(splice.tokens.positions), None)
        wide = SplicedCache(own, {name: by_row(value, 1) for name, value in splice.cache.items()}, by_row(splice.slots))
        chosen = jnp.asarray(index.reshape(rows * count, -1))
        cache = dict(repair_everywhere(self.backbone, wide, chosen).cache)
        cut = lambda value: value[:, columns].reshape(rows * count, length, *value.shape[2:])
        tokens = self.backbone.embed(cut(self.questions.ids), cut(self.behind))
        logits = self.backbone.prefill(tokens, cache, logits="all").logits
        return np.asarray(jax.nn.log_softmax(logits, axis=-1)).reshape(rows, count * length, -1)

    # ----------------------------------------------------------------------------------------------- the deficit

    def page_classes(self) -> dict[str, Int[np.ndarray, "B T"]]:
        """Numbers the page's cells by what each shows, one thing at a time, and by the colours that it absorbs."""
        fill, stripe, _ = task.latest(self.contexts)
        address, glyph = self.contexts.page_address, self.contexts.page_glyph
        return {
            "shape": glyph % task.SHAPES,
            "ink": glyph // task.SHAPES,
            "row mark": address // task.COLUMN_MARKS,
            "column mark": address % task.COLUMN_MARKS,
            "absorbed fill": np.take_along_axis(fill, address, axis=1),
            "absorbed stripe": np.take_along_axis(stripe, address, axis=1),
        }

    def class_shares(self) -> dict[str, dict[str, Float[np.ndarray, "B L"]]]:
        """Computes, by class and channel, the share of ‖Δ‖² over the page's cells that means of each class explain."""
        # Whatever else is drawn on a page (a title) stands in front of its cells.
        cells = np.flatnonzero(self.form.chunk_ids[-1] == self.form.image_token)[-self.contexts.size.cells :]
        delta = {name: np.asarray(flatten_heads(value))[:, :, cells] for name, value in self.delta.items()}
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, classes in self.page_classes().items():
            belongs = np.eye(classes.max() + 1, dtype=np.float32)[classes]  # [B, T, C]
            share = belongs / np.maximum(belongs.sum(axis=1, keepdims=True), 1)
            found[name] = {}
            for channel, value in delta.items():
                means = np.einsum("btc,lbtf->lbcf", share, value)
                left = value - np.einsum("btc,lbcf->lbtf", belongs, means)
                whole = np.square(value).sum(axis=(2, 3))
                shares = 1 - np.square(left).sum(axis=(2, 3)) / np.where(whole > 0, whole, 1.0)
                found[name][channel] = np.where(whole > 0, shares, 0.0).T  # the first layer absorbs nothing
        return found
