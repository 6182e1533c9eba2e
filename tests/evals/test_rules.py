"""The rules are read as they are written, what beats a patch is found by them, and seeds are meant over."""

import json
import math

import pytest

from evals.report.comparison import smallest_rank
from evals.report.seeds import seeds_sentence, seeds_table, tables_of
from evals.results.beating import beating, on_every_axis, pareto_front
from evals.results.headline import headline, headline_rows, is_headline, smallest_rank_of_mean
from evals.results.rows import Rows, as_row
from evals.rules import PATH, RULES, read_rules

PROBE = "repair.visible"


def results(arms, model="one"):
    """{arm: (stored, serving, chain, aggregate)} as the rows of a run."""
    rows = []
    for arm, numbers in arms.items():
        metrics = ("stored_bytes", "serving_flops", "accuracy.chain", "accuracy.aggregate")
        rows += [as_row(PROBE, model, arm, metric, value) for metric, value in zip(metrics, numbers, strict=True)]
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
    found = beating(Rows(results(ARMS)), "patch.rank=8")
    assert {(beats.arm, beats.axis) for beats in found} == {
        ("quantised.bits=2", "stored_bytes"),
        ("chosen.budget=0.05", "stored_bytes"),
        ("better", "stored_bytes"),
        ("better", "serving_flops"),
    }
    assert next(beats.arm for beats in found if beats.axis == "stored_bytes") == "chosen.budget=0.05"
    assert on_every_axis(found) == ["better"]
    assert beating(Rows(results({"patch.rank=8": ARMS["patch.rank=8"]})), "patch.rank=8") == []


def test_the_front_of_an_axis():
    assert pareto_front(Rows(results(ARMS)), "serving_flops", "chain") == ["worse", "patch.rank=4", "better"]


def test_means_over_seeds():
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
    assert is_headline(tables)
    assert not is_headline({name: tables[name] for name in RULES.headline_backbones[:2]})
    rows = Rows({"rows": headline_rows(tables, "mean")})
    assert rows.get(PROBE, "blind", "accuracy.chain").n == 3
    assert smallest_rank_of_mean(tables) is None
    whole = {name: results(ARMS, name)["rows"] for name in RULES.headline_backbones}
    assert smallest_rank_of_mean(whole) == 8
    assert all(math.isfinite(spread.mean) for spread in headline(whole).values())


def test_the_headline_in_words():
    """Each seed's own rows alone, not its control's; an arm that one seed lacks is left out."""
    runs = []
    for name, chain in zip(RULES.headline_backbones, (0.2, 0.5, 0.6), strict=True):
        rows = [
            as_row(PROBE, name, arm, f"accuracy.{kind}", chain)
            for arm in ("blind", "re-prefill")
            for kind in ("chain", "aggregate")
        ]
        rows.append(as_row(PROBE, f"{name}_no_window", "blind", "accuracy.chain", 0.9))
        runs.append({"config": {}, "environment": {}, "rows": rows})
    runs[0]["rows"] += [as_row(PROBE, RULES.headline_backbones[0], "first_k.budget=0.15", "accuracy.chain", 0.3)]
    tables = tables_of(runs)
    assert set(tables) == set(RULES.headline_backbones)
    text = seeds_table(tables, ["re-prefill", "blind", "first_k.budget=0.15"])
    assert "| blind reuse | 0.433 (0.200 to 0.600) | 0.433 (0.200 to 0.600) |" in text
    assert "first-k" not in text
    assert "over 3 training seeds" in seeds_sentence(tables)
