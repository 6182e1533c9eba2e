"""A plan claims only KV that is stored and readable, and only as much as its goal and the certificate allow."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import dataclasses

import pytest
from serving_sides import TOKENS

from kvpatch_jax.cache import identity
from kvpatch_jax.plan import FORWARD, Option
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, RequestOptions, StoreOptions, plan_request, segments_of
from kvpatch_jax.serving.vllm.plan import PromptHistory
from tests.shared.certificates import certificate

ENDS = (8, 18, 24)
SEGMENTS = segments_of("tiny", TOKENS, ends=ENDS)
EVERYTHING = ConnectorConfig(StoreOptions("s"), "tiny", kl=10.0, allow=("exact", "certified", "patched", "blind"))


class Shelf:
    """Options of every chunk without a store; what is lacking is found out when it is read."""

    def __init__(self, *options):
        self.forwards = [FORWARD._replace(cost=segment.end - segment.begin) for segment in SEGMENTS]
        self.listed, self.lacking = options, set()

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


def planned(shelf=SHELF, signed=SIGNED, config=EVERYTHING, **options):
    return plan_request(PromptHistory(SEGMENTS), shelf, config, RequestOptions(**options), signed)


LIMITED, SHORT = dataclasses.replace(EVERYTHING, kl=0.1), dataclasses.replace(SIGNED, tokens=23)


@pytest.mark.parametrize(
    ("options", "points", "kl", "why"),
    [
        ({}, "leading", 0.0, "chunk 2 of 3 is not stored behind those in front of it"),
        ({"reuse": "certified"}, "leading stored bare", 5.0, ""),
        # The third chunk is prefilled behind an approximate one, and so counts among the others.
        ({"reuse": "certified", "kl": 0.1}, "leading stored", 0.02, "chunk 3 of 3 is not certified within 0.1 nats"),
        ({"reuse": "certified", "config": LIMITED}, "leading stored", 0.02, "not certified within 0.1 nats"),
        ({"reuse": "certified", "kl": 0.1, "signed": SHORT}, "leading", 0.0, "window of 24 tokens; certified up to 23"),
        ({"reuse": "certified", "signed": None}, "leading", 0.0, "there is no certificate"),
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
    assert (plan.kl, plan.exact) == (kl, points in ("", "leading"))
    assert why in plan.why


def test_what_cannot_be_read_gives_way_to_the_next_best():
    damaged = [option("stored", 4, "damaged patch"), option("bare")]
    plan = planned(Shelf([LEADING], damaged, [option("bare")]), reuse="certified")
    assert [step.point for step in plan.steps] == ["leading", "bare", "bare"]
    assert planned(Shelf([LEADING._replace(made="damaged")], damaged, [])).matched == 0


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
    plan = planned(reuse="blind")
    assert plan.salt("tiny", None) in salts
    # What is left of one keeps its bound while anything approximate is.
    cuts = [plan.cut(end) for end in (24, 20, 12, 8)]
    assert [(cut.matched, cut.kl) for cut in cuts] == [(24, 5.0), (20, 5.0), (12, 5.0), (8, 0.0)]
