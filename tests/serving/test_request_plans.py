"""A plan claims only KV that is stored and readable, and only as much as its goal and the certificate allow."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_sides import TOKENS

from kvpatch_jax.cache import identity
from kvpatch_jax.plan import FORWARD, Option
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, RequestOptions, StoreOptions, plan_request, segments_of
from kvpatch_jax.serving.vllm.plan import PromptHistory
from tests.shared.certificates import certificate

ENDS = (8, 18, 24)
SEGMENTS = segments_of("tiny", TOKENS, ends=ENDS)
HISTORY = PromptHistory(SEGMENTS)
EVERYTHING = ConnectorConfig(StoreOptions("s"), "tiny", kl=10.0, allow=("exact", "certified", "patched", "blind"))


class Shelf:
    """Options of every chunk without a store; what is lacking is found out when it is read."""

    def __init__(self, *options, lacking=(), segments=SEGMENTS):
        self.forwards = [FORWARD._replace(cost=segment.end - segment.begin) for segment in segments]
        self.listed, self.lacking = options, set(lacking)

    def options(self, goal, promise):
        def options(index, chosen):
            is_reached = not (chosen and chosen[-1].is_forward)
            listed = [option for option in self.listed[index] if option.made not in self.lacking]
            return [*listed, self.forwards[index]] if is_reached else [self.forwards[index]]

        return options

    def provide(self, chosen):
        unread = [made for _, made, *_ in chosen if made.startswith("damaged") and made not in self.lacking]
        self.lacking |= set(unread[:1])
        return not unread


def option(point, rank=0, name=""):
    return Option(point, name or f"{point} {rank}", ((point, rank),), rank)


LEADING = Option("leading", identity(SEGMENTS[0].id))
SHELF = Shelf([LEADING], [option("stored", 4), option("stored", 2), option("bare")], [option("bare")])


SIGNED = certificate({("stored", 4): [0.01, 0.02, 0.03], ("bare", 0): [5.0] * 3}, chunks=3, tokens=99)


def planned(shelf=SHELF, signed=SIGNED, config=EVERYTHING, history=HISTORY, **options):
    return plan_request(history, shelf, config, RequestOptions(**options), signed)


APPROXIMATE = Shelf([], [option("bare")], [])
LIMITED, SHORT = dataclasses.replace(EVERYTHING, kl=0.1), dataclasses.replace(SIGNED, tokens=23)
UNCERTIFIED = "chunk {} of 3 is not certified within {} nats"
NO_CERTIFICATE = f"{UNCERTIFIED.format(2, 10)}: there is no certificate"
BEYOND = f"{UNCERTIFIED.format(2, 0.1)}: window of 24 tokens; certified up to 23"
BEHIND = "chunk 2 of 3 is not stored behind those in front of it"


@pytest.mark.parametrize(
    ("options", "points", "kl", "why"),
    [
        ({}, "leading", 0.0, BEHIND),
        ({"shelf": APPROXIMATE}, "", 0.0, "chunk 1 of 3 is not stored"),
        ({"reuse": "certified"}, "leading stored bare", 5.0, ""),
        # The third chunk is prefilled behind an approximate one, and so counts among the others.
        ({"reuse": "certified", "kl": 0.1}, "leading stored", 0.02, UNCERTIFIED.format(3, 0.1)),
        ({"reuse": "certified", "kl": 0.015}, "leading", 0.0, UNCERTIFIED.format(2, 0.015)),
        ({"reuse": "certified", "config": LIMITED}, "leading stored", 0.02, UNCERTIFIED.format(3, 0.1)),
        ({"reuse": "certified", "kl": 0.1, "signed": SHORT}, "leading", 0.0, BEYOND),
        ({"reuse": "certified", "signed": None}, "leading", 0.0, NO_CERTIFICATE),
        # Goals without bounds state one where there is one.
        ({"reuse": "patched"}, "leading stored", 0.02, "chunk 3 of 3 is not stored"),
        ({"reuse": "blind"}, "leading bare bare", 5.0, ""),
        ({"reuse": "blind", "signed": None}, "leading bare bare", None, ""),
    ],
)
def test_a_prompt_is_served_as_far_as_its_goal_and_the_certificate_allow(options, points, kl, why):
    plan = planned(**options)
    assert [step.point for step in plan.steps] == points.split()
    assert plan.matched == dict(enumerate(ENDS, 1)).get(len(plan.steps), 0)
    assert (plan.kl, plan.exact, plan.why) == (kl, points in ("", "leading"), why)


def test_what_cannot_be_read_gives_way_to_the_next_best():
    damaged = [option("stored", 4, "damaged patch"), option("bare")]
    plan = planned(Shelf([LEADING], damaged, [option("bare")]), reuse="certified")
    assert [step.point for step in plan.steps] == ["leading", "bare", "bare"]
    assert planned(Shelf([LEADING._replace(made="damaged")], damaged, [])).matched == 0


@given(data=st.data())
def test_no_allowed_prefix_is_longer(data):
    """Against every selection of up to five chunks, bounded as the certificate itself bounds them."""
    count = data.draw(st.integers(1, 5))
    history = PromptHistory(segments_of("tiny", range(100), ends=[9 * (index + 1) for index in range(count)]))
    ways = [("stored", 4), ("near", 0), ("bare", 0)]
    bounds = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5).map(sorted)
    signed = certificate(data.draw(st.dictionaries(st.sampled_from(ways), bounds)) or {("orbit", 1): [0.1]})
    listed = [data.draw(st.lists(st.sampled_from(ways), unique=True)) for _ in range(count)]
    exact = [data.draw(st.booleans()) for _ in range(count)]
    kl = data.draw(st.floats(0.0, 1.0))

    def longest():
        menus = [[("leading", 0)] * is_exact + ways for is_exact, ways in zip(exact, listed, strict=True)]
        for length in range(count, 0, -1):
            for served in itertools.product(*menus[:length]):
                # What is exact inherits nothing; what the engine prefills does.
                approximate = [way for way in served if way[0] != "leading"]
                others = len(approximate) + (count - length if approximate else 0) - 1
                bounds = [signed.bound(*way, behind=others) for way in approximate]
                if all(bound is not None and bound <= kl for bound in bounds):
                    return length
        return 0

    options = []
    for is_exact, ways in zip(exact, listed, strict=True):
        options.append([Option("leading", "made")] * is_exact + [option(*way) for way in ways])
    shelf = Shelf(*options, segments=history.segments)
    plan = planned(shelf, signed, history=history, reuse="certified", kl=kl)
    assert plan.kl is not None
    assert plan.kl <= kl
    assert len(plan.steps) <= longest()
    # An exact chunk behind approximate ones counts as if it were one, which may end a prefix early.
    if not any(any(exact[index:]) for index in range(1, count)):
        assert len(plan.steps) == longest()


def test_exact_plans_have_no_salt_and_approximate_ones_their_own():
    exact = planned()
    assert exact.steps == (ChunkStep(SEGMENTS[0], "leading", LEADING.made),)
    assert (exact.salt("tiny", None), exact.salt("tiny", "acme")) == (None, "acme")
    stored = (Shelf([LEADING], [option("stored", 4, made)], []) for made in ("", "of another time"))
    plans = [planned(shelf, reuse="patched") for shelf in stored]
    plans += [planned(shelf, reuse="blind") for shelf in (SHELF, Shelf([LEADING], [option("bare")], []))]
    assert not any(plan.exact for plan in plans)
    salts = [plan.salt("tiny", None) for plan in plans]
    salts += [plans[0].salt("tiny", "another"), plans[0].salt("other", None)]
    assert len(set(salts)) == len(salts)
    assert all(salt.startswith("kvpatch-") for salt in salts)
    assert planned(reuse="blind").salt("tiny", None) in salts


def test_a_plan_that_was_cut_keeps_its_bound_while_anything_approximate_remains():
    cuts = [planned(reuse="blind").cut(end) for end in (24, 20, 12, 8)]
    assert [(cut.matched, cut.kl) for cut in cuts] == [(24, 5.0), (20, 5.0), (12, 5.0), (8, 0.0)]
