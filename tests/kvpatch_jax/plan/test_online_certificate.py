"""Online certificates: bounds that hold at their level however often one looks, and go when the traffic changes."""

import json
import random

import pytest

from kvpatch_jax.errors import CertificateError
from kvpatch_jax.plan import AuditPolicy, OnlineCertificate

WAY = "near", 0
CHUNKS = [(96, "image"), (120, "image")]


def audited(losses, **options) -> OnlineCertificate:
    certificate = OnlineCertificate("weights", **options)
    for loss in losses:
        certificate.audit([WAY], loss, others=1, tokens=400, chunks=CHUNKS)
    return certificate


def losses(seed: int, share: float, count: int, beyond: float = 0.06):
    """Draws losses, of which this share lies beyond .05 nats."""
    draw = random.Random(seed)
    return [beyond if draw.random() < share else 0.009 * draw.random() for _ in range(count)]


def test_nothing_is_bounded_before_there_is_evidence():
    certificate = OnlineCertificate("weights")
    assert certificate.growing("bound", *WAY, promise="forget", most=3) == []
    assert certificate.beyond(1, []) is not None
    assert certificate.bound("leading") == 0.0
    assert certificate.bound("survivor", promise="remember") == 0.0
    assert certificate.bound("survivor", promise="forget") is None


def test_the_smallest_bound_that_the_audits_prove_is_the_ways():
    certificate = audited([0.03] * 60)
    assert certificate.admitted(*WAY) == 0.05
    assert certificate.growing("bound", *WAY, promise="remember", most=5) == [0.05, 0.05]
    assert certificate.bound(*WAY, behind=1) == 0.05
    assert certificate.bound(*WAY, behind=2) is None
    assert certificate.bound("seen") is None


def test_a_bound_holds_for_nothing_larger_than_what_was_audited():
    certificate = audited([0.001] * 60)
    assert certificate.beyond(400, CHUNKS) is None
    assert "401 tokens" in str(certificate.beyond(401, CHUNKS))
    assert "3 chunks" in str(certificate.beyond(400, [*CHUNKS, (96, "image")]))
    assert "spans 121" in str(certificate.beyond(400, [(121, "image")]))
    assert "text" in str(certificate.beyond(400, [(96, "text")]))
    assert "nobody said" in str(certificate.beyond(400, [(96, None)]))


@pytest.mark.parametrize("share", [0.101, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.15, 0.3))])
def test_a_way_that_misses_more_often_than_the_level_allows_is_hardly_ever_admitted(share):
    """The promise is 5 % of ways at most, however often one looks: of 400 at most 5 % and three standard errors."""
    wrong = 0
    for seed in range(400):
        certificate = OnlineCertificate("weights")
        for loss in losses(seed, share, 150):
            certificate.audit([WAY], loss)
            bound = certificate.admitted(*WAY)
            if bound is not None and bound <= 0.05:
                wrong += 1
                break
    assert wrong <= 400 * (0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5)


def test_a_way_without_misses_is_admitted_within_forty_audits():
    assert audited([0.001] * 40).admitted(*WAY) == 0.01


def test_traffic_that_changes_is_noticed_within_thirty_audits():
    for seed in range(20):
        certificate = audited(losses(seed, 0.0, 60))
        assert certificate.admitted(*WAY) == 0.01
        for loss in losses(seed + 100, 0.6, 30):
            certificate.audit([WAY], loss)
            bound = certificate.admitted(*WAY)
            if bound is None or bound > 0.05:
                break
        assert bound is None or bound > 0.05


def test_audits_of_several_writers_count_together_and_once():
    first, second = audited([0.001] * 25, writer="a"), audited([0.001] * 25, writer="b")
    assert first.admitted(*WAY) is None
    first.merge(second.to_json())
    assert first.admitted(*WAY) == 0.01
    assert first.audits(*WAY) == 50

    # The same state again, and one that came back by way of the other, add nothing.
    first.merge(second.to_json())
    second.merge(first.to_json())
    first.merge(second.to_json())
    assert first.audits(*WAY) == second.audits(*WAY) == 50


def test_a_new_process_goes_on_where_an_old_one_ended():
    old = audited([0.001] * 60, writer="old")
    new = OnlineCertificate("weights", writer="new")
    new.merge(old.to_json())
    assert new.admitted(*WAY) == 0.01
    assert new.beyond(400, CHUNKS) is None


@pytest.mark.parametrize("ways", [[], [("no point", 0)], [("near", -1)]])
def test_an_audit_of_no_way_is_refused(ways):
    with pytest.raises(CertificateError, match="audit"):
        OnlineCertificate("weights").audit(ways, 0.1)


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), -2.0])
def test_an_audit_without_a_finite_loss_is_refused(kl):
    certificate = OnlineCertificate("weights")
    with pytest.raises(CertificateError, match="audit"):
        certificate.audit([WAY], kl)
    assert certificate.audits(*WAY) == 0


@pytest.mark.parametrize("field", ["level", "confidence", "share", "cost"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, "much", None, float("nan")])
def test_a_policy_out_of_range_is_refused(field, value, unchecked):
    with pytest.raises(CertificateError, match=field):
        AuditPolicy(**{field: value})


def forged(change):
    """The JSON of a certificate with one part changed."""
    body = json.loads(audited([0.001] * 60, writer="old").to_json())
    change(body)
    return json.dumps(body)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        b"\xff\xfe",
        "[" * 100_000,
        forged(lambda body: body.update(backbone="others")),
        forged(lambda body: body.update(version=3)),
        forged(lambda body: body.update(policy={"level": 0.1})),
        forged(lambda body: body.pop("support")),
        forged(lambda body: body.update(flops=[])),
        forged(lambda body: body.update(tried="ab")),
        forged(lambda body: body.update(tried=[1])),
        forged(lambda body: body["flops"].update(old=[1])),
        forged(lambda body: body["flops"].update(old=[-5, 1])),
        forged(lambda body: body["support"].update(tokens=-1)),
        forged(lambda body: body["support"].update(spans=[1, 2, 3])),
        forged(lambda body: body["support"].update(modalities=["x"] * 99)),
        forged(lambda body: body.update(shards=[])),
        forged(lambda body: body["shards"]["old"][0].pop()),
        forged(lambda body: body["shards"]["old"][0].__setitem__(5, 1e6)),
        forged(lambda body: body["shards"]["old"][0].__setitem__(2, 0.03)),
        forged(lambda body: body["shards"]["old"][0].__setitem__(0, "leading")),
        forged(lambda body: body["shards"]["old"][0].__setitem__(3, True)),
    ],
)
def test_the_certificate_of_a_stranger_is_refused_whole(text):
    certificate = OnlineCertificate("weights")
    with pytest.raises(CertificateError):
        certificate.merge(text)
    assert certificate.audits(*WAY) == 0
    assert certificate.beyond(1, []) is not None


def test_a_chunk_is_covered_by_the_audit_that_tried_it_until_its_way_is_withdrawn():
    certificate = audited([0.001] * 60)
    certificate.audit([WAY], 0.001, tried=["a", "b"])
    copy = OnlineCertificate("weights", writer="copy")
    copy.merge(certificate.to_json())
    for own in (certificate, copy):
        assert own.covers("near", "a")
        assert own.covers("near", "b")
        assert not own.covers("near", "c")
        assert not own.covers("seen", "a")

    for _ in range(30):
        certificate.audit([WAY], 0.3)
    assert not certificate.covers("near", "a")


def test_an_alarm_about_one_bound_withdraws_the_way_as_a_whole():
    """Losses that stay below a larger bound are of another time all the same: they may go on growing."""
    certificate = audited([0.001] * 60)
    assert certificate.admitted(*WAY) == 0.01
    for _ in range(30):
        certificate.audit([WAY], 0.03)
        if certificate.admitted(*WAY) is None:
            break
    assert certificate.admitted(*WAY) is None
    assert certificate.audits(*WAY) < 30


def test_audits_are_hurried_until_they_decide_and_when_they_speak_against_a_bound():
    assert OnlineCertificate("weights").needs_audits(*WAY)
    # Below all bounds that are tried nothing can be proved.
    assert not OnlineCertificate("weights").needs_audits(*WAY, kl=0.001)
    proved = audited([0.001] * 60)
    assert not proved.needs_audits(*WAY)
    proved.audit([WAY], 0.3)
    assert proved.needs_audits(*WAY)

    hopeless = audited([0.3] * 3)
    assert not hopeless.needs_audits(*WAY)
    assert hopeless.needs_audits(*WAY, kl=0.5)


def test_audits_are_paid_by_the_work_of_all_sessions_and_writers():
    first = OnlineCertificate("weights", writer="a")
    assert not first.affords(1)
    first.count_flops(work=1000)
    assert first.affords(50)
    assert not first.affords(51)
    first.count_flops(audits=50)
    assert not first.affords(1)

    second = OnlineCertificate("weights", writer="b")
    second.count_flops(work=3000)
    second.merge(first.to_json())
    assert second.affords(150)
    assert not second.affords(151)
