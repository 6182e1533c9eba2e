"""Revisits: visits are what their names say, other ways count what they say, and exact reuse loses nothing."""

from pathlib import Path

import pytest

from evals.harness import config, runner
from evals.harness.frame import Lookup
from evals.harness.methods import REFERENCE
from evals.loops.costs import PrefixCache
from evals.windows.visits import (
    BATCHED,
    CONTEXTS,
    FIRST,
    FORK,
    KEPT,
    MPIC,
    ONE_BY_ONE,
    PIECES,
    PLACEHOLDER,
    PLACEHOLDER_TOKENS,
    REPREFILL,
    SAME,
    SHUFFLED,
    Visit,
    counted_work,
    draw_visits,
)


def flops(tokens: int, behind: int) -> int:
    """FLOPs that say what they are of."""
    return tokens * (1000 + behind)


@pytest.mark.parametrize(("contexts", "window", "revisits"), [(2, 4, 8), (4, 8, 16)])
def test_nothing_is_revisited_while_it_is_in_the_window(contexts: int, window: int, revisits: int):
    for seed in range(5):
        for visit in draw_visits(contexts, window, revisits, seed):
            assert len(visit.pieces) == contexts * PIECES + revisits
            assert set(visit.pieces[: contexts * PIECES]) == set(range(contexts * PIECES))
            for step, piece in enumerate(visit.pieces):
                assert piece not in visit.pieces[max(step - window, 0) : step]


def test_visits_differ_as_their_names_say():
    visits = {visit.name: visit for visit in draw_visits(4, 8, 16, 0)}
    assert list(visits) == [FIRST, SAME, CONTEXTS, SHUFFLED, FORK]
    assert visits[SAME].pieces == visits[FIRST].pieces != visits[CONTEXTS].pieces
    # Within a context nothing changes.
    for start in range(0, 32, PIECES):
        first = visits[CONTEXTS].pieces[start]
        assert visits[CONTEXTS].pieces[start : start + PIECES] == tuple(range(first, first + PIECES))
    together = sum(b == a + 1 for a, b in zip(visits[SHUFFLED].pieces, visits[SHUFFLED].pieces[1:], strict=False))
    assert together < 12
    # The branch goes back to what its parent goes back to.
    forked = visits[FORK].forked
    assert visits[FORK].pieces[:forked] == visits[FIRST].pieces[:forked]
    assert visits[FORK].pieces[forked:] != visits[FIRST].pieces[forked:]


def test_other_ways_prefill_what_they_do_not_have():
    visit, caches, tokens = Visit("a", (0, 1, 2, 0)), dict[str, PrefixCache](), [10, 100, 1000]
    work = {way: found for way, (found, _) in counted_work(visit, tokens, 4, 2, flops, caches).items()}
    # (0) (0 1) (1 2) (2 0), as a whole each time.
    assert work[REPREFILL] == 10 + 110 + 1100 + 1010
    assert work[ONE_BY_ONE] == 10 + 100 + 1100 + 1010
    # (0) (0 1) (0 1 2) (0 1 2 0): nothing leaves before there are four.
    assert work[BATCHED] == 10 + 100 + 1000 + 10
    # (0) (0 1) (… 1 2) (… … 2 0): what follows a placeholder is prefilled again, the one before is known.
    assert work[PLACEHOLDER] == 10 + 100 + (PLACEHOLDER_TOKENS + 1100) + (PLACEHOLDER_TOKENS + 1010)
    # Every piece once, and 15 % of each piece of every window.
    assert work[MPIC] == 1110 + 2 + (2 + 15) + (15 + 150) + (150 + 2)

    # What outlives the visit is known; what does not begins anew.
    again = {way: found for way, (found, _) in counted_work(visit, tokens, 4, 2, flops, caches).items()}
    assert again[ONE_BY_ONE + KEPT] == again[BATCHED + KEPT] == 0
    assert again[ONE_BY_ONE] == work[ONE_BY_ONE]
    assert again[MPIC] == work[MPIC] - 1110
    # FLOPs are counted behind the lead; what a fork's parent computed is in the branch's cache.
    assert counted_work(Visit("a", (0, 1)), tokens, 4, 2, flops, {})[REPREFILL][1] == 20 * 1004 + 100 * 1014
    assert counted_work(Visit("a", (0, 1), forked=1), tokens, 4, 2, flops, {})[ONE_BY_ONE][0] == 100


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Lookup:
    folder: Path = tmp_path_factory.mktemp("revisits")
    results = runner.run(config.read_config("revisits", [], ["quick"]), folder)
    assert results is not None
    return Lookup(results["rows"])


@pytest.mark.nightly
def test_exact_reuse_loses_nothing_and_a_restart_computes_nothing(lookup: Lookup):
    place = {"model": "documents/qwen2_5_vl", "arm": "default"}
    for visit in (FIRST, SAME, CONTEXTS, SHUFFLED, FORK, "other"):
        assert lookup.get(probe=f"revisits.documents.window=2.{visit}", metric="kl.answer", **place).value == 0
    restart = {**place, "probe": f"revisits.documents.window=2.{SAME}"}
    assert lookup.get(metric="hits", **restart).value == 1
    assert lookup.get(metric="tokens", **restart).value == 0


@pytest.mark.nightly
def test_what_is_run_agrees_with_what_is_counted(lookup: Lookup):
    for visit in (FIRST, SHUFFLED):
        place = {"probe": f"revisits.documents.window=2.{visit}", "model": "documents/qwen2_5_vl", "metric": "tokens"}
        tokens = {way: lookup.get(arm=way, **place).value for way in lookup.values("arm", place)}
        assert tokens[REFERENCE] < tokens[f"{BATCHED}, run"] < tokens[f"{ONE_BY_ONE}, run"] <= tokens[REPREFILL]
        # A session that forgets prefills its window again whenever a chunk leaves; a cache may know the prompt.
        assert tokens[ONE_BY_ONE] <= tokens[f"{ONE_BY_ONE}, run"]
        assert tokens[BATCHED] <= tokens[f"{BATCHED}, run"]
