"""A document is cut into the same chunks in every prompt, and a plan claims only KV that is stored and allowed."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_sides import TOKENS

from kvpatch_jax.cache import identity
from kvpatch_jax.errors import InputError
from kvpatch_jax.plan import FORWARD, Option
from kvpatch_jax.serving.vllm import (
    ChunkingOptions,
    ChunkStep,
    ConnectorConfig,
    PromptFeature,
    RequestOptions,
    StoreOptions,
    plan_request,
    segments_of,
)
from kvpatch_jax.serving.vllm.plan import PromptHistory
from kvpatch_jax.serving.vllm.segments import MAX_SEGMENTS
from tests.shared.certificates import certificate

# --------------------------------------------------------------------------------------------------------------- chunks

OPENER, FRAME, PIXEL, SEPARATOR = [1, 2], (5, 6), 9, [7, 8]
"""Token ids below 1000 stand in no text."""
OPTIONS = ChunkingOptions((tuple(SEPARATOR),), (tuple(OPENER),), least=32, image_frame=FRAME)
QUESTION = list(range(100, 140))
seeds = st.integers(0, 2**32 - 1)


def text(count, seed=0):
    return np.random.default_rng(seed).integers(1000, 150_000, count).tolist()


def divided(tokens, options=OPTIONS, features=(), ends=None):
    return segments_of("tiny", tokens, features, ends, options)


def ends_of(tokens, options=OPTIONS, **more):
    return [segment.end for segment in divided(tokens, options, **more)]


@given(st.integers(64, 3000), seeds, st.integers(32, 1500), st.booleans())
def test_a_document_has_the_same_chunks_behind_any_text_or_image(length, seed, before, opened):
    document = [*(OPENER if opened else []), *text(length, seed), *SEPARATOR]
    alone = [(segment.id, segment.begin, segment.end) for segment in divided([*document, *QUESTION])]
    alone = alone[: [end for *_, end in alone].index(len(document)) + 1]

    prefix = [*text(before, seed + 1), *([] if opened else SEPARATOR)]
    picture, features = [FRAME[0], *[PIXEL] * 20, FRAME[1]], [PromptFeature("cat", len(prefix) + 1, 20)]
    for front, images in ((prefix, []), ([*prefix, *picture], features)):
        segments, at = divided([*front, *document, *QUESTION], features=images), len(front)
        behind = [(segment.id, segment.begin - at, segment.end - at) for segment in segments if segment.begin >= at]
        assert behind[: len(alone)] == alone
        ends = [segment.end for segment in segments]
        assert [segment.begin for segment in segments] == [0, *ends][:-1], "no gap"
        assert ends[-1] < at + len(document) + len(QUESTION), "a token of the question is left"
        assert not any(begin < end < begin + count for _, begin, count in images for end in ends)


FIRST, SECOND = [*text(50), *SEPARATOR], [*OPENER, *text(60, 1)]
SHORT = [*OPENER, *text(5)]


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ([*FIRST, *SECOND, *SEPARATOR, 3], [52, 116]),
        ([*FIRST, *SHORT, *SECOND, *text(40, 2)], [59]),  # the short message is in the first chunk
        ([*SHORT, *SECOND, *SEPARATOR, 3], [71]),  # nothing is in front of it
        ([*FIRST, *[*OPENER, *text(14)] * 4, *OPENER, *text(40)], [52, 84, 116]),  # in pairs, just long enough
        ([*FIRST, *SECOND, *OPENER, 3], [52]),  # the opening of the answer is part of the question
        (FIRST, []),  # no question would be left
        (FIRST * (MAX_SEGMENTS + 10), list(range(52, 52 * MAX_SEGMENTS + 1, 52))),
    ],
)
def test_what_closes_opens_and_joins(tokens, ends):
    """A separator belongs to the chunk in front, an opening to the one behind; short documents join."""
    assert ends_of(tokens) == ends


def test_images_come_before_texts_and_declared_ends_before_both():
    tokens = [*text(100), FRAME[0], *SEPARATOR * 20, FRAME[1], *text(400, 1), *SEPARATOR, *QUESTION]
    features = [PromptFeature("separators", 101, 40)]
    segments = divided(tokens, features=features)
    assert [(segment.end, segment.modality) for segment in segments] == [(100, "text"), (142, "image"), (544, "text")]
    assert ends_of(tokens, features=features, ends=[50, 142]) == [50, 142]
    assert ends_of(tokens, features=features, ends=[]) == []
    assert ends_of(tokens, None, features=features) == [101, 141], "without frames, and no text behind images"
    ending = [*text(200), *SEPARATOR, *[PIXEL] * 9]
    assert ends_of(ending, features=[PromptFeature("a", 202, 9)])[-1] == 202, "an image at the end is the question"


def test_an_id_is_of_tokens_and_images_wherever_they_stand():
    """So nobody claims another chunk's content, and a client's uuid names an image as any identifier does."""

    def chunk(identifier="uuid of a cat", offset=2, begin=0, backbone="tiny", pixel=PIXEL):
        tokens, features = [3] * begin + [pixel] * 8 + [3], [PromptFeature(identifier, begin + offset, 4)]
        return segments_of(backbone, tokens, features, [begin, begin + 8] if begin else [8])[-1].id

    assert chunk(begin=5) == chunk()
    assert len({chunk(), chunk("uuid of a dog"), chunk(offset=3), chunk(backbone="b"), chunk(pixel=4)}) == 5


def test_ends_outside_of_a_prompt_or_inside_an_image_are_refused():
    features = [PromptFeature("a", 40, 20), PromptFeature("b", 50, 20)]
    for options, why in (
        ({"ends": [100]}, "got end 100 in a prompt of 100 tokens"),
        ({"ends": [45]}, "got end 45 inside an image at 40 to 60"),
        *(({"options": chunking}, "got end 60 inside an image at 50 to 70") for chunking in (None, OPTIONS)),
    ):
        with pytest.raises(InputError, match=why):
            divided(text(100), features=features, **options)


# ---------------------------------------------------------------------------------------------------------------- plans

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


LIMITED, NARROW = dataclasses.replace(EVERYTHING, kl=0.1), dataclasses.replace(SIGNED, tokens=23)


@pytest.mark.parametrize(
    ("options", "points", "kl", "why"),
    [
        ({}, "leading", 0.0, "chunk 2 of 3 is not stored behind those in front of it"),
        ({"reuse": "certified"}, "leading stored bare", 5.0, ""),
        # The third chunk is prefilled behind an approximate one, and so counts among the others.
        ({"reuse": "certified", "kl": 0.1}, "leading stored", 0.02, "chunk 3 of 3 is not certified within 0.1 nats"),
        ({"reuse": "certified", "config": LIMITED}, "leading stored", 0.02, "not certified within 0.1 nats"),
        (
            {"reuse": "certified", "kl": 0.1, "signed": NARROW},
            "leading",
            0.0,
            "window of 24 tokens; certified up to 23",
        ),
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
