"""Sessions over a model whose layers are of two kinds and whose images see themselves whole (a tiny Gemma 3).

The oracle is plain prefills over contiguous contexts. Reading an image's tokens in causal order, or turning the keys of
the sliding layers by the other layers' rope, is shown to be something else.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from session_cases import QUESTION, logits, worded
from window_oracle import BUCKETS, tiny

import kvpatch_jax as kvp
from kvpatch_jax.backbone import joined
from kvpatch_jax.errors import InputError
from kvpatch_jax.patching import Placed, apply_patch, conditioned, form_patch, make_chunk
from kvpatch_jax.session import embedded
from models import Buckets

BAR = 2e-5


@pytest.fixture(scope="module")
def backbone() -> Any:
    return worded(tiny("gemma3", BUCKETS))


@pytest.fixture(scope="module")
def exact() -> Any:
    """Without buckets, for forwards of exactly what is given."""
    return tiny("gemma3", None)


def image_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (24, 24, 3), np.uint8)


def close(found: Any, expected: Any, bar: float = BAR) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(found - expected).max() <= bar * np.abs(expected).max()


def expected_logits(backbone: Any, order: list[np.ndarray], kvs: list[Any]) -> np.ndarray:
    """Logits of the question behind phase-free KV of images, one behind the other."""
    layout, parts, start = backbone.layout, [], 0
    for image, kv in zip(order, kvs, strict=True):
        tokens = backbone.embed(**backbone.prepare([image]))
        parts.append(kvp.to_engine(layout, kv, np.asarray(tokens.positions)[0], start))
        start += int(np.asarray(tokens.positions).max()) + 1
    asked = embedded(backbone, [QUESTION])
    return np.asarray(backbone.prefill(asked.tokens.take(0, asked.length).shift(start), joined(*parts)).logits)


def test_images_that_slide_and_change_places_are_served_as_they_were_computed(backbone: Any):
    """Added behind one another, then the middle one leaves and two change places: rotations alone, of two ropes."""
    images = [image_of(seed) for seed in range(4)]
    with kvp.Session(backbone, lead=0) as session:
        for image in images:
            session.add(image, order_free=True)
        whole = conditioned(backbone, [[image] for image in images])
        close(logits(session), expected_logits(backbone, images, whole))
        session.evict(session.ids[1])
        close(logits(session), expected_logits(backbone, [images[n] for n in (0, 2, 3)], [whole[n] for n in (0, 2, 3)]))
        session.reorder([session.ids[n] for n in (2, 1, 0)])
        order = (3, 2, 0)
        close(logits(session), expected_logits(backbone, [images[n] for n in order], [whole[n] for n in order]))
        answer = session.ask(QUESTION, steps=5)
        assert answer is not None


def test_a_stored_image_is_recalled_bit_for_bit(backbone: Any, tmp_path: Path):
    image = image_of(7)
    with kvp.ChunkStore(tmp_path / "chunks") as store, kvp.Session(backbone, store, lead=0) as session:
        session.add(image)
        first = logits(session)
    with kvp.ChunkStore(tmp_path / "chunks") as store, kvp.Session(backbone, store, lead=0) as session:
        session.add(image)
        assert (logits(session) == first).all()


def test_an_images_tokens_see_each_other_in_its_chunk_as_in_the_prompt(exact: Any):
    """KV(image) alone equals its KV at the front of any prompt; in causal order it would be another."""
    tokens = exact.embed(**exact.prepare([image_of(0)]))
    assert tokens.ahead is not None
    assert np.asarray(tokens.ahead)[0].tolist() == [0, *range(8, -1, -1), 0]
    alone, behind = (exact.prefill(t).kv for t in (tokens, exact.embed(**exact.prepare([image_of(0), [5, 6, 7]]))))
    for name, value in alone.items():
        close(behind[name][:, :, : value.shape[2]], value)
    causal = exact.prefill(tokens._replace(ahead=None)).kv
    assert any(np.abs(np.asarray(causal[name] - alone[name])).max() > 1e-2 for name in alone)


def test_a_patch_of_an_image_leaves_less_by_rank(exact: Any):
    first, second = image_of(1), image_of(2)
    chunk = make_chunk(exact, [second], id="second")
    _, target = conditioned(exact, [[first], [second]])
    start = chunk.span  # one image as long as the other
    wanted = kvp.to_engine(exact.layout, target, chunk.local, start)
    left = []
    for rank in (None, 1, 2, 4, 8):
        patch = None if rank is None else form_patch(chunk, target, rank, ("first",), method="exact", dense=False)
        found = apply_patch(Placed(chunk, patch, start, ("first",)))
        left.append(sum(float(np.square(np.asarray(found[name] - wanted[name])).sum()) for name in wanted))
    assert all(after < before for before, after in itertools.pairwise(left))


@pytest.mark.usefixtures("unchecked")
def test_a_chunk_of_a_prefill_holds_images_whole(exact: Any):
    tokens = exact.embed(**exact.prepare([[5, 6, 7], image_of(0), [8, 9]]))
    whole = exact.prefill(tokens)
    for chunk in (13, 14):
        close(exact.prefill(tokens, chunk=chunk).logits, whole.logits)
    with pytest.raises(InputError, match="chunk: got 6 tokens, which part token 4 from those that it sees"):
        exact.prefill(tokens, chunk=6)


def test_buckets_change_nothing(exact: Any):
    padded = tiny("gemma3", Buckets(smallest=32, steps=1))
    prompt = exact.prepare([[5, 6, 7], image_of(0), [8, 9]])
    found, wanted = (backbone.prefill(backbone.embed(**prompt)) for backbone in (padded, exact))
    close(found.logits, wanted.logits)
    for name, value in wanted.kv.items():
        close(found.kv[name], value)


def test_the_other_rope_would_be_something_else(exact: Any):
    """What the keys of the sliding layers would be if they turned as those of the others do."""
    layout = exact.layout
    kv = exact.prefill(exact.embed(**exact.prepare([image_of(0)]))).kv
    local = dataclasses.replace(layout.channel("k_local"), rope=None)
    channels = tuple(local if channel.name == "k_local" else channel for channel in layout.channels)
    wrong = dataclasses.replace(layout, channels=channels)
    places = np.arange(kv["k"].shape[2])
    right, other = (kvp.to_engine(each, kv, places, 50)["k_local"] for each in (layout, wrong))
    assert np.abs(np.asarray(right - other)).max() > 0.1 * np.abs(np.asarray(right)).max()
