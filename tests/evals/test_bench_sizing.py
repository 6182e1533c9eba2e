"""Sizing against a store that is asked for the same: within stated bounds, and the table says what the rows do."""

import pytest

from evals.bench import sizing


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    result = sizing.run(quick=True)
    assert "hits, host" in sizing.table(result)
    return {row["metric"]: row for row in result["rows"]}


@pytest.mark.slow
def test_an_exact_log_predicts_what_the_store_does(rows: dict[str, dict[str, float]]):
    """Hits of each tier within three hundredths of all requests, bytes and remote requests within a tenth."""
    for metric, row in rows.items():
        assert row["measured"] > 0, metric
        bound = 0.03 if metric.startswith("hits") else 0.1 * row["measured"]
        assert abs(row["exact"] - row["measured"]) <= bound, (metric, row)
    assert all(rows[f"hits, {tier}"]["measured"] > 0.1 for tier in ("host", "disk", "remote", "missed"))


def test_a_curve_predicts_what_reaches_the_remote_store(rows: dict[str, dict[str, float]]):
    """What memory answers it understates, for popular chunks are those that were found before."""
    for metric in ("hits, remote", "hits, missed"):
        assert abs(rows[metric]["curve"] - rows[metric]["measured"]) <= 0.05
    local = {name: rows["hits, host"][name] + rows["hits, disk"][name] for name in ("curve", "measured")}
    assert abs(local["curve"] - local["measured"]) <= 0.05
    assert rows["hits, host"]["curve"] <= rows["hits, host"]["measured"] + 0.02
    for metric in ("remote writes", "remote reads", "received, bytes", "sent, bytes"):
        assert abs(rows[metric]["curve"] / rows[metric]["measured"] - 1) <= 0.15
