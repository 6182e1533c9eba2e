"""The window's benchmarks: their arithmetic and oracles on a tiny random model."""

import numpy as np
import pytest

from evals.bench import window_pretrained, window_texts
from evals.bench.checkpoints import random_backbone, tiny_config
from evals.bench.window_oracle import banded_mask, history
from evals.bench.window_slides import Slides, Trial
from models import ModelBackbone

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
    long = "word " * 50
    (tmp_path / "module.py").write_text(f'"""{long}"""\n\ndef f():\n    """Short."""\n\nclass C:\n    """{long}C"""\n')
    found = window_texts.documentation(tmp_path / "module.py")
    assert found == f"{long.strip()}\n\n{long}C"
