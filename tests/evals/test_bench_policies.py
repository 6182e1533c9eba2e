"""The benchmark of ways to keep a window: that its rows are what policies cost, and its table what the rows say."""

from pathlib import Path

import pytest

from evals.bench import policies
from evals.bench.checkpoints import SEVEN_BILLION, shape_costs
from kvpatch_jax.plan import DeviceCosts, EvictionPolicy, price_policy


@pytest.fixture(scope="module")
def result():
    return policies.run()


def test_rows_are_over_sliding_and_each_loop_has_one(result):
    slides = [
        row for row in result["rows"] if row["policy"].startswith("slide, ") and "re-prefilled" not in row["policy"]
    ]
    assert len(slides) == len(policies.SHAPES) * len(policies.LOOPS)
    assert all(row[f"{name} over sliding"] == 1 for row in slides for name in ("flops", "bytes", "seconds"))


def test_a_row_is_the_price_of_its_policy(result):
    loop, policy = policies.LOOPS[1], EvictionPolicy(3, 6, placeholder=True)
    devices = DeviceCosts.assumed(policies.DEVICE)
    price = price_policy(policy, loop.sizes, costs=shape_costs("7B", SEVEN_BILLION), devices=devices)
    rows = {(row["shape"], row["loop"], row["policy"]): row for row in result["rows"]}
    row = rows["7B", loop.name, policy.name]
    assert (row["flops"], row["bytes"], row["tokens"]) == (price.step_flops, price.step_bytes, price.tokens)


def test_something_is_taken_for_all_that_is_asked_and_the_classic_ways_where_sliding_is_not_bounded(result):
    for shape in policies.SHAPES:
        for loop in policies.LOOPS:
            rows = [row for row in result["rows"] if (row["shape"], row["loop"]) == (shape, loop.name)]
            taken = [name for row in rows for name in row["taken"]]
            assert sorted(taken) == sorted(policies.ASKED if loop.sizes.text else ("remember", "forget"))
            if loop.low > 1:
                (forgets,) = (row for row in rows if "forget" in row["taken"])
                assert forgets["policy"].startswith("batched eviction")


def test_the_table_has_a_line_for_each_row(result):
    lines = policies.table(result).splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(result["rows"]) + 2 * 6


def test_the_guide_shows_what_the_program_prints(result):
    guide = (Path(__file__).parents[2] / "docs/guides/windows.md").read_text()
    shown = [
        row
        for row in result["rows"]
        if row["shape"] == "7B" and row["loop"] in (policies.LOOPS[0].name, policies.LOOPS[1].name)
    ]
    printed = [line for line in policies.table({"rows": shown}).splitlines() if line.startswith("| ")]
    assert len(printed) == len(shown) + 2 * 2
    assert [line for line in printed if line not in guide] == []
