"""The rules are read as they are written, what beats a patch is found by them, and seeds are meant over."""

import json
import math

import pytest

from evals.harness.frame import Rows
from evals.report.comparison import smallest_rank
from evals.report.table import comparison_table
from evals.results.dominance import dominating_arms, on_both, pareto_front
from evals.results.headline import headline, headline_results, headline_rows
from evals.rules import PATH, RULES, read_rules
from tests.evals.made_rows import as_row

PROBE = "repair.visible"


def results(arms, model="one"):
    """{arm: (stored for each, serving, chain, aggregate)} as the rows of a run, no canonicals."""
    rows = []
    for arm, (stored, *numbers) in arms.items():
        metrics = ("serving_flops", "accuracy.chain", "accuracy.aggregate")
        rows += [as_row(PROBE, model, arm, metric, value) for metric, value in zip(metrics, numbers, strict=True)]
        rows += [as_row(PROBE, model, arm, f"stored_bytes.antecedents={count}", stored) for count in (1, 4, 16)]
    return {"config": {}, "rows": rows}


ARMS = {
    "re-prefill": (0.0, 1.0, 0.99, 0.80),
    "blind": (0.0, 0.001, 0.20, 0.20),
    "patch.rank=4": (0.07, 0.005, 0.985, 0.77),
    "patch.rank=8": (0.14, 0.01, 0.99, 0.795),
    "quantised.bits=2": (0.13, 0.02, 0.985, 0.79),
    "chosen.budget=0.05": (0.0, 0.08, 0.99, 0.80),
    "better": (0.14, 0.01, 0.99, 0.80),
    "equal": (0.14, 0.01, 0.99, 0.795),
    "worse": (0.0, 0.0, 0.97, 0.80),
    "class_mean": (0.0, 0.0, 1.0, 1.0),
    "oracle_delta.budget=0.5": (0.0, 0.0, 1.0, 1.0),
}


def test_the_digest_is_of_the_file(tmp_path):
    """Any change of the file is another digest, and a rule that is missing or not known is refused."""
    again = tmp_path / "rules.json"
    again.write_bytes(PATH.read_bytes())
    assert read_rules(again) == RULES
    again.write_bytes(PATH.read_bytes().replace(b"52711", b"52712"))
    assert read_rules(again).digest != RULES.digest
    for change in ({"seed": None}, {"unknown": 1}):
        written = {**json.loads(PATH.read_text()), **change}
        written = {name: value for name, value in written.items() if value is not None}
        again.write_text(json.dumps(written))
        with pytest.raises(TypeError, match=r"seed|unknown"):
            read_rules(again)


def test_a_rank_is_judged_by_the_kinds_of_the_rules():
    """Override questions are shown and decide nothing."""
    found = results(ARMS)
    assert RULES.rank_kinds == ("chain", "aggregate")
    assert smallest_rank(found, PROBE) == 8
    found["rows"] += [as_row(PROBE, "one", "patch.rank=8", "accuracy.override", 0.1)]
    found["rows"] += [as_row(PROBE, "one", "re-prefill", "accuracy.override", 0.9)]
    assert smallest_rank(found, PROBE) == 8


def test_what_beats_the_patch_on_either_axis():
    """Within the tolerance, no dearer on the axis, not its equal; nothing that a server cannot have."""
    found = dominating_arms(Rows(results(ARMS)), "patch.rank=8")
    stored = {f"stored_bytes.antecedents={count}" for count in (1, 4, 16)}
    expected = {(arm, axis) for arm in ("quantised.bits=2", "chosen.budget=0.05", "better") for axis in stored}
    assert {(beats.arm, beats.axis) for beats in found} == {*expected, ("better", "serving_flops")}
    for axis in stored:
        assert next(beats.arm for beats in found if beats.axis == axis) == "chosen.budget=0.05"
        assert on_both(found, axis) == ["better"]
    assert dominating_arms(Rows(results({"patch.rank=8": ARMS["patch.rank=8"]})), "patch.rank=8") == []


def test_the_front_of_an_axis():
    assert pareto_front(Rows(results(ARMS)), "serving_flops", "chain") == ["worse", "patch.rank=4", "better"]


def test_means_over_seeds_leave_out_what_a_seed_lacks():
    """Mean, least and largest, of what every seed has; a seed that lacks a statistic leaves it out."""
    tables = {
        name: results({"blind": (0.0, 0.0, chain, 0.2), "re-prefill": ARMS["re-prefill"]}, name)["rows"]
        for name, chain in zip(RULES.headline_backbones, (0.2, 0.5, 0.6), strict=True)
    }
    tables[RULES.headline_backbones[0]].append(as_row(PROBE, "one", "blind", "kl.chain", 3.0))
    spread = headline(tables)[PROBE, "blind", "accuracy.chain"]
    assert spread == pytest.approx((1.3 / 3, 0.2, 0.6, 3))
    assert str(spread) == "0.433 (0.200 to 0.600 over 3 seeds)"
    assert (PROBE, "blind", "kl.chain") not in headline(tables)
    rows = Rows({"rows": headline_rows(tables, "mean")})
    assert rows.get(PROBE, "blind", "accuracy.chain").n == 3


def of_seeds(found):
    """Results of a run that holds the rows of several models, and config of the first."""
    return {"config": {"model": next(iter(found))}, "rows": [row for rows in found.values() for row in rows]}


def test_the_rank_of_the_mean():
    whole = {name: results(ARMS, name)["rows"] for name in RULES.headline_backbones}
    mean = headline_results(of_seeds(whole))
    assert mean is not None
    assert smallest_rank(mean, PROBE) == 8
    assert all(math.isfinite(row["value"]) for row in mean["rows"])
    assert headline_results(of_seeds({name: whole[name] for name in RULES.headline_backbones[:2]})) is None


def test_the_headline_as_a_table():
    """Each seed's own rows alone, not its control's; an arm that one seed lacks is left out."""
    found = {}
    for name, chain in zip(RULES.headline_backbones, (0.2, 0.5, 0.6), strict=True):
        arms = {arm: (0.0, 0.0, chain, chain) for arm in ("blind", "re-prefill")}
        found[name] = results(arms, name)["rows"]
        found[f"{name}_no_window"] = results({"blind": (0.0, 0.0, 0.9, 0.9)}, f"{name}_no_window")["rows"]
    first = RULES.headline_backbones[0]
    found[first] += results({"first_k.budget=0.15": (0.0, 0.0, 0.3, 0.3)}, first)["rows"]
    mean = headline_results(of_seeds(found))
    assert mean is not None
    assert mean["config"]["seeds"] == list(RULES.headline_backbones)
    assert Rows(mean).arms(PROBE) == ["blind", "re-prefill"]
    head, lines = comparison_table(Rows(mean), ["blind"], ["chain", "aggregate"])
    assert head[:5] == ["way of reuse", "kept, N = 1", "kept, N = 4", "kept, N = 16", "serving FLOPs"]
    assert lines[0][5:7] == ["0.433 (0.200 to 0.600)"] * 2
