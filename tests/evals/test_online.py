"""Loops with a certificate that learns: published tables are those of their rows, and a small loop keeps its books."""

import json
import random
from pathlib import Path

import pytest

from evals.online import document, simulation, suite
from evals.online.loop import AnswerRecord, AuditRecord
from evals.online.measures import row_of
from evals.online.traffic import TrafficPlan, image_traffic
from evals.report.documents import block
from evals.trained import MAIN, shipped
from models import load

ROOT = Path(__file__).parents[2]
BOUND = 0.05


@pytest.fixture(scope="module")
def published():
    return json.loads((ROOT / document.KEPT).read_text())


def test_the_page_shows_the_published_rows(published):
    page = ROOT / document.PAGE
    assert block(document.section(published), page, "online") == page.read_text()


def test_published_loops_keep_to_the_cost_of_their_policy(published):
    assert published["loops"]
    for row in published["loops"]:
        assert row["largest cost"] <= 0.05


def test_a_small_loop_audits_and_reuses_exactly_before_anything_is_admitted(tmp_path):
    results = suite.run(suite.QUICK, lambda task: load(shipped(MAIN), dtype="float32"), tmp_path)
    (row,) = results["loops"]
    finished = json.loads(next(tmp_path.glob("images*.json")).read_text())
    answers = [AnswerRecord(*own) for own in finished["answers"]]
    assert len(answers) == row["answers"] == suite.QUICK.images.answers
    # Nothing is admitted this early, so that every answer is as promised.
    assert row["admitted after answers"] is None
    assert max(own.kl for own in answers) < 1e-9
    assert 0 < row["hits"][1] < len(answers)
    assert row["largest cost"] <= 0.05
    # A finished loop is read, not run.
    assert suite.run(suite.QUICK, lambda task: pytest.fail("loaded again"), tmp_path)["loops"] == results["loops"]
    assert len(document.section(results).splitlines()) > 6


def test_traffic_changes_at_the_shift_and_shows_no_chunk_that_is_in_the_window():
    plan = TrafficPlan(answers=120, shift_at=60, documents=3, keep=4)
    traffic = image_traffic(plan, 3, "awake")
    half, shown = len(traffic.chunks) // 2, []
    for number, step in enumerate(traffic.steps):
        shown = [] if step.begins else shown
        assert step.chunk not in shown[-plan.keep :]
        assert (step.chunk >= half) == (number >= 60)
        shown.append(step.chunk)
    assert traffic.steps[60].begins


def answer(kl: float, bounds, approximate: int = 0, audits: int = 0, hit: bool = False) -> AnswerRecord:
    return AnswerRecord(True, hit, approximate, kl, BOUND if approximate else 0.0, audits, audits, 100, bounds)


def test_a_row_counts_what_was_served_until_the_shift_and_until_the_withdrawal():
    none, proved = (None,) * 4, (None, BOUND, None, None)
    answers = [answer(0.0, none, audits=1), answer(0.0, proved, audits=2), answer(0.01, proved, 1, 2, True)]
    answers += [answer(0.2, proved, 2, 3, True), answer(0.3, proved, 2, 5, True), answer(0.4, none, 1, 6)]
    audits = [AuditRecord(place, (way,), 1, 0.0) for place, way in ((0, "near"), (4, "near"), (4, "seen"), (5, "near"))]
    row = row_of(answers, audits, 4, BOUND)
    assert (row["admitted after answers"], row["admitted after audits"]) == (2, 2)
    assert (row["served before"], row["beyond before"]) == (2, 1)
    assert (row["served after"], row["beyond after"], row["beyond until withdrawn"]) == (2, 2, 2)
    assert (row["withdrawn after answers"], row["withdrawn after audits"]) == (2, 3)
    assert row["first served after"] == 1
    assert row["hits"] == [2, 4]
    assert row["largest cost"] == 0.06


def test_a_simulated_enemy_is_hardly_ever_admitted_and_what_holds_is():
    draw = random.Random(0)
    trials = tuple((1 + draw.randrange(5), 0.2 if draw.random() < 0.02 else 0.01 * draw.random()) for _ in range(200))
    losses = simulation.Losses(trials, trials)
    honest = [simulation.simulate(losses, BOUND, 0.1, seed) for seed in range(10)]
    assert all(own.admitted is not None and own.beyond <= 0.1 * own.served for own in honest)
    enemies = [simulation.simulate(losses, BOUND, 0.1, seed, 0.15) for seed in range(40)]
    assert sum(own.admitted is not None for own in enemies) <= 40 * (0.05 + 3 * (0.05 * 0.95 / 40) ** 0.5)
