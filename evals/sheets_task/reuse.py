"""A context of the sheets task whose every image is reused: prefilled alone, moved to its place, mended or not.

The patches are formed with the first sheet at position 0 and served `MOVED` positions further on, so that sheets and
page all stand where nothing of them was computed. Axis letters: B contexts, T tokens of the prefix or of the page, N
tokens of the questions, Q questions, R rows (one question of one context each), L layers, S keys.
"""

import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import flatten_heads
from kvpatch_jax.repair import SplicedCache
from models import ModelBackbone

from ..results.costs import ChunkCosts, input_width
from ..rules import RULES
from ..small_task.prefix import positions_behind, prefix_positions, within_own
from . import task
from .task import SheetsContexts, SheetsQuestions
from .task_spec import SHEETS

MOVED = 37
KV = dict[str, Array]


class Reuse:
    """A batch of contexts and their questions: the chunks, what re-prefill gives, and caches for every arm.

    Attributes:
      chunks: the canonicals, the page last. tokens: the prefix where it is served. conditioned: phase-free KV of the
      prefix, prefilled whole, {channel: [L,B,T,K,H]}. engine: the same in the engine frame. page_alone: the page's
      tokens, at position 0.
    """

    material = SHEETS

    def __init__(self, backbone: ModelBackbone, contexts: SheetsContexts, questions: SheetsQuestions):
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
        # What a layer adds of its own (Qwen3-VL's DeepStack) is a chunk's as well.
        self.page_alone = alone = tokens.take(where.start, where.stop)._replace(positions=jnp.asarray(local))
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
        page, backbone = self.form.page, self.backbone
        width = input_width(self.tokens)
        return ChunkCosts(backbone.forward_costs, backbone.layout, page.stop - page.start, page.start, width)

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
            placed.append(dict(kvp.apply_patch(kvp.Placed(chunk, given.get(place), int(start), antecedent))))
        return {name: jnp.concatenate([piece[name] for piece in placed], axis=2) for name in placed[0]}

    def splice(self) -> SplicedCache:
        """Makes what token repairs of the page start from: the cache of moved canonicals."""
        page, count = self.form.page, len(self.contexts)
        slots = jnp.asarray(np.tile(np.arange(page.start, page.stop), (count, 1)))
        own = self.tokens.take(page.start, page.stop)
        return SplicedCache(own, self.cache(), slots, conditioned=self.cut(self.conditioned, -1))

    def as_page(self) -> Any:
        """Makes what `evals.probes.other_ways` takes: this page, in front of it the sheets' moved canonicals."""
        last, page = self.form.chunks - 1, self.form.page
        scene = types.SimpleNamespace(
            backbone=self.backbone, images=[self.page_alone], page=page, contexts=self.contexts, form=self.form
        )
        return types.SimpleNamespace(
            scene=scene,
            page=self.page,
            page_conditioned=self.cut(self.conditioned, -1),
            delta=self.delta,
            tokens=self.tokens,
            engine=self.cache(),
            costs=self.costs,
            patch=functools.partial(self.patch, last),
            cache=lambda patch: self.cache({last: patch}),
            splice=self.splice,
        )

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
