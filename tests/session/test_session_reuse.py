"""A store serves bit-equal KV of the same history, and other KV only within its goal, certificate and audited loss."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false

import dataclasses
import random
import warnings
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import ReuseWarning
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, Goal, RankChoice, Rates
from kvpatch_jax.session.guard import Audit, Guard
from kvpatch_jax.window import StoredPrefills
from tests.shared.session_cases import QUESTION, Oracle, PatchesAlone, expect_logits, image_of, logits, settled
from tests.shared.window_oracle import Watched

ORDER = [0, 1, 2, 3, 4, *(random.Random(0).randrange(5) for _ in range(6))]


def visit(backbone: Any, store: Any, order: list[int], **options: Any) -> tuple[list[np.ndarray], list[str], Any]:
    """Adds images in this order to a window of three. Returns logits and the fidelity of each, and the counts."""
    outcomes, served = [], []
    with kvp.Session(backbone, store, **{"keep": 3, **options}) as session:
        for number in order:
            name = session.add(image_of(number))
            outcomes.append(logits(session))
            served.append(session.fidelity(name))
        if store is not None:
            settled(session)
        return outcomes, served, session.stats()


def test_a_session_that_starts_again_computes_no_chunk_twice(backbone, tmp_path, monkeypatch):
    towers, encode = [], backbone.programs.encode
    monkeypatch.setattr(backbone.programs, "encode", lambda *inputs: (towers.append(inputs), encode(*inputs))[1])
    with kvp.ChunkStore(tmp_path) as store:
        first, fidelities, _ = visit(backbone, store, ORDER)
        ran = len(towers)
    with kvp.ChunkStore(tmp_path) as store:
        second, again, stats = visit(backbone, store, ORDER)
    # The first chunk is a canonical; all others were prefilled behind pieces that the second session has again.
    assert (stats.forwards, stats.misses, len(towers)) == (0, 0, ran)
    assert stats.encoded >= 5
    assert (stats.formed.patches, stats.formed.prefills) == (0, 0)
    assert again == fidelities
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_prefill_that_is_gone_or_another_when_it_is_read_is_computed(backbone, tmp_path, monkeypatch):
    """Whoever may write to the store may have written anything under the name of a prefill."""
    with kvp.ChunkStore(tmp_path) as store:
        truth, _, _ = visit(backbone, store, [0, 1, 2])
    with kvp.ChunkStore(tmp_path) as store:
        get = store.get
        # Another process deletes every prefill between the look and the read.
        monkeypatch.setattr(
            store, "get", lambda id, *args, lead=None, **options: get(id, *args, **options) if lead is None else None
        )
        answers, fidelities, stats = visit(backbone, store, [0, 1, 2])
        assert (stats.forwards, fidelities) == (2, ["exact"] * 3)
        np.testing.assert_allclose(answers, truth, atol=2e-5)
        with kvp.Session(backbone, store, keep=3) as session:
            session.add(image_of(0))
            name = session.add(image_of(1))
            made = session.window.piece(name).made
    with kvp.ChunkStore(tmp_path) as store:
        prefills = StoredPrefills(store, backbone.fingerprint, "float32")
        forged = kvp.make_chunk(backbone, [kvp.Text(QUESTION)], id=name)
        store.put(dataclasses.replace(forged, content=name, lead=prefills.lead(made)))
        answers, _, stats = visit(backbone, store, [0, 1])
        assert stats.forwards == 1
        np.testing.assert_allclose(answers, truth[:2], atol=2e-5)


def test_a_session_keeps_forms_and_serves_in_its_encoding_and_its_front_exactly(backbone, store):
    options, patches = {"reuse": "patched", "encoding": "k8v8"}, PatchesAlone(store)
    exact, _, stats = visit(backbone, patches, [0, 1, 2], rank=4, **options)
    assert (stats.formed.canonicals, stats.formed.encoded, stats.formed.patches) == (3, 2, 2)
    names = [chunk_id(backbone.fingerprint, image_of(number)) for number in range(3)]
    assert [store.contains(name, backbone.fingerprint) for name in names] == [True, False, False]
    served, fidelities, again = visit(backbone, patches, [0, 1, 2], rank=4, **options)
    assert (again.hits, again.forwards, fidelities) == (3, 0, ["exact", "approximate", "approximate"])
    assert 0 < np.abs(served[-1] - exact[-1]).max() < 0.5 * np.abs(exact[-1]).max()
    # A session without the encoding serves nothing of it.
    assert visit(backbone, patches, [0, 1, 2], rank=0, reuse="patched")[2].forwards == 2


@pytest.fixture(scope="module")
def patches(backbone, tmp_path_factory):
    """What a session of three images left behind, each behind the first one: patches, and no prefills."""
    with kvp.ChunkStore(tmp_path_factory.mktemp("store")) as chunks:
        store = PatchesAlone(chunks)
        with kvp.Session(backbone, store, keep=1, rank=4) as session:
            for step in range(3):
                session.add(image_of(step), id=f"shot {step}")
            settled(session)
            # Nothing vouches for patches, so the chunk is prefilled.
            session.recall("shot 1")
            assert session.fidelity("shot 1") == "exact"
            stats = session.stats()
            assert (stats.hits, stats.misses, stats.stale, stats.formed.patches) == (0, 1, 1, 2)
        yield store


def test_a_stored_patch_serves_a_chunk_behind_the_very_antecedent(backbone, patches):
    with kvp.Session(backbone, patches, keep=1, rank=0, reuse="patched") as session:
        session.add(image_of(0), id="lead")
        session.add(image_of(1), id="shot")
        assert [session.fidelity(name) for name in session.ids] == ["exact", "approximate"]
        assert session.window.piece(session.window.ids[-1]).method == "patch"
        assert (session.stats().hits, session.stats().forwards) == (2, 0)
        assert session.stats().steps[-1].reused == {"kept": 18, "patch": 18}
        patched = session.ask(QUESTION, steps=3, stop=(), audit=True)
        assert patched.kl > 1e-8
        assert not patched.audit.as_promised
        # It would stand behind another antecedent, for which there is no patch.
        session.slide(0)
        session.add("w9 w10")
        session.recall("shot")
        assert session.fidelity("shot") == "exact"
        assert session.stats().stale == 1


def test_blind_reuse_serves_canonicals_alone(backbone, patches):
    with kvp.Session(backbone, patches, rank=0, reuse="blind") as session:
        oracle = Oracle(backbone)
        for number in (0, 2, 1):
            session.add(image_of(number))
            oracle.put(str(number), image_of(number))
            oracle.naive.parts[-1].kv = Oracle(backbone, image_of(number)).naive.parts[0].kv
        expect_logits(session, oracle.logits())
        assert [piece.method for piece in session.window.pieces] == ["leading", "bare", "bare"]


def signed(model: Any, **fields: Any) -> Certificate:
    """Returns an invented certificate of patches of rank 4."""
    row = CertifiedLoss("stored", 4, 0, "forget", 0.0, 0.0, 0.0, 0.01, 0.95, 0.9, 1.0, 0.5, 0.0, 0.0, 40)
    texts = ("tiny", "2026-11-22", 0.95, 20, 20, 3, 99, "images", "questions", True, (1, 9), ("image",))
    rows = (row, dataclasses.replace(row, promise="remember"))
    certificate = Certificate(model.fingerprint, *texts, rows, RankChoice(4, "invented"))
    return dataclasses.replace(certificate, **fields)


BOUNDED = [({}, 0.05, None), ({}, 0.001, "KL"), ({"tokens": 4}, 0.05, "window of 36 tokens; certified up to 4")]


@pytest.mark.parametrize(("fields", "kl", "beyond"), BOUNDED)
def test_a_certificate_serves_nothing_beyond_what_was_measured(backbone, patches, monkeypatch, fields, kl, beyond):
    slow = DeviceCosts("slow", None, {"prefill": Rates(flop=1.0)})
    monkeypatch.setattr(DeviceCosts, "assumed", lambda: slow)
    with kvp.Session(backbone, patches, 2, rank=0, certificate=signed(backbone, **fields), kl=kl) as session:
        session.add(image_of(0))
        planned = session.plan(image_of(1))
        assert planned.chunks[-1].point == ("stored" if beyond is None else "prefill")
        assert planned.beyond in (None, beyond)
        name = session.add(image_of(1))
        assert session.fidelity(name) == ("approximate" if beyond is None else "exact")
        assert session.window.as_promised == (beyond is not None)
        # What is inserted in front has what follows prefilled again, in either case.
        session.insert(image_of(2), name)
        assert [session.fidelity(id) for id in session.ids] == ["exact"] * 3


def test_a_prefill_behind_the_same_nearest_chunk_serves_where_losses_may_be(backbone, store):
    def visit(*order: int, **options: Any) -> kvp.Session:
        session = kvp.Session(backbone, store, **options)
        for number in order:
            session.add(image_of(number), id=str(number))
        settled(session)
        return session

    visit(0, 1, 2, 3).close()
    with visit(0, 4, 2, 3, 6, reuse="patched", rank=0, keep=4) as session:
        # 2 stood behind 1, and 3 behind 2 and farther away other chunks.
        assert [session.fidelity(name) for name in session.ids] == ["exact"] * 3 + ["approximate"] * 2
        assert (session.stats().hits, session.stats().forwards) == (2, 3)
        piece = session.window.pieces[-2]
        assert (piece.method, piece.ways) == ("restored", (("near", 0),))
        # What was prefilled behind it stays approximate when it has left.
        session.slide(1)
        assert session.fidelity("6") == "approximate"
    with visit(0, 5, 2, 3) as session:
        assert [session.fidelity(name) for name in session.ids] == ["exact"] * 4
        assert (session.stats().hits, session.stats().forwards) == (1, 3)


class Distorting(PatchesAlone):
    """A store that gives every patch back as if it had been formed badly."""

    def __init__(self, store: kvp.ChunkStore, scale: float):
        super().__init__(store)

        def get_patches(served: Any) -> list[kvp.Patch]:
            patches = store.get_patches(served)
            return [dataclasses.replace(p, factors=jax.tree.map(lambda x: x * scale, p.factors)) for p in patches]

        self.get_patches = get_patches


@pytest.fixture(scope="module")
def every_patch(backbone, tmp_path_factory):
    """A store with patches of two images, each behind the first one, of every direction."""
    with kvp.ChunkStore(tmp_path_factory.mktemp("store")) as store:
        with kvp.Session(backbone, PatchesAlone(store), keep=1, rank=18) as session:
            for number in range(3):
                session.add(image_of(number))
            settled(session)
        yield store


def patched_session(backbone: Any, store: Any, **options: Any) -> kvp.Session:
    """A session of the first two images, of which the second is served by its patch."""
    session = kvp.Session(backbone, store, keep=1, **{"rank": 0, "reuse": "patched", **options})
    session.add(image_of(0))
    session.add(image_of(1))
    assert session.window.pieces[-1].method == "patch"
    return session


def test_an_audit_measures_what_a_reprefill_does_and_changes_no_answer(backbone, every_patch):
    watched = Watched(backbone)
    with patched_session(watched.backbone, Distorting(every_patch, 0.9), audit=0) as session:
        plain = session.ask(QUESTION, steps=3, stop=()).ids
        unaudited = watched.forwards
        assert session.stats().audits.answers == 0
        # The session's own audit reads the whole prompt in one forward, without the pool.
        expected = session.ask(QUESTION, steps=3, stop=(), audit=True).audit

    watched.forwards = 0
    with patched_session(watched.backbone, Distorting(every_patch, 0.9)) as session:
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
        assert watched.forwards == unaudited + 4
        assert session.window == before
        assert answer.audit is None
        # What audits run is not the session's work, and leaves nothing in the store.
        assert session.stats().forwards == 0
        assert len(session.runtime.executor.branches) == 1


def test_a_bad_patch_is_warned_of_once_and_prefilled_from_then_on(backbone, every_patch):
    with kvp.Session(backbone, keep=1) as exact:
        exact.add(image_of(0))
        exact.add(image_of(1))
        right = exact.ask(QUESTION, steps=4, stop=()).ids

    with patched_session(backbone, Distorting(every_patch, -12.0)) as session:
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


def test_only_answers_that_are_read_to_their_end_are_audited_against_the_window_that_was_asked(backbone, every_patch):
    with patched_session(backbone, PatchesAlone(every_patch)) as session:
        session.ask(QUESTION, steps=5, stop=()).close()
        begun = session.ask(QUESTION, steps=3, stop=())
        session.slide(0)
        assert session.window.as_promised
        assert len(begun.ids) == 3
        audits = session.stats().audits
        assert (audits.answers, audits.skipped, audits.kl < 1e-6, audits.blind_kl > 1e-6) == (1, 0, True, True)
        # Exact windows cost nothing.
        str(session.ask(QUESTION, steps=3, stop=()))
        assert session.stats().audits.answers == 1
        assert len(session.runtime.executor.branches) == 1


def test_a_full_pool_skips_audits(backbone, every_patch):
    """There is room for the window and one answer, but not for the window again: nobody waits for it."""
    with kvp.Sessions(backbone, PatchesAlone(every_patch), pages=256, rank=0, timeout=600) as sessions:
        sessions.runtime.executor.slots.allocate(251 * 16)
        session = sessions.open(keep=1, reuse="patched")
        session.add(image_of(0))
        session.add(image_of(1))
        assert len(session.ask(QUESTION, steps=3, stop=()).ids) == 3
        audits = session.stats().audits
        assert (audits.answers, audits.skipped) == (0, 1)


@pytest.fixture(scope="module")
def window(backbone, every_patch) -> Any:
    with patched_session(backbone, PatchesAlone(every_patch)) as session:
        return session.window


def test_a_kind_is_ruled_out_beyond_the_goal_or_beyond_blind_reuse(window):
    """With a warning, after audits of these KL, and of blind reuse's."""
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
        guard = Guard(Goal("patched", 0.05), 0.02)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for kl, blind in audits:
                guard.end(window, Audit(kl, 0, 1, None if blind is None else (blind, 0), 18, 4))
        assert (len(seen), bool(guard.ruled_out)) == (count, count > 0), audits


def test_the_first_three_and_then_a_share_are_audited(window):
    for share, audits in ((0.02, [1, 2, 3, 50, 100]), (0.0, []), (1.0, [*range(1, 101)])):
        guard = Guard(Goal("patched"), share)
        assert [number for number in range(1, 101) if guard.begin(window)] == audits
        assert not any(Guard(Goal("exact"), share).begin(window) for _ in range(9))
