"""Contexts whose every image is reused: prefilled alone, moved to its place, and asked packed questions.

The patches are formed with the first sheet at position 0 and served `MOVED` positions further on, so that sheets and
page all stand where nothing of them was computed. Axis letters: B contexts, Q questions, N tokens of a question, M
tokens of all of them, T tokens of the page, n chosen ones, C classes, S keys, L layers, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax import deficit
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import flatten_heads, fold, transition_of
from kvpatch_jax.repair import SplicedCache, repair_everywhere
from models import ModelBackbone

from ..arms.query_aware import marks_of
from ..arms.reused_page import KV, ReusedPage, chunk_of, joined
from ..small_task.prefix import Prefix, positions_behind, prefix_positions
from ..small_task.reader import received_attention
from ..small_task.scenes import log_probabilities
from .packed_answers import PackedAnswers, QuestionItems, groups_of, items_of, joined_answers, read_packed
from .task import KINDS, SheetsContexts, SheetsQuestions
from .task_spec import SHEETS, TaskSpec

MOVED = 37


def move_page(backbone: ModelBackbone, contexts: SheetsContexts, spec: TaskSpec = SHEETS) -> ReusedPage:
    """Prefills every image alone and all of them as one prompt, and places the prompt `MOVED` positions further on."""
    count = len(contexts)
    form, at_zero, images = images_alone(backbone, contexts, spec)
    conditioned, reference, transitions = _conditioned(backbone, at_zero, [tokens for tokens, _ in images])
    moved, _ = prefix_positions(form, np.ones((count, form.chunks), bool), np.full(count, MOVED))
    page = ReusedPage(
        backbone=backbone,
        contexts=contexts,
        form=form,
        chunks=tuple(chunk for _, chunk in images),
        starts=tuple(int(start) for start in MOVED + np.cumsum([0, *form.spans[:-1]])),
        tokens=at_zero._replace(positions=jnp.asarray(moved)),
        alone=images[-1][0],
        conditioned=conditioned,
        reference=dict(kvp.to_engine(backbone.layout, {**conditioned, **reference}, moved, 0)),
        front={},
        transitions=transitions,
    )
    page.front = joined([page.placed(place=place) for place in range(form.chunks)])
    return page


def images_alone(
    backbone: ModelBackbone, contexts: SheetsContexts, spec: TaskSpec = SHEETS
) -> tuple[Prefix, Tokens, list[tuple[Tokens, kvp.Chunk]]]:
    """Prefills every image alone: the prefix's form, its tokens from position 0, and each image's own with its
    canonical, the page last.
    """
    config, settings, count = backbone.config, backbone.image_config, len(contexts)
    form = spec.form_of(config, settings, contexts.size)
    ids, arrays = spec.inputs(config, settings, contexts)
    positions, _ = prefix_positions(form, np.ones((count, form.chunks), bool), np.zeros(count, int))
    at_zero = backbone.embed(ids, positions, **arrays)

    images = []
    for place, (where, own) in enumerate(zip(form.slices, form.chunk_local, strict=True)):
        # The features that a tower adds to deeper layers (Qwen3-VL's DeepStack) belong to the chunk as well.
        local = jnp.asarray(np.broadcast_to(own, (count, *own.shape)))
        alone = at_zero.take(where.start, where.stop)._replace(positions=local)
        name = f"{place}:" + "-".join(map(str, contexts.ink_seed[:2].tolist()))
        images.append((alone, chunk_of(backbone, backbone.prefill(alone).kv, own, name, name)))
    return form, at_zero, images


def _conditioned(backbone: ModelBackbone, whole: Tokens, images: Sequence[Tokens]) -> tuple[KV, KV, tuple[KV, ...]]:
    """Prefills a prefix whole; returns the rows of its phase-free KV, its transition, and that of each chunk's tokens.

    Of a hybrid model every chunk takes a forward of its own behind those in front of it: that alone tells its own
    transition. Of others there are none.

    Args:
      whole: the prefix's tokens. images: each chunk's, with positions from its own start.
    """
    if not backbone.layout.parts:
        return dict(backbone.prefill(whole).kv), {}, ()

    pieces = [dict(kv) for kv in kvp.patching.conditioned(backbone, images)]
    transitions = tuple(transition_of(piece) for piece in pieces)
    rows, composed = joined(pieces), fold(transitions)
    return {name: value for name, value in rows.items() if name not in composed}, composed, transitions


class PackedReader:
    """Reads packed questions from the caches of arms (an `evals.datasets.PageReader`).

    Args:
      probe: name of the one probe.
      page: the reused page.
      questions: those asked of its contexts.
    """

    kinds: tuple[str, ...] = KINDS

    def __init__(self, probe: str, page: ReusedPage, questions: SheetsQuestions):
        self.probes, self.page, self.questions = (probe,), page, questions
        self.backbone, self.form = page.backbone, page.form
        shown, count = np.ones((len(page), self.form.chunks), bool), len(page)
        _, behind = prefix_positions(self.form, shown, np.full(count, MOVED))
        self.behind = positions_behind(self.form, behind, questions.step)
        self.groups = groups_of(questions)

    def read(self, cache: KV, probe: str = "") -> PackedAnswers:
        """Asks all questions over a cache of the prefix."""
        return read_packed(self.backbone, self.questions, self.behind, cache)

    def asked(self, probe: str) -> QuestionItems:
        """Returns the questions as items."""
        return items_of(self.questions)

    # -------------------------------------------------------------------------------- questions that choose tokens

    def attention(self, group: Int[np.ndarray, "Q N"], cache: KV) -> Float[np.ndarray, "L B Q T"]:
        """Measures what attention the page's tokens receive from each question, the mean over heads."""
        tokens, mask = self._asking(group)
        received = received_attention(self.backbone, tokens, cache, mask)[..., self.form.page]
        return received.reshape(*received.shape[:2], *group.shape, -1).sum(axis=3)

    def read_entries(
        self, group: Int[np.ndarray, "Q N"], cache: KV, index: Int[np.ndarray, "B Q n"]
    ) -> Float[np.ndarray, "B M V"]:
        """Reads every question over the sheets and its own entries of the page alone; nothing is run again."""
        tokens, mask = self._asking(group)
        mask[:, 0, :, self.form.page] = np.repeat(marks_of(index, self.page.page.tokens), group.shape[1], axis=1)
        return log_probabilities(self.backbone.prefill(tokens, cache, mask, logits="all").logits)

    def read_recomputed(
        self, group: Int[np.ndarray, "Q N"], cache: KV, index: Int[np.ndarray, "B Q n"]
    ) -> Float[np.ndarray, "B M V"]:
        """Reads every question over a cache of its own, in which its own tokens are recomputed: one row each.

        Tokens that are run again see the moved canonicals of the sheets.
        """
        splice = self.page.splice()
        (count, length), rows = group.shape, len(self.page)

        def repeat(value: Any, axis: int = 0) -> Array:
            return jnp.repeat(jnp.asarray(value), count, axis=axis)

        own, deepstack = splice.tokens, splice.tokens.deepstack
        own = Tokens(repeat(own.embeddings), repeat(own.positions), None if deepstack is None else repeat(deepstack))
        wide = SplicedCache(own, {name: repeat(value, 1) for name, value in cache.items()}, repeat(splice.slots))
        chosen = jnp.asarray(index.reshape(rows * count, -1))
        repaired = dict(repair_everywhere(self.backbone, wide, chosen).cache)

        ids, positions = (
            value[:, group].reshape(rows * count, length, *value.shape[2:])
            for value in (self.questions.ids, self.behind)
        )
        logits = self.backbone.prefill(self.backbone.embed(ids, positions), repaired, logits="all").logits
        return log_probabilities(logits).reshape(rows, count * length, -1)

    def joined_answers(self, parts: Sequence[np.ndarray]) -> PackedAnswers:
        """Puts the answers of all groups into the order of the questions' tokens."""
        return joined_answers(self.questions, self.groups, parts)

    def rerun_flops(self, index: Int[np.ndarray, "B Q n"]) -> int | float:
        """Counts the FLOPs of recomputing one question's tokens, each behind half of the page."""
        costs = self.page.costs
        return costs.forward.flops(index.shape[-1], self.form.page.start + costs.tokens // 2)

    def _asking(self, group: Int[np.ndarray, "Q N"]) -> tuple[Tokens, Bool[np.ndarray, "B 1 M S"]]:
        """Embeds questions and makes their mask: all of the prefix, and each question its own tokens."""
        flat, (count, length) = group.reshape(-1), group.shape
        tokens = self.backbone.embed(self.questions.ids[:, flat], self.behind[:, flat])
        own = np.kron(np.eye(count, dtype=bool), np.tri(length, dtype=bool))
        mask = np.concatenate([np.ones((len(flat), self.form.prefix_tokens), bool), own], axis=1)
        return tokens, np.array(np.broadcast_to(mask, (len(self.page), 1, *mask.shape)))


# ------------------------------------------------------------------------------------------------- the deficit


def class_shares(page: ReusedPage, spec: TaskSpec = SHEETS) -> dict[str, dict[str, Float[np.ndarray, "B L"]]]:
    """Computes, by class and channel with a row per token, the share of ‖Δ‖² over the page's cells that means of each
    class explain.
    """
    # Whatever else is drawn on a page (a title) stands in front of its cells.
    cells = np.flatnonzero(page.form.chunk_ids[-1] == page.form.image_token)[-page.contexts.size.cells :]
    rows = [channel.name for channel in page.page.layout.token_channels]
    delta = {name: np.asarray(flatten_heads(page.delta[name]))[:, :, cells] for name in rows}
    shares: dict[str, dict[str, np.ndarray]] = {}

    for name, classes in spec.classes(page.contexts).items():
        belongs = np.eye(classes.max() + 1, dtype=np.float32)[classes]  # [B, T, C]
        weight = belongs / np.maximum(belongs.sum(axis=1, keepdims=True), 1)
        shares[name] = {}

        for channel, value in delta.items():
            means = np.einsum("btc,lbtf->lbcf", weight, value)
            left = value - np.einsum("btc,lbcf->lbtf", belongs, means)
            whole = np.square(value).sum(axis=(2, 3))
            explained = 1 - np.square(left).sum(axis=(2, 3)) / np.where(whole > 0, whole, 1.0)
            # The first layer's deficit is 0.
            shares[name][channel] = np.where(whole > 0, explained, 0.0).T

    return shares


def energy_ranks(page: ReusedPage) -> dict[str, Int[np.ndarray, "B _"]]:
    """Computes, by channel, how many directions hold 90 % of the deficit's energy, by context and layer."""
    ranks = {}
    for channel, delta in page.delta.items():
        by_context = [deficit.e90({channel: delta[:, row]})[channel] for row in range(len(page))]
        ranks[channel] = np.stack([np.asarray(values) for values in by_context])
    return ranks
