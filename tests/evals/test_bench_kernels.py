"""The benchmark of the kernels: its rows and its table, at sizes whose times say nothing."""

import math

import pytest

from evals.bench import kernels

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny():
    return kernels.run_sizes(kernels.TINY, repeats=2, seed=0)


def test_every_row_is_there(tiny):
    names = [(row["metric"], row.get("arm")) for row in tiny["rows"]]
    assert names[:4] == [
        ("steps over one pass", "rank 0"),
        ("steps over one pass", "rank 4"),
        ("splice is linear in tokens", "R²"),
        ("splice into 16 × the pool", "16 tokens"),
    ]
    assert [name for name, _ in names[4:6]] == [
        "full SVD over the randomised factorisation",
        "energy captured over the most possible",
    ]
    assert [arm for _, arm in names[6:]] == [
        *("memcpy", "blind", "patched", "spliced", "relocated"),
        *("apply_patch, blind", "apply_patch", "splice", "relocate"),
    ]
    assert all(math.isfinite(row["value"]) for row in tiny["rows"])
    assert all(row["agrees"] for row in tiny["rows"][:2])
    assert tiny["config"]["repeats"] == 2


def test_table_counts_what_passed(tiny):
    lines = kernels.BENCHMARK.format(tiny).splitlines()
    assert len(lines) == 2 + len(tiny["rows"]) + 2
    assert lines[-1].endswith("of 11 rows within their bars")


def test_steps_that_compute_something_else_fail(monkeypatch):
    monkeypatch.setattr(kernels, "STEPS_BAR", 0.0)
    assert all(row["passed"] for row in kernels.pass_rows(kernels.TINY, 1, 0))
    right = kernels.one_by_one
    monkeypatch.setattr(kernels, "one_by_one", lambda **given: -right(**given))
    assert not any(row["passed"] for row in kernels.pass_rows(kernels.TINY, 1, 0))
