"""Runs resume from their parts: after kills, in shards, and never over another run's."""

import functools
import multiprocessing
import os
import random
import signal
import time
import types
from pathlib import Path

import pytest

from evals.harness.parts import Cluster, Part, Plan, Shard, run_parts, run_plan, sharing, stored_records
from kvpatch_jax.errors import InputError

CONFIG = {"model": "toy", "seed": 3}


def measured(number: int, seconds: float = 0.0) -> list[dict[str, float]]:
    time.sleep(seconds)
    return [{"line": line, "value": number * 0.1 + line} for line in range(2)]


def parts_of(seconds: float) -> list[Part]:
    return [Part(f"part {number}", functools.partial(measured, number, seconds)) for number in range(30)]


def run_slowly(out: Path) -> None:
    run_parts(out, CONFIG, parts_of(0.02))


PARTS = parts_of(0.0)
EXPECTED = {part.key: list(part.measure()) for part in PARTS}


def test_ten_kills_at_random_moments_leave_the_same_records(tmp_path):
    """Each process is killed; together with a last one they measure every part, and lose or repeat none in a file."""
    rng = random.Random(7)
    for _ in range(10):
        process = multiprocessing.get_context("spawn").Process(target=run_slowly, args=[tmp_path])
        process.start()
        # Until its first part is there at the latest: most of the time goes into imports.
        before = len(stored_records(tmp_path, CONFIG))
        deadline = time.monotonic() + 30
        while len(stored_records(tmp_path, CONFIG)) == before and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
    assert 0 < len(stored_records(tmp_path, CONFIG)) <= len(PARTS)
    assert run_parts(tmp_path, CONFIG, PARTS) == EXPECTED


def test_a_line_cut_off_by_a_kill_is_measured_again(tmp_path):
    run_parts(tmp_path, CONFIG, PARTS[:3])
    file = tmp_path / "parts.jsonl"
    file.write_bytes(file.read_bytes()[:-7])
    assert len(stored_records(tmp_path, CONFIG)) == 2
    assert run_parts(tmp_path, CONFIG, PARTS) == EXPECTED


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_measure_every_part_once(tmp_path, count):
    for index in range(count):
        records = run_parts(tmp_path, CONFIG, PARTS, Shard(index, count))
    assert {part.key: records[part.key] for part in PARTS} == EXPECTED
    written = "".join(file.read_text() for file in tmp_path.glob("parts*.jsonl"))
    assert [written.count(f'"{key}"') for key in EXPECTED] == [1] * len(EXPECTED)


@pytest.mark.nightly
def test_tasks_of_ray_measure_what_one_process_measures_whatever_happens_to_a_worker(tmp_path):
    ray = pytest.importorskip("ray")

    # Defined in here, it travels by value: a worker cannot import a test.
    def plan(expected=EXPECTED, config=CONFIG, mark=tmp_path / "died"):
        def measure(key):
            if key == "part 7" and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return expected[key]

        return Plan(config, [Part(key, functools.partial(measure, key)) for key in expected])

    cluster = sharing(types.SimpleNamespace(ray="local", shards=3, ray_resources='{"num_cpus": 0.5}'))
    assert cluster == Cluster("local", 3, {"num_cpus": 0.5})
    try:
        assert run_plan(tmp_path / "out", plan(), cluster, plan) == EXPECTED
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()
    written = "".join(file.read_text() for file in (tmp_path / "out").glob("parts*.jsonl"))
    assert [written.count(f'"{key}"') for key in EXPECTED] == [1] * len(EXPECTED)


@pytest.mark.parametrize("resources", ["[1]", "num_gpus=1"])
def test_resources_of_a_task_are_an_object(resources):
    with pytest.raises(InputError, match="--ray_resources"):
        sharing(types.SimpleNamespace(ray="auto", shards=2, ray_resources=resources))


def test_parts_measured_under_other_shards_are_not_measured_again(tmp_path):
    run_parts(tmp_path, CONFIG, PARTS, Shard(1, 2))
    missing = [part for number, part in enumerate(PARTS) if number % 2 == 0]
    fail = [Part(part.key, pytest.fail) for number, part in enumerate(PARTS) if number % 2]
    assert run_parts(tmp_path, CONFIG, [*missing, *fail]) == EXPECTED


def test_threads_measure_what_one_measures(tmp_path):
    assert run_parts(tmp_path, CONFIG, PARTS, threads=4) == EXPECTED


def test_a_failing_part_keeps_the_finished_ones(tmp_path):
    broken = Part("broken", lambda: [{"value": 1 / 0}])
    with pytest.raises(ZeroDivisionError):
        run_parts(tmp_path, CONFIG, [*PARTS[:4], broken, *PARTS[4:]])
    # How many of those behind it were finished by then is a matter of pace.
    assert {part.key for part in PARTS[:4]} <= set(stored_records(tmp_path, CONFIG))


@pytest.mark.parametrize("change", [{"model": "other"}, {"seed": 4}, {"n": 64}])
def test_a_folder_of_another_run_is_refused_and_kept(tmp_path, change):
    run_parts(tmp_path, CONFIG, PARTS[:2])
    before = (tmp_path / "parts.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"another .*expected toy|another model"):
        run_parts(tmp_path, {**CONFIG, **change}, PARTS)
    assert (tmp_path / "parts.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"not JSON\n", b'{"config": 1}\n', b'{"config": {"model": "toy", "seed": 3}}\n[]\n']
)
def test_a_file_of_something_else_is_refused_and_kept(tmp_path, content):
    (tmp_path / "parts.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="parts"):
        run_parts(tmp_path, CONFIG, PARTS)
    assert (tmp_path / "parts.jsonl").read_bytes() == content


@pytest.mark.parametrize("text", ["2/2", "-1/3", "1", "a/b", "0/0"])
def test_a_shard_is_an_index_below_its_count(text):
    with pytest.raises(InputError, match="0 <= index < count"):
        Shard.of(text)
