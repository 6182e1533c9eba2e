"""Plans of requests: what the goal and the certificate allow, and the salt that a plan needs."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_sides import TOKENS

from kvpatch_jax.cache import identity
from kvpatch_jax.plan import FORWARD, Certificate, CertifiedLoss, Option, RankChoice
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, RequestOptions, StoreOptions, plan_request, segments_of
from kvpatch_jax.serving.vllm.plan import PromptHistory

ENDS = (8, 18, 24)
SEGMENTS = segments_of("tiny", TOKENS, ends=ENDS)
HISTORY = PromptHistory(SEGMENTS)
EVERYTHING = ConnectorConfig(StoreOptions("s"), "tiny", kl=10.0, allow=("exact", "certified", "patched", "blind"))


class Shelf:
    """Options of every chunk without a store; what is lacking is found out when it is read."""

    def __init__(self, *options, lacking=(), segments=SEGMENTS):
        self.forwards = [FORWARD._replace(cost=own.end - own.begin) for own in segments]
        self.listed, self.lacking = options, set(lacking)

    def options(self, goal, promise):
        def options(index, chosen):
            listed = [own for own in self.listed[index] if own.made not in self.lacking]
            return [*listed, self.forwards[index]] if not (chosen and chosen[-1].is_forward) else [self.forwards[index]]

        return options

    def provide(self, chosen):
        unread = [own.made for own in chosen if own.made.startswith("damaged") and own.made not in self.lacking]
        self.lacking |= set(unread[:1])
        return not unread


def option(point, rank=0, made=""):
    return Option(point, made or f"{point} {rank}", ((point, rank),), rank)


LEADING = Option("leading", identity(SEGMENTS[0].id))
SHELF = Shelf([LEADING], [option("stored", 4), option("stored", 2), option("bare")], [option("bare")])


def certificate_of(*rows, **fields):
    losses = [
        CertifiedLoss(*row[:3], "forget", 0.0, 0.0, 0.0, row[3], 1.0, 1.0, 1.0, None, 0.0, 0.1, 10) for row in rows
    ]
    stated = {"backbone": "tiny", "model": "m", "made": "2026-01-01", "level": 0.95, "calibration": 30, "held_out": 30}
    stated |= {"chunks": 3, "tokens": 99, "content": "c", "asked": "a", "disjoint": True}
    stated |= {"spans": (1, 99), "modalities": ("text",)}
    return Certificate(**stated | fields, rows=tuple(losses), recommended=RankChoice(4, "r"))


ROWS = [("stored", 4, behind, 0.01 * (behind + 1)) for behind in (0, 1, 2)]
ROWS += [("bare", 0, behind, 5.0) for behind in (0, 1, 2)]
SIGNED = certificate_of(*ROWS)


def planned(shelf=SHELF, certificate=SIGNED, config=EVERYTHING, history=HISTORY, **options):
    return plan_request(history, shelf, config, RequestOptions(**options), certificate)


def test_exact_requests_get_exact_chunks_and_no_salt():
    plan = planned()
    assert plan.steps == (ChunkStep(SEGMENTS[0], "leading", LEADING.made),)
    assert (plan.matched, plan.exact, plan.kl) == (8, True, 0.0)
    assert plan.why == "chunk 2 of 3 is not stored behind those in front of it"
    assert (plan.salt("tiny", None), plan.salt("tiny", "own")) == (None, "own")
    empty = planned(Shelf([], [option("bare")], []))
    assert (empty.matched, empty.why) == (0, "chunk 1 of 3 is not stored")


def test_a_prompt_beyond_the_certificate_is_served_exactly():
    within = planned(reuse="certified", kl=0.1)
    assert (within.matched, within.kl) == (18, 0.02)
    for smaller, reason in (
        ({"tokens": 23}, "window of 24 tokens; certified up to 23"),
        ({"chunks": 1}, "window of 2 chunks; certified up to 1"),
        ({"spans": (1, 9)}, "chunk that spans 10 positions; certified from 1 to 9"),
        ({"modalities": ("image",)}, "chunk of text; certified of image"),
    ):
        beyond = planned(certificate=dataclasses.replace(SIGNED, **smaller), reuse="certified", kl=0.1)
        assert (beyond.matched, beyond.kl, beyond.exact) == (8, 0.0, True)
        assert reason in beyond.why


def test_a_certified_prompt_is_matched_as_far_as_the_certificate_bounds_it():
    everything = planned(reuse="certified")
    assert [(step.point, step.rank) for step in everything.steps] == [("leading", 0), ("stored", 4), ("bare", 0)]
    assert (everything.matched, everything.kl) == (24, 5.0)
    within = planned(reuse="certified", kl=0.1)
    # The third chunk is prefilled behind an approximate one, and so counts among the others.
    assert (within.matched, within.kl) == (18, 0.02)
    assert "chunk 3 of 3 is not certified within 0.1 nats" in within.why
    assert planned(reuse="certified", kl=0.015).matched == 8
    assert planned(config=dataclasses.replace(EVERYTHING, kl=0.1), reuse="certified").matched == 18
    without = planned(certificate=None, reuse="certified")
    assert (without.matched, without.exact) == (8, True)
    assert "there is no certificate" in without.why


def test_goals_without_bounds_take_the_most_faithful_option_they_allow():
    """They state a bound where there is one."""
    patched, blind = planned(reuse="patched"), planned(reuse="blind")
    assert [(step.point, step.rank) for step in patched.steps] == [("leading", 0), ("stored", 4)]
    assert [(step.point, step.rank) for step in blind.steps] == [("leading", 0), ("bare", 0), ("bare", 0)]
    assert (patched.kl, blind.kl) == (0.02, 5.0)
    assert planned(certificate=None, reuse="blind").kl is None


def test_what_cannot_be_read_gives_way_to_the_next_best():
    damaged = [option("stored", 4, "damaged patch"), option("bare")]
    plan = planned(Shelf([LEADING], damaged, [option("bare")]), reuse="certified")
    assert [step.point for step in plan.steps] == ["leading", "bare", "bare"]
    assert planned(Shelf([LEADING._replace(made="damaged")], damaged, [])).matched == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_allowed_prefix_is_longer(data):
    """Against every selection of up to five chunks, bounded as the certificate itself bounds them."""
    count = data.draw(st.integers(1, 5))
    history = PromptHistory(segments_of("tiny", range(100), ends=[9 * (index + 1) for index in range(count)]))
    ways = [("stored", 4), ("near", 0), ("bare", 0)]
    rows = []
    for way in data.draw(st.lists(st.sampled_from(ways), unique=True)):
        bounds = sorted(data.draw(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5)))
        rows += [(*way, behind, bound) for behind, bound in enumerate(bounds)]
    certificate = certificate_of(*rows or [("orbit", 1, 0, 0.1)], chunks=9, tokens=999)
    listed = [data.draw(st.lists(st.sampled_from(ways), unique=True)) for _ in range(count)]
    exact = [data.draw(st.booleans()) for _ in range(count)]
    kl = data.draw(st.floats(0.0, 1.0))

    def longest():
        menus = [[("leading", 0)] * own + ways for own, ways in zip(exact, listed, strict=True)]
        for length in range(count, 0, -1):
            for served in itertools.product(*menus[:length]):
                # What is exact inherits nothing; what the engine prefills does.
                approximate = [way for way in served if way[0] != "leading"]
                others = len(approximate) + (count - length if approximate else 0) - 1
                bounds = [certificate.bound(*way, behind=others) for way in approximate]
                if all(bound is not None and bound <= kl for bound in bounds):
                    return length
        return 0

    options = [
        [Option("leading", "made")] * own + [option(*way) for way in ways]
        for own, ways in zip(exact, listed, strict=True)
    ]
    shelf = Shelf(*options, segments=history.segments)
    plan = planned(shelf, certificate, history=history, reuse="certified", kl=kl)
    assert plan.kl is not None
    assert plan.kl <= kl
    assert len(plan.steps) <= longest()
    # An exact chunk behind approximate ones counts as if it were one, which may end a prefix early.
    if not any(any(exact[index:]) for index in range(1, count)):
        assert len(plan.steps) == longest()


def test_different_approximate_plans_have_different_salts():
    plans = [
        planned(reuse="blind"),
        planned(Shelf([LEADING], [option("bare")], []), reuse="blind"),
        planned(Shelf([LEADING], [option("stored", 4)], []), reuse="patched"),
        planned(Shelf([LEADING], [option("stored", 4, "of another time")], []), reuse="patched"),
    ]
    assert not any(own.exact for own in plans)
    salts = [own.salt("tiny", None) for own in plans]
    salts += [plans[0].salt("tiny", "own"), plans[0].salt("other", None)]
    assert len(set(salts)) == len(salts)
    assert all(salt.startswith("kvpatch-") for salt in salts)
    assert planned(reuse="blind").salt("tiny", None) == salts[0]


@pytest.mark.parametrize(("end", "matched", "kl"), [(24, 24, 5.0), (20, 20, 5.0), (12, 12, 5.0), (8, 8, 0.0)])
def test_a_plan_that_was_cut_keeps_its_bound_while_anything_approximate_remains(end, matched, kl):
    cut = planned(reuse="blind").cut(end)
    assert (cut.matched, cut.kl) == (matched, kl)
