"""The window's benchmarks: their arithmetic and oracles on a tiny random model."""

from typing import Any

import numpy as np
import pytest

from evals.bench import window, window_pretrained
from evals.bench.banded_mask import banded_mask, history
from evals.bench.checkpoints import random_backbone, shape_costs, tiny_config
from evals.bench.window import break_even
from evals.bench.window_loop import PrefixCache, divergence
from evals.bench.window_pretrained import SlideSizes, TextSlides
from evals.texts.corpus import documentation
from kvpatch_jax.errors import InputError
from kvpatch_jax.window import Costs
from models import ModelBackbone

SIZES = SlideSizes(chunk=8, window=3, steps=2, scored=4, ranks=(4,), removal_ranks=(4,))


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return random_backbone(tiny_config("Qwen2ForCausalLM"))


def test_a_history_says_who_was_in_the_window_by_counting():
    spans, window, lead = [3, 2, 4, 3], 2, 5
    segments = history(spans, window, lead, asked=[3])
    chunks = {segment.index: segment for segment in segments if segment.kind == "chunk"}
    assert [chunks[number].start for number in range(4)] == [5, 8, 10, 14]
    for number, chunk in chunks.items():
        seen = [segments[place] for place in chunk.sees]
        assert [other.index for other in seen if other.kind == "chunk"] == list(range(max(0, number - 1), number))
        (front,) = (other for other in seen if other.kind == "lead")
        assert front.start + lead == chunks[max(0, number - 1)].start  # right in front of the window
    question = segments[-1]
    assert question.start == 17
    assert [(segments[place].kind, segments[place].index) for place in question.sees] == [
        ("lead", 2),
        ("chunk", 2),
        ("chunk", 3),
    ]

    counts = [lead if segment.kind == "lead" else 2 for segment in segments]
    mask = banded_mask(segments, counts)
    assert mask[-1].sum() == lead + 2 + 2 + 2
    assert mask[-2].sum() == lead + 2 + 2 + 1
    assert not mask[:, -2:][:-2].any()  # nobody sees the question


@pytest.mark.slow
@pytest.mark.parametrize("lead", [0, 5])
def test_kept_survivors_are_the_model_under_the_banded_mask(backbone: ModelBackbone, lead: int):
    drawn = np.random.default_rng(3).integers(3, 290, (2, SIZES.tokens)).astype(np.int32)
    records = list(TextSlides(backbone, drawn, np.arange(7, 7 + lead, dtype=np.int32), SIZES).run())
    kl = {}
    for record in records:
        kl.setdefault((record["arm"], record["against"]), []).append(record["kl"])
    assert max(kl["kept", "remember"]) < 1e-5
    assert max(map(abs, kl["re-prefill", "forget"])) < 1e-6
    assert min(kl["re-prefill", "remember"]) > 1e-4  # the two meanings differ, or nothing was shown
    assert np.mean(kl["blind", "forget"]) > np.mean(kl["canonical, patch of rank 4", "forget"])
    assert np.mean(kl["kept", "forget"]) > np.mean(kl["kept, removal patch of rank 4", "forget"])
    assert (("canonicals behind the lead", "forget") in kl) == bool(lead)


class ConstantSlides:
    """Records without a forward."""

    def __init__(self, backbone: None, streams: np.ndarray, lead: np.ndarray, sizes: SlideSizes):
        self.kl, self.steps = (len(lead) - streams[:, 0] * 1e-6).tolist(), range(1, sizes.steps + 1)

    def run(self):
        for step in self.steps:
            for row, kl in enumerate(self.kl):
                for arm, against in (("kept", "remember"), ("kept", "forget"), ("blind", "forget")):
                    yield {
                        "row": row,
                        "step": step,
                        "arm": arm,
                        "against": against,
                        "kl": kl,
                        "flips": 0.5,
                        "loss": 2.0,
                    }


def test_a_run_resumes_its_parts_and_refuses_others(monkeypatch, tmp_path):
    monkeypatch.setattr(window_pretrained, "TextSlides", ConstantSlides)
    texts = {f"{number}.py": np.full(4, number) for number in range(3)}
    config = {"rows": 2, "model": "tiny"}
    arguments = (None, texts, np.array([7, 8], np.int32), SIZES)
    (tmp_path / window_pretrained.PARTS).write_text('{"config": {"ro')  # stopped before the first part
    first = window_pretrained.measure(*arguments, config, tmp_path, 1)
    with (tmp_path / window_pretrained.PARTS).open("a") as file:
        file.write('{"part": ["no lead", 0], "records": [{"fro')  # stopped while it was written
    whole = window_pretrained.measure(*arguments, config, tmp_path, 0)
    assert whole[: len(first)] == first
    assert window_pretrained.measure(*arguments, config, tmp_path, 0) == whole
    parts = {(record["front"], record["first"]) for record in whole}
    assert parts == {(front, first) for front in ("pinned lead", "no lead") for first in (0, 2)}

    result = window_pretrained.summary(whole, config)
    assert {row["n"] for row in result["rows"]} == {3 * SIZES.steps}
    passed = {(row["probe"], row["metric"]): row["passed"] for row in result["rows"] if "passed" in row}
    assert passed == {
        ("window, pinned lead, remember", "largest KL"): False,
        ("window, pinned lead, forget", "mean KL"): False,
        ("window, no lead, remember", "largest KL"): True,
    }
    assert "| kl | window, no lead, forget | blind |" in window_pretrained.BENCHMARK.format(result)
    with pytest.raises(ValueError, match="holds parts of another"):
        window_pretrained.measure(*arguments, config | {"model": "another"}, tmp_path, 0)


def test_documentation_is_a_modules_long_strings(tmp_path):
    long = ("word " * 50).strip()
    (tmp_path / "module.py").write_text(f'"""{long}"""\n\ndef f():\n    """Short."""\n\nclass C:\n    """{long}C"""\n')
    found = documentation(tmp_path / "module.py")
    assert found == f"{long}\n\n{long}C"


def test_a_prefix_cache_hits_whole_blocks_of_what_it_saw():
    cache = PrefixCache(block=4)
    prompt = lambda *names: [(name, index) for name in names for index in range(6)]
    assert cache.hit(prompt("lead", "a", "b")) == 0
    assert cache.hit(prompt("lead", "a", "b")) == 16  # of 18, in blocks of 4
    assert cache.hit(prompt("lead", "a", "b", "c")) == 16
    assert cache.hit(prompt("lead", "b", "c")) == 4  # slid: the lead's whole block
    assert cache.hit(prompt("b", "c")) == 0
    assert cache.hit(prompt("lead")[:4]) == 0  # the last token always runs


def test_break_even_is_what_was_spent_over_what_a_reuse_saves():
    cost = {"prefill in the window": 10.0, "patch placed": 2.0, "canonical": 6.0, "factors formed": 4.0}
    found = break_even(cost)
    assert found["canonical stored"] == pytest.approx(14 / 8)
    assert found["no canonical yet"] == pytest.approx(20 / 8)
    assert found["formed from traffic, canonical stored"] == pytest.approx(4 / 8)
    assert break_even(cost | {"patch placed": 11.0})["canonical stored"] == float("inf")


def test_divergence_is_zero_of_itself_and_counts_flips():
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    assert divergence(logits, logits) == (pytest.approx(0.0, abs=1e-6), False)
    found = divergence(logits, logits[::-1].copy())
    shares = np.exp(logits) / np.exp(logits).sum()
    assert found == (pytest.approx(float((shares * (logits - logits[::-1])).sum()), rel=1e-5), True)


def test_edits_of_a_slide_grow_with_survivors_and_those_of_a_recall_do_not():
    result = window.measure_lengths((1, 3, 9))
    rows = {(row["operation"], row["chunks"]): row for row in result["rows"]}
    rotated = 2 * 2 * 24 * 2 * 64 * window.TOKENS  # read and written, bfloat16 keys of 24 layers and two heads
    for count in (1, 3, 9):
        assert rows["slide", count]["bytes"] == rotated * (count - 1)
        assert rows["recall", count]["bytes"] == rows["recall", 1]["bytes"] > 0
        assert rows["append", count]["flops"] > rows["append", max(1, count // 3)]["flops"] or count == 1
    assert [row["passed"] for row in window.length_rows(result)[:2]] == [True, True]


def test_costs_of_a_shape_are_those_of_its_backbone(backbone: ModelBackbone):
    assert shape_costs(backbone.fingerprint, tiny_config("Qwen2ForCausalLM")) == Costs.of(backbone)


def test_rows_judge_the_worst_flops_and_leave_out_what_warms_up():
    entry = lambda step, arm, seconds: {
        "step": step,
        "arm": arm,
        "seconds": seconds,
        "warm_up": step == 1,
        "forget": {"kl": 0.1, "flip": 1.0},
        "remember": {"kl": 1e-7, "flip": 0.0},
    }
    names = ("window", "re-prefill", "prefix hit", "prefix cache")
    seconds = dict(zip(names, (3.0, 8.0, 2.0, 7.0), strict=True))
    compared = [entry(step, arm, seconds[arm]) for step in (1, 2) for arm in names]
    compared[0]["seconds"] = 100.0
    loop = {"seconds": 1.0, "forwards": 3, "compilations": 2, "ledger": {"Prefill": {"bytes": 2_000_000}}}
    step = {"kinds": {"Prefill": {"padded_flops": 33}}}
    part = {
        "config": {"backbone": "tiny", "window": 1},
        "flops": {"window": [9, 31, 33], "bar": [9, 30, 30], "re-prefill": [9, 62, 66], "prefix cache": [9, 31, 33]},
        "cold": loop,
        "warm": loop | {"steps": [step] * 3},
        "compared": compared,
    }
    found = {row["metric"]: row for row in window.loop_rows(part)}
    flops = found["FLOPs over prefilling image and question"]
    assert (flops["value"], flops["passed"], flops["n"]) == (pytest.approx(1.1), False, 2)
    assert (found["time over a prefix hit's"]["value"], found["time over a prefix hit's"]["passed"]) == (1.5, False)
    assert found["time of re-prefill over ours"]["value"] == pytest.approx(8 / 3)
    assert "passed" not in found["time of re-prefill over ours"]  # judged at 16 images of the 0.5B shape alone
    assert found["warm loop: MB of KV moved"]["value"] == 2.0
    rows = window.rows_of({"loop, tiny": part})
    assert "| time over a prefix hit's | loop, tiny | 1.5 |" in window.BENCHMARK.format({"rows": rows})


def test_parts_of_another_configuration_are_refused(monkeypatch, tmp_path):
    """Before anything is measured."""

    def measured(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(window, "measure_lengths", measured)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            window.run(out=str(tmp_path), quick=True, repeats=5)
    options: dict[str, Any] = {"out": str(tmp_path), "quick": True, "repeats": 5}
    for other in ({"quick": False}, {"seed": 1}, {"repeats": 3}):
        changed: dict[str, Any] = options | other
        with pytest.raises(InputError, match="holds parts of another"):
            window.run(**changed)


@pytest.mark.slow
def test_the_suite_runs_and_keeps_its_parts(tmp_path):
    result = window.run(repeats=1, out=str(tmp_path), quick=True)
    found = {row["metric"]: row for row in result["rows"]}
    assert found["FLOPs over prefilling image and question"]["passed"]
    assert found["KL to what the window promises (remember)"]["passed"]
    assert found["warm loop: programs compiled"]["value"] == 0
    assert found["warm loop: forwards"]["value"] == 8 + 1  # images, a question with each, and the lead
    assert found["recall by a patch: FLOPs of re-prefill over ours"]["value"] > 5
    assert found["recall by a patch: KL to a prefill in the window"]["value"] < 1e-3
    window.BENCHMARK.write(result, tmp_path)
    assert (tmp_path / "bench_window.json").stat().st_size > 10_000
    again = window.run(repeats=1, out=str(tmp_path), quick=True)
    assert again["parts"] == result["parts"]
