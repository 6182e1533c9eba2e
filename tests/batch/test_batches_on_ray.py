"""Shards as tasks of a local Ray cluster of two workers: the answers of one process, whatever happens to a worker."""

import functools
import os
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax.batch import BatchItem, answer_batch, once_in_this_process, read_answers, run_shards
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.models import load
from kvpatch_jax.store import ChunkStore
from tests.goldens.load import write_checkpoint


@pytest.fixture(scope="module")
def cluster():
    """Two workers of one core each on this machine."""
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # as `run_shards` starts one
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 1024 * 1024)
    yield ray
    ray.shutdown()


@pytest.mark.nightly
def test_a_batch_on_two_workers_answers_as_one_process_does(cluster, tmp_path):
    model = write_checkpoint("qwen2_5_vl", tmp_path / "model")
    draw = np.random.default_rng(3)
    first, second, page = (draw.integers(0, 256, (40, 40, 3), np.uint8) for _ in range(3))
    fronts = [[first, page], [second, first], [first, second, page]]
    items = [BatchItem(fronts[number % 3], [5, 6], f"q{number}", steps=2) for number in range(6)]

    # Defined in here, it travels by value: a worker cannot import a test.
    def opening(model=model, root=tmp_path / "chunks"):
        return load(model), ChunkStore(root)

    backbone, store = opening()
    with store:
        alone = answer_batch(backbone, store, items, out=tmp_path / "alone.jsonl")

    def task(index, count, opening=opening, items=items, out=tmp_path / "shared.jsonl"):
        backbone, store = once_in_this_process(opening)
        return answer_batch(backbone, store, items, out=out, shard=(index, count))

    reports = run_shards(task, 3)
    assert [report.answered for report in reports] == [2, 2, 2]
    assert alone.answered == 6
    shared = read_answers(*(report.path for report in reports))
    assert shared == read_answers(tmp_path / "alone.jsonl")
    # What the batch before had stored was read by the workers.
    assert sum(report.forwards for report in reports) == 0


@pytest.mark.nightly
def test_a_shard_whose_worker_dies_begins_again_and_an_error_of_one_leaves_the_others(cluster, tmp_path):
    def dies_once(folder: str, index: int, count: int) -> tuple[int, int]:
        mark = Path(folder) / f"{index}"
        if index == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mark.touch()
        return index, count

    assert run_shards(functools.partial(dies_once, str(tmp_path)), 3) == [(0, 3), (1, 3), (2, 3)]

    def refuses(folder: str, index: int, count: int) -> int:
        (Path(folder) / f"done {index}").touch()
        if index == 0:
            raise ValueError("a page\nthat nobody has")
        return index

    with pytest.raises(
        SessionError, match=r"1 of 3 shards that failed \(0\): shard 0: a page that nobody has; expected"
    ):
        run_shards(functools.partial(refuses, str(tmp_path)), 3)
    assert {path.name for path in tmp_path.glob("done *")} == {"done 0", "done 1", "done 2"}


@pytest.mark.parametrize("count", [0, -1, True])
def test_counts_that_are_none_are_refused(count):
    with pytest.raises(InputError, match=f"got count {count!r}; expected a number of shards"):
        run_shards(lambda index, count: index, count)
