"""Events of blocks for routers: exact ones alone, with what vLLM hashes of them, and withdrawn when they are gone."""

from types import SimpleNamespace

import pytest
from serving_sides import PAGE, TOKENS

from kvpatch_jax.serving.vllm import PromptSegment, events
from kvpatch_jax.serving.vllm.events import BlockEvents, BlocksRemoved, BlocksStored


@pytest.fixture
def collected() -> BlockEvents:
    collected = BlockEvents(PAGE)
    collected.enabled = True
    return collected


def request_of(tokens=TOKENS, salt=None, images=(), hashes=None):
    """A request whose blocks are hashed as an engine hashes them: each with all those in front."""
    features = []
    for identifier, offset, length in images:
        position = SimpleNamespace(offset=offset, length=length)
        features.append(SimpleNamespace(identifier=identifier, mm_position=position))
    names = [f"{salt} {images} {tokens[: end + PAGE]}" for end in range(0, len(tokens) - PAGE + 1, PAGE)]
    return SimpleNamespace(prompt_token_ids=tokens, block_hashes=hashes or names, cache_salt=salt, mm_features=features)


def steps_of(*ends, exact=10):
    """Steps of a plan; the one at the place `exact` is approximate."""
    steps = [SimpleNamespace(segment=PromptSegment("id", 0, end), exact=True, point="restored") for end in ends]
    for step in steps[exact : exact + 1]:
        step.exact, step.point = False, "near"
    return steps


def test_blocks_are_announced_as_far_as_a_plan_is_exact_and_withdrawn_when_they_are_gone(collected):
    request, nothing = request_of(), (None,) * 4
    hashes = tuple(request.block_hashes)
    for steps, expected in (
        (steps_of(8, 18), [BlocksStored(hashes[:4], None, tuple(TOKENS[:16]), PAGE, nothing)]),
        (steps_of(8, 18), []),
        (steps_of(8, 18, 24), [BlocksStored(hashes[4:6], hashes[3], tuple(TOKENS[16:24]), PAGE, nothing[:2])]),
        (steps_of(8, 12, 24, exact=1), [BlocksRemoved(hashes[2:6])]),
        ([], [BlocksRemoved(hashes[:2])]),
    ):
        collected.note_plan(request, None, steps)
        assert collected.take() == expected


@pytest.mark.parametrize(("point", "count"), [("near", 1), ("survivor", 0)])
def test_a_survivor_says_nothing_of_the_exact_chunk_in_its_place(collected, point, count):
    """A window that remembers takes it although the exact chunk is stored: other requests can load that."""
    collected.note_plan(request_of(), None, steps_of(8, 16))
    collected.take()
    steps = steps_of(8, 16, exact=1)
    steps[1].point = point
    collected.note_plan(request_of(), None, steps)
    assert len(collected.take()) == count


def test_images_and_salts_are_announced_with_what_vllm_hashes_of_them(collected):
    """`generate_block_hash_extra_keys` of vLLM 0.32: images from each block's start, then the first block's salt."""
    request = request_of(salt="acme", images=(("cat", 2, 7), ("dog", 9, 2)))
    collected.note_plan(request, "acme", steps_of(16))
    (stored,) = collected.take()
    assert stored.extra_keys == ((("cat", 2), "acme"), (("cat", -2),), (("cat", -6), ("dog", 1)), None)
    assert stored.hashes == tuple(request.block_hashes[:4])


@pytest.mark.parametrize(
    ("request_", "steps", "enabled"),
    [
        (request_of(), steps_of(8, exact=0), True),
        (request_of(), steps_of(PAGE - 1), True),
        (request_of(salt="kvpatch-1234"), steps_of(8), True),
        (request_of(hashes=["other units"] * 3), steps_of(8), True),
        (request_of(), steps_of(8), False),
    ],
    ids=["approximate", "less than a block", "salted by the plan", "hashed in other units", "nobody listens"],
)
def test_what_a_router_could_not_use_is_not_announced(collected, request_, steps, enabled):
    collected.enabled = enabled
    collected.note_plan(request_, None, steps)
    assert collected.take() == []


def test_the_least_recently_planned_blocks_are_withdrawn_from_a_prompts_end(collected, monkeypatch):
    monkeypatch.setattr(events, "MAX_ANNOUNCED", 3)
    first, second = request_of(), request_of(TOKENS[1:])
    for request in (first, second):
        collected.note_plan(request, None, steps_of(8))
    assert collected.take()[-1] == BlocksRemoved((first.block_hashes[1],))
    collected.clear()
    (removed,) = collected.take()
    assert len(removed.hashes) == 3
