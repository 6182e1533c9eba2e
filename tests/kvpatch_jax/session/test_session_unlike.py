"""Sessions over a model whose layers are of two kinds and whose images see themselves whole (a tiny Gemma 3).

The oracle is plain prefills over contiguous contexts. Reading an image's tokens in causal order, or turning the keys of
the sliding layers by the other layers' rope, is shown to be something else.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from typing import Any

import numpy as np
import pytest
from session_cases import QUESTION, logits, worded
from window_oracle import BUCKETS, tiny

import kvpatch_jax as kvp
from kvpatch_jax.backbone import joined
from kvpatch_jax.patching import conditioned
from kvpatch_jax.session import embedded

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


@pytest.mark.slow
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


@pytest.mark.slow
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
