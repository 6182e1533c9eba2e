"""Threads end with their program, files are replaced as units, and sizes, JSON and cache options are read exactly."""
# pyright: reportArgumentType=false

import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.store import ChunkStore, StaticLibrary
from kvpatch_jax.utils import compiling, strict_json
from kvpatch_jax.utils.atomic_files import replace
from kvpatch_jax.utils.background import JobQueue
from kvpatch_jax.utils.sizes import size_of

PRINTED = {"patient queue": "job 0\njob 1\njob 2\n", "impatient queue": "job 0\n", "hanging": "told to end\n"}
CASES = ["end answering", "error answering", *PRINTED]


def test_processes_end_with_their_own_status_while_threads_work():
    """Sessions and queues that nobody closes; the job that runs is waited for, and those that wait within a limit."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("ending.py")), *CASES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [end["case"] for end in ends] == CASES
    for end in ends:
        assert end["status"] == end["expected"], end
        assert end["printed"].startswith("at work\n"), end
        assert end["printed"].count("Traceback") == (end["status"] == 1), end  # the program's own and no thread's
        assert ("cut short" in end["printed"]) == ("answering" in end["case"]), end
        assert ("'hangs' still runs after 0.01 s" in end["printed"]) == (end["case"] == "hanging"), end
        assert end["printed"].removeprefix("at work\n").startswith(PRINTED.get(end["case"], "")), end
        assert "job 1" not in end["printed"] or end["case"] == "patient queue", end


def test_a_queue_runs_jobs_in_order_and_is_bounded():
    begun, opened, jobs = threading.Event(), threading.Event(), []

    def run(job: int) -> None:
        begun.set()
        assert opened.wait(60)
        jobs.append(job)

    queue = JobQueue(run, 2, "gate")
    assert queue.add(0)
    assert begun.wait(60)
    assert [queue.add(number) for number in (1, 2, 3)] == [True, True, False]
    assert (queue.full, queue.backlog) == (True, 3)
    opened.set()
    queue.flush()
    assert jobs == [0, 1, 2]
    assert queue.add(4)
    assert queue.close()  # runs what waits
    assert queue.close()
    assert jobs == [0, 1, 2, 4]
    assert not queue.add(5)


WRITTEN = {"0": 0, "512": 512, "512 bytes": 512, "1 byte": 1, "10 gb": 10**10, " 10G ": 10**10, "2T": 2 * 10**12}
WRITTEN |= {"1_000 MB": 10**9, "1.5 GiB": 3 << 29, "1Ki": 1024, "0.1 KiB": 102, 7: 7, 1e9: 10**9, np.int64(5): 5}
WRONG = [math.nan, math.inf, -1, "-1 GB", True, 1.5, "", "GB", "ten", "1 XB", "1e9", "1.5.2 GB"]
WRONG += ["10 G B", "9" * 5000 + "GB", 10**400, None, [], b"1GB", 1 << 62, "5000 PB"]


def test_of_many_writers_the_file_of_one_stays_and_no_other(tmp_path: Path):
    path = tmp_path / "a[1]*.json"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=replace, args=(path, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_json_with_repeated_names_or_infinities_is_refused():
    cases = {
        '{"a": 1, "a": 2}': "there twice",
        "NaN": "NaN is no number",
        "[-Infinity]": "-Infinity is no number",
        "[" * 100_000: "too deeply|Expecting",
    }
    for text, message in cases.items():
        for content in (text, text.encode()):
            with pytest.raises(ValueError, match=message):
                strict_json.loads(content)
    assert strict_json.loads('{"a": [1, 2.5, null], "b": {"a": 1}}') == {"a": [1, 2.5, None], "b": {"a": 1}}


@pytest.mark.usefixtures("unchecked")
def test_a_size_is_read_as_people_write_it(tmp_path: Path):
    assert {size: size_of(size, "x") for size in WRITTEN} == WRITTEN
    for size in WRONG:
        with pytest.raises(InputError, match=r"^x: got .*; expected bytes, 0 or more, such as .*'10 GB'"):
            size_of(size, "x")
    with ChunkStore(tmp_path / "store", root_budget="10GB", share="5 GiB", memory="1 GiB") as store:
        assert StaticLibrary(store, quota="1 MB").quota == 10**6
        budgets = store.objects.index.rows("SELECT bytes FROM budgets ORDER BY bytes")
        assert budgets == [(5 << 30,), (10**10,)]


OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """jax as a user has it who set nothing, beside an empty cache folder, which is returned."""
    before = {option: getattr(jax.config, option) for option in OPTIONS}
    for option in OPTIONS:
        monkeypatch.delenv(option.upper(), raising=False)
    monkeypatch.setenv(compiling.CACHE, str(tmp_path / "cache"))
    for option, value in zip(OPTIONS, (None, -1, True, 1.0), strict=True):
        jax.config.update(option, value)
    yield tmp_path / "cache"
    for option, value in before.items():
        jax.config.update(option, value)


def test_programs_are_kept_in_the_cache_folder(unset):
    compiling.keep_compiled()
    folder = jax.config.jax_compilation_cache_dir
    assert folder is not None
    assert folder.startswith(str(unset / "compiled"))
    assert [path.stat().st_mode & 0o077 for path in unset.glob("compiled/*")] == [0]
    assert jax.config.jax_compilation_cache_max_size > 0
    assert jax.config.jax_persistent_cache_min_compile_time_secs < 1
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == folder


def test_what_a_user_chose_stays(unset, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7
    # An empty variable says that there is to be none.
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None
