"""The report of the sheets task is made of rows: verdict, bars, tables, the guide; instances and their control."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from evals import runner
from evals.datasets import PackedDataset
from evals.report import task_report as report
from evals.report.documents import ROOT, block
from evals.results.headline import headline_rows
from evals.sheets_task import KINDS
from evals.sheets_task.dataset import SHEETS_DATASET
from kvpatch_jax import KVLayout
from kvpatch_jax.core import Rope
from kvpatch_jax.errors import InputError

ARMS = {
    "re-prefill": (1.0, 0.8, 0.0, 1.0),
    "blind": (0.2, 0.1, 0.0, 0.001),
    "patch.rank=4": (0.7, 0.5, 0.09, 0.005),
    "patch.rank=16": (1.0, 0.8, 0.37, 0.02),
    "quantised.bits=2": (1.0, 0.8, 0.14, 0.002),
    "random_tokens.budget=0.15": (0.3, 0.1, 0.0, 0.15),
}


def table(model: str, shift: float) -> list[dict]:
    """Rows of one instance: page and sheet always right, other kinds as ARMS say, the seed's shift on aggregates."""
    rows = []
    add = lambda size, arm, metric, value: rows.append(
        {"probe": f"sheets.{size}", "model": model, "arm": arm, "metric": metric, "value": value}
        | {"low": None, "high": None, "n": 64}
    )
    for size in ("4", "8", "16"):
        for arm, (chain, aggregate, stored, serving) in ARMS.items():
            for kind in KINDS:
                value = {"page": 1.0, "sheet": 1.0, "aggregate": aggregate + shift}.get(kind, chain)
                add(size, arm, f"accuracy.{kind}", value)
            for count in (1, 4, 16):
                add(size, arm, f"stored_bytes.antecedents={count}", stored + (arm != "quantised.bits=2") / count)
            add(size, arm, "serving_flops", serving)
            for reuses in (1, 3, 10):
                add(size, arm, f"serving_flops.reuses={reuses}", serving + 0.9 / reuses)
        for layer in range(4):
            for classes in (*SHEETS_DATASET.visible, "absorbed fill"):
                add(size, f"layer={layer}.v", f"class_mean_share.{classes}", 0.1 * layer + 0.05)
            add(size, f"layer={layer}.v", "e90", layer + 1.0)
    return rows


@pytest.fixture(scope="module")
def results() -> dict:
    """Three seeds and a control that is none."""
    seeds = {f"a_seed{number}": table(f"a_seed{number}", 0.01 * number) for number in range(3)}
    rows = [row for rows in seeds.values() for row in rows] + headline_rows(seeds, "mean") + table("a_no_window", 0.05)
    sizes = {size: f"{size} chunks" for size in ("4", "8", "16")}
    config = {
        "task": "sheets",
        "kind": "sheets",
        "probes": sizes,
        "visible": list(SHEETS_DATASET.visible),
        "model": "mean",
    }
    config |= {
        "questions": dict(SHEETS_DATASET.questions),
        "seeds": list(seeds),
        "seed": 1,
        "contexts": 64,
        "command": "run it",
        "rules": {},
    }
    return {"config": config, "environment": {}, "rows": rows}


def test_verdict_and_bars_are_read_off_the_rows(results: dict):
    """Means of seeds, the control apart; a bar that is missed says so; what beats the patch is named."""
    text = report.markdown(results)
    assert "1.000 of chain questions and 0.810 (0.800 to 0.820) of aggregate questions" in text.replace("\n", " ")
    assert "conditioned KV in 2 bits" in text.replace("\n", " ")
    assert "a_no_window (control, trained without a sliding window): chain 1.000 → 0.200, aggregate 0.850 → 0.150" in (
        text.replace("\n", " ")
    )
    bars = {bar.what.partition(":")[0]: bar for bar in report.bars(results)}
    assert bars["re-prefill, aggregate"].measured == "0.810"
    assert bars["training seeds"].met
    assert bars["smallest rank that suffices"].measured == "16"
    shown = next(bar for bar in report.bars(results) if bar.what.startswith("means over"))
    assert shown.measured == "35 %"
    assert shown.met
    worse = [
        {**row, "value": 0.7} if (row["arm"], row["metric"]) == ("re-prefill", "accuracy.aggregate") else row
        for row in results["rows"]
    ]
    assert "5 are met; not met: re-prefill, aggregate: at least .75 (0.700); smallest rank" in (
        report.markdown({**results, "rows": worse}).replace("\n", " ")
    )
    assert "Of 7 bars that were set before the runs 7 are met." in text.replace("\n", " ")


@pytest.mark.slow
def test_the_page_reads_from_its_head(results: dict, tmp_path: Path):
    """Verdict and chart before the contents, caveats before tables, the patch's rival in the first table, offline."""
    report.write_report(results, tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    places = [page.index(text) for text in ("verdict", 'class="hero"', "<nav", 'id="caveats"', 'id="first"')]
    assert places == sorted(places)
    assert "width=device-width" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    first = page[page.index('id="first"') : page.index('id="size4"')]
    assert "conditioned KV in 2 bits" in first
    assert {path.name for path in (tmp_path / "figures").iterdir()} >= {"hero.png", "pareto_serving_flops.png"}
    assert page.count("data:image/png") == 4


def test_what_the_guide_keeps_says_the_same(results: dict):
    """Rows that no table shows are left out, and the text stays."""
    kept = report.kept(json.loads(json.dumps(results)))
    assert report.markdown(kept) == report.markdown(results)
    assert len(kept["rows"]) < len(results["rows"])


@pytest.mark.parametrize("kind", report.KINDS)
def test_the_guide_is_written_from_its_rows(kind: str):
    kept, guide = json.loads((ROOT / report.KEPT[kind]).read_text("utf-8")), ROOT / report.GUIDES[kind]
    assert kept["config"]["kind"] == kind
    assert kept["config"]["task"] == kind.partition("_")[0]
    assert block(report.markdown(kept), guide) == guide.read_text("utf-8")


def test_which_arms_are_asked():
    """Every way that could win with four chunks; fewer, but all ranks and the question's own, with more chunks."""
    layout = KVLayout.gqa(4, 2, 64, Rope(1e4, 64))
    here, elsewhere = (runner.arm_names(layout, first=first) for first in (True, False))
    ways = {name.partition(".")[0] for name in here}
    assert {"quantised", "svd", "shadowkv", "residual", "prophetkv", "prcr", "pooled", "random_tokens"} <= ways
    assert {f"patch.rank={rank}" for rank in (1, 2, 4, 8, 16, 32, 64)} <= set(here) & set(elsewhere)
    assert (
        {"query_attention.budget=0.01", "quantised.bits=2", "svd.rank=16"}
        <= set(elsewhere)
        < set(here) | {"quantised.bits=8"}
    )


@pytest.mark.slow
def test_a_control_is_no_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By its name; all instances are found, however many there are."""
    for name in ("a", "a_seed1", "a_no_window"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "training.json").write_text("{}")
    seen = {}

    def measured(
        path: Path, sizes: runner.RunSizes, of: PackedDataset, file: Path, *, control: bool = False
    ) -> list[dict]:
        seen[path.name] = control
        return table(path.name, 0.0)

    monkeypatch.setattr(runner, "measure_instance", measured)
    monkeypatch.setattr(runner, "check_language", lambda *_: None)
    found = runner.run("all", 1, tmp_path / "out", dataclasses.replace(SHEETS_DATASET, folder=tmp_path))
    assert seen == {"a": False, "a_seed1": False, "a_no_window": True}
    assert found["config"]["seeds"] == ["a", "a_seed1"]
    means = [row for row in found["rows"] if row["model"] == "mean"]
    assert {row["n"] for row in means} == {2}


def test_instances_of_another_kind_are_found(tmp_path: Path):
    """By their folder's name beside the suite's, or by its path; another task's folder only by its path."""
    for name in ("sheets/a", "sheets_b/b", "sheets_b/b_seed1", "documents/c", "empty"):
        (tmp_path / name).mkdir(parents=True)
        if name != "empty":
            (tmp_path / name / "config.json").write_text("{}")
    of = dataclasses.replace(SHEETS_DATASET, folder=tmp_path / "sheets")
    names = lambda name: [path.name for path in of.instances(name)]
    assert names("all") == names("a") == ["a"]
    assert names("sheets_b") == names(str(tmp_path / "sheets_b")) == ["b", "b_seed1"]
    assert names(str(tmp_path / "sheets_b" / "b")) == ["b"]
    for missing in ("documents", "empty", str(tmp_path / "empty"), "sheets_c"):
        with pytest.raises(InputError, match="expected a checkpoint directory"):
            of.instances(missing)
