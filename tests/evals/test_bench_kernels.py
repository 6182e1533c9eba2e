"""The benchmark of the kernels: its rows and its table, at sizes whose times say nothing."""

import math

import pytest

from evals.bench import kernels

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny():
    return kernels.run(repeats=2, sizes=kernels.TINY)


def test_every_row_is_there(tiny):
    names = [(row["metric"], row.get("arm")) for row in tiny["rows"]]
    assert names[:4] == [
        ("steps over one pass", "rank 0"),
        ("steps over one pass", "rank 4"),
        ("splice is linear in tokens", "R²"),
        ("splice into 16 × the pool", "16 tokens"),
    ]
    assert [name for name, _ in names[4:8]] == [
        "factorise seconds",
        "factorise seconds",
        "factorise speedup",
        "factorise energy_ratio",
    ]
    assert [arm for _, arm in names[8:]] == [
        *("memcpy", "blind", "patched", "spliced", "relocated"),
        *("apply_patch, blind", "apply_patch", "splice", "relocate"),
    ]
    assert all(math.isfinite(row["value"]) for row in tiny["rows"])
    assert all(row["agrees"] for row in tiny["rows"][:2])
    assert tiny["config"]["repeats"] == 2


def test_table_counts_what_passed(tiny):
    lines = kernels.table(tiny).splitlines()
    assert len(lines) == 1 + len(tiny["rows"]) + 1
    assert lines[-1].endswith("of 11 rows within their bars")
    row = {"metric": "m", "arm": "a", **kernels._verdict([1.0, 3.0, 2.0], 3.0, lambda value: value >= 3.0)}
    assert (row["value"], row["low"], row["high"], row["passed"]) == (2.0, 1.0, 3.0, False)
    assert kernels.table({"rows": [row]}).splitlines()[1].split()[-1] == "FAIL"


def test_steps_that_compute_something_else_fail(monkeypatch):
    monkeypatch.setattr(kernels, "STEPS_BAR", 0.0)
    assert all(row["passed"] for row in kernels.pass_rows(kernels.TINY, 1, 0))
    right = kernels.one_by_one
    monkeypatch.setattr(kernels, "one_by_one", lambda **given: -right(**given))
    assert not any(row["passed"] for row in kernels.pass_rows(kernels.TINY, 1, 0))
