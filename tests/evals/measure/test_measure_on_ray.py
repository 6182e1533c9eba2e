"""A measurement on a local Ray cluster: the files of one process, whatever is killed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from evals.measure.on_ray import occupied_resources
from kvpatch_jax.errors import InputError
from tests.evals.measure.test_measure_program import ROOT, WRITTEN, program, ran


def workers() -> list[int]:
    """Processes of Ray that run a task of ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_run"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds workers in /proc")
def test_workers_and_drivers_that_are_killed_leave_the_files_of_one_process(checkpoint, data, tmp_path):
    pytest.importorskip("ray")
    model = checkpoint("qwen2_5_vl")
    code, _, error = ran(model, data, tmp_path / "one")
    assert code == 0, error

    def started(count: int):
        flags = ("--ray=local", f"--ray_shards={count}")
        command = program(model, data, tmp_path / f"{count}", *flags)
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)

    def wait_for(condition, process):
        deadline = time.monotonic() + 120
        while not condition() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def lines(count: int) -> int:
        return sum(path.read_bytes().count(b"\n") for path in (tmp_path / f"{count}").glob("parts*.jsonl"))

    for count in (1, 2, 5):
        # First the whole run is killed, then a worker of the next one, which goes on by itself.
        process = started(count)
        wait_for(lambda count=count: lines(count) > 2, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process, before = started(count), lines(count)
        wait_for(lambda count=count, before=before: lines(count) > before, process)
        for worker in workers()[:1]:
            os.kill(worker, signal.SIGKILL)
        assert process.wait(timeout=300) == 0
        for name in WRITTEN:
            assert (tmp_path / f"{count}" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), (count, name)


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_resources_that_are_no_table_are_refused(text):
    with pytest.raises(InputError, match=r"--ray_resources: got .*; expected JSON such as"):
        occupied_resources(text)
