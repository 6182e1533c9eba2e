"""MPIC's insights and VLCache's schedules: probes against NumPy, schedules against all, the page against its rows."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals.bench import prompt_reuse as bench
from evals.bench.checkpoints import qwen2_config, random_backbone
from evals.prompt_reuse import document, insights, recomputed, suite
from evals.prompt_reuse.contexts import load_prompts
from evals.report.documents import block
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import RepairBudget, mpic, vlcache
from tests.compiled_flops import hlo_flops

ROOT = Path(__file__).parents[2]
TINY = qwen2_config(32, 64, heads=4, layers=3, kv_heads=2, vocabulary=64)
SHAPE = bench.PromptShape(2, 24, 10)


@pytest.fixture(scope="module")
def published():
    return json.loads((ROOT / document.KEPT).read_text())


def test_the_page_shows_the_published_rows(published):
    page = ROOT / document.PAGE
    for mark, text in document.section(published).items():
        assert block(text, page, mark) == page.read_text()


def test_published_greedy_schedules_are_within_five_percent_of_the_optimum(published):
    sums = {
        (row["model"], row["arm"]): row["value"]
        for row in published["rows"]
        if row["probe"] == "schedule" and row["metric"] == "sum"
    }
    assert len(sums) == 2 * len(recomputed.STATIC) * len(published["config"]["plan"]["tasks"])
    for (task, name), value in sums.items():
        assert value <= 1.05 * sums[task, name.replace("greedy", "optimal")]


def test_published_methods_spend_less_than_a_quarter_of_reprefill(published):
    rows = [row for row in published["bench"] if "FLOPs" in row["metric"] and "bar" in row]
    assert {row["model"] for row in rows} >= {"7B", "0.5B"}
    assert all(row["passed"] for row in rows if "20 of text" in row["prompt"])


# ------------------------------------------------------------------------------------------------------------ probes


def test_attention_to_an_image_is_described_as_by_hand():
    rng = np.random.default_rng(0)
    scores = rng.exponential(size=(2, 3, 4, 40)) ** 4
    weights = scores / scores.sum(axis=-1, keepdims=True)
    found = insights.attention_insights(weights, slice(5, 25))
    for layer, row in itertools.product(range(2), range(3)):
        own = weights[layer, row].mean(axis=0)[5:25]
        own = own / own.sum()
        assert found.above[row, layer] == pytest.approx(sum(own > 1e-3) / 20)
        assert found.above_scaled[row, layer] == pytest.approx(sum(own > 1176e-3 / 20) / 20)
        assert found.first[row, layer] == pytest.approx(own[: round(20 * 500 / 1176)].sum())
        assert found.tenth[row, layer] == pytest.approx(own[:2].sum())
        ranks = [(head[5] > head).sum() / 40 for head in weights[layer, row]]
        assert found.rank[row, layer] == pytest.approx(np.mean(ranks))


def test_layers_are_counted_where_a_token_is_among_those_that_differ_most():
    rng = np.random.default_rng(1)
    before, behind = ({"k": rng.standard_normal((5, 2, 30, 2, 4)).astype(np.float32)} for _ in range(2))
    found = insights.key_rank_layers(before, behind, "k", 0.1)
    for row in range(2):
        counts = np.zeros(30)
        for layer in range(5):
            apart = behind["k"][layer, row].astype(np.float64) - before["k"][layer, row]
            counts[np.argsort(-np.linalg.norm(apart.reshape(30, -1), axis=1))[:3]] += 1
        np.testing.assert_allclose(found[row], counts / 5)


def test_ratios_that_recompute_the_same_tokens_are_one():
    ratios = recomputed.distinct_ratios([28, 66])
    counts = [tuple(int(ratio * size + 1e-9) for size in (28, 66)) for ratio in ratios]
    assert len(set(counts)) == len(counts)
    assert counts[0] == (0, 1)
    assert counts[-1] == (8, 19)
    menu = recomputed.menu_of([28, 66])
    assert set(menu) <= set(ratios)
    assert len(menu) == len(recomputed.STEPS)


def test_tokens_of_either_side_are_those_of_every_image():
    parts = [(0, 10), (12, 32)]
    assert recomputed.side_tokens(parts, 0.1, True).tolist() == [0, 12, 13]
    assert recomputed.side_tokens(parts, 0.1, False).tolist() == [9, 30, 31]


def test_no_proxies_or_no_images_are_refused(unchecked_shapes):
    with pytest.raises(InputError, match="proxies: got none"):
        recomputed.sensitivity_of([], [0.1])
    with pytest.raises(InputError, match="sizes: got no images"):
        recomputed.menu_of([])
    with pytest.raises(InputError, match="none larger than the one below it"):
        vlcache(
            random_backbone(TINY), bench.drawn_splice(random_backbone(TINY), SHAPE, 0), RepairBudget(by_layer=(0.1,))
        )


@pytest.fixture
def unchecked_shapes():
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.slow
def test_a_small_run_measures_every_row_and_resumes(tmp_path):
    from evals.runner import run_recorded

    results = run_recorded(suite.dataset(suite.QUICK), tmp_path)
    for table in (
        document.insights_table,
        document.sensitivity_table,
        document.schedules_table,
        document.sides_table,
    ):
        head, lines = table(results)
        assert len(lines) > 1
        assert all(len(line) == len(head) for line in lines)

    def loaded_again(task: str) -> Any:
        raise AssertionError(task)

    assert run_recorded(suite.dataset(suite.QUICK, loaded_again), tmp_path)["rows"] == results["rows"]


@pytest.mark.slow
def test_first_tokens_that_are_recomputed_are_right_where_nothing_in_front_is_wrong():
    """The first image has nothing in front, so that its first tokens are what a prefill gives."""
    prompts = load_prompts("sheets", suite.load_backbone("sheets"), 0, 0, 2)
    mended = vlcache(prompts.backbone, prompts.splice, 0.3).cache
    for name, true in prompts.reference.items():
        np.testing.assert_allclose(np.asarray(mended[name])[:, :, :8], np.asarray(true)[:, :, :8], atol=2e-4, rtol=2e-4)


# ------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    ("repair", "budget"), [(mpic, RepairBudget(tokens=4)), (vlcache, RepairBudget(by_layer=(0.5, 0.25, 0.25)))]
)
def test_flops_that_are_counted_are_those_of_the_compiled_program(repair, budget):
    backbone = random_backbone(TINY)
    splice = bench.drawn_splice(backbone, SHAPE, 0)

    def serve(own):
        repaired = repair(backbone, own, budget)
        return repaired.cache, repaired.logits

    program = jax.jit(serve).lower(splice).compile()
    executed = hlo_flops(program.as_text() or "")
    assert executed > 0
    assert repair(backbone, splice, budget).flops == executed


def test_the_benchmark_counts_shapes_as_repairs_count_themselves():
    backbone = random_backbone(TINY)
    splice = bench.drawn_splice(backbone, SHAPE, 0)
    for method in (bench.MPIC_8, bench.VLCACHE, bench.REPREFILL):
        counted = bench.reuse_flops(TINY, SHAPE, method)
        assert counted == method.repair(backbone, splice, method.budget).flops
        assert method.repair(backbone, splice, method.budget).cache[backbone.layout.names[0]].dtype == jnp.float32


def test_timed_rows_hold_the_single_step_to_its_bar():
    rows = bench.timed_rows("tiny", random_backbone(TINY), SHAPE, 2, 0, False)
    judged = [row for row in rows if "bar" in row]
    assert [row["metric"] for row in judged] == ["seconds of MPIC-32 / two-step full reuse's"]
    assert judged[0]["sense"] == "at most"
    assert all(row["value"] > 0 for row in rows)
