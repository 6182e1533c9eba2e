"""Sessions whose certificate starts from nothing and learns from their own answers."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import concurrent.futures
import itertools
from typing import Any

import numpy as np
import pytest
from session_cases import QUESTION, image_of, logits

import kvpatch_jax as kvp
from kvpatch_jax.errors import SessionError
from kvpatch_jax.plan import AuditPolicy, OnlineCertificate
from kvpatch_jax.session.logit_comparison import compared

LENIENT = AuditPolicy(level=0.6, confidence=0.6, cost=0.9)
"""A few audits decide, and may cost nearly as much as all else: these images are no larger than questions."""


def visit(backbone: Any, store: Any, order: tuple[int, ...], certificate: Any) -> Any:
    """Adds images in this order and asks once. Closing waits for the audit."""
    with kvp.Session(backbone, store, keep=4, rank=0, certificate=certificate) as session:
        for number in order:
            session.add(image_of(number))
        str(session.ask(QUESTION, steps=1))
        return session.stats()


@pytest.fixture(scope="module")
def learnt(backbone, tmp_path_factory):
    """A store, and a certificate that learnt from visits of five images in many orders."""
    certificate = OnlineCertificate(backbone.fingerprint, LENIENT)
    with kvp.ChunkStore(tmp_path_factory.mktemp("store")) as store:
        for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 4):
            visit(backbone, store, order, certificate)
        yield store, certificate


def test_a_way_is_admitted_by_audits_and_then_served(backbone, learnt):
    store, certificate = learnt
    # Which of the two is tried is drawn; three audits without a miss admit either.
    proved = [certificate.admitted(way) for way in ("near", "seen")]
    bound = max(bound for bound in proved if bound is not None)
    assert bound <= 0.05
    with kvp.Session(backbone, store, keep=4, rank=0, certificate=certificate) as session:
        for number in (4, 0, 2, 1, 3):
            session.add(image_of(number))
        planned = session.plan(image_of(0))
        served = logits(session)
        assert "approximate" in session.stats().fidelity
        assert session.stats().hits > 1
    assert planned.kl is not None
    assert planned.kl <= 0.05

    # What it promises: close to a session that reuses nothing.
    with kvp.Session(backbone, None, keep=4) as session:
        for number in (4, 0, 2, 1, 3):
            session.add(image_of(number))
        kl, _ = compared(logits(session)[0], served[0])
    assert float(kl[0]) <= bound


def test_nothing_approximate_is_served_before_audits_prove_it(backbone, tmp_path):
    certificate = OnlineCertificate(backbone.fingerprint)
    with kvp.ChunkStore(tmp_path) as store:
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)):
            stats = visit(backbone, store, order, certificate)
            assert "approximate" not in stats.fidelity
    assert certificate.audits("near") + certificate.audits("seen") > 0


def test_what_no_audit_tried_is_not_served_although_its_way_is_admitted(backbone, learnt):
    store, _ = learnt
    certificate = OnlineCertificate(backbone.fingerprint, LENIENT)
    for way in ("near", "seen"):
        for _ in range(40):
            certificate.audit([(way, 0)], 0.001, others=9, tokens=9999, chunks=[(1, "image"), (9999, "image")] * 5)
        assert certificate.admitted(way) == 0.01

    def fidelity(order: tuple[int, ...]) -> Any:
        with kvp.Session(backbone, store, keep=4, rank=0, certificate=certificate) as session:
            for number in order:
                session.add(image_of(number))
            return session.stats().fidelity

    assert "approximate" not in fidelity((4, 3, 0, 2, 1))
    # Had an audit tried them, they would be served. In another order: what was run just now is stored as it is.
    with kvp.Session(backbone) as session:
        ids = [session.add(image_of(number)) for number in range(5)]
    certificate.audit([("near", 0)], 0.001, tried=ids)
    assert "approximate" in fidelity((4, 2, 3, 1, 0))


def test_audits_take_no_more_than_their_share_and_count_what_they_took(backbone, tmp_path):
    certificate = OnlineCertificate(backbone.fingerprint, AuditPolicy(cost=0.2))
    with kvp.ChunkStore(tmp_path) as store:
        for order in itertools.islice(itertools.permutations(range(5)), 0, 60, 4):
            with kvp.Session(backbone, store, keep=4, certificate=certificate) as session:
                for number in order:
                    session.add(image_of(number))
                    str(session.ask(QUESTION, steps=1))
                # Audits run on forks, and their forwards are in the ledger of the pool, too.
                session._questions.close()
                stats, total = session.stats(), session.runtime.executor.ledger.total.flops
                assert 0 <= stats.audit_flops < total
                assert stats.audit_flops > 0 or not stats.audits
            assert certificate.affords(0)
    assert certificate.audits("near") + certificate.audits("seen") > 5


def test_a_session_goes_on_from_what_the_store_has_of_others(backbone, learnt):
    store, _ = learnt
    with kvp.Session(backbone, store, keep=4, certificate="online") as session:
        other = session.config.certificate
        assert isinstance(other, OnlineCertificate)
        # Another policy is another certificate: what was learnt under it says nothing here.
        assert other.audits("near") + other.audits("seen") == 0
    copy = OnlineCertificate(backbone.fingerprint, LENIENT, writer="copy")
    saved = store.get_encoder("online certificate", backbone.fingerprint)
    assert saved is not None
    copy.merge(saved.tobytes())
    assert copy.audits("near") + copy.audits("seen") > 0


def test_damaged_state_beside_the_chunks_is_ignored(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path) as store:
        for state in (b"", b"[", b"{}", bytes(range(200)) * 9):
            store.put_encoder("online certificate", backbone.fingerprint, np.frombuffer(state or b"\0", np.uint8))
            with kvp.Session(backbone, store, keep=2, certificate="online") as session:
                session.add(image_of(0))
                assert session.config.certificate.audits("near") == 0


@pytest.mark.parametrize("certificate", ["offline", 3, {}, b"online"])
def test_what_is_no_certificate_is_refused(backbone, certificate, unchecked):
    with pytest.raises(SessionError, match=r"session\.certificate: got .*; expected Certificate\.read"):
        kvp.Session(backbone, certificate=certificate)


def test_sessions_on_one_pool_learn_together(backbone, tmp_path):
    """Audits of several sessions run beside their answers, and give back every page."""
    certificate = OnlineCertificate(backbone.fingerprint, LENIENT)
    with kvp.ChunkStore(tmp_path) as store, kvp.Sessions(backbone, store, pages=96, rank=0) as sessions:
        free = sessions.shared.executor.books.allocator.counts.tolist()

        def visit_all(first: int) -> list[str]:
            with sessions.open(keep=3, certificate=certificate) as session:
                answers = []
                for number in (first, 4, 2, first + 1, 3):
                    session.add(image_of(number))
                    answers.append(str(session.ask(QUESTION, steps=1)))
                return answers

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            together = list(pool.map(visit_all, (0, 1, 0, 1)))
        assert sessions.shared.executor.books.allocator.counts.tolist() == free
    assert all(len(answers) == 5 for answers in together)
