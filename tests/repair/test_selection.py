"""Each method recomputes exactly the tokens that its paper's definition selects, row by row and layer by layer.

`DEFINITIONS` has the definition of every method that selects tokens a second time, in NumPy. Add a new method's there.
"""

import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.repair import (
    METHODS,
    RATIOS,
    PromptPiece,
    RepairBudget,
    best_schedule,
    canonical_of,
    logit_error,
    recomputed_sensitivity,
    reordered_by_question,
    splice_prompt,
)
from kvpatch_jax.repair.positions import chunk_scores, placed_for_scoring
from kvpatch_jax.repair.question_attention import infoflow_layers, question_scores
from tests.repair.slow_decoder import SlowDecoder
from tests.repair.splices import (
    ASKED,
    BEFORE,
    CHUNK,
    LAYERS,
    NEW,
    ROWS,
    SPARE,
    changed,
    error,
    make_splice,
    prefilled,
    text_tokens,
    tiny_backbone,
)
from tests.shared.arrays import placed

SIZE, PAGE = BEFORE + CHUNK + SPARE, 2
CHUNK_SLOTS, DEEP = slice(BEFORE, BEFORE + CHUNK), (2, 3)
"""Slots of the chunk; of four layers, those at .55 to .65 of the depth, which are also the last two."""


class SlowRow:
    """One row of a splice for the slow decoder."""

    def __init__(self, decoder: SlowDecoder, splice: Any, expected: dict[str, np.ndarray], row: int):
        self.decoder, self.row = decoder, row
        self.keys, self.values = (np.asarray(splice.cache[name], np.float64)[:, row] for name in ("k", "v"))
        self.true = tuple(np.asarray(expected[name], np.float64)[:, row] for name in ("k", "v"))
        self.start = np.asarray(splice.tokens.embeddings, np.float64)[row]
        self.places = BEFORE + np.arange(CHUNK)
        self.question = np.asarray(splice.question.embeddings, np.float64)[row]

    def rerun(self, written, first=0, last=None, residual=None, caches=None):
        keys, values = (self.keys.copy(), self.values.copy()) if caches is None else caches
        residual = self.start if residual is None else residual
        return self.decoder.run(residual, self.places, self.places, keys, values, written, first, last), keys, values

    def two_layers(self):
        """All tokens run through two layers: what the methods with a check at layer 1 have seen."""
        return self.rerun(np.repeat((np.arange(LAYERS) < 2)[:, None], CHUNK, 1), last=2)

    def deviation(self, fresh, layer: int) -> np.ndarray:
        """‖fresh − spliced‖ over each channel's typical norm, keys and values together (CacheBlend)."""
        score = np.zeros(CHUNK)
        for new, old in zip(fresh, (self.keys, self.values), strict=True):
            new, old = new[layer, CHUNK_SLOTS], old[layer, CHUNK_SLOTS]
            score += np.sqrt(((new - old) ** 2).sum((1, 2))) / np.sqrt((new**2).sum((1, 2)).mean())
        return score

    def question_pass(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The question's attention [Q,N,S] over the cached keys that it sees, and its queries [Q,N,H], by layer."""
        room = np.zeros((LAYERS, ASKED, *self.keys.shape[2:]))
        keys, values = np.concatenate([self.keys, room], 1), np.concatenate([self.values, room], 1)
        positions, slots = BEFORE + CHUNK + np.arange(ASKED), SIZE + np.arange(ASKED)
        seen, written = np.ones(SIZE + ASKED, bool), np.ones((LAYERS, ASKED), bool)
        seen[BEFORE + CHUNK : SIZE] = False
        _, maps, queries = self.decoder.run(self.question, positions, slots, keys, values, written, seen=seen)
        return [*maps.values()], [*queries.values()]


def cacheblend(row: SlowRow, count: int) -> np.ndarray:
    _, keys, values = row.two_layers()
    return row.deviation((keys, values), 1)


def cacheblend_gradual(row: SlowRow, count: int) -> np.ndarray:
    # Checks at layers 1 and 2 of four: half more tokens than wanted go through layer 2, and of them the best stay.
    (residual, _, _), keys, values = row.two_layers()
    survivors = np.argsort(-row.deviation((keys, values), 1), kind="stable")[: int(np.ceil(1.5 * count))]
    written = np.zeros((LAYERS, CHUNK), bool)
    written[2, survivors] = True
    row.rerun(written, 2, 3, residual, (keys, values))
    # Scores are relative to the typical norm of all tokens, fresh where they were run.
    return np.where(written[2], row.deviation((keys, values), 2), -np.inf)


def kvshare(row: SlowRow, count: int) -> np.ndarray:
    (_, _, queries), keys, _ = row.two_layers()
    fresh, old = (row.decoder.attend(queries[1], cache[1], row.places) for cache in (keys, row.keys))
    return np.abs(fresh - old).sum((0, 1))[CHUNK_SLOTS]


def infoflow(row: SlowRow, count: int, reading: str = "mean") -> np.ndarray:
    """The question's attention [Q,N,S] of two layers: its mean over heads in sum, or its norm over queries or both."""
    maps = [row.question_pass()[0][layer] for layer in DEEP]
    readings = {
        "mean": lambda map: map.mean(1).sum(0),
        "norm": lambda map: np.sqrt((map.mean(1) ** 2).sum(0)),
        "head_norm": lambda map: np.sqrt((map**2).sum((0, 1))),
    }
    return np.sum([readings[reading](map) for map in maps], axis=0)[CHUNK_SLOTS]


def prophetkv(row: SlowRow, count: int) -> np.ndarray:
    masses = [layer.mean(1).sum(0)[CHUNK_SLOTS] for layer in row.question_pass()[0]]
    return np.mean([mass / mass.sum() for mass in masses], axis=0)


def quest(row: SlowRow, count: int) -> np.ndarray:
    _, queries = row.question_pass()
    pages = [np.arange(first, min(first + PAGE, CHUNK)) + BEFORE for first in range(0, CHUNK, PAGE)]
    votes, share = np.zeros(len(pages)), np.zeros(len(pages))
    for layer, head in np.ndindex(LAYERS, queries[0].shape[1]):
        keys = row.keys[layer, :, head // row.decoder.group]
        for query in queries[layer][:, head] / np.sqrt(row.decoder.width):
            bound = np.array([np.maximum(query * keys[p].min(0), query * keys[p].max(0)).sum() for p in pages])
            votes += bound >= np.sort(bound)[-min(-(-count // PAGE), len(pages))]
            raised = np.exp(bound - bound.max())
            share += raised / raised.sum()
    # Ties go to the page with the larger share, and on a page to the first tokens.
    return np.repeat(votes + share / share.sum() / 2, PAGE)[:CHUNK] - 1e-9 * np.arange(CHUNK)


def oracle_delta(row: SlowRow, count: int) -> np.ndarray:
    return np.sum([row.deviation(row.true, layer) for layer in range(LAYERS)], axis=0)


class Definition(NamedTuple):
    """Scores of tokens, highest first; and how many layers run all tokens before they are chosen."""

    scores: Callable[[SlowRow, int], np.ndarray]
    whole: int = 0
    settings: Mapping[str, Any] = types.MappingProxyType({})


DEFINITIONS = {
    "first_k": Definition(lambda row, count: -np.arange(CHUNK, dtype=float)),
    "vlcache": Definition(lambda row, count: -np.arange(CHUNK, dtype=float)),
    "random_tokens": Definition(lambda row, count: np.random.default_rng((0, row.row)).random(CHUNK, np.float32)),
    "oracle_delta": Definition(oracle_delta),
    "cacheblend": Definition(cacheblend, 2),
    "cacheblend_gradual": Definition(cacheblend_gradual, 2),
    "kvshare": Definition(kvshare, 2),
    "infoflow": Definition(infoflow),
    "infoflow norm": Definition(lambda row, count: infoflow(row, count, "norm"), settings={"reading": "norm"}),
    "infoflow head_norm": Definition(
        lambda row, count: infoflow(row, count, "head_norm"), 2, {"reading": "head_norm", "whole_layers": 2}
    ),
    "prophetkv": Definition(prophetkv),
    "quest": Definition(quest, settings={"page": PAGE}),
}


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize(
    ("seeds", "counts"),
    [((102,), (3,)), pytest.param(range(100, 124), (1, 2, 3, 5, 7), marks=pytest.mark.nightly)],
    ids=["few", "many"],
)
def test_the_chosen_tokens_are_the_papers(backbone, name, seeds, counts):
    definition, decoder, undecided = DEFINITIONS[name], SlowDecoder(backbone.parameters, backbone.config), 0
    for seed in seeds:
        splice, expected = make_splice(backbone, seed=seed)
        splice = splice.replace(length=np.full(ROWS, CHUNK))
        for count in counts:
            method = METHODS[name.split()[0]]
            chosen = np.asarray(method(backbone, splice, RepairBudget(tokens=count), **definition.settings).chosen)
            sizes = [CHUNK if layer < definition.whole else count for layer in range(LAYERS)]
            if name == "cacheblend_gradual":
                sizes[2] = min(CHUNK, int(np.ceil(1.5 * count)))
            assert chosen.sum(-1).tolist() == [[size] * ROWS for size in sizes]
            assert not (chosen[1:] & ~chosen[:-1]).any()
            for row in range(ROWS):
                score = definition.scores(SlowRow(decoder, splice, expected, row), count)
                order = np.argsort(-score, kind="stable")
                # A tie within float32's rounding may go either way.
                if score[order[count - 1]] - score[order[count]] < 1e-5 * abs(score[order[0]]) and name != "quest":
                    undecided += 1
                else:
                    assert set(np.flatnonzero(chosen[-1, row])) == set(order[:count].tolist()), (seed, count, row)
    assert undecided <= len(seeds) * len(counts) * ROWS // 10


def test_prcr_shows_the_question_the_tokens_that_infoflow_would_run_and_runs_none(backbone, spliced):
    splice, _ = spliced
    budget = RepairBudget(tokens=3)
    repaired, chosen = (
        METHODS["prcr"](backbone, splice, budget),
        METHODS["infoflow"](backbone, splice, budget).chosen[0],
    )
    expected = np.asarray(splice.seen).copy()
    expected[:, CHUNK_SLOTS] = chosen
    np.testing.assert_array_equal(repaired.visible, expected)
    assert not repaired.chosen.any()
    for name, value in splice.cache.items():
        np.testing.assert_array_equal(repaired.cache[name], value)


def test_channels_of_unlike_size_weigh_alike(backbone, spliced):
    """Keys that are off by all of themselves outrank values that are off by half, however large values are."""
    splice, _ = spliced
    splice = splice.replace(cache={"k": splice.cache["k"], "v": 30.0 * splice.cache["v"]})
    share = {"k": np.repeat([0.0, 1.0], [5, 3]), "v": np.repeat([0.5, 0.0], [3, 5])}
    canonical = canonical_of(backbone.layout, splice)
    recorded = {name: value * (1 + share[name][:, None, None]) for name, value in canonical.items()}
    repaired = METHODS["oracle_delta"](backbone, splice.replace(recorded=recorded), RepairBudget(tokens=3))
    assert repaired.chosen[:, :, 5:].all()


PROMPT = {
    "mpic": (RepairBudget(tokens=2), {}, [[2, 2]]),
    "first_k": (RepairBudget(share=0.5), {}, [[3, 5]]),
    "attention_sink": (None, {}, [[4, 4]]),
    "vlcache": (0.4, {"schedules": {0.4: (0.6, 0.6, 0.1, 0.1)}}, [[3, 5], [3, 5], [0, 0], [0, 0]]),
}


@pytest.mark.parametrize("name", PROMPT)
def test_new_text_and_the_first_tokens_of_each_chunk_of_a_prompt_are_run(prompt, name):
    backbone, splice, _, _ = prompt
    budget, settings, counts = PROMPT[name]
    if "schedules" in settings:
        schedule = settings["schedules"][0.4][: backbone.layout.layers]
        settings, counts = {"schedules": {0.4: schedule}}, counts[: len(schedule)]
    chosen = np.asarray(METHODS[name](backbone, splice, budget, **settings).chosen)
    for layer in range(backbone.layout.layers):
        tokens = [*NEW]
        for (first, _), count in zip(splice.chunks, counts[min(layer, len(counts) - 1)], strict=True):
            tokens.extend(range(first, first + count))
        assert all(np.flatnonzero(row).tolist() == sorted(tokens) for row in chosen[layer])


# ---------------------------------------------------------------------------------------------- where tokens are scored

LENGTHS, STARTS = (5, 7, 4), (0, 5, 12)


@pytest.fixture(scope="module")
def chunks(kind) -> Any:
    """Three cached chunks behind one another, and a question, of one row."""
    backbone, row = tiny_backbone(kind), lambda tree, axis=0: jax.tree.map(lambda leaf: np.take(leaf, [1], axis), tree)
    tokens = text_tokens(backbone, np.random.default_rng(3).integers(0, 300, (ROWS, sum(LENGTHS) + ASKED)))
    pieces = []
    for start, length in zip(STARTS, LENGTHS, strict=True):
        part = tokens.take(start, start + length)
        kv = prefilled(backbone, part._replace(positions=part.positions - start)).kv
        pieces.append(PromptPiece(row(part), row(kv, 1)))
    question = row(tokens.take(sum(LENGTHS), sum(LENGTHS) + ASKED))
    return backbone, splice_prompt(backbone, pieces).replace(question=question), pieces


@pytest.mark.parametrize(
    ("geometry", "starts", "asked"),
    [("global", [0, 5, 12], 16), ("hl_hp", [0, 0, 0], 7), ("hl_tp", [0, 0, 0], 16), ("tl_tp", [11, 9, 12], 16)],
)
def test_geometries_place_chunks_and_question_as_infoflow_says(chunks, geometry, starts, asked):
    backbone, splice, pieces = chunks
    question, cache = placed_for_scoring(backbone.layout, splice, geometry)
    assert np.asarray(question.positions).reshape(ASKED, -1)[0, 0] == asked
    for piece, place, start, length in zip(pieces, STARTS, starts, LENGTHS, strict=True):
        moved = kvp.to_engine(backbone.layout, piece.kv, np.asarray(piece.tokens.positions) - place, start)
        for name, value in moved.items():
            assert error(np.asarray(cache[name])[:, :, place : place + length], value) <= 1e-5


def test_the_chunk_that_the_question_looks_at_most_is_served_last(chunks):
    """The new order is the splice that would have been made of it."""
    backbone, splice, pieces = chunks
    score = np.zeros((1, sum(LENGTHS)))
    score[:, [0, 1, 2]], score[:, [6, 7]], score[:, 12:] = 1.0, (5.0, 0.5), -np.inf  # the last are padding
    np.testing.assert_allclose(chunk_scores(splice, placed(score), 0.25), [[1.0, 5.5, 0.0]])

    mass = np.asarray(question_scores(backbone, splice, geometry="hl_tp"))[0]
    order = np.argsort([mass[start : start + length].sum() for start, length in zip(STARTS, LENGTHS, strict=True)])
    moved, start, parts = reordered_by_question(backbone, splice, share=1.0), 0, []
    for number in order.tolist():
        piece = pieces[number]
        positions = np.asarray(piece.tokens.positions) + start - STARTS[number]
        parts.append(PromptPiece(piece.tokens._replace(positions=positions), piece.kv))
        start += LENGTHS[number]
    expected = splice_prompt(backbone, parts)
    assert moved.chunks == expected.chunks != splice.chunks
    np.testing.assert_array_equal(moved.tokens.positions, expected.tokens.positions)
    np.testing.assert_array_equal(moved.tokens.embeddings, expected.tokens.embeddings)
    for name, value in expected.cache.items():
        assert error(moved.cache[name], value) <= 1e-5


# ------------------------------------------------------------------------------------------------ VLCache's schedules


def optimum(sensitivity: np.ndarray, ratios: list[float], target: float) -> float:
    """The least sum over every schedule that does not increase with depth and keeps to the target."""
    least = np.inf
    for steps in itertools.combinations_with_replacement(range(len(ratios) - 1, -1, -1), len(sensitivity)):
        if sum(ratios[step] for step in steps) <= target + 1e-12:
            least = min(least, sum(sensitivity[layer, step] for layer, step in enumerate(steps)))
    return least


@given(st.integers(0, 2**32 - 1), st.booleans())
@example(0, False)
def test_the_best_schedule_is_the_optimum(seed, falling):
    rng = np.random.default_rng(seed)
    layers, count = rng.integers(1, 6), rng.integers(2, 7)
    ratios = np.sort(rng.choice(RATIOS, count, replace=False)).tolist()
    sensitivity = rng.random((layers, count))
    if falling:
        sensitivity = np.sort(sensitivity, axis=1)[:, ::-1] * rng.random((layers, 1))
    target = float(rng.uniform(layers * ratios[0], layers * ratios[-1]))
    schedule = best_schedule(sensitivity, ratios, target)
    assert len(schedule) == layers
    assert list(schedule) == sorted(schedule, reverse=True)
    assert sum(schedule) <= target + 1e-9
    total = sum(sensitivity[layer, ratios.index(ratio)] for layer, ratio in enumerate(schedule))
    assert total == pytest.approx(optimum(sensitivity, ratios, target), rel=1e-9)


def test_sensitivity_is_the_mean_loss_of_one_layer_recomputed_as_while_serving(backbone, spliced):
    """The tokens run through the layers below as served, and only their KV at the one layer is new."""
    splice, expected = spliced
    caches, losses = [], (3.0, 5.0)

    def loss(number, cache):
        caches.append(cache)
        return losses[number] + len(caches)

    result = recomputed_sensitivity(backbone, [splice, splice], [0.0, 0.5], loss)
    # Each proxy's reused cache is measured once, then each layer of the one ratio that runs any token.
    np.testing.assert_allclose(result[:, 0], 4.0 + (1 + 6) / 2)
    np.testing.assert_allclose(result[:, 1], 4.0 + (np.arange(2, 6) + np.arange(7, 11)) / 2)
    for layer, cache in enumerate(caches[1 : 1 + LAYERS]):
        differs = changed(cache, splice.cache)
        assert differs[layer, :, : CHUNK // 2].all() == (layer > 0)  # layer 0 does not depend on the antecedent
        assert not differs[np.arange(LAYERS) != layer].any()
        assert not differs[:, :, CHUNK // 2 :].any()
    # Layer 0 of the cache is that of a prefill, so that what enters layer 1 is, too.
    tokens = slice(BEFORE, BEFORE + CHUNK // 2)
    for name, value in expected.items():
        assert error(caches[2][name][1, :, tokens], value[1, :, tokens]) <= 1e-5
    assert logit_error(np.array([1.0, 2.0]), np.array([1.5, 4.0])) == pytest.approx((0.25 + 4) / 2)


def test_infoflow_scores_with_the_layers_of_the_paper():
    layers = lambda count, *reading: infoflow_layers(kvp.KVLayout.gqa(count, 1, 8, kvp.Rope(1e4, 8)), *reading)
    assert layers(40) == (22, 23, 24, 25, 26)
    assert layers(40, "head_norm") == (38, 39)
    assert layers(1) == (0,)
