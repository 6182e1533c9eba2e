"""The benchmark of many agents: who sees what, and its table."""

from typing import Any

import pytest

from evals.bench import sessions
from evals.bench.loop_workload import LoopWorkload

LOAD = sessions.AgentLoad(agents=2, images=6, keep=2, steps=3, batch=2)


def test_agents_keep_their_first_image_and_the_last_ones():
    none: Any = None
    views = sessions.AgentViews(LoopWorkload("none", none, none, list(range(9)), [], None), LOAD)  # pyright: ignore
    assert [views.window(0, step) for step in range(5)] == [(0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4)]
    assert views.window(1, 4) == (5, 8, 0)


def one(rate: float) -> dict[str, Any]:
    quantiles = {"p50": 0.1, "p99": 0.2}
    sums = {"tokens_per_second": rate, "tokens_per_cpu_second": 2.0, "flops": 2e9, "padded_flops": 3e9}
    return sums | {"first": quantiles, "between": quantiles, "launches": 4, "compilations": 0}


def test_rows_are_medians_and_extremes_of_every_arm():
    arms = {arm: {"runs": [one(2.0), one(4.0), one(3.0)], "agreement": 0.5} for arm in sessions.ARMS}
    rows = sessions.rows_of(arms)
    first = [row for row in rows if row["metric"] == "tokens per second"]
    assert [row["arm"] for row in first] == ["re-prefill", "prefix", "window"]
    assert {(row["value"], row["low"], row["high"]) for row in first} == {(3, 2, 4)}
    assert [row["value"] for row in rows[-3:]] == [0.5] * 3
    lines = sessions.BENCHMARK.format({"rows": rows}).splitlines()
    assert lines[2] == "| tokens per second | re-prefill | 3 | 2 to 4 |  |  |"


@pytest.mark.slow
def test_arms_answer_alike_and_compute_ever_less():
    result = sessions.run(quick=True)
    parts = [result["arms"][arm] for arm in sessions.ARMS]
    flops = [part["runs"][0]["flops"] for part in parts]
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > 1.5 * flops[2]
    assert parts[1]["agreement"] == 1.0
    assert all(part["runs"][0]["compilations"] == 0 for part in parts)
