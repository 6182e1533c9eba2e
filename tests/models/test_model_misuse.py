"""KV of another frame, unmoved questions, bare prompts, added masks and foreign caches are refused."""
# pyright: reportArgumentType=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import InputError, KVPatchError, LayoutError, ShapeError
from kvpatch_jax.models import load

T = 10
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def backbone(qwen2_5_vl_directory):
    """M-RoPE: three axes."""
    return load(qwen2_5_vl_directory)


def tokens_of(backbone, rows: int = 1, start: int = 0, length: int = T) -> Tokens:
    ids = np.random.default_rng(rows).integers(0, 40, (rows, length))
    places = np.broadcast_to((start + np.arange(length))[None, :, None], (rows, length, 3))
    return backbone.embed(ids, places)


@pytest.fixture(scope="module")
def prefilled(backbone):
    tokens = tokens_of(backbone)
    out = backbone.prefill(tokens)
    return tokens, out, kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0)


def refused(error: type[KVPatchError], message: str, *calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(error, match=message):
            call()


def test_phase_free_kv_is_refused_as_a_context(backbone, prefilled):
    tokens, out, engine = prefilled
    rest, step, slots = tokens.shift(T), tokens.take(0, 1).shift(T), np.array([[2]])
    for kv in (out.kv, jax.jit(lambda kv: kv)(out.kv), kvp.core.to_local(backbone.layout, out.kv, tokens.positions)):
        refused(
            LayoutError,
            "expected it in the engine frame",
            lambda kv=kv: backbone.prefill(rest, kv),
            lambda kv=kv: backbone.generate(rest, 2, context=kv),
            lambda kv=kv: backbone.decode(step, kv, slots),
            lambda kv=kv: backbone.recompute(step, kv, slots),
        )
    assert type(backbone.decode(step, engine, slots).cache) is type(engine)


def test_engine_frame_kv_is_refused_where_phase_free_belongs(backbone, prefilled):
    layout, chunk = backbone.layout, kvp.make_chunk(backbone, [[3, 1, 4, 1, 5]], "B")
    placed = kvp.apply_patch(chunk, None, 3)
    for kv in (placed, jax.vmap(lambda kv: kv)(placed), kvp.core.to_local(layout, chunk.kv, chunk.local)):
        refused(
            LayoutError,
            "expected it phase-free",
            lambda kv=kv: kvp.accumulate(None, kv, chunk, ["A"]),
            lambda kv=kv: kvp.removal_patch(chunk, kv, chunk.kv, 2, ["A"], ["A", "B"]),
            lambda kv=kv: kvp.apply_patch(chunk, None, 3, base=kv),
            lambda kv=kv: kvp.to_engine(layout, kv, chunk.local, 3),
            lambda kv=kv: kvp.core.to_local(layout, kv, chunk.local),
        )
    refused(
        LayoutError,
        "phase-free; expected it in the engine frame or in the local frame",
        lambda: kvp.to_phase_free(layout, chunk.kv, chunk.local, 3),
        lambda: kvp.relocate(layout, prefilled[1].kv, 0, 3),
    )
    # Of a plain dictionary nothing is known: it is taken at its word.
    assert kvp.to_engine(layout, dict(chunk.kv), chunk.local, 0)


def test_a_question_that_was_not_moved_is_refused_unless_the_mask_hides_what_is_in_front(backbone, prefilled):
    tokens, _, engine = prefilled
    two = jax.tree.map(lambda value: jnp.repeat(value, 2, axis=1), engine)
    rows, moved = tokens_of(backbone, 2), tokens_of(backbone, 2, T)
    for question, context in ((tokens, engine), (rows, two)):
        refused(
            InputError,
            rf"row 0.*position 0.*{T} tokens; expected.*shift\(",
            lambda question=question, context=context: backbone.prefill(question, context),
            lambda question=question, context=context: backbone.generate(question, 2, context=context),
        )
    second = rows._replace(positions=np.stack([moved.positions[0], rows.positions[1]]))
    refused(InputError, "row 1 at position 0", lambda: backbone.prefill(second, two))

    # Padding in front stands at 0; a row that the mask keeps from the context has none.
    padded = moved._replace(positions=moved.positions * (np.arange(T) > 2)[:, None])
    assert np.isfinite(backbone.prefill(padded, two).logits).all()
    mask = np.concatenate([np.ones((2, 1, T, T), bool), np.tri(T, dtype=bool)[None, None].repeat(2, 0)], axis=3)
    mask[0, ..., :T] = False
    beside = rows._replace(positions=np.stack([rows.positions[0], moved.positions[1]]))
    assert np.isfinite(backbone.prefill(beside, two, mask).logits).all()
    refused(InputError, "row 0", lambda: backbone.prefill(beside, two, mask[::-1]))


def test_prompts_that_are_no_tokens_and_missing_axes_are_refused(backbone, prefilled):
    (tokens, _, engine), slots = prefilled, np.array([[2]])
    for prompt in (backbone.prepare([[1, 2, 3]]), [1, 2, 3]):
        refused(
            InputError,
            r"expected Tokens, which backbone\.embed\(\*\*backbone\.prepare",
            lambda prompt=prompt: backbone.prefill(prompt),
            lambda prompt=prompt: backbone.generate(prompt, 2),
            lambda prompt=prompt: backbone.decode(prompt, engine, slots),
            lambda prompt=prompt: backbone.recompute(prompt, engine, slots),
        )
    bare, rest = jax.tree.map(lambda value: value[0], tokens), tokens.shift(T)
    refused(
        ShapeError,
        "expected",
        lambda: backbone.generate(bare, 2),
        lambda: backbone.prefill(bare),
        lambda: backbone.generate(rest, 2, context=jax.tree.map(lambda value: value[:, 0], engine)),
        lambda: backbone.generate(tokens_of(backbone, 2, T), 2, context=engine),
        lambda: backbone.decode(rest.take(0, 1), engine, np.array([2])),
    )
    for wrong in (-1, 320, 2**31):
        message = f"token ids: got {wrong}; expected 0 … 319"
        refused(InputError, message, lambda wrong=wrong: backbone.embed(np.array([[1, wrong]], np.int64)))


def test_foreign_caches_and_added_masks_are_refused(backbone, prefilled):
    tokens, _, engine = prefilled
    step, last, every = tokens.take(0, 1).shift(T), tokens.take(T - 1, T), np.arange(T)[None]
    for cache in ((engine["k"], engine["v"]), {"k": engine["k"]}, {**engine, "v": engine["v"][:, :, :3]}):
        refused(
            KVPatchError,
            r"(decode|recompute): cache.*expected",
            lambda cache=cache: backbone.decode(step, cache, np.array([[2]])),
            lambda cache=cache: backbone.recompute(step, cache, np.array([[2]])),
        )
    mask = np.where(np.tri(T, dtype=bool)[None, None], 0.0, -np.inf).astype(np.float32)
    refused(
        ShapeError,
        "(mask|keep): got float32; expected an array of bool",
        lambda: backbone.prefill(tokens, mask=mask),
        lambda: backbone.generate(tokens, 2, mask=mask),
        lambda: backbone.recompute(tokens, engine, every, mask=mask),
        lambda: backbone.recompute(tokens, engine, every, np.ones((2, 1, T), np.float32)),
        lambda: backbone.decode(last, engine, np.array([[T - 1]]), mask[..., -1:, :]),
    )
