"""Chunks of prompts whose texts are divided without a hand: where documents are cut, and what cannot change that."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.serving.vllm import ChunkingOptions, PromptFeature, segments_of
from kvpatch_jax.serving.vllm.chunking import MAX_LENGTH
from kvpatch_jax.serving.vllm.settings import MAX_SEGMENTS

OPENER, FRAME, PIXEL, SEPARATOR = [1, 2], (5, 6), 9, [7, 8]
"""Token ids below 1000 stand in no text."""
OPTIONS = ChunkingOptions((tuple(SEPARATOR),), (tuple(OPENER),), least=32)
QUESTION = list(range(100, 140))
seeds = st.integers(0, 2**32 - 1)


def text(count, seed=0):
    return np.random.default_rng(seed).integers(1000, 150_000, count).tolist()


def divided(tokens, options=OPTIONS, features=(), frame=FRAME):
    return segments_of("tiny", tokens, features, None, frame, options)


def ends_of(tokens, options=OPTIONS, **more):
    return [segment.end for segment in divided(tokens, options, **more)]


def chunks_inside(tokens, begin, end, **more):
    """Ids of the chunks within a range, and where they end from its begin."""
    inside = [segment for segment in divided(tokens, **more) if begin <= segment.begin and segment.end <= end]
    return [(segment.id, segment.end - begin) for segment in inside]


# ------------------------------------------------------------------------------------------------ the same anywhere


@given(st.integers(64, 3000), seeds, st.integers(32, 1500), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_document_has_the_same_chunks_behind_any_prefix_that_ends_at_a_reset_point(length, seed, before, opened):
    document = [*(OPENER if opened else []), *text(length, seed), *SEPARATOR]
    alone = chunks_inside([*document, *QUESTION], 0, len(document))
    assert alone[-1][1] == len(document), "its chunks are all of it"

    prefix = [*text(before, seed + 1), *([] if opened else SEPARATOR)]
    begin = len(prefix)
    assert chunks_inside([*prefix, *document, *QUESTION], begin, begin + len(document)) == alone

    picture = [FRAME[0], *[PIXEL] * 20, FRAME[1]]
    features = [PromptFeature("cat", len(prefix) + 1, 20)]
    begin = len(prefix) + len(picture)
    tokens = [*prefix, *picture, *document, *QUESTION]
    assert chunks_inside(tokens, begin, begin + len(document), features=features) == alone


# ------------------------------------------------------------------------------------------------ what holds always

PARTS = st.one_of(
    st.tuples(st.just("text"), st.integers(0, 700), seeds),
    st.tuples(st.just("same"), st.integers(0, 900), st.integers(1000, 1003)),
    st.tuples(st.just("image"), st.integers(1, 80), st.booleans()),
    st.tuples(st.sampled_from(["separator", "opener"]), st.just(0), st.just(0)),
)


def piece_of(kind, count, detail):
    if kind == "text":
        return text(count, detail)
    return [detail] * count if kind == "same" else SEPARATOR if kind == "separator" else OPENER


def prompt_of(parts):
    """Returns a prompt's tokens, its images, and their bounds with frames."""
    tokens, features, bounds = [], [], []
    for index, (kind, count, detail) in enumerate(parts):
        begin = len(tokens)
        if kind == "image":
            tokens += [FRAME[0], *[PIXEL] * count, FRAME[1]] if detail else [PIXEL] * count
            features.append(PromptFeature(f"image {index}", begin + detail, count))
            bounds.append((begin, len(tokens)))
        else:
            tokens += piece_of(kind, count, detail)
    return tokens, features, bounds


@given(st.lists(PARTS, max_size=12))
@settings(max_examples=60, deadline=None)
def test_chunks_cover_a_prompt_in_order_and_cut_no_image(parts):
    tokens, features, bounds = prompt_of([*parts, ("text", 5, 1)])
    segments = divided(tokens, features=features)
    begins = [segment.begin for segment in segments]

    assert begins == [0, *(segment.end for segment in segments)][: len(segments)], "no gap"
    assert all(segment.begin < segment.end < len(tokens) for segment in segments), "a token of a question is left"
    for begin, end in bounds:
        assert {begin, end} - {0, len(tokens)} <= {0, *(segment.end for segment in segments)}
        assert not any(begin < segment.end < end for segment in segments)

    walls = {0, *itertools.chain(*bounds)}
    for segment in segments:
        if segment.modality == "text":
            length = segment.end - segment.begin
            assert length >= OPTIONS.least or {segment.begin, segment.end} <= walls, "a short text between images"


def test_what_closes_opens_and_joins():
    """A separator belongs to the chunk in front, an opening to the one behind; short documents join."""
    first, second = [*text(50), *SEPARATOR], [*OPENER, *text(60, 1)]
    assert ends_of([*first, *second, *SEPARATOR, 3]) == [52, 116]

    chat = [*first, *OPENER, *text(5), *second, *text(40, 2)]
    assert ends_of(chat) == [59], "the short message is in the first chunk"
    assert ends_of([*OPENER, *text(5), *second, *SEPARATOR, 3]) == [71], "nothing is in front of it"
    short = [*OPENER, *text(10)]
    assert ends_of([*first, *short * 7, *OPENER, *text(40)]) == [52, 88, 136], "in threes; the seventh joins"

    assert ends_of([*first, 3]) == [52], "a question may be short"
    assert ends_of([*first, *second, *OPENER, 3]) == [52], "the opening of the answer is part of the question"
    assert ends_of([*first, *OPENER, *text(9), *OPENER, 3]) == [52]
    assert ends_of([*text(50), *SEPARATOR]) == [], "no question would be left"


def test_images_come_before_texts_and_declared_ends_before_both():
    tokens = [*text(100), FRAME[0], *SEPARATOR * 20, FRAME[1], *text(400, 1), *SEPARATOR, *QUESTION]
    features = [PromptFeature("separators", 101, 40)]
    ends = ends_of(tokens, features=features)
    assert ends[-1] == 544
    assert [end for end in ends if 100 <= end <= 142] == [100, 142], "what is in an image divides nothing"
    kinds = {(segment.begin, segment.modality) for segment in divided(tokens, features=features)}
    assert (100, "image") in kinds

    assert [own.end for own in segments_of("tiny", tokens, features, [50, 142], FRAME, OPTIONS)] == [50, 142]
    assert segments_of("tiny", tokens, features, [], FRAME, OPTIONS) == ()
    assert [own.end for own in segments_of("tiny", tokens, features, None, FRAME)] == [100, 142]

    # A pattern that reaches from a text into an image, or from an image into a text, is none.
    inside = text(40, 2)
    crossing = [*text(60), 7, *inside, *[PIXEL] * 9, *inside, *text(60, 1), *QUESTION]
    plain = dataclasses.replace(OPTIONS, openers=((7, *inside, PIXEL),), separators=((PIXEL, *inside),))
    assert ends_of(crossing, plain, features=[PromptFeature("a", 101, 9)]) == [101, 110]
    assert ends_of(crossing, plain) == [60, 150], "but for the image"
    ending = [*text(200), *SEPARATOR, *[PIXEL] * 9]
    assert ends_of(ending, features=[PromptFeature("a", 202, 9)])[-1] == 202, "an image at the end is the question"


# -------------------------------------------------------------------------------------------------- hostile prompts


@pytest.mark.parametrize("tokens", [[], [7, 8], [7, 8] * 9, [1] * 31], ids=len)
def test_a_prompt_of_next_to_nothing_has_no_chunk(tokens):
    assert divided(tokens) == ()


def test_overlapping_separators_and_long_ones():
    options = dataclasses.replace(OPTIONS, separators=((7, 7), (7, 7, 7), (8,) * 64), openers=())
    assert ends_of([*text(50), 7, 7, 7, *text(50, 1), 8, 8, 3], options) == [53]
    assert ends_of([*text(50), *[8] * 64, 3], options) == [114]
    assert ends_of([7, 7], options) == []


def test_no_more_than_the_most_chunks():
    tokens = [*text(40), *SEPARATOR] * (MAX_SEGMENTS + 10)
    assert len(divided(tokens)) == MAX_SEGMENTS


def test_overlapping_images_are_refused_as_without_chunking():
    features = [PromptFeature("a", 40, 20), PromptFeature("b", 50, 20)]
    for chunking in (None, OPTIONS):
        with pytest.raises(InputError, match="got end 60 inside an image at 50 to 70"):
            segments_of("tiny", text(100), features, None, None, chunking)


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *((value, "connector.chunking: got") for value in ([], "512", {}, {"mean": 512, "separators": [[1]]})),
        *(
            ({"separators": value}, r"chunking\.separators: got")
            for value in (3, [3], [[]], [["#"]], [[-1]], [[1]] * 65)
        ),
        *(({"openers": value}, r"chunking\.openers: got") for value in ([[2**31]], [[1] * 65], None)),
        *(({"openers": [[1]], "least": value}, r"chunking\.least: got") for value in (0, "32", MAX_LENGTH + 1)),
    ],
)
def test_settings_that_are_none_are_refused_by_name(unchecked, value, named):
    with pytest.raises(ConfigError, match=named):
        ChunkingOptions.read(value)


def test_settings_are_read_from_json():
    assert ChunkingOptions.read({"separators": [[7, 8]], "openers": [[1, 2]], "least": 32}) == OPTIONS
    assert ChunkingOptions.read({"openers": [[1, 2]]}) == dataclasses.replace(OPTIONS, separators=())
