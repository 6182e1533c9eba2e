"""The loss guard: a share of approximate answers is audited, and what loses too much is prefilled from then on."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
import warnings
from typing import Any

import jax
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import ReuseWarning, SessionError
from kvpatch_jax.plan import Goal
from kvpatch_jax.session import compared
from kvpatch_jax.session.guard import Audit, Guard
from tests.shared.session_cases import QUESTION, PatchesAlone, image_of, logits, settled
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
def kept(backbone, tmp_path_factory):
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


def test_an_audit_measures_what_a_reprefill_does_and_changes_no_answer(backbone, kept):
    counting = counting_of(backbone)
    with patched(counting, Distorting(kept, 0.9), audit=0) as session:
        plain = session.ask(QUESTION, steps=3, stop=()).ids
        unaudited = counting.forwards
        assert session.stats().audits.answers == 0
        # The session's own audit reads the whole prompt in one forward, without the pool.
        expected = session.ask(QUESTION, steps=3, stop=(), audit=True).audit
        blind = session.needs(session.ids[-1], QUESTION, steps=3)

    counting.forwards = 0
    with patched(counting, Distorting(kept, 0.9)) as session:
        before = session.window
        answer = session.ask(QUESTION, steps=3, stop=())
        assert answer.ids == plain
        audits = session.stats().audits
        assert (audits.answers, audits.tokens, audits.compared, audits.skipped) == (1, 3, 1, 0)
        assert audits.kl == pytest.approx(expected.kl, rel=1e-3)
        assert audits.flips == expected.flips
        assert expected.kl < audits.blind_kl
        assert blind.bare.kl > 0
        # Three questions and the prefill of the chunk.
        assert (audits.forwards, audits.prefix_cache) == (4, 18)
        assert counting.forwards == unaudited + 4
        assert session.window == before
        assert answer.audit is None
        assert "1 answer audited" in str(session.stats())
        # What audits run is not the session's work, and leaves nothing in the store.
        assert session.stats().forwards == 0
        assert len(session.runtime.executor.branches) == 1


def test_a_bad_patch_is_warned_of_once_and_prefilled_from_then_on(backbone, kept):
    with kvp.Session(backbone, keep=1) as exact:
        exact.add(image_of(0))
        exact.add(image_of(1))
        right = exact.ask(QUESTION, steps=4, stop=()).ids

    with patched(backbone, Distorting(kept, -12.0)) as session:
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
            branch.ask(QUESTION, steps=1).ids  # noqa: B018
        audits = session.stats().audits
        assert list(audits.ruled_out) == ["patched image pieces"]
        assert audits.answers == 1
        assert "patched image pieces ruled out" in str(session.stats())


def test_answers_that_are_not_read_to_their_end_are_not_audited(backbone, kept):
    with patched(backbone, PatchesAlone(kept)) as session:
        closed = session.ask(QUESTION, steps=5, stop=())
        closed.close()
        with pytest.raises(SessionError, match="got closed"):
            closed.ids  # noqa: B018
        # An audit belongs to the window that was asked.
        begun = session.ask(QUESTION, steps=2, stop=())
        session.slide(0)
        assert session.window.as_promised
        assert len(begun.ids) == 2
        audits = session.stats().audits
        assert (audits.answers, audits.skipped, audits.kl < 1e-6, audits.blind_kl > 1e-6) == (1, 0, True, True)
        # Exact windows cost nothing.
        session.ask(QUESTION, steps=2, stop=()).ids  # noqa: B018
        assert session.stats().audits.answers == 1
        assert len(session.runtime.executor.branches) == 1


def test_memory_of_what_has_left_is_no_loss(backbone, kept):
    def slid(**options: Any) -> kvp.Session:
        """A window whose second image remembers one that has left, and whose third one is new behind it."""
        session = kvp.Session(backbone, **options)
        for number in (0, 5, 7):
            session.add(image_of(number), id=f"shot {number}")
        session.evict("shot 5")
        session.add(image_of(1), id="shot 1")
        return session

    with slid() as exact, slid(store=PatchesAlone(kept), reuse="blind", rank=0) as session:
        assert session.fidelity("shot 7") == "survivor"
        assert session.window.pieces[-1].method == "bare"
        answer = session.ask(QUESTION, steps=1, stop=())
        assert len(answer.ids) == 1
        kl, _ = compared(logits(exact)[0], logits(session)[0])
        audits = session.stats().audits
        assert audits.kl == pytest.approx(float(kl[0]), rel=1e-3)
        assert (audits.compared, audits.prefix_cache) == (0, 18)
        # A re-prefill of the window has forgotten what has left.
        assert session.ask(QUESTION, steps=1, stop=(), audit=True).kl != pytest.approx(audits.kl, rel=0.05)


def test_many_sessions_share_audits_and_a_full_pool_skips_them(backbone, kept):
    store = PatchesAlone(kept)
    with kvp.Sessions(backbone, store, pages=64, rank=0) as sessions:
        opened = [sessions.open(keep=1, reuse="patched") for _ in range(2)]
        for session in opened:
            session.add(image_of(0))
            session.add(image_of(1))
        answers = [session.ask(QUESTION, steps=3, stop=()) for session in opened for _ in range(2)]
        texts = {answer.ids for answer in answers}
        assert len(texts) == 1
        # The first three of all, not of each.
        assert opened[0].stats().audits.answers == opened[1].stats().audits.answers == 3
        assert sessions.open(reuse="blind").stats().audits.answers == 0

    # Room for the window and one answer, but not for the window again: nobody waits for it.
    with kvp.Sessions(backbone, store, pages=5, rank=0, timeout=600) as sessions:
        session = sessions.open(keep=1, reuse="patched")
        session.add(image_of(0))
        session.add(image_of(1))
        assert {session.ask(QUESTION, steps=3, stop=()).ids} == texts
        audits = session.stats().audits
        assert (audits.answers, audits.skipped) == (0, 1)


def test_what_could_not_be_stored_is_said_at_the_end(backbone, store):
    def refused(patches: Any) -> None:
        raise OSError("no space")

    failing = PatchesAlone(store)
    failing.put_patches = refused
    session = kvp.Session(backbone, failing, keep=1, rank=4)
    for number in range(3):
        session.add(image_of(number))
    with pytest.warns(ReuseWarning, match=r"2 pieces were not stored, or got no patch; the last one: no space"):
        session.close()


# ----------------------------------------------------------------------------------------------------- what it decides


@pytest.fixture(scope="module")
def window(backbone, kept) -> Any:
    with patched(backbone, PatchesAlone(kept)) as session:
        return session.window


def audited(window: Any, *audits: tuple[float, float | None]) -> list[str]:
    """Returns the warnings after audits of these KL, and of blind reuse's, with a goal of .05 nats."""
    guard = Guard(Goal("patched", 0.05), 0.02)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for kl, blind in audits:
            guard.end(window, Audit(kl, 0, 1, None if blind is None else (blind, 0), 18, 4))
    assert bool(seen) == bool(guard.ruled_out)
    return [str(warning.message) for warning in seen]


def test_a_kind_is_ruled_out_beyond_the_goal_or_beyond_blind_reuse(window):
    # A lone bad answer decides if it loses as much as three may.
    assert audited(window, (0.14, 0.5)) == []
    assert len(audited(window, (0.16, 0.5))) == 1
    assert audited(window, (0.14, 0.5), (0.0, 0.5), (0.0, 0.5)) == []
    assert len(audited(window, (0.06, 0.5), (0.06, 0.5), (0.06, 0.5), (0.06, 0.5))) == 1
    # Worse than blind reuse, and more than a tenth of the goal.
    assert audited(window, *[(0.01, 0.004)] * 2) == []
    assert "more than blind reuse 0.004" in audited(window, *[(0.01, 0.004)] * 3)[0]
    assert audited(window, *[(0.004, 0.001)] * 9) == []
    assert audited(window, *[(0.04, None)] * 9) == []


@pytest.mark.parametrize(("share", "audits"), [(0.02, [1, 2, 3, 50, 100]), (0.0, []), (1.0, [*range(1, 101)])])
def test_the_first_three_and_then_a_share_are_audited(window, share, audits):
    guard = Guard(Goal("patched"), share)
    assert [number for number in range(1, 101) if guard.begin(window)] == audits
    assert not any(Guard(Goal("exact"), share).begin(window) for _ in range(9))


def test_a_share_is_checked(backbone, unchecked):
    for share in (-0.1, 1.5, True, "2 %", None):
        with pytest.raises(SessionError, match=r"session\.audit: got"):
            kvp.Session(backbone, audit=share)
