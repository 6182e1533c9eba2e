"""Patched, blind and certified reuse: what serves a chunk that comes back, and that its label says so."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalOperand=false

import dataclasses
from typing import Any

import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, RankChoice, Rates
from tests.shared.session_cases import QUESTION, Oracle, PatchesAlone, expect_logits, image_of, settled, state


@pytest.fixture(scope="module")
def patches(backbone, tmp_path_factory):
    """What a session of three images left behind, each behind the first one: patches, and no prefills."""
    with kvp.ChunkStore(tmp_path_factory.mktemp("store")) as kept:
        store = PatchesAlone(kept)
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
        assert session.needs("shot", QUESTION, steps=3).bare.kl > 0
        assert not patched.audit.as_promised
        # It would stand behind another antecedent, for which there is no patch.
        session.slide(0)
        session.add("w9")
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
        assert [session.fidelity(name) for name in session.ids] == ["exact", "approximate", "approximate"]
        assert [piece.method for piece in session.window.pieces] == ["leading", "bare", "bare"]
        # A chunk that no store has is prefilled, behind approximate ones.
        session.add(image_of(5), id="new")
        assert (session.fidelity("new"), session.stats().forwards) == ("approximate", 1)
        oracle.put("new", image_of(5))
        expect_logits(session, oracle.logits())


def signed(model: Any, **fields: Any) -> Certificate:
    """Returns an invented certificate of patches of rank 4."""
    row = CertifiedLoss("stored", 4, 0, "forget", 0.0, 0.0, 0.0, 0.01, 0.95, 0.9, 1.0, 0.5, 0.0, 0.0, 40)
    texts = ("tiny", "2026-11-22", 0.95, 20, 20, 3, 99, "images", "questions", True, (1, 9), ("image",))
    rows = (row, dataclasses.replace(row, promise="remember"))
    certificate = Certificate(model.fingerprint, *texts, rows, RankChoice(4, "invented"))
    return dataclasses.replace(certificate, **fields)


BOUNDED = [
    ({}, 0.05, None),
    ({}, 0.001, "KL"),
    ({"tokens": 4}, 0.05, "window of 36 tokens; certified up to 4"),
    ({"modalities": ("text",)}, 0.05, "chunk of image; certified of text"),
]


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


def test_a_certificate_of_other_weights_is_refused(backbone):
    with pytest.raises(InputError, match="'tiny'"):
        kvp.Session(backbone, certificate=signed(backbone, backbone="f" * 64))


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


def test_deleted_chunks_are_prefilled_or_asked_for_again(backbone, store):
    with kvp.Session(backbone, PatchesAlone(store), 1, rank=4, reuse="patched", memory=0) as session:
        session.add(image_of(0))
        name = session.add(image_of(1))
        settled(session)
        session.slide(0)
        session.recall(name)
        assert session.fidelity(name) == "approximate", "what was discarded is served by its patch"
        session.slide(0)
        assert store.delete(name, backbone.fingerprint)
        session.runtime.executor.forget(name)
        before = state(session)
        with pytest.raises(SessionError, match="given again"):
            session.recall(name)
        assert state(session) == before
        session.recall(image_of(1))
        assert session.fidelity(name) == "exact"
