"""A share of approximate answers is audited at its true loss, and what loses too much is prefilled from then on."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
import warnings
from typing import Any

import jax
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import ReuseWarning
from kvpatch_jax.plan import Goal
from kvpatch_jax.session.guard import Audit, Guard
from tests.shared.session_cases import QUESTION, PatchesAlone, image_of, settled
from tests.shared.window_oracle import counting_of


class Distorting(PatchesAlone):
    """A store that gives every patch back as if it had been formed badly."""

    def __init__(self, store: kvp.ChunkStore, scale: float):
        super().__init__(store)

        def get_patches(served: Any) -> list[kvp.Patch]:
            patches = store.get_patches(served)
            return [dataclasses.replace(p, factors=jax.tree.map(lambda x: x * scale, p.factors)) for p in patches]

        self.get_patches = get_patches


@pytest.fixture(scope="module")
def patches(backbone, tmp_path_factory):
    """A store with patches of two images, each behind the first one, of every direction."""
    with kvp.ChunkStore(tmp_path_factory.mktemp("store")) as store:
        with kvp.Session(backbone, PatchesAlone(store), keep=1, rank=18) as session:
            for number in range(3):
                session.add(image_of(number))
            settled(session)
        yield store


def patched(backbone: Any, store: Any, **options: Any) -> kvp.Session:
    """A session of the first two images, of which the second is served by its patch."""
    session = kvp.Session(backbone, store, keep=1, **{"rank": 0, "reuse": "patched", **options})
    session.add(image_of(0))
    session.add(image_of(1))
    assert session.window.pieces[-1].method == "patch"
    return session


def test_an_audit_measures_what_a_reprefill_does_and_changes_no_answer(backbone, patches):
    counting = counting_of(backbone)
    with patched(counting, Distorting(patches, 0.9), audit=0) as session:
        plain = session.ask(QUESTION, steps=3, stop=()).ids
        unaudited = counting.forwards
        assert session.stats().audits.answers == 0
        # The session's own audit reads the whole prompt in one forward, without the pool.
        expected = session.ask(QUESTION, steps=3, stop=(), audit=True).audit

    counting.forwards = 0
    with patched(counting, Distorting(patches, 0.9)) as session:
        before = session.window
        answer = session.ask(QUESTION, steps=3, stop=())
        assert answer.ids == plain
        audits = session.stats().audits
        assert (audits.answers, audits.tokens, audits.compared, audits.skipped) == (1, 3, 1, 0)
        assert audits.kl == pytest.approx(expected.kl, rel=1e-3)
        assert audits.flips == expected.flips
        assert expected.kl < audits.blind_kl
        # Three questions and the prefill of the chunk.
        assert (audits.forwards, audits.prefix_cache) == (4, 18)
        assert counting.forwards == unaudited + 4
        assert session.window == before
        assert answer.audit is None
        # What audits run is not the session's work, and leaves nothing in the store.
        assert session.stats().forwards == 0
        assert len(session.runtime.executor.branches) == 1


def test_a_bad_patch_is_warned_of_once_and_prefilled_from_then_on(backbone, patches):
    with kvp.Session(backbone, keep=1) as exact:
        exact.add(image_of(0))
        exact.add(image_of(1))
        right = exact.ask(QUESTION, steps=4, stop=()).ids

    with patched(backbone, Distorting(patches, -12.0)) as session:
        answer = session.ask(QUESTION, steps=4, stop=())
        with pytest.warns(ReuseWarning, match=r"patched image pieces lose .* they are prefilled from now on") as seen:
            wrong = answer.ids
        assert len(seen) == 1
        assert wrong != right
        assert session.window.pieces[-1].method == "patch"
        # The piece in the window is prefilled before the next answer, and so is what comes in.
        assert session.ask(QUESTION, steps=4, stop=()).ids == right
        assert [session.fidelity(name) for name in session.ids] == ["exact", "exact"]
        with session.fork() as branch:
            branch.add(image_of(2))
            assert branch.fidelity(branch.ids[-1]) != "approximate"
            str(branch.ask(QUESTION, steps=1))
        audits = session.stats().audits
        assert list(audits.ruled_out) == ["patched image pieces"]
        assert audits.answers == 1


def test_only_answers_that_are_read_to_their_end_are_audited_against_the_window_that_was_asked(backbone, patches):
    with patched(backbone, PatchesAlone(patches)) as session:
        session.ask(QUESTION, steps=5, stop=()).close()
        begun = session.ask(QUESTION, steps=2, stop=())
        session.slide(0)
        assert session.window.as_promised
        assert len(begun.ids) == 2
        audits = session.stats().audits
        assert (audits.answers, audits.skipped, audits.kl < 1e-6, audits.blind_kl > 1e-6) == (1, 0, True, True)
        # Exact windows cost nothing.
        str(session.ask(QUESTION, steps=2, stop=()))
        assert session.stats().audits.answers == 1
        assert len(session.runtime.executor.branches) == 1


def test_a_full_pool_skips_audits(backbone, patches):
    """There is room for the window and one answer, but not for the window again: nobody waits for it."""
    with kvp.Sessions(backbone, PatchesAlone(patches), pages=5, rank=0, timeout=600) as sessions:
        session = sessions.open(keep=1, reuse="patched")
        session.add(image_of(0))
        session.add(image_of(1))
        assert len(session.ask(QUESTION, steps=3, stop=()).ids) == 3
        audits = session.stats().audits
        assert (audits.answers, audits.skipped) == (0, 1)


@pytest.fixture(scope="module")
def window(backbone, patches) -> Any:
    with patched(backbone, PatchesAlone(patches)) as session:
        return session.window


def warnings_of(window: Any, *audits: tuple[float, float | None]) -> list[str]:
    """Returns the warnings after audits of these KL, and of blind reuse's, with a goal of .05 nats."""
    guard = Guard(Goal("patched", 0.05), 0.02)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for kl, blind in audits:
            guard.end(window, Audit(kl, 0, 1, None if blind is None else (blind, 0), 18, 4))
    assert bool(seen) == bool(guard.ruled_out)
    return [str(warning.message) for warning in seen]


def test_a_kind_is_ruled_out_beyond_the_goal_or_beyond_blind_reuse(window):
    for audits, count in (
        # A lone bad answer decides if it loses as much as three may.
        ([(0.14, 0.5)], 0),
        ([(0.16, 0.5)], 1),
        ([(0.14, 0.5), (0.0, 0.5), (0.0, 0.5)], 0),
        ([(0.06, 0.5)] * 4, 1),
        # Worse than blind reuse, and more than a tenth of the goal.
        ([(0.01, 0.004)] * 2, 0),
        ([(0.01, 0.004)] * 3, 1),
        ([(0.004, 0.001)] * 9, 0),
        ([(0.04, None)] * 9, 0),
    ):
        assert len(warnings_of(window, *audits)) == count, audits


def test_the_first_three_and_then_a_share_are_audited(window):
    for share, audits in ((0.02, [1, 2, 3, 50, 100]), (0.0, []), (1.0, [*range(1, 101)])):
        guard = Guard(Goal("patched"), share)
        assert [number for number in range(1, 101) if guard.begin(window)] == audits
        assert not any(Guard(Goal("exact"), share).begin(window) for _ in range(9))
