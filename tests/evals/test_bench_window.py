"""The window's benchmarks: their arithmetic and oracles on a tiny random model."""

import numpy as np
import pytest

from evals.bench import window, window_lengths, window_pretrained, window_texts
from evals.bench.checkpoints import LARGE, random_backbone, tiny_config
from evals.bench.window_break_even import break_even
from evals.bench.window_loop import PrefixCache, divergence
from evals.bench.window_oracle import banded_mask, history
from evals.bench.window_slides import Slides, Trial
from kvpatch_jax.errors import InputError
from models import FAMILIES, ModelBackbone
from models.decoder.costs import forward_costs

TRIAL = Trial(chunk=8, window=3, steps=2, scored=4, ranks=(4,), removal_ranks=(4,))


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
    drawn = np.random.default_rng(3).integers(3, 290, (2, TRIAL.tokens)).astype(np.int32)
    records = list(Slides(backbone, drawn, np.arange(7, 7 + lead, dtype=np.int32), TRIAL).run())
    kl = {}
    for record in records:
        if "arm" in record:
            kl.setdefault((record["arm"], record["against"]), []).append(record["kl"])
    assert max(kl["kept", "remember"]) < 1e-5
    assert max(map(abs, kl["re-prefill", "forget"])) < 1e-6
    assert min(kl["re-prefill", "remember"]) > 1e-4  # the two meanings differ, or nothing was shown
    assert np.mean(kl["blind", "forget"]) > np.mean(kl["canonical, patch of rank 4", "forget"])
    assert np.mean(kl["kept", "forget"]) > np.mean(kl["kept, removal patch of rank 4", "forget"])
    assert (("canonicals behind the lead", "forget") in kl) == bool(lead)


class Pretended:
    """Records without a forward."""

    def __init__(self, backbone: None, streams: np.ndarray, lead: np.ndarray, trial: Trial):
        self.kl, self.steps = (len(lead) - streams[:, 0] * 1e-6).tolist(), range(1, trial.steps + 1)

    def run(self):
        for step in self.steps:
            yield {"step": step, "append_seconds": 1.0, "forget_seconds": 4.0}
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


def test_parts_are_gone_on_from_and_others_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(window_pretrained, "Slides", Pretended)
    texts = {f"{number}.py": np.full(4, number) for number in range(3)}
    config = {"rows": 2, "model": "tiny"}
    arguments = (None, texts, np.array([7, 8], np.int32), TRIAL)
    (tmp_path / window_pretrained.PARTS).write_text('{"config": {"ro')  # stopped before the first part
    first = window_pretrained.measured(*arguments, config, tmp_path, 1)
    with (tmp_path / window_pretrained.PARTS).open("a") as file:
        file.write('{"part": ["no lead", 0], "records": [{"fro')  # stopped while it was written
    whole = window_pretrained.measured(*arguments, config, tmp_path, 0)
    assert whole[: len(first)] == first
    assert window_pretrained.measured(*arguments, config, tmp_path, 0) == whole
    parts = {(record["front"], record["first"]) for record in whole}
    assert parts == {(front, first) for front in ("pinned lead", "no lead") for first in (0, 2)}

    result = window_pretrained.summary(whole, config)
    assert {row["n"] for row in result["rows"]} == {3 * TRIAL.steps}
    within = {bar["what"].partition(":")[0]: bar["within"] for bar in result["bars"]}
    assert within == {
        "kept, pinned lead, against the banded mask": False,
        "kept, pinned lead, against re-prefill": False,
        "kept, no lead, against the banded mask": True,
    }
    assert result["cpu_seconds_per_stream_and_step"] == {"append_seconds": 0.5, "forget_seconds": 2.0}
    assert "| no lead, forget | blind |" in window_pretrained.table(result)
    with pytest.raises(ValueError, match="choose another --out"):
        window_pretrained.measured(*arguments, config | {"model": "another"}, tmp_path, 0)


def test_documentation_is_what_stands_in_a_modules_strings(tmp_path):
    long = ("word " * 50).strip()
    (tmp_path / "module.py").write_text(f'"""{long}"""\n\ndef f():\n    """Short."""\n\nclass C:\n    """{long}C"""\n')
    found = window_texts.documentation(tmp_path / "module.py")
    assert found == f"{long}\n\n{long}C"


def test_a_prefix_cache_hits_whole_blocks_of_what_it_saw():
    cache = PrefixCache(block=4)
    prompt = lambda *names: [(name, each) for name in names for each in range(6)]
    assert cache.hit(prompt("lead", "a", "b")) == 0
    assert cache.hit(prompt("lead", "a", "b")) == 16  # of 18, in blocks of 4
    assert cache.hit(prompt("lead", "a", "b", "c")) == 16
    assert cache.hit(prompt("lead", "b", "c")) == 4  # slid: the lead's whole block
    assert cache.hit(prompt("b", "c")) == 0
    assert cache.hit(prompt("lead")[:4]) == 0  # the last token always runs


def test_break_even_is_what_was_spent_over_what_a_reuse_saves():
    cost = {"prefill behind the window": 10.0, "patch placed": 2.0, "canonical": 6.0, "factors formed": 4.0}
    found = break_even(cost)
    assert found["canonical stored"] == pytest.approx(14 / 8)
    assert found["no canonical yet"] == pytest.approx(20 / 8)
    assert found["formed from traffic, canonical stored"] == pytest.approx(4 / 8)
    assert break_even(cost | {"patch placed": 11.0})["canonical stored"] == float("inf")


def test_divergence_is_zero_of_itself_and_counts_flips():
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    assert divergence(logits, logits) == {"kl": pytest.approx(0.0, abs=1e-6), "flip": 0.0}
    found = divergence(logits, logits[::-1].copy())
    shares = np.exp(logits) / np.exp(logits).sum()
    assert found == {"kl": pytest.approx(float((shares * (logits - logits[::-1])).sum()), rel=1e-5), "flip": 1.0}


def test_edits_of_a_slide_grow_with_survivors_and_those_of_a_recall_do_not():
    result = window_lengths.measure((1, 3, 9), repeats=0)
    rows = {(row["operation"], row["chunks"]): row for row in result["rows"]}
    layout = window_lengths.Unrun().layout
    turned = 2 * 2 * 24 * 2 * 64 * window_lengths.TOKENS  # read and written, bfloat16 keys of 24 layers and two heads
    assert layout.bytes_per_token() == 2 * 24 * 2 * 64 * 2
    for count in (1, 3, 9):
        assert rows["slide", count]["bytes"] == turned * (count - 1)
        assert rows["recall", count]["bytes"] == rows["recall", 1]["bytes"] > 0
        assert rows["append", count]["flops"] > rows["append", max(1, count // 3)]["flops"] or count == 1
    assert [bar["within"] for bar in result["bars"][:2]] == [True, True]


def test_costs_of_the_unrun_backbone_are_those_of_the_same_shape():
    costs = forward_costs(FAMILIES["Qwen2ForCausalLM"].config(LARGE, "exact", None).text)
    assert window_lengths.Unrun().forward_costs == costs


def test_rows_judge_the_worst_flops_and_leave_out_what_warms_up():
    way = lambda step, name, seconds: {
        "step": step,
        "way": name,
        "seconds": seconds,
        "cpu": seconds,
        "warm_up": step == 1,
        "forget": {"kl": 0.1, "flip": 1.0},
        "remember": {"kl": 1e-7, "flip": 0.0},
    }
    names = ("window", "re-prefill", "prefix hit", "prefix cache", "canonical")
    compared = [
        way(step, name, second)
        for step in (1, 2)
        for name, second in zip(names, (3.0, 8.0, 2.0, 7.0, 1.0), strict=True)
    ]
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
    found = {row["what"]: row for row in window.loop_rows(part)}
    flops = found["FLOPs over image behind the window and question"]
    assert (flops["value"], flops["within"], flops["n"]) == (pytest.approx(1.1), False, 2)
    assert (found["time over a prefix hit's"]["value"], found["time over a prefix hit's"]["within"]) == (1.5, False)
    assert found["time of re-prefill over ours"]["value"] == pytest.approx(8 / 3)
    assert "within" not in found["time of re-prefill over ours"]  # judged at 16 images of the 0.5B shape alone
    assert found["warm loop: MB of KV moved"]["value"] == 2.0
    assert "| loop, tiny | time over a prefix hit's | 1.5 |" in window.table({"parts": {"loop, tiny": part}})


def test_parts_of_a_quick_look_are_no_measurement(tmp_path):
    config = {"seed": 0, "repeats": 5, "quick": True}
    assert window.kept_parts(tmp_path / "new" / "folder", config) == {}
    window.keep_parts(tmp_path, config, {"lengths": {"rows": []}})
    assert window.kept_parts(tmp_path, config) == {"lengths": {"rows": []}}
    for other in ({"quick": False}, {"seed": 1}, {"repeats": 3}):
        with pytest.raises(InputError, match="choose another --out"):
            window.kept_parts(tmp_path, config | other)

    file = tmp_path / window.PARTS
    whole = file.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"[]", b"\xff", b'{"lengths": {}}'):
        file.write_bytes(broken)
        with pytest.raises(InputError, match="not a file of parts"):
            window.kept_parts(tmp_path, config)
        assert file.read_bytes() == broken  # whatever it is, it is not ours to delete
    for name in (window.PARTS, f"{window.PARTS}/below"):
        with pytest.raises(InputError, match="expected a folder"):
            window.kept_parts(tmp_path / name, config)
    with pytest.raises(SystemExit, match=r"error: .*choose another --out"):
        window.run(out=str(tmp_path), quick=True)


@pytest.mark.slow
def test_the_suite_runs_and_keeps_its_parts(tmp_path):
    result = window.run(repeats=1, out=str(tmp_path), quick=True)
    found = {row["what"]: row for row in window.rows(result["parts"])}
    assert found["FLOPs over image behind the window and question"]["within"]
    assert found["KL to what the window promises (remember)"]["within"]
    assert found["warm loop: programs compiled"]["value"] == 0
    assert found["warm loop: forwards"]["value"] == 8 + 1  # images, a question with each, and the lead
    assert found["recall by a patch: FLOPs of re-prefill over ours"]["value"] > 5
    assert found["recall by a patch: KL to a prefill behind the window"]["value"] < 1e-3
    assert (tmp_path / "window_lengths.png").stat().st_size > 10_000
    again = window.run(repeats=1, out=str(tmp_path), quick=True)
    assert again["parts"] == result["parts"]
