"""Samples, parts and shards of a measurement, and its rows by hand."""

import json

import numpy as np
import pytest

from evals.datasets import RecordedDataset
from evals.harness.frame import Rows
from evals.harness.parts import ExpectedPace, PlannedPart
from evals.measure.items import Item, Piece
from evals.measure.plan import QUESTIONS, WorkShard, contexts_of, longest_prompt, sampled
from evals.measure.rows import records_in, rows_of
from evals.measure.shards import run_shard
from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

PACE = ExpectedPace(100.0, 10.0)


def item(number, text="A page.", cluster="deck"):
    return Item(f"q{number}", cluster, (Piece(Text(text), "page 1"),), "What?", ("this",), "", "exact")


def test_items_of_one_context_are_one_part():
    items = [item(0), item(1, "Another."), item(2), item(3, cluster="other")]
    assert [[own.id for own in part.items] for part in contexts_of(items)] == [["q0", "q2"], ["q1"], ["q3"]]
    many = contexts_of([item(number) for number in range(QUESTIONS + 1)])
    assert [len(part.items) for part in many] == [QUESTIONS, 1]
    assert len({part.name for part in many}) == 2


def test_a_sample_is_the_seeds_and_in_the_datas_order():
    items = [item(number) for number in range(20)]
    drawn = sampled(items, 5, 3)
    assert [own.id for own in drawn] == [own.id for own in sampled(items, 5, 3)]
    assert [items.index(own) for own in drawn] == sorted(items.index(own) for own in drawn)
    assert len(drawn) == 5
    assert sampled(items, 0, 3) == sampled(items, 50, 3) == items


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_share_all_parts(count):
    parts = contexts_of([item(number, f"Page {number}.") for number in range(7)])
    shared = [part.name for index in range(count) for part in WorkShard(index, count).of(parts)]
    assert sorted(shared) == sorted(part.name for part in parts)
    assert len({WorkShard(index, count).file for index in range(count)}) == count


def counting_dataset(measured, **config):
    """Ten parts that note when they are measured."""

    def measure(number):
        measured.append(number)
        yield {"number": number}

    parts = [PlannedPart(f"{number}: q", lambda _, number=number: measure(number), 1) for number in range(10)]
    return RecordedDataset({"model": "m", **config}, parts, lambda parts: [], ())


def test_shards_resume_after_lines_that_were_cut_off_and_after_other_shardings(tmp_path):
    """Whoever measured a part, it is measured once, but for one whose line was cut off; all see the same records."""
    measured = []
    dataset = counting_dataset(measured)
    assert len(run_shard(dataset, tmp_path, WorkShard(0, 2), PACE)) == 5
    file = tmp_path / WorkShard(0, 2).file
    file.write_bytes(file.read_bytes()[:-3])

    assert len(run_shard(dataset, tmp_path, WorkShard(1, 2), PACE)) == 9
    finished = run_shard(dataset, tmp_path, WorkShard(0, 1), PACE)
    assert sorted(measured) == sorted([*range(10), 8])
    assert [record["number"] for record in records_in(finished)] == list(range(10))


def test_another_measurements_folder_is_refused_and_left_as_it_is(tmp_path):
    run_shard(counting_dataset([]), tmp_path, WorkShard(1, 2), PACE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        InputError, match=r"--out: got .*parts-00001-of-00002\.jsonl, which holds parts of another seed"
    ):
        run_shard(counting_dataset([], seed=1), tmp_path, WorkShard(0, 2), PACE)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_processes_on_one_shard_are_refused(tmp_path):
    def measure(_):
        with pytest.raises(InputError, match="which another process is writing"):
            run_shard(counting_dataset([]), tmp_path, WorkShard(), PACE)
        yield {}

    dataset = RecordedDataset({"model": "m"}, [PlannedPart("0: q", measure, 1)], lambda _: [], ())
    run_shard(dataset, tmp_path, WorkShard(), PACE)


@pytest.mark.parametrize(
    ("config", "most"),
    [({"max_position_embeddings": 8}, 8), ({"text_config": {"max_position_embeddings": 9}}, 9), ({}, None)],
)
def test_the_longest_prompt_is_what_the_configuration_says(tmp_path, config, most):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_prompt(str(tmp_path)) == most


def record(number, blind_score, blind_kl, kind="a"):
    def answer(score, kl, agrees):
        return {"said": "", "score": score, "kl": kl, "kl_first": kl, "agrees": agrees, "first_agrees": agrees}

    arms = {
        "re-prefill": answer(1.0, 0.0, True),
        "blind": answer(blind_score, blind_kl, False),
        "patch": answer(1.0, blind_kl / 4, number % 2 == 0),
    }
    costs = {arm: {"serving_flops": 0.5} for arm in arms}
    return {"item": f"{number}", "cluster": f"c{number}", "kind": kind, "arms": arms, "costs": costs}


def rows_behind(records):
    parts = [{"part": f"{place}: q", "records": [own]} for place, own in enumerate(records)]
    return Rows({"config": {"model": "m"}, "rows": rows_of(parts[::-1], "m")})


def test_rows_are_those_counted_by_hand():
    """Where blind reuse loses score and KL, both shares that an arm brings back are given; an arm's failures count."""
    records = [record(number, 0.0, 0.4) for number in range(30)]
    rows = rows_behind(records)
    assert rows.get("measure", "blind", "accuracy.all").value == 0
    assert rows.get("measure", "blind", "difference.all")[:3] == (-1, -1, -1)
    assert rows.get("measure", "patch", "eta.all").value == pytest.approx(0.75)
    assert rows.get("measure", "patch", "closed.all").value == 1
    assert rows.get("measure", "patch", "flips.all").value == 0.5
    assert rows.get("measure", "patch", "serving_flops").value == 0.5

    records[0]["arms"]["patch"] = {"failed": "no room"}
    assert rows_behind(records).get("measure", "patch", "kl.all").n == 29


def test_shares_of_a_loss_that_cannot_be_told_from_nothing_are_not_given():
    rows = rows_behind([record(number, 1.0 - number % 2 * 0.0, 1e-5) for number in range(30)])
    assert np.isnan(rows.get("measure", "patch", "closed.all").value)
    assert np.isnan(rows.get("measure", "patch", "eta.all").value)
    assert rows.kinds("measure") == ["all"]
