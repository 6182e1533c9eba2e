"""The main job on four contexts: what it writes, which arms and metrics are there, how its flags answer.

By default with a few arms, one of each kind, and the suites that need no other windows; with all of them, slow.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import app

from evals import pictured_context, probes, run, scene_jobs, small_task
from evals.arms.recomputed_tokens import METHODS
from evals.harness.environment import environment
from evals.harness.frame import COLUMNS, Rows
from evals.probes import ResultsTable
from evals.report import coverage, side_by_side
from evals.report.drawing import draw_all
from evals.report.notes import NOTES
from evals.report.page import write_report
from evals.report.summary import TOKEN_METHODS
from evals.report.wording import number
from evals.results.costs import METRICS as COSTS
from evals.results.headline import headline_arms, headline_results
from evals.rules import RULES
from evals.small_task import COLOURS, KINDS, VOCABULARY
from evals.trained import CONTROL, MAIN, backbone_names, shipped, shipped_names
from kvpatch_jax import KVLayout, Rope
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import REPAIRS
from models import ModelBackbone, load
from tests.compilations import compilations

CONTEXTS = 4
OWN = tuple(suite for suite in run.SUITES if suite not in ("control", "seeds"))
CONFIG = run.RunConfig(run.MAIN, OWN, 77, CONTEXTS, CONTEXTS, CONTEXTS)
PER_ITEM = ("accuracy", "difference", "kl", "eta", "flip_recover")
MULTI_HOP = ("chain", "aggregate")
PATCH_ARMS = [f"patch.rank={rank}" for rank in (1, 2, 4, 8, 16, 32, 64)]
VARIANTS = ["patch.deepest_half.rank=16", "patch.k_only.rank=16", "patch.v_only.rank=16"]
ROTATED = ["patch.rotated_frame.rank=16"]
FEW, MATCHED = ("budget=0.15", "budget=0.5"), ("bytes_of_rank=8", "bytes_of_rank=16")
TOKEN_ARMS = [
    *(f"first_k.{setting}" for setting in ("budget=0.1", "budget=0.15", "budget=0.25", "budget=0.5", *MATCHED)),
    *(f"{method}.{setting}" for method in ("cacheblend", "oracle_delta") for setting in (*FEW, *MATCHED)),
]
OTHER_ARMS = [
    *(f"patch.int8.rank={rank}" for rank in (4, 8)),
    *(f"pooled.rank={rank}" for rank in (8, 16)),
    *(f"quantised.bits={bits}" for bits in (2, 3, 4, 16)),
    *(f"svd.rank={rank}" for rank in (4, 8, 16)),
    "shadowkv.rank=8",
    "shadowkv.keys_alone.rank=8",
    *(f"residual.layer={layer}" for layer in (1, 3)),
    "random_tokens.budget=0.15",
    "class_mean",
]
QUESTION_ARMS = [
    *(f"{way}.budget={share}" for way in ("query_attention", "prophetkv") for share in ("0.01", "0.05", "0.15")),
    "prcr.budget=0.15",
]
REPAIR_ARMS = ["re-prefill", "blind", *PATCH_ARMS, *VARIANTS, *ROTATED, *TOKEN_ARMS, *OTHER_ARMS, *QUESTION_ARMS]
FEW_ARMS = ["re-prefill", "blind", "patch.rank=8", "patch.rank=64", "first_k.budget=0.15"]
ALL = pytest.mark.parametrize("job", [pytest.param("all", marks=pytest.mark.slow)], indirect=True)
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """One measured run and what it wrote."""

    folder: Path
    rows: list[Row]
    written: dict[str, Any]
    items: list[dict[str, Any]]
    ticks: Counter[str]
    arms: list[str]
    suite: tuple[str, ...]

    def value(self, probe: str, arm: str, metric: str) -> float:
        """The one row's value."""
        found = [row for row in self.rows if (row["probe"], row["arm"], row["metric"]) == (probe, arm, metric)]
        assert len(found) == 1, (probe, arm, metric)
        return found[0]["value"]


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return load(shipped(run.MAIN), dtype="float32")


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, backbone: ModelBackbone) -> Job:
    """Every suite but the control, or few arms of some, on four contexts."""
    whole = request.param == "all"
    arms, asked = (REPAIR_ARMS, CONFIG.suite) if whole else (FEW_ARMS, ("repair", "slide", "deficit"))
    folder = tmp_path_factory.mktemp("run")

    class Count(run.Progress):
        """Counts instead of drawing."""

        def __init__(self) -> None:
            self.names: Counter[str] = Counter()

        def __call__(self, name: str, work: int = 1) -> None:
            self.names[name] += work

    progress = Count()
    with pytest.MonkeyPatch.context() as patched:
        if not whole:
            patched.setattr(scene_jobs, "arms_of", lambda *_: arms)
        [ledger] = run.measure(backbone, dataclasses.replace(CONFIG, suite=asked), folder, progress)
    rows = ledger.rows()
    config = {**dataclasses.asdict(CONFIG), "command": "python -m evals.run --seed=77"}
    run.write_results({"config": config, "environment": environment(run.PACKAGES), "rows": rows}, [ledger], folder)
    strict = lambda text: json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    items = [strict(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    return Job(folder, rows, strict((folder / "results.json").read_text()), items, progress.names, arms, asked)


# ------------------------------------------------------------------------------------------------------- sharing


@pytest.mark.slow
def test_the_control_is_run_by_the_main_instances_programs(backbone: ModelBackbone):
    """Bit for bit what it answers by its own, and nothing is compiled for it."""
    control = load(shipped(CONTROL), dtype="float32")
    same = scene_jobs.sibling(backbone, control)
    ids = np.arange(6)[None] + VOCABULARY.glyph
    places = np.zeros((1, 6, 3), np.int32)
    answered = lambda of: np.asarray(of.prefill(of.embed(ids, places)).logits)
    mains = answered(backbone)
    with compilations() as compiled:
        controls = answered(same)
    assert not compiled
    assert (controls == answered(control)).all()
    assert (controls != mains).any()
    assert (answered(backbone) == mains).all()
    assert same.fingerprint == control.fingerprint != backbone.fingerprint


def test_tables_of_scenes_are_put_together():
    """The larger maximum over both, and the first one's finished rows alone."""
    first, second = ResultsTable("one"), ResultsTable("one")
    for table, value in ((first, 1.0), (second, 2.0)):
        table.largest("mask", "arm", "apart", value, 4)
        table.value("repair.visible", "arm", "bytes", value, 4)
    first.take(second)
    assert [(row["metric"], row["value"], row["n"]) for row in first.rows()] == [("apart", 2.0, 8), ("bytes", 1.0, 4)]


# --------------------------------------------------------------------------------------------------------- rows


def test_rows_are_long_form(job: Job):
    """Exactly the eight keys; each (probe, arm, metric) once; values inside their intervals; n a count."""
    assert {tuple(sorted(row)) for row in job.rows} == {tuple(sorted(COLUMNS))}
    assert max(Counter((row["probe"], row["arm"], row["metric"]) for row in job.rows).values()) == 1
    for row in job.rows:
        assert row["model"] == run.MAIN
        assert isinstance(row["n"], int)
        assert row["n"] >= 0
        if math.isfinite(row["low"]):
            assert row["low"] <= row["value"] <= row["high"], row


@ALL
def test_rows_that_the_page_of_coverage_names_are_there(job: Job):
    assert coverage.missing("default", job.rows) == []


def test_numbers_are_finite_where_they_must_be(job: Job):
    """Only η (blind equals re-prefill), flip-recover (no flips) and rows without items may be undefined."""
    for row in job.rows:
        if not math.isfinite(row["value"]):
            assert row["metric"].split(".")[0] in ("eta", "flip_recover"), row
    for kind in MULTI_HOP:
        for arm in job.arms:
            for metric in PER_ITEM:
                assert math.isfinite(job.value("repair.visible", arm, f"{metric}.{kind}")), (arm, metric)


def test_nan_is_written_as_null(job: Job):
    """results.json is strict JSON and says the same as the rows."""
    assert set(job.written) == {"config", "environment", "rows"}
    assert len(job.written["rows"]) == len(job.rows)
    undefined = 0
    for row, written in zip(job.rows, job.written["rows"], strict=True):
        for name in COLUMNS:
            nan = isinstance(row[name], float) and not math.isfinite(row[name])
            undefined += nan
            assert written[name] == (None if nan else row[name])
    assert undefined > 0
    assert job.written["environment"]["cores"] >= 1
    assert job.written["config"]["seed"] == CONFIG.seed


@pytest.mark.parametrize("probe", ["repair.visible", "repair.evicted"])
def test_every_repair_arm_is_there(job: Job, probe: str):
    """All arms × metrics × kinds; questions about legends, and what a question chooses, only with legends in view."""
    kinds = [kind for kind in KINDS if probe == "repair.visible" or kind != "legend"]
    reuse = [arm for arm in job.arms if probe == "repair.visible" or arm not in QUESTION_ARMS]
    arms = [*reuse, "mask_4d"] if probe == "repair.visible" else reuse
    expected = {(arm, f"{metric}.{kind}") for arm in arms for metric in PER_ITEM for kind in kinds}
    found = {(row["arm"], row["metric"]) for row in job.rows if row["probe"] == probe}
    expected |= {(arm, metric) for arm in reuse for metric in COSTS}
    if probe == "repair.visible":
        expected |= {(arm, "bytes") for arm in reuse}
    assert found == expected


@ALL
def test_arm_count_is_what_the_bar_was_told(job: Job, backbone: ModelBackbone):
    """The progress bar ends where its total says."""
    arms, every = probes.main_arms(backbone.layout), probes.all_arms(backbone.layout)
    assert arms == REPAIR_ARMS == scene_jobs.arms_of(CONFIG, backbone)
    assert scene_jobs.arms_of(dataclasses.replace(CONFIG, arms="all"), backbone) == every
    assert len(every) == len(set(every)) > len(arms)
    assert [name for name in every if name in arms] == arms
    assert {name: job.ticks[name] for name in REPAIR_ARMS} == dict.fromkeys(REPAIR_ARMS, 1)
    assert job.ticks.total() == sum(scene_jobs.planned_ticks(CONFIG, len(arms)).values())
    assert set(METHODS) <= set(REPAIRS)


@ALL
def test_window_probes_are_there(job: Job):
    found = {(row["probe"], row["arm"], row["metric"]) for row in job.rows}
    arms = {
        "reorder": (["re-prefill", "blind", "transfer", "orbit", "exact"], ["page", "chain", "aggregate", "override"]),
        "slide": (["re-prefill", "keep", "removal", "blind"], ["survivor", "evicted", "aggregate"]),
        "recall": (
            [f"{arm}.turnover={k}" for arm in ("re-prefill", "blind", "stale", "fresh") for k in range(4)],
            ["page", "chain", "aggregate"],
        ),
    }
    for probe, (names, kinds) in arms.items():
        expected = {(probe, arm, f"{metric}.{kind}") for arm in names for metric in PER_ITEM for kind in kinds}
        if probe == "reorder":
            expected.add((probe, "order", "relative_order_effect"))
            expected |= {(probe, "orbit", f"orbit_minus_exact.{kind}") for kind in kinds}
        assert {row for row in found if row[0] == probe} == expected
    metrics = ("relative_norm", "e90", "e90_rotated", "token_share_90", "head_share_max", "class_mean_share")
    shape = {("deficit", f"layer={layer}.{name}", m) for layer in range(6) for name in "kv" for m in metrics}
    assert {row for row in found if row[0] == "deficit"} == shape
    assert {row for row in found if row[0] == "mask"} == {
        ("mask", "mask_4d", "probability_difference"),
        ("mask", "mask_4d", "kv_difference"),
    }


def test_numbers_agree_with_each_other(job: Job):
    """What must hold by construction, at any sample size."""
    value = job.value
    for probe in ("repair.visible", "repair.evicted"):
        for kind in MULTI_HOP:
            assert value(probe, "re-prefill", f"kl.{kind}") == 0
            assert value(probe, "re-prefill", f"difference.{kind}") == 0
            assert value(probe, "blind", f"eta.{kind}") == 0
            assert value(probe, "blind", f"flip_recover.{kind}") == 0
            assert value(probe, "patch.rank=64", f"eta.{kind}") > 0.999
            for arm in ("blind", "patch.rank=8", "first_k.budget=0.15"):
                gap = value(probe, arm, f"accuracy.{kind}") - value(probe, "re-prefill", f"accuracy.{kind}")
                assert abs(value(probe, arm, f"difference.{kind}") - gap) < 1e-12
    shares = [value("repair.visible", arm, "bytes") for arm in ("blind", *PATCH_ARMS) if arm in job.arms]
    assert shares == sorted(shares)
    assert value("repair.visible", "re-prefill", "bytes") == 1
    assert value("mask", "mask_4d", "probability_difference") <= 1e-5
    assert value("deficit", "layer=0.k", "relative_norm") < 1e-4
    assert value("deficit", "layer=5.v", "relative_norm") > 0.1
    if "recall" not in job.suite:
        return
    stale = [value("recall", f"stale.turnover={k}", "kl.chain") for k in range(4)]
    assert stale[0] < 0.01 < min(stale[1:])


# -------------------------------------------------------------------------------------------------------- files


def test_items_are_one_line_per_valid_question(job: Job):
    """As many lines of each kind as the rows say items, each with every arm's answer and KL, none a question twice."""
    counts = Counter((line["probe"], line["kind"]) for line in job.items)
    for probe, arm in (
        ("repair.visible", "blind"),
        ("repair.evicted", "blind"),
        ("slide", "keep"),
        ("reorder", "orbit"),
    ):
        rows = [row for row in job.rows if row["probe"] == probe and row["arm"] == arm]
        assert bool(rows) == (probe.partition(".")[0] in job.suite)
        for row in rows:
            name, _, kind = row["metric"].partition(".")
            if name == "accuracy":
                assert counts[probe, kind] == row["n"] > 0
    rng = np.random.default_rng([CONFIG.seed, 0])
    contexts = small_task.sample_contexts(rng, CONTEXTS)
    questions = small_task.ask(contexts, rng, scene_jobs.QUESTIONS)
    visible = [line for line in job.items if line["probe"] == "repair.visible"]
    assert len(visible) == questions.valid.sum()
    for line, index in zip(visible, np.argwhere(questions.valid), strict=True):
        context, question = index
        assert line["model"] == run.MAIN
        assert line["context"] == context
        assert line["kind"] == KINDS[questions.kind[context, question]]
        assert line["answer"] == VOCABULARY.names[questions.answer[context, question]]
        assert set(line["arms"]) == {*job.arms, "mask_4d"}
        for said, divergence in line["arms"].values():
            assert said in VOCABULARY.names
            assert divergence >= -1e-5
    right = np.mean([line["arms"]["patch.rank=8"][0] == line["answer"] for line in visible if line["kind"] == "chain"])
    assert right == pytest.approx(job.value("repair.visible", "patch.rank=8", "accuracy.chain"), abs=1e-12)


@ALL
def test_report_and_figures_are_written(job: Job, backbone: ModelBackbone):
    """report.html holds every figure inline and nothing from outside; no NaN is shown. (Of made-up rows: reports.)"""
    results = {**job.written, "rows": job.rows}
    figures = [
        pictured_context.read_example(backbone, job.folder, CONFIG.seed, CONFIG.batch, "patch.rank=4")(),
        *draw_all(results, job.folder / "figures"),
    ]
    write_report(results, figures, job.folder / "report.html", NOTES)
    page = (job.folder / "report.html").read_text()
    figures = sorted((job.folder / "figures").glob("*.png"))
    assert len(figures) >= 5
    assert job.folder / "figures" / "example.png" in figures
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000 for path in figures)
    assert page.count("data:image/png;base64,") == len(figures)
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    assert str(job.folder) not in page


def test_images_are_kept(job: Job):
    images = list((job.folder / "images").glob("*.png"))
    assert len(images) >= CONTEXTS * (small_task.LEGENDS + 1)


@ALL
def test_backbones_side_by_side(job: Job, tmp_path: Path):
    """One line per backbone, whose cells are the rows' own values; the numbers lie beside the table as JSON."""
    config = {**job.written["config"], "parameters": 1_414_720, "kv": {"k": 128, "v": 128}}
    results = {name: {"config": {**config, "backbone": name}, "rows": job.rows} for name in ("first", "second")}
    table = side_by_side.write(results, tmp_path)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.read_text().splitlines()]
    assert [line[0] for line in lines] == ["backbone", "---", "first", "second"]
    assert {len(line) for line in lines} == {len(side_by_side.HEAD)}
    cells = dict(zip(lines[0], lines[2], strict=True))
    assert cells["parameters"] == "1.41 M"
    assert cells["KV per token and layer"] == "k 128 + v 128"
    for kind in MULTI_HOP:
        blind = job.value("repair.visible", "blind", f"accuracy.{kind}")
        assert f"→ {number(blind)}" in cells[f"{kind}: re-prefill → blind"]
    best = max(job.value("repair.visible", f"{method}.bytes_of_rank=8", "accuracy.chain") for method in TOKEN_METHODS)
    assert cells["best token recompute at the bytes of rank 8 (chain)"].startswith(number(best))
    assert cells["order effect"].startswith(number(job.value("reorder", "order", "relative_order_effect")))
    kept = json.loads((tmp_path / "backbones.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert set(kept) == {"first", "second"}
    assert {row["probe"] for row in kept["first"]["rows"]} == {"repair.visible", "reorder"}
    assert (tmp_path / "backbones.png").read_bytes().startswith(b"\x89PNG")


def test_all_backbones_are_the_shipped_ones():
    """All but the control, the first one and its seeds in front."""
    names = backbone_names()
    assert names[0] == MAIN
    assert set(names) | {CONTROL} == set(shipped_names())
    assert run.suites_for(MAIN, run.SUITES) == run.SUITES
    assert all(not {"control", "seeds"} & {*run.suites_for(name, run.SUITES)} for name in names[1:])


# -------------------------------------------------------------------------------------------------------- flags


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evals.run", *arguments], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_help_explains():
    done = call("--help")
    assert done.returncode in (0, 1)
    for word in ("--backbone", "--suite", "--out", "--[no]quick", "--seed", "re-prefill", "results.json", *run.SUITES):
        assert word in done.stdout


@pytest.mark.slow
def test_an_unknown_suite_is_refused(tmp_path: Path):
    """It ends the program, naming it and the known ones, before anything is measured. (Backbones: command lines.)"""
    done = call("--suite=mends", f"--out={tmp_path / 'out'}")
    assert done.returncode != 0
    assert done.stdout.startswith("kvpatch_jax: a small trained model")
    for word in (*run.SUITES, "'mends'"):
        assert word in done.stdout + done.stderr
    assert not (tmp_path / "out" / "results.json").exists()


def test_suites_are_what_was_asked_for():
    assert run.asked_suites(["all"]) == run.SUITES
    assert run.asked_suites(["window", "all"]) == (*run.SUITES, "window")
    assert run.asked_suites(["window", "repair"]) == ("window", "repair")
    for names in ([], ["window", "mends"], ["window", "repairs"], ["pretrained", "repairs"]):
        with pytest.raises(app.UsageError, match="--suite: got"):
            run.asked_suites(names)


def test_further_seeds_are_a_part_of_the_bar():
    """Each of the headline's other instances is asked the rules' arms over all contexts."""
    others = scene_jobs.other_seeds()
    assert {MAIN, *others} == set(RULES.headline_backbones)
    config = run.RunConfig(MAIN, ("repair", "seeds"), 77, 128, 128, 64)
    assert scene_jobs.planned_ticks(config, 10) == {"repair": 20, "seeds": 2 * len(RULES.headline_arms) * len(others)}
    layout = KVLayout.gqa(6, 2, 64, Rope(1e4, 64))
    assert set(RULES.headline_arms) <= set(probes.main_arms(layout))


@pytest.mark.slow
def test_further_seeds_make_the_headline(backbone: ModelBackbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A table of each seed, main instance first; their mean is what the report opens with."""
    monkeypatch.setattr(scene_jobs, "arms_of", lambda *_: FEW_ARMS)
    config = dataclasses.replace(CONFIG, suite=("repair", "seeds"))
    tables = run.measure(backbone, config, tmp_path, run.Progress({}))
    assert [table.model for table in tables] == [MAIN, *scene_jobs.other_seeds()]
    found = {"config": {"model": MAIN}, "rows": [row for table in tables for row in table.rows()]}
    mean = headline_results(found)
    assert mean is not None
    right = []
    for table in tables:
        items = table.items("repair.visible")
        right.append(items.metrics("blind", dict(items.by_kind())["chain"])["accuracy"].value)
    assert Rows(mean).get("repair.visible", "blind", "accuracy.chain").value == pytest.approx(np.mean(right))
    assert set(headline_arms(mean)) == set(FEW_ARMS) & set(RULES.headline_arms)


def test_an_earlier_runs_table_does_not_stay_beside_other_results(tmp_path: Path):
    (tmp_path / "table.md").write_text("| of another suite |")
    run.write_results({"rows": []}, [], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_unknown_backbone_is_typed():
    with pytest.raises(InputError, match="nowhere") as found:
        shipped("nowhere")
    assert run.MAIN in shipped_names()
    assert all(name in str(found.value) for name in shipped_names())


def test_training_is_disclosed():
    """The recipe beside the weights goes into the results."""
    assert run.training_of(shipped(run.MAIN))["recipe"]["window"] == 0.5


def test_questions_cover_every_kind():
    """Each kind gives 1 000 items or more in a full run."""
    whole = run.RunConfig(run.MAIN, run.SUITES, 9001)
    assert set(scene_jobs.QUESTIONS) == set(KINDS)
    assert all(count * whole.contexts >= 1000 for count in scene_jobs.QUESTIONS.values())
    assert COLOURS > small_task.ACTIVE_FILLS
