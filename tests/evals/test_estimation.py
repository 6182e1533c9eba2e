"""Estimates of deficits: definitions against slow transcriptions, exact cases, and nothing that sees the truth."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import spearmanr

import kvpatch_jax as kvp
from evals.arms.reused_page import ReusedPage, cut
from evals.estimation import document, fitting, negatives, similarity, structure, suite
from evals.estimation.arms import estimators
from evals.estimation.coefficients import DeepForward, RecomputedSample, SingleAntecedents, nearest_sampled
from evals.estimation.contexts import FITTED, MEASURED, QUICK, load_contexts
from evals.estimation.estimate import FirstTokens, explained, oracle_in_directions, oracle_patch
from evals.estimation.fitting import KernelSettings, SharedDirections
from evals.estimation.served_chunk import MeasuredChunk, ServedChunk, energy, flat, served_of
from evals.report.documents import block
from evals.results import intervals
from evals.results.costs import ChunkCosts
from evals.runner import run_recorded
from evals.small_task import scenes, task
from evals.trained import shipped
from kvpatch_jax.backbone import ForwardCosts, LayerAttention, Tokens
from models import load

L, B, T, S, H, D = 4, 3, 12, 6, 3, 6
LAYOUT = kvp.KVLayout(
    "gqa",
    L,
    (kvp.Channel("k", 2, H, 0), kvp.Channel("v", 2, H, 0)),
    kvp.Rope(theta=10000.0, dim=2),
)


class ConstructedChunk(ServedChunk):
    """A served chunk whose forwards return what a test puts there, by method."""

    def behind_others(self, front, by=0):
        return self.backbone.behind(self, front, by)

    def lower_layers(self, stop):
        delta = self.backbone.truth[int(self.front_positions[0, 0])]
        return {name: np.where(np.arange(L)[:, None, None, None, None] < stop, own, 0) for name, own in delta.items()}

    def upper_layers(self, start):
        delta = self.backbone.truth[int(self.front_positions[0, 0])]
        return {name: np.where(np.arange(L)[:, None, None, None, None] >= start, own, 0) for name, own in delta.items()}

    def recomputed(self, index):
        delta = self.backbone.truth[int(self.front_positions[0, 0])]
        written = np.zeros((len(index), T), bool)
        np.put_along_axis(written, index, True, axis=1)
        return {name: np.where(written[None, :, :, None, None], own, 0) for name, own in delta.items()}


def constructed(number: int, deficit, backbone: Any) -> MeasuredChunk:
    """Makes a batch with random canonicals and the deficit that `deficit(canonical [L,B,T,F], rng)` gives."""
    rng = np.random.default_rng(number)
    canonical = {name: rng.standard_normal((L, B, T, 2, H)).astype(np.float32) for name in ("k", "v")}
    backbone.truth[number] = split(deficit(flat(canonical), rng))
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    tokens = Tokens(jnp.zeros((B, T, D)), positions, None)
    costs = ChunkCosts(ForwardCosts((1000,) * L, (10,) * L, (0,) * L, 1), LAYOUT, T, S, D)
    front = {name: rng.standard_normal((L, B, S, 2, H)).astype(np.float32) for name in ("k", "v")}
    served = ConstructedChunk(
        backbone=backbone,
        tokens=tokens,
        alone=tokens,
        canonical=canonical,
        front=front,
        front_positions=np.full((B, S), number),
        pieces=(cut(front, slice(2)), cut(front, slice(2, S))),
        costs=costs,
    )
    conditioned = {name: canonical[name] + own for name, own in backbone.truth[number].items()}
    return MeasuredChunk(served, conditioned, no_answers, lambda: np.ones((B, T)), {}, np.arange(B))


def no_answers(kv: Any) -> Any:
    """Stands for questions where none are asked."""
    pytest.fail("asked a question")


def split(delta: np.ndarray) -> dict[str, np.ndarray]:
    """Splits features [L,B,T,F] into the layout's channels."""
    return {
        name: own.reshape(L, B, T, 2, H).astype(np.float32)
        for name, own in zip(("k", "v"), np.split(delta, 2, axis=-1), strict=True)
    }


def stub_backbone(**methods: Any) -> Any:
    return SimpleNamespace(layout=LAYOUT, fingerprint="stub", truth={}, **methods)


def whole_directions() -> SharedDirections:
    """Directions that span everything."""
    identity = np.broadcast_to(np.eye(2 * H, dtype=np.float32), (L, 2 * H, 2 * H))
    return SharedDirections({"k": identity, "v": identity}, {"k": 2, "v": 2})


def share_explained(found: Any, measured: MeasuredChunk) -> float:
    error, whole = explained([found.delta], [measured.delta])
    return float(1 - error.sum() / whole.sum())


# ------------------------------------------------------------------------------------------------- definitions


def slow_fewest(values: np.ndarray, share: float) -> int:
    if values.sum() == 0:
        return 0
    held, count = 0.0, 0
    for value in sorted(values, reverse=True):
        held, count = held + value, count + 1
        if held >= share * values.sum():
            break
    return count


def test_the_fewest_values_that_hold_a_share_are_counted():
    rng = np.random.default_rng(0)
    values = rng.random((200, 9)) ** 4
    values[0] = 0
    assert structure.fewest_holding(values).tolist() == [slow_fewest(row, 0.9) for row in values]


def test_landmark_keys_are_those_that_receive_the_attention_of_all_tokens_and_heads():
    rng = np.random.default_rng(1)
    B, T, S, N, K, behind = 2, 5, 9, 4, 2, 4
    query, keys = rng.standard_normal((B, T, N, H)), rng.standard_normal((B, S, K, H))
    allowed = np.arange(S) <= behind + np.arange(T)[:, None]
    attention = LayerAttention(
        jnp.asarray(query, jnp.float32),
        jnp.asarray(keys, jnp.float32),
        jnp.asarray(np.broadcast_to(allowed, (B, 1, T, S))),
        0.7,
    )
    found = structure.link_reducer(behind)(attention)

    weights = np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        scores = [0.7 * query[b, t, n] @ keys[b, s, n // (N // K)] if allowed[t, s] else -np.inf for s in range(S)]
        weights[b, n, t] = np.exp(scores) / np.exp(scores).sum()
    link = weights[..., :behind]
    np.testing.assert_allclose(found["by_key"], link.sum(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(found["by_token"], link.sum(axis=-1).mean(axis=1), rtol=1e-5)
    for b, n in np.ndindex(B, N):
        assert int(found["by_head"][b, n]) == slow_fewest(link[b, n].sum(axis=0), 0.9)
        assert int(found["rank"][b, n]) == slow_fewest(np.linalg.svd(link[b, n], compute_uv=False) ** 2, 0.9)


def test_recall_is_the_share_of_the_true_best_that_was_chosen():
    rng = np.random.default_rng(2)
    scores, truth = rng.random((20, 17)), rng.random((20, 17))
    slow = []
    for own, true in zip(scores, truth, strict=True):
        chosen, wanted = (set(sorted(range(17), key=lambda t, of=of: -of[t])[:4]) for of in (own, true))
        slow.append(len(chosen & wanted) / 4)
    np.testing.assert_allclose(structure.recall(scores, truth, 0.25), slow)
    assert structure.recall(truth, truth, 0.25).min() == 1


@pytest.mark.parametrize("heads", [2, 1])
def test_cells_hold_the_energy_of_their_layer_and_head(heads):
    rng = np.random.default_rng(3)
    delta = {name: rng.standard_normal((L, B, T, heads, H)).astype(np.float32) for name in ("k", "v")}
    cells = structure.cell_energy(delta)
    assert cells.shape == (B, L, 2)
    for b, layer, number in np.ndindex(cells.shape):
        if heads == 2:
            slow = sum((own[layer, b, :, number].astype(float) ** 2).sum() for own in delta.values())
        else:
            # One head a channel: each channel is a cell.
            slow = (delta["kv"[number]][layer, b].astype(float) ** 2).sum()
        assert cells[b, layer, number] == pytest.approx(slow)

    kept = structure.within_cells(delta, structure.best_cells(cells, 0.25))
    best = np.sort(cells.reshape(B, -1), axis=1)[:, -2:].sum(axis=1)
    np.testing.assert_allclose(energy(kept).sum(axis=1), best, rtol=1e-5)


def test_measures_of_likeness_are_what_their_names_say():
    rng = np.random.default_rng(4)
    first, second = (rng.integers(0, 256, (2, 4, 5, 3)).astype(np.uint8) for _ in range(2))
    a, b = first[1].astype(float).ravel(), second[1].astype(float).ravel()
    assert similarity.motion(first, second)[1] == pytest.approx(sum(abs(a - b)) / len(a) / 255)
    cosine = np.corrcoef(a, b)[0, 1]
    assert similarity.frame_similarity(first, second)[1] == pytest.approx(cosine)
    assert similarity.motion(first, first).max() == 0
    assert similarity.frame_similarity(first, first) == pytest.approx(1)
    x, y = rng.standard_normal((2, 2, 3, 4))
    assert similarity.embedding_difference(x, y)[0] == pytest.approx(
        np.sqrt(((x[0] - y[0]) ** 2).sum() / (y[0] ** 2).sum())
    )


def test_rank_correlations_equal_spearmans_and_resample_clusters():
    rng = np.random.default_rng(5)
    a = rng.integers(0, 6, 60).astype(float)
    b, cluster = a + rng.standard_normal(60) * 2, np.repeat(np.arange(12), 5)
    found = intervals.rank_correlation(a, b, cluster)
    assert found.value == pytest.approx(spearmanr(a, b)[0])
    assert found.low < found.value < found.high
    assert found.n == 60
    assert np.isnan(intervals.rank_correlation(np.ones(60), b, cluster).value)
    same = intervals.rank_correlation(a, -a, cluster)
    assert (same.value, same.low, same.high) == pytest.approx((-1, -1, -1))


def test_key_similarity_is_the_largest_cosine_with_an_antecedent_key():
    layout = dataclasses.replace(
        LAYOUT, channels=(kvp.Channel("k", 2, 4, 4), kvp.Channel("v", 2, 3, 0)), rope=kvp.Rope(theta=10000.0, dim=4)
    )
    measured = constructed(6, lambda own, rng: own, stub_backbone())
    rng = np.random.default_rng(6)
    free = {name: rng.standard_normal((L, B, S, 2, 4 if name == "k" else 3)).astype(np.float32) for name in "kv"}
    canonical = {name: rng.standard_normal((L, B, T, 2, 4 if name == "k" else 3)).astype(np.float32) for name in "kv"}
    positions = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S))
    served = dataclasses.replace(
        measured.served,
        backbone=SimpleNamespace(layout=layout),
        canonical=canonical,
        front=dict(kvp.to_engine(layout, free, positions, 0)),
        front_positions=positions,
    )
    found = negatives.key_similarity(served)
    for b, t in np.ndindex(B, T):
        best = []
        for layer, head in np.ndindex(L, 2):
            own, others = canonical["k"][layer, b, t, head], free["k"][layer, b, :, head]
            best.append(max(own @ other / np.linalg.norm(own) / np.linalg.norm(other) for other in others))
        assert found[b, t] == pytest.approx(np.mean(best), abs=1e-5)


# ------------------------------------------------------------------------------------------------- exact cases


def test_a_linear_map_is_found_and_a_constant_feature_is_harmless():
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((L, 50, 5)), rng.standard_normal((L, 5, 3))
    x[..., 4] = 2.0
    y = x @ w + 1.0
    found = fitting.fit_linear(x, y, (1e-9,))
    np.testing.assert_allclose(found(x), y, atol=1e-5)
    # Of several penalties that which predicts samples best that were not fitted.
    assert fitting.fit_linear(x, y, (10.0, 1e-9, 1.0)).ridge == 1e-9


def test_a_deficit_in_shared_directions_is_its_coefficients():
    rng = np.random.default_rng(8)
    rows = np.linalg.qr(rng.standard_normal((2, L, 2 * H, 2)))[0].swapaxes(-1, -2).astype(np.float32)
    inside = lambda own, rng: np.concatenate(
        [rng.standard_normal((L, B, T, 2)) @ rows[0][:, None], rng.standard_normal((L, B, T, 2)) @ rows[1][:, None]],
        axis=-1,
    )
    backbone = stub_backbone()
    fitted, measured = [constructed(number, inside, backbone) for number in (1, 2)], constructed(3, inside, backbone)
    directions = fitting.fit_directions(fitted, 2)
    assert share_explained(oracle_in_directions(measured, directions), measured) == pytest.approx(1, abs=1e-5)
    assert share_explained(oracle_patch(measured, 2), measured) == pytest.approx(1, abs=1e-5)
    assert share_explained(oracle_patch(measured, 1), measured) < 0.99
    # The whole forward from layer 0, projected, is then the truth too.
    assert share_explained(DeepForward(0, directions).estimate(measured.served), measured) == pytest.approx(1, abs=1e-5)


def test_an_antecedents_operator_is_exact_where_the_deficit_is_linear_in_the_canonical():
    rng = np.random.default_rng(9)
    maps = rng.standard_normal((B, L, 4 * H, 4 * H))

    def behind(served, front, by):
        canonical = {name: np.roll(own, -by, axis=1) for name, own in served.canonical.items()}
        delta = split(np.einsum("lbtf,blfg->lbtg", flat(canonical), maps))
        return {name: canonical[name] + delta[name] for name in canonical}

    backbone = stub_backbone(behind=behind)
    measured = constructed(9, lambda own, rng: np.einsum("lbtf,blfg->lbtg", own, maps), backbone)
    found = negatives.AntecedentOperator(whole_directions(), 2).estimate(measured.served)
    assert share_explained(found, measured) > 0.999
    # Another antecedent's map would not do: contexts are fitted apart.
    assert maps[0] != pytest.approx(maps[1])


def test_a_shallow_seed_predicts_deep_deficits_that_are_linear_in_it():
    rng = np.random.default_rng(10)
    maps = rng.standard_normal((L, 4 * H, 4 * H))

    def deficit(own, rng):
        seed = rng.standard_normal((B, T, 4 * H))
        return np.stack([seed if layer < 2 else seed @ maps[layer] for layer in range(L)])

    backbone = stub_backbone()
    fitted = [constructed(number, deficit, backbone) for number in range(20, 26)]
    measured = constructed(30, deficit, backbone)
    found = negatives.ShallowSeed(whole_directions(), fitted, 2).estimate(measured.served)
    assert share_explained(found, measured) > 0.999
    for name, own in found.delta.items():
        np.testing.assert_allclose(own[:2], measured.delta[name][:2], atol=1e-6)


def test_an_antecedent_stream_reads_a_deficit_that_is_linear_in_its_state():
    def deficit(own, rng):
        return np.zeros_like(own)

    backbone = stub_backbone()
    everything = [constructed(number, deficit, backbone) for number in range(40, 48)]
    rng = np.random.default_rng(11)
    map_ = rng.standard_normal((12 * H, 4 * H))
    for at, own in enumerate(everything):
        # Set after the fact: the state depends on the antecedents, which are drawn with the chunk.
        delta = split(negatives.stream_features(own.served) @ map_)
        conditioned = {name: own.served.canonical[name] + value for name, value in delta.items()}
        everything[at] = dataclasses.replace(own, conditioned=conditioned)
    *fitted, measured = everything
    found = negatives.AntecedentStream(whole_directions(), fitted).estimate(measured.served)
    assert share_explained(found, measured) > 0.99


def test_samples_represent_every_group_and_spread_what_their_group_absorbed():
    rng = np.random.default_rng(12)
    group = np.stack([rng.permutation(np.repeat(np.arange(3), T // 3)) for _ in range(B)])
    centres = np.eye(4 * H)[:3]

    def deficit(own, rng):
        # Every token of a group has absorbed the same; the canonical tells the groups apart.
        own[...] = 0
        own[...] = centres[group] + 1e-3 * rng.standard_normal(own.shape)
        return rng.standard_normal((L, B, 3, 4 * H))[:, np.arange(B)[:, None], group]

    backbone = stub_backbone()
    measured = constructed(50, deficit, backbone)
    canonical = centres[group] + 1e-3 * rng.standard_normal((L, B, T, 4 * H))
    served = dataclasses.replace(measured.served, canonical=split(canonical))
    index = fitting.spread_tokens(served.features[-1], 3)
    assert all(set(np.take(own, at)) == {0, 1, 2} for own, at in zip(group, index, strict=True))

    found = nearest_sampled(served, served.recomputed(index), index)
    for name, own in found.items():
        np.testing.assert_allclose(own, backbone.truth[50][name], atol=1e-6)
    estimate = RecomputedSample(0.25, "nearest").estimate(served)
    assert share_explained(estimate, measured) == pytest.approx(1)
    assert share_explained(RecomputedSample(0.25, "nothing").estimate(served), measured) < 0.6


def test_kernel_regression_equals_its_definition_and_meets_its_samples():
    rng = np.random.default_rng(13)
    features, index = rng.standard_normal((B, T, 5)), np.array([[0, 3, 7], [1, 2, 9], [4, 5, 11]])
    values = rng.standard_normal((B, 3, 2))
    similar, among = fitting.cosines(features, index)
    found = fitting.spread_values(similar, among, values, KernelSettings(3.0, 1e-9))
    for b in range(B):
        np.testing.assert_allclose(found[b, index[b]], values[b], atol=1e-4)
        unit = features[b] / np.linalg.norm(features[b], axis=1, keepdims=True)
        kernel = np.array([[np.exp(3 * (x @ unit[s] - 1)) for s in index[b]] for x in unit])
        slow = kernel @ np.linalg.inv(kernel[index[b]]) @ values[b]
        np.testing.assert_allclose(found[b], slow, atol=1e-3)


def test_sums_of_single_antecedents_are_exact_where_deficits_add():
    def behind(served, front, by):
        added = flat(front).sum(axis=2, keepdims=True)
        delta = split(np.broadcast_to(added, served.features.shape))
        return {name: served.canonical[name] + delta[name] for name in delta}

    measured = constructed(60, lambda own, rng: own, stub_backbone(behind=behind))
    truth = behind(measured.served, measured.served.front, 0)
    measured = dataclasses.replace(measured, conditioned=truth)
    for rank in (None, 1):
        assert share_explained(SingleAntecedents(rank).estimate(measured.served), measured) == pytest.approx(
            1, abs=1e-5
        )


def test_first_tokens_cost_no_more_than_they_are_given():
    served = constructed(70, lambda own, rng: own, stub_backbone()).served
    for share in (0.0, 0.2, 0.5, 1.0):
        flops = share * served.costs.prefill + served.costs.rotation
        count = FirstTokens(flops).count(served)
        assert served.rerun_flops(np.arange(count)[None]) + served.costs.rotation <= flops
        if count < T:
            assert served.rerun_flops(np.arange(count + 1)[None]) + served.costs.rotation > flops
    assert FirstTokens(2.0 * served.costs.prefill).count(served) == T


# --------------------------------------------------------------------------------------------------- the truth


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> ReusedPage:
    backbone = load(shipped("qwen2_5_vl"), dtype="float32")
    contexts = task.sample_contexts(np.random.default_rng(14), 4)
    return scenes.reused_page(scenes.load_scene(backbone, contexts, tmp_path_factory.mktemp("scene")))


def perturbed(page: ReusedPage) -> ReusedPage:
    """Puts other numbers in the place of all that was computed of the page in context."""
    own = page.slots

    def other(kv: Any) -> dict[str, Any]:
        return {name: jnp.asarray(value).at[:, :, own].add(1.5) for name, value in kv.items()}

    changed = {name: other(getattr(page, name)) for name in ("conditioned", "reference", "front")}
    return dataclasses.replace(page, **changed)


def arrays_of(served: ServedChunk) -> list[np.ndarray]:
    parts = [*served.canonical.values(), *served.front.values(), served.front_positions]
    parts += [value for piece in served.pieces for value in piece.values()]
    for tokens in (served.tokens, served.alone):
        parts += [tokens.embeddings, tokens.positions]
    return [np.asarray(part) for part in parts]


def test_what_estimators_get_does_not_depend_on_the_true_deficit(page):
    before, after = served_of(page), served_of(perturbed(page))
    for first, second in zip(arrays_of(before), arrays_of(after), strict=True):
        np.testing.assert_array_equal(first, second)
    # The truth did change.
    assert not np.array_equal(page.page_conditioned["v"], perturbed(page).page_conditioned["v"])
    fields = {field.name for field in dataclasses.fields(ServedChunk)}
    assert fields == {"backbone", "tokens", "alone", "canonical", "front", "front_positions", "pieces", "costs"}


def test_all_tokens_recomputed_are_the_true_deficit(page):
    served = served_of(page)
    everything = np.broadcast_to(np.arange(served.length), (served.rows, served.length))
    found = served.recomputed(everything)
    for name, value in found.items():
        truth = np.asarray(page.page_conditioned[name]) - np.asarray(served.canonical[name])
        np.testing.assert_allclose(value, truth, atol=1e-4)
    costs = served.costs
    assert served.rerun_flops(everything) == pytest.approx(costs.prefill)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "kimi_vl"])
def test_parts_of_a_forward_are_parts_of_the_truth(name):
    measured = load_contexts(suite.load_backbone(name), name, QUICK, MEASURED)[0]
    served, layers = measured.served, measured.served.backbone.layout.layers
    lower, whole = served.lower_layers(layers // 2), served.upper_layers(0)
    for channel, truth in measured.delta.items():
        np.testing.assert_allclose(lower[channel][: layers // 2], truth[: layers // 2], atol=1e-4)
        assert np.abs(lower[channel][layers // 2 :]).max() < 1e-4
        np.testing.assert_allclose(whole[channel], truth, atol=1e-4)
    assert structure.injected_residual(measured, 0) == pytest.approx(0, abs=1e-4)
    assert structure.injected_residual(measured, layers - 1) == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_no_estimator_sees_the_true_deficit_of_what_it_estimates(page):
    backbone = page.backbone
    fitted = load_contexts(backbone, "qwen2_5_vl", QUICK, FITTED)
    directions = fitting.fit_directions(fitted, QUICK.rank)
    before, after = served_of(page), served_of(perturbed(page))
    count = 0
    for name, estimator in estimators(QUICK, backbone.layout.layers, directions, fitted):
        found = [estimator.estimate(served).delta for served in (before, after)]
        for channel in found[0]:
            np.testing.assert_array_equal(found[0][channel], found[1][channel], err_msg=name)
        count += 1
    assert count > 20


@pytest.mark.slow
def test_a_small_run_writes_its_page(tmp_path):
    plan = dataclasses.replace(QUICK, fitted=4, measured=4)
    data = suite.dataset(["qwen2_5_vl"], plan, suite.load_backbone)
    results = run_recorded(data, tmp_path)
    rows = {(row["arm"], row["metric"]): row["value"] for row in results["rows"]}
    assert rows["oracle: rank 16", "eta.chain"] > 0.95
    assert rows["blind", "eta.chain"] == 0
    assert rows["injection, layer 5", "residual"] == pytest.approx(1, abs=1e-4)
    assert len(document.section(document.summary(results)).splitlines()) > 40


def test_the_page_shows_the_published_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text())
    page = document.ROOT / document.PAGE
    assert block(document.section(kept), page, "estimation") == page.read_text()
