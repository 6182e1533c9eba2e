"""Figures, report and summary from made-up results."""

import base64
import io
import json
import re
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

from evals import small_task
from evals.harness.frame import Rows
from evals.harness.intervals import UNDEFINED, Interval
from evals.report import comparison, drawing, example, figures, page, summary, verdict
from evals.rules import RULES
from tests.evals.made_rows import as_row

KINDS = ("page", "legend", "chain", "aggregate", "override")
TOP = {"page": 0.97, "legend": 0.99, "chain": 0.96, "aggregate": 0.8, "override": 0.9, "survivor": 0.95, "evicted": 0.3}
LOSS = {"page": 0.002, "legend": 0.0, "chain": 0.5, "aggregate": 0.55, "override": 0.4, "survivor": 0.5, "evicted": 0.1}


def around(value, half=0.02, n=1000):
    return Interval(value, value - half, value + half, n)


class Made:
    """Rows of an imaginary model in which an arm that loses a share `lost` of the gap loses it on every measure."""

    def __init__(self, model):
        self.model, self.rows = model, []
        self.kinds: tuple[str, ...] = KINDS

    def add(self, probe, arm, metric, interval):
        self.rows.append(as_row(probe, self.model, arm, metric, interval))

    def arm(self, probe, arm, lost, share=None):
        for kind in self.kinds:
            down = LOSS[kind] * lost
            self.add(probe, arm, f"accuracy.{kind}", around(TOP[kind] - down))
            self.add(probe, arm, f"difference.{kind}", around(-down, 0.01))
            self.add(probe, arm, f"kl.{kind}", around(4 * LOSS[kind] * lost**1.5, 0.3 * LOSS[kind] * lost**1.5))
            self.add(probe, arm, f"eta.{kind}", around(1 - lost**1.5) if LOSS[kind] else UNDEFINED)
            self.add(probe, arm, f"flip_recover.{kind}", around(1 - lost, n=500))
        if share is not None:
            self.add(probe, arm, "bytes", share)

    def costs(self, probe, arm, stored, work, *, canonical=True):
        """What is kept for each antecedent, an N-th of the canonical with it, and work."""
        for count in (1, 4, 16):
            self.add(probe, arm, f"stored_bytes.antecedents={count}", stored + canonical / count)
        self.add(probe, arm, "serving_flops", work)


def repair_rows(made, probe):
    made.arm(probe, "re-prefill", 0.0)
    made.arm(probe, "blind", 1.0)
    made.arm(probe, "mask_4d", 1.0)
    for power, rank in enumerate((1, 2, 4, 8, 16, 32, 64)):
        made.arm(probe, f"patch.rank={rank}", 0.62 * 0.3**power, 0.018 * rank)
        if power > 1:
            made.arm(probe, f"patch.rotated_frame.rank={rank}", 0.8 * 0.5**power, 0.018 * rank)
    for variant, lost in (("deepest_half", 0.05), ("k_only", 0.95), ("v_only", 0.08)):
        made.arm(probe, f"patch.{variant}.rank=16", lost, 0.15)
    for method, power in (("first_k", 1.0), ("cacheblend", 0.7), ("oracle_delta", 1.3)):
        for budget in (0.1, 0.15, 0.25, 0.5):
            made.arm(probe, f"{method}.budget={budget}", 1 - budget * power)
        for rank in (8, 16):
            made.arm(probe, f"{method}.bytes_of_rank={rank}", 1 - 0.018 * rank * power)
    for arm in dict.fromkeys(row["arm"] for row in made.rows if row["probe"] == probe):
        tokens = arm.startswith(("first_k", "cacheblend", "oracle_delta"))
        made.costs(probe, arm, 0.144 * arm.startswith("patch"), 0.5 if tokens else 0.02)


def made_results():
    made = Made("small")
    repair_rows(made, "repair.visible")
    repair_rows(made, "repair.evicted")
    for arm, lost in (("re-prefill", 0.0), ("transfer", 0.3), ("orbit", 0.08), ("exact", 0.01), ("blind", 1.0)):
        made.arm("reorder", arm, lost)
    made.add("reorder", "order", "relative_order_effect", around(0.31))
    for kind in KINDS:
        made.add("reorder", "orbit", f"orbit_minus_exact.{kind}", around(-0.07 * LOSS[kind], 0.005))
    made.kinds = ("survivor", "evicted", "aggregate")
    for arm, lost in (("re-prefill", 0.0), ("removal", 0.02), ("keep", 0.1), ("blind", 1.0)):
        made.arm("slide", arm, lost)
    made.kinds = KINDS
    made.add("mask", "mask_4d", "probability_difference", 3e-6)
    for turnover in range(4):
        for arm, lost in (("re-prefill", 0.0), ("fresh", 0.01), ("stale", 0.01 + 0.4 * turnover), ("blind", 1.0)):
            made.arm("recall", f"{arm}.turnover={turnover}", lost)
    for layer in range(6):
        for channel, scale in (("k", 0.15), ("v", 0.22)):
            arm = f"layer={layer}.{channel}"
            made.add("deficit", arm, "relative_norm", around(scale * layer))
            made.add("deficit", arm, "e90", around(4 + 10 * scale * layer) if layer else UNDEFINED)
            made.add("deficit", arm, "token_share_90", around(0.5 + layer * scale / 5))
            made.add("deficit", arm, "head_share_90", around(0.6 + layer * scale / 6))
    control = Made("small_no_window")
    control.arm("repair.visible", "re-prefill", 0.0)
    control.arm("repair.visible", "blind", 0.2)
    config = {
        "model": "small",
        "command": "python -m evals.run --seed=11",
        "contexts": 256,
        "seed": 11,
        "training": {"small": {"window": 0.5, "seed": 0, "note": "<b>tied & true</b>"}},
    }
    return {"config": config, "environment": {"jax": "0.0", "cpu": "two cores"}, "rows": made.rows + control.rows}


@pytest.fixture(scope="module")
def results():
    return json.loads(json.dumps(made_results(), allow_nan=False))


@pytest.fixture(scope="module")
def drawn(results, tmp_path_factory):
    return drawing.draw_all(results, tmp_path_factory.mktemp("figures"))


def without(results, probe):
    return results | {"rows": [row for row in results["rows"] if not row["probe"].startswith(probe)]}


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.slow
def test_every_figure_is_drawn(drawn):
    names = [path.stem for path in drawn]
    pareto = ["pareto_kept_1", "pareto_kept_16", "pareto_serving_flops"]
    accuracy = ["rank", "accuracy_visible", "accuracy_evicted"]
    assert names == ["hero", *pareto, *accuracy, "reorder", "slide", "recall", "deficit"]
    assert all(is_png(path) for path in drawn)


@pytest.mark.slow
def test_missing_probes_are_skipped(results, tmp_path):
    nothing = {"config": {}, "environment": {}, "rows": []}
    assert drawing.draw_all(nothing, tmp_path) == []
    assert [path.stem for path in drawing.draw_all(without(results, "re"), tmp_path)] == ["slide", "deficit"]
    for some in (nothing, without(results, "repair"), without(results, "recall"), without(results, "deficit")):
        assert page.write_report(some, [], tmp_path / "report.html", []).read_text().endswith("</html>\n")
        summary.print_summary(some, io.StringIO())


def test_example_shows_every_answer(tmp_path):
    rng = np.random.default_rng(0)
    legends, page = rng.integers(0, 255, (3, 70, 30, 3), np.uint8), rng.integers(0, 255, (100, 100, 3), np.uint8)
    questions = ["chain: fill of cell r3t2", "aggregate: most in row r5"]
    answers = {"re-prefill": ["red", "blue"], "blind": ["green", "red"], "patch.rank=8": ["red", "blue"]}
    marks = [example.Mark(3, 10, 0, 10, 10, "1"), example.Mark(0, 0, 10, 30, 10, "1")]
    seen = (marks, example.swatches())
    path = example.example_figure(legends, page, questions, answers, tmp_path / "e.png", ["red", "blue"], *seen)
    assert is_png(path)
    with pytest.raises(ValueError, match="'blind': got 1; expected 2"):
        example.example_figure(legends, page, questions, {"blind": ["red"]}, path)


def test_the_example_says_and_marks_what_a_person_sees():
    """Every question's words name its row and cell by the colours drawn there; every mark lies on what is asked."""
    contexts = small_task.sample_contexts(np.random.default_rng(3), 1)
    questions = small_task.ask(contexts, np.random.default_rng(4), {"page": 1, "legend": 1, "chain": 2, "aggregate": 1})
    names, side = small_task.COLOUR_NAMES, small_task.CELL_PIXELS
    legends, pages = small_task.render(contexts)
    marks = example.marks_of(contexts, questions)
    asked = [
        example.question_in_words(*(int(x[0, i]) for x in (questions.kind, questions.ask, questions.argument)))
        for i in range(5)
    ]
    for number, text in enumerate(asked):
        mine = [mark for mark in marks if str(number + 1) in mark.word.split(", ")]
        row, cell = int(questions.row[0, number]), int(questions.cell[0, number])
        if row >= 0:
            (page_mark,) = (mark for mark in mine if mark.image == small_task.LEGENDS)
            assert page_mark.top == side * row
            header = pages[0, side * row : side * (row + 1), :side].reshape(-1, 3).astype(int)
            colour = header[header.sum(axis=1) > 150].mean(axis=0)
            assert f"{names[np.abs(small_task.PALETTE - colour).sum(axis=1).argmin()]} row" in text
        if cell >= 0:
            frame = pages[0, side * row, side * (cell + 1) : side * (cell + 2)].mean(axis=0)
            assert f"{names[np.abs(small_task.PALETTE - frame).sum(axis=1).argmin()]} cell" in text
        answer = example.answer_in_words(int(questions.answer[0, number]))
        if text.startswith(("chain", "legend")):
            (row_mark,) = (mark for mark in mine if mark.image < small_task.LEGENDS)
            rows = legends[0, row_mark.image, int(row_mark.top) : int(row_mark.top) + side]
            shown = rows[::2, 20:] if answer.endswith("stripes") else rows[:, 10:20]
            colour = shown.reshape(-1, 3).mean(axis=0)
            assert answer.split()[0] == names[np.abs(small_task.PALETTE - colour).sum(axis=1).argmin()]
    assert [text.split(":")[0] for text in asked] == ["page", "legend", "chain", "chain", "aggregate"]


def test_arms_have_readable_labels():
    assert figures.arm_label("patch.deepest_half.rank=16") == "patch, deepest half, rank 16"
    assert figures.arm_label("first_k.budget=0.15") == "first-k, 15 % of tokens"
    assert figures.arm_label("oracle_delta.bytes_of_rank=8") == "oracle Δ, bytes of rank 8"
    assert figures.family("patch.rotated_frame.rank=4") == "rotated_frame"


def test_the_smallest_rank_within_a_tolerance_is_found(results):
    """0.55 · 0.62 · 0.3ⁿ falls below 0.01 first at n = 3, rank 8; nothing comes within 1e-5."""
    assert comparison.smallest_rank(results, "repair.visible") == 8
    assert comparison.smallest_rank(results, "repair.visible", tolerance=0.2) == 2
    assert comparison.smallest_rank(results, "repair.visible", tolerance=1e-5) is None
    assert comparison.smallest_rank(results, "slide") is None


@pytest.mark.slow
def test_report_reads_offline(results, drawn, tmp_path):
    path = page.write_report(results, drawn, tmp_path / "new" / "report.html", ["a note of ours <here>"])
    text = path.read_text()
    assert text.count("<table") == text.count("</table>")
    assert text.count("data:image/png;base64,") == len(drawn)
    assert base64.b64encode(drawn[0].read_bytes()).decode() in text
    assert not re.search(r"(src|href)=\"(?!data:|#)", text)
    assert "<script" not in text
    assert "a note of ours &lt;here&gt;" in text
    assert "&lt;b&gt;tied &amp; true&lt;/b&gt;" in text
    assert "python -m evals.run --seed=11" in text
    assert "two cores" in text
    assert str(tmp_path) not in text
    for heading in ("Reorder", "Slide", "Recall", "Beside the paper"):
        assert f"{heading}" in text


def test_verdict_is_read_off_the_rows(results):
    """Its figures are the rows' own, and its sentences turn round when the rows do."""
    lost, mended, others = verdict.verdict(results)
    assert "but only 0.460 of chain questions and 0.250 of aggregate questions" in lost
    assert mended.startswith("A patch of rank 8 answers")
    assert mended.endswith("it takes 114 %, 39 % and 21 % of the page's KV for each of N = 1, 4, 16 antecedents.")
    assert "the smallest sufficient rank, within 0.01 of re-prefill on chain, aggregate" in mended
    assert others.startswith("None of the 18 other arms")
    turned = json.loads(json.dumps(results))
    for row in turned["rows"]:
        if row["metric"].startswith("accuracy.") and row["probe"] == "repair.visible" and row["model"] == "small":
            if row["arm"] == "cacheblend.bytes_of_rank=8":
                row["value"] = 0.99
            if row["arm"].startswith("patch.rank="):
                row["value"] = 0.5
            if row["arm"] == "blind":
                row["value"] = TOP[row["metric"].split(".")[1]]
    lost, mended, others = verdict.verdict(turned)
    assert "but only" not in lost
    assert "no rank suffices; the largest tried is within 0.01 of re-prefill on no kind" in mended
    assert "CacheBlend-style" in others
    assert "(bytes for N = 1, 4, 16)" in others
    assert verdict.verdict({"config": {}, "rows": []}) == []


def test_whatever_beats_the_patch_is_in_the_first_table(results):
    """Axis by axis, the cheapest of a family; never what falls short by more than 0.01, nor what is told the answer."""
    assert len(verdict.first_arms(results)) == verdict.ROWS
    made = Made("small")
    for arm, stored, work, lost in (
        ("re-prefill", 0.0, 1.0, 0.0),
        ("blind", 0.0, 0.01, 1.0),
        ("patch.rank=8", 0.14, 0.02, 0.001),
        *((f"first_k.budget={share}", 0.0, share, 1 - share) for share in (0.1, 0.15, 0.25, 0.5)),
        ("magic.tokens=1", 0.0, 0.015, 0.0005),
        ("magic.tokens=5", 0.0, 0.019, 0.0),
        ("choosing.tokens=9", 0.0, 0.3, 0.0),
        ("bits.bits=2", 0.12, 0.001, 0.05),
        ("bits.bits=3", 0.19, 0.001, 0.0),
        ("oracle_delta.budget=0.1", 0.0, 0.01, 0.0),
    ):
        made.arm("repair.visible", arm, lost)
        made.costs("repair.visible", arm, stored, work, canonical=not arm.startswith(("bits", "re-")))
    both = {"config": {}, "rows": made.rows}
    one, four, sixteen, serving = verdict.cost_axes(Rows(both))
    runs, bits = ["choosing.tokens=9", "magic.tokens=1"], "bits.bits=3"
    assert verdict.beating(Rows(both), "patch.rank=8") == {
        one: [bits, *runs],
        four: [bits, *runs],
        sixteen: [*runs, bits],
        serving: [bits, "magic.tokens=1"],
    }
    assert {*runs, bits} <= set(verdict.first_arms(both))
    said = verdict.verdict(both)
    assert "it takes 114 %, 39 % and 20 % of the page's KV for each of N = 1, 4, 16 antecedents" in said[1]
    for arm in (*runs, bits):
        assert figures.arm_label(arm) in said[2]
    table = page.probe_table(Rows(both), "repair.visible", verdict.first_arms(both), few=True)
    assert table is not None
    heads = [head.replace("\u00a0", " ") for head in table.metrics]
    kept = ["kept, N = 1", "kept, N = 4", "kept, N = 16", "serving FLOPs"]
    assert heads[:6] == ["accuracy, chain", "accuracy, aggregate", *kept]


def test_what_undercuts_on_both_axes_need_not_be_the_cheapest_on_one():
    made = Made("small")
    for arm, stored, work, lost in (
        ("re-prefill", 0.0, 1.0, 0.0),
        ("blind", 0.0, 0.01, 1.0),
        ("patch.rank=8", 0.14, 0.02, 0.001),
        ("magic.tokens=1", 0.0, 0.3, 0.0),
        ("magic.tokens=2", 0.1, 0.01, 0.0),
        ("magic.tokens=3", 0.2, 0.001, 0.0),
    ):
        made.arm("repair.visible", arm, lost)
        made.costs("repair.visible", arm, stored, work)
    said = verdict.verdict({"config": {}, "rows": made.rows})[2]
    by = "magic, tokens 2"
    assert said.endswith(f"at once it is undercut for N = 1, 4, 16 by {by}.")


def test_what_needs_no_canonical_undercuts_a_patch_that_serves_one_antecedent():
    """KV(B|A) kept whole or in four bits is a rival with all its bytes, and the patch with its canonical's."""
    made = Made("small")
    for arm, stored, work, canonical in (
        ("re-prefill", 0.0, 1.0, False),
        ("blind", 0.0, 0.001, True),
        ("patch.rank=8", 0.14, 0.02, True),
        ("quantised.bits=4", 0.27, 0.002, False),
        ("quantised.bits=16", 1.0, 0.001, False),
    ):
        made.arm("repair.visible", arm, 1.0 if arm == "blind" else 0.0)
        made.costs("repair.visible", arm, stored, work, canonical=canonical)
    _, mended, others = verdict.verdict({"config": {}, "rows": made.rows})
    assert mended.endswith("; the conditioned KV in 16 bits, which needs no canonical, takes 100 %.")
    bits = "conditioned KV in 4 bits"
    assert others.endswith(
        f"it is undercut for N = 1 by {bits}, conditioned KV in 16 bits; for N = 4 by {bits}; for N = 16 by none."
    )
    assert {"quantised.bits=4", "quantised.bits=16"} <= set(verdict.first_arms({"config": {}, "rows": made.rows}))


def verdicts(results):
    return {claim.about: claim.verdict for claim in comparison.compare(results)}


def test_directions_are_computed(results):
    """The same claims turn round when the measured numbers do."""
    before = verdicts(results)
    assert before["Blind reuse loses multi-hop answers"] == "same direction"
    assert before["One orbit patch does as well as the order's own"] == "same direction"
    turned = json.loads(json.dumps(results))
    for row in turned["rows"]:
        if row["arm"] == "blind" and row["metric"] == "difference.chain":
            row.update(value=0.1, low=0.05, high=0.15)
        if row["arm"] == "orbit" and row["metric"].startswith("eta."):
            row.update(value=0.1, low=0.05, high=0.15)
        if row["arm"] == "order":
            row.update(value=0.01, low=0.0, high=0.02)
    after = verdicts(turned)
    assert after["Blind reuse loses multi-hop answers"] == "differs"
    assert after["One orbit patch does as well as the order's own"] == "differs"
    assert set(verdicts({"config": {}, "rows": []}).values()) == {"not measured"}
    for row in turned["rows"]:
        if row["arm"] == "blind" and row["metric"] == "difference.chain":
            row.update(value=-0.01, low=-0.05, high=0.05)
    assert verdicts(turned)["Blind reuse loses multi-hop answers"] == "undecided"


def test_summary_is_a_dozen_lines(results):
    out = io.StringIO()
    summary.print_summary(results, out, report=Path("out") / "report.html")
    lines = out.getvalue().strip().splitlines()
    assert 10 <= len(lines) <= 16
    assert max(map(len, lines)) <= 120
    text = out.getvalue()
    assert "rank 8" in text
    assert "out/report.html" in text
    for word in ("chain", "aggregate", "blind", "Reorder", "Slide", "Recall"):
        assert word in text
    assert "nan" not in text


def test_bad_results_are_named(tmp_path):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match="'metric'"):
            page.write_report(
                {"rows": [{"probe": "slide", "model": "m", "arm": "keep"}]}, [], tmp_path / "report.html", []
            )
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


SEEDS = RULES.headline_backbones


def seeded() -> dict:
    """A run of three seeds, that of the first with every probe; blind reuse takes most from the first."""
    rows = [{**row, "model": SEEDS[0]} for row in made_results()["rows"] if row["model"] == "small"]
    for seed in SEEDS[1:]:
        made = Made(seed)
        repair_rows(made, "repair.visible")
        rows += made.rows
    for row in rows:
        if (row["probe"], row["arm"], row["metric"]) == ("repair.visible", "blind", "accuracy.chain"):
            row["value"] = {SEEDS[0]: 0.2, SEEDS[1]: 0.5, SEEDS[2]: 0.8}[row["model"]]
    return {**made_results(), "config": {"command": "run", "contexts": 4}, "rows": rows}


@pytest.mark.slow
def test_report_and_console_open_with_the_mean_over_seeds(tmp_path: Path):
    results, out = seeded(), io.StringIO()
    text = page.write_report(results, [], tmp_path / "report.html", []).read_text()
    first = text[: text.index("<nav")]
    assert "0.500 (0.200 to 0.800) of chain questions" in first
    table = text[text.index("<table") : text.index("</table>")]
    assert re.search(r"blind reuse</td><td>0\.500<small>\(0\.200 to 0\.800\)</small>", table)
    summary.print_summary(results, out)
    said = out.getvalue()
    assert "blind 0.500 (0.200 to 0.800)" in said
    assert said.index("0.500 (0.200 to 0.800)") < said.index("blind reuse 0.200")
