"""Plans of requests: segments, what the certificate allows, salts, and strict reading of settings and options."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import dataclasses
import math

import pytest
from serving_sides import TOKENS

from kvpatch_jax.cache import identity
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.plan import DEFAULT_KL, Certificate, CertifiedLoss, RankChoice
from kvpatch_jax.serving.vllm import (
    ChunkStep,
    ConnectorConfig,
    PromptFeature,
    RequestOptions,
    segments_of,
)
from kvpatch_jax.serving.vllm import plan_request as plan_prompt
from kvpatch_jax.serving.vllm.prompt_history import PromptHistory
from kvpatch_jax.serving.vllm.request_plan import StockedPatch

ENDS = (8, 18, 24)
SETTINGS = ConnectorConfig(store="/nowhere", backbone="tiny")


class Shelf:
    """A store of names: canonicals, and patches by chunk and front."""

    def __init__(self, canonicals, patches=()):
        self.canonicals, self.kept = set(canonicals), dict(patches)

    def has_canonical(self, id):
        return id in self.canonicals

    def patches(self, id, front):
        return self.kept.get((id, front), [])

    def prefills(self, index):
        return {}

    def survivor(self, index, front):
        return None

    def provide(self, step):
        return True


def plan_request(segments, *others):
    return plan_prompt(PromptHistory(segments), *others)


def certificate_of(*rows):
    made = [
        CertifiedLoss(*row[:3], "forget", 0.0, 0.0, 0.0, row[3], 1.0, 1.0, 1.0, None, 0.0, row[4], 10) for row in rows
    ]
    given = {"backbone": "tiny", "model": "m", "made": "2026-01-01", "level": 0.95, "calibration": 30, "held_out": 30}
    given |= {"chunks": 3, "tokens": 99, "content": "c", "asked": "a", "disjoint": True}
    given |= {"spans": (1, 99), "modalities": ("text",)}
    return Certificate(**given, rows=tuple(made), recommended=RankChoice(4, "r"))


ROWS = [("stored", 4, behind, 0.01 * (behind + 1), 0.1) for behind in (0, 1, 2)]
ROWS += [("bare", 0, behind, 5.0, 0.9) for behind in (0, 1, 2)]


@pytest.fixture(scope="module")
def segments():
    return segments_of("tiny", TOKENS, ends=ENDS)


@pytest.fixture(scope="module")
def shelf(segments):
    first, second, third = (own.id for own in segments)
    patches = {(second, (first,)): [StockedPatch("aa", 2), StockedPatch("bb", 4)]}
    return Shelf([first, second, third], patches)


def test_chunk_ids_depend_on_content_and_not_on_position():
    moved = segments_of("tiny", [1, 2, *TOKENS[8:18], 5], ends=[2, 12])
    first, second, _ = segments_of("tiny", TOKENS, ends=ENDS)
    assert moved[1].id == second.id
    assert (second.begin, second.end) == (8, 18)
    assert len({first.id, second.id, segments_of("other", TOKENS, ends=ENDS)[0].id}) == 3
    named = lambda name, ends=(6,): segments_of("tiny", [9] * 8, [PromptFeature(name, 2, 3)], ends)[0].id
    assert named("cat") != named("dog")
    assert named("cat") != segments_of("tiny", [9] * 8, ends=(6,))[0].id


def test_image_chunks_include_their_frame_tokens():
    tokens = [7, 7, 1, 3, 3, 2, 1, 3, 3, 2, 8]
    features = [PromptFeature("b", 7, 2), PromptFeature("a", 3, 2)]
    ends = lambda **more: [own.end for own in segments_of("tiny", tokens, features, **more)]
    assert ends(frame=(1, 2)) == [2, 6, 10]
    assert ends() == [3, 5, 7, 9]
    assert segments_of("tiny", tokens[:9], features)[-1].end == 7  # the last image is the question
    assert segments_of("tiny", tokens) == ()
    with pytest.raises(InputError, match="inside an image at 3 to 5"):
        segments_of("tiny", tokens, features, ends=[4])
    with pytest.raises(InputError, match="question"):
        segments_of("tiny", tokens, features, ends=[11])


def test_exact_requests_get_the_leading_chunk_and_no_salt(segments, shelf):
    planned = plan_request(segments, shelf, SETTINGS, RequestOptions(), certificate_of(*ROWS))
    assert planned.steps == (ChunkStep(segments[0], "leading", identity(segments[0].id)),)
    assert (planned.matched, planned.exact, planned.kl) == (8, True, 0.0)
    assert planned.why == "chunk 2 of 3 is not stored behind those in front of it"
    assert planned.salt(SETTINGS, RequestOptions(), None) is None
    assert planned.salt(SETTINGS, RequestOptions(), "own") == "own"
    assert plan_request(segments, Shelf([segments[1].id]), SETTINGS, RequestOptions()).matched == 0


def test_a_prompt_beyond_the_certificate_is_served_exactly(segments, shelf):
    asked, certificate = RequestOptions(policy="approximate", kl=0.1), certificate_of(*ROWS)
    within = plan_request(segments, shelf, SETTINGS, asked, certificate)
    assert (within.matched, within.kl) == (18, 0.02)
    assert [segment.span for segment in segments] == [8, 10, 6]
    for smaller, said in (
        ({"tokens": 23}, "window of 24 tokens; certified up to 23"),
        ({"chunks": 1}, "window of 2 chunks; certified up to 1"),
        ({"spans": (1, 9)}, "chunk that spans 10 positions; certified from 1 to 9"),
        ({"modalities": ("image",)}, "chunk of text; certified of image"),
    ):
        beyond = plan_request(segments, shelf, SETTINGS, asked, dataclasses.replace(certificate, **smaller))
        assert (beyond.matched, beyond.kl, beyond.exact) == (8, 0.0, True)
        assert said in beyond.why
    far = [*segments[:2], segments[2]._replace(end=400_020)]
    assert plan_request(far, shelf, SETTINGS, asked, certificate).exact
    images = segments_of(
        "tiny", TOKENS, [PromptFeature("a", 9, 4), PromptFeature("b", 18, 2), PromptFeature("c", 21, 2)], ENDS
    )
    assert [(own.modality, own.span) for own in images] == [("text", 8), ("image", None), ("images", None)]


def test_an_approximate_prompt_is_matched_as_far_as_the_certificate_bounds_it(segments, shelf):
    asked = lambda policy="approximate", **more: RequestOptions(policy=policy, **more)
    generous = ConnectorConfig(store="s", backbone="tiny", most_kl=10.0)
    plan = lambda own, rows=ROWS, settings=generous: plan_request(
        segments, shelf, settings, own, certificate_of(*rows) if rows else None
    )
    whole = plan(asked())
    assert [(step.point, step.patch, step.rank) for step in whole.steps] == [
        ("leading", None, 0),
        ("stored", "bb", 4),
        ("bare", None, 0),
    ]
    assert (whole.matched, whole.kl) == (24, 5.0)
    within = plan(asked(kl=0.1))
    # The third chunk is prefilled behind an approximate one, and so counts among the others.
    assert (within.matched, within.kl) == (18, 0.02)
    assert "chunk 3 of 3 is not certified" in within.why
    assert plan(asked(kl=0.015)).matched == 8
    assert plan(asked(kl=0.1, flips=0.05)).matched == 8
    assert plan(asked(), settings=ConnectorConfig(store="s", backbone="tiny", most_kl=0.1)).matched == 18
    assert plan(asked(), rows=None).matched == 8


def test_blind_reuse_requires_request_and_operator_to_name_it(segments, shelf):
    """An operator that says no bound has one, and a request that says "approximate" is never served beyond it."""

    def plan(policy, rows=ROWS, **more):
        settings, certificate = (
            ConnectorConfig(store="s", backbone="tiny", **more),
            certificate_of(*rows) if rows else None,
        )
        return plan_request(segments, shelf, settings, RequestOptions(policy=policy), certificate)

    assert ConnectorConfig(store="s", backbone="tiny").most_kl == DEFAULT_KL == 0.05
    certified = plan("approximate")
    assert (certified.matched, certified.kl) == (18, 0.02), "the bare chunk would lose 5 nats"
    assert "chunk 3 of 3 is not certified within 0.05 nats" in certified.why
    assert plan("approximate", uncertified=True) == certified, "what the operator allows, the request has to ask for"
    assert plan("approximate", rows=[], uncertified=True).matched == 8
    assert plan("blind") == certified
    assert (plan("blind", uncertified=True).matched, plan("blind", uncertified=True).kl) == (24, 5.0)
    loose = plan("blind", rows=[], uncertified=True)
    assert (loose.matched, loose.kl) == (24, None)


@pytest.mark.parametrize("bound", [math.nan, math.inf, -0.1, "0.05", True], ids=str)
def test_bounds_must_be_finite_and_not_negative(unchecked, bound):
    for name in ("kl", "flips"):
        with pytest.raises(InputError, match=rf"kv_transfer_params\.kvpatch\.{name}: got"):
            RequestOptions.read({"kvpatch": {name: bound}})
    for name in ("most_kl", "patience"):
        with pytest.raises(ConfigError, match=rf"connector\.{name}: got"):
            ConnectorConfig.read({"store": "s", "backbone": "b", name: bound})


def test_different_approximate_plans_have_different_salts(segments, shelf):
    loose = ConnectorConfig(store="s", backbone="tiny", uncertified=True)
    first, second = (own.id for own in segments[:2])
    asked = RequestOptions(policy="blind")
    plans = [
        plan_request(segments, shelf, loose, asked),
        plan_request(segments, Shelf([first, second], shelf.kept), loose, asked),
        plan_request(segments, Shelf([first, second]), loose, asked),
        plan_request(segments, Shelf([first, second], {(second, (first,)): [StockedPatch("cc", 4)]}), loose, asked),
    ]
    assert not any(own.exact for own in plans)
    other = RequestOptions(policy="blind", tenant="other")
    salts = [own.salt(loose, asked, None) for own in plans]
    salts += [plans[0].salt(loose, asked, "own"), plans[0].salt(loose, other, None)]
    assert len(set(salts)) == len(salts)
    assert all(salt.startswith("kvpatch-") for salt in salts)
    assert plan_request(segments, shelf, loose, asked).salt(loose, asked, None) == salts[0]


def test_unknown_or_invalid_settings_and_options_are_refused(unchecked):
    assert RequestOptions.read(None) is None
    assert RequestOptions.read({"do_remote_prefill": True}) is None
    assert RequestOptions.read({"kvpatch": {"segments": [3, 9], "kl": 0.1}}) == RequestOptions(segments=(3, 9), kl=0.1)
    blind = {"policy": "blind"}
    assert RequestOptions.read({"kvpatch": blind}) == RequestOptions(policy="blind")
    refused = [{"policy": "any"}, {"segments": [9, 3]}, {"segments": 3}, {"kl": -1}, {"tenant": ""}, {"rank": 3}]
    for given in (*refused, {**blind, "kl": 0.1}, {**blind, "flips": 0.1}):
        with pytest.raises(InputError, match="kv_transfer_params"):
            RequestOptions.read({"kvpatch": given})
    assert ConnectorConfig.read({"store": "s", "backbone": "b", "image_frame": [1, 2]}).image_frame == (1, 2)
    for given in ({}, {"store": "s"}, {"store": "s", "backbone": "b", "rnak": 3}, {"store": "s", "backbone": ""}):
        with pytest.raises(ConfigError, match="connector"):
            ConnectorConfig.read(given)
