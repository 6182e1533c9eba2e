"""The connector in vLLM with tpu-inference on a CPU: run by `tests/engine/run`, in an environment of its own.

Every scenario of `scenarios.py` is a process with an engine of its own, so that chunks go from one to the other.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.engine

MATCHED, LEADING = 88, 48
"""Tokens of both chunks, and of the first."""
ROUNDING = 1e-3
"""Nats: two prefills of one prompt in float32 differ by less."""


@pytest.fixture(scope="module")
def work(tmp_path_factory, request):
    folder = request.config.getoption("--work")
    return Path(folder).absolute() if folder else tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def run(work):
    """Runs a scenario in a process of its own, once, and reads its results."""

    def run(scenario, kind="wide"):
        path = work / f"{scenario}-{kind}.json"
        if not path.exists():
            command = [sys.executable, HERE / "scenarios.py", scenario, work, kind]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
            if done.returncode:
                pytest.fail(f"{scenario}: {done.returncode}, {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(path.read_text())

    return run


@pytest.fixture(scope="module", params=["wide", "llama3"])
def formed(run, request):
    return run("forms", request.param)


@pytest.fixture(scope="module")
def served(run):
    run("forms")
    return run("serves")


def is_equal(results):
    return results["equal"] == results["of"] and results["difference"] < ROUNDING


def points(results):
    return [point for point, *_ in results["kvpatch"]["served"]]


def test_chunks_and_patches_are_formed_from_traffic(formed):
    assert formed["formed"] == {"canonicals": 5, "patches": 1}


@pytest.mark.parametrize(("way", "matched"), [("joined", MATCHED), ("leading", LEADING)])
def test_exact_kv_from_the_store_gives_the_engines_own_tokens(formed, way, matched):
    results = formed[way]
    assert results["cached"] == results["kvpatch"]["matched"] == matched
    assert results["kvpatch"]["exact"]
    assert is_equal(formed["again"])
    assert is_equal(results)


def test_a_patch_brings_the_answer_nearer(formed):
    """Random weights: the order of blind reuse and patches is shown, and how far each is off; not a task's accuracy."""
    patched, bare = formed["patched"], formed["bare"]
    assert points(patched) == ["leading", "stored"]
    assert points(bare) == ["leading", "bare"]
    assert patched["cached"] == bare["cached"] == MATCHED
    assert patched["difference"] < bare["difference"]


def test_a_chunk_that_moved_is_rotated_as_the_engine_rotates(run):
    """In a model of one layer KV depends on a token and its position alone, so a bare chunk is exact there."""
    assert is_equal(run("forms", "shallow")["bare"])


def test_a_plan_with_an_approximate_chunk_shares_blocks_with_its_equals_alone(formed):
    assert formed["plain without the plan's salt"]["difference"] > ROUNDING, "else contamination would not show"
    assert formed["plain after bare"]["cached"] == 0
    assert is_equal(formed["plain after bare"])
    assert formed["bare again"]["cached"] > MATCHED, "the question's blocks too"


def test_while_chunks_are_read_another_request_is_answered(run):
    results = run("waits")
    assert results["seconds"]["plain"] < results["seconds"]["chunks"]
    assert points(results["chunks"]) == ["leading", "stored"]
    assert is_equal(results["plain"])
    assert is_equal(results["behind an abandoned one"])
    assert results["asked_again"] < 400, "an idle engine waits for the store, and does not ask all the time"
    assert results["tracked"] == 0


def test_another_process_serves_what_one_formed(served, run):
    formed = run("forms")
    assert is_equal(served["leading"])
    for way in ("leading", "patched", "bare"):
        assert points(served[way]) == points(formed[way])
        assert abs(served[way]["difference"] - formed[way]["difference"]) < ROUNDING


def test_two_devices_serve_what_one_formed(run):
    """A KV head on each."""
    formed, results = run("forms"), run("wider")
    for way in ("leading", "patched", "bare"):
        assert points(results[way]) == points(formed[way])
        assert abs(results[way]["difference"] - formed[way]["difference"]) < ROUNDING
    assert is_equal(results["plain after bare"])


def test_a_damaged_object_is_computed_again(served):
    assert served["damaged"]["cached"] == 0
    assert is_equal(served["damaged"])
    assert is_equal(served["plain after damaged"])


def test_a_chunk_that_cannot_be_placed_is_computed_again(served):
    """Without async scheduling; the connector refuses to recompute with it."""
    assert served["not placed"]["kvpatch"]["failed"]
    assert served["failed"] == 1
    assert is_equal(served["not placed"])
    assert is_equal(served["plain after not placed"])


def test_a_request_that_cannot_be_planned_is_served_plainly(served):
    assert served["refused"]["kvpatch"] == {}
    assert is_equal(served["refused"])


@pytest.mark.parametrize(("scenario", "count"), [("many", 500), ("mended", 100)])
def test_mixed_requests_at_once_answer_as_alone_and_leave_nothing_behind(run, scenario, count):
    """Without async scheduling; and with it, once the engine is mended (`cpu_engine.mend_resumed_requests`)."""
    results = run(scenario)
    assert results["equal"] == results["answered"]
    assert sum(results["answered"].values()) == count - results["ended"]
    assert results["ended"]
    assert not results["plain is bare"], "else contamination would not show"
    assert results["left to the engine"]["bare"] > 0
    assert results["left to the engine"]["apart"] == 0
    assert results["damaged matched"] == 0
    assert results["preempted"], "the pool is to be too small"
    assert results["free"][0] == results["free"][1]
    assert results["tracked"] == 0


def test_the_engine_alone_answers_wrongly_behind_a_preemption(run):
    """What tpu-inference 0.32 does without us. Where this fails it was mended: guide and warning can say so."""
    results = run("preempted")
    assert 1 <= results["as it is"]["wrong"] <= results["as it is"]["preempted"]
    assert results["mended"]["preempted"]
    assert results["mended"]["wrong"] == 0


def test_an_engine_killed_while_it_saves_harms_no_other_on_its_store(run):
    """The chunk whose save was cut is not there; the other one is, and what is formed again is served."""
    results = run("neighbours")
    assert results["status"] == -9
    assert points(results["left"]) == ["leading"]
    assert is_equal(results["left"])
    assert points(results["again"]) == ["leading", "stored"]
    assert is_equal(results["plain"])
    assert results["free"][0] == results["free"][1]


def test_a_store_that_fails_costs_no_answer(run):
    results = run("fails")
    assert {phase["equal"] for phase in results["phases"].values()} == {40}
    assert results["phases"]["again"]["matched"]
    assert results["phases"]["remote answers"]["matched"]
    assert results["hung"] <= 20, "a store that hangs is not asked by each request"
    assert results["free"][0] == results["free"][1]
    assert results["tracked"] == 0


def test_no_request_body_makes_an_answer_wrong_or_ends_the_engine(run):
    results = run("hostile")
    assert results["wrong"] == 0
    assert results["answered"] > 200
    assert all(results["equal after"])
    assert points(results["served after"]) == ["leading"]
    assert is_equal(results["served after"])
    assert results["free"][0] == results["free"][1]
    assert results["tracked"] == 0


def test_images_are_served_by_uuid_alone(run):
    results = run("uuids")
    before, behind = results["before"], results["behind another"]
    assert before["kvpatch"]["exact"]
    assert before["cached"] > 0
    assert is_equal(results["before, alone"])
    assert len(behind["kvpatch"]["served"]) == 3
    for answer in (before, behind):
        assert is_equal(answer), "as if the images were sent"
