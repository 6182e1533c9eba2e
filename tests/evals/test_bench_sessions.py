"""The benchmark of many agents: who sees what, and its table."""

from typing import Any

import pytest

from evals.bench import sessions
from evals.bench.window_material import Material

LOAD = sessions.Load(agents=2, images=6, keep=2, steps=3, batch=2)


def test_agents_keep_their_first_image_and_the_last_ones():
    none: Any = None
    shown = sessions.Shown(Material("none", none, none, list(range(9)), [], None), LOAD)  # pyright: ignore
    assert [shown.wanted(0, step) for step in range(5)] == [(0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4)]
    assert shown.wanted(1, 4) == (5, 8, 0)


def one(rate: float) -> dict[str, Any]:
    quantiles = {"p50": 0.1, "p99": 0.2}
    sums = {"tokens_per_second": rate, "tokens_per_cpu_second": 2.0, "flops": 2e9, "padded_flops": 3e9}
    return sums | {"first": quantiles, "between": quantiles, "launches": 4, "compilations": 0}


def test_the_table_has_medians_and_extremes_of_every_way():
    ways = {way: {"runs": [one(2.0), one(4.0), one(3.0)], "agreement": 0.5} for way in sessions.WAYS}
    table = sessions.table({"ways": ways}).splitlines()
    assert table[0] == "| what | re-prefill | prefix | window |"
    assert table[2] == "| tokens per second | 3 (2 to 4) | 3 (2 to 4) | 3 (2 to 4) |"
    assert table[-1] == "| first tokens as re-prefill's | 0.5 | 0.5 | 0.5 |"


@pytest.mark.slow
def test_the_ways_say_the_same_and_run_ever_less():
    result = sessions.run(quick=True)
    parts = [result["ways"][way] for way in sessions.WAYS]
    flops = [part["runs"][0]["flops"] for part in parts]
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > 1.5 * flops[2]
    assert parts[1]["agreement"] == 1.0
    assert all(part["runs"][0]["compilations"] == 0 for part in parts)
