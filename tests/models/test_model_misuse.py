"""KV of another frame, unmoved questions, bare prompts, added masks and foreign caches are refused."""
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import InputError, KVPatchError, LayoutError, ShapeError
from kvpatch_jax.models import load

T = 10
"""Also twice a chunk's tokens, so that contexts of either make run the same programs."""
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


def test_phase_free_kv_is_refused_as_a_context(backbone, prefilled):
    tokens, out, engine = prefilled
    rest, step = tokens.shift(T), tokens.take(0, 1).shift(T)
    for kv in (out.kv, jax.jit(lambda kv: kv)(out.kv), kvp.core.to_local(backbone.layout, out.kv, tokens.positions)):
        for call in (
            lambda kv=kv: backbone.prefill(rest, kv),
            lambda kv=kv: backbone.generate(rest, 2, context=kv),
            lambda kv=kv: backbone.decode(step, kv, np.array([[2]])),
            lambda kv=kv: backbone.recompute(step, kv, np.array([[2]])),
        ):
            with pytest.raises(LayoutError, match="expected it in the engine frame"):
                call()
    assert type(backbone.decode(step, engine, np.array([[2]])).cache) is type(engine)


def test_engine_frame_kv_is_refused_where_phase_free_belongs(backbone, prefilled):
    layout, chunk = backbone.layout, kvp.make_chunk(backbone, [[3, 1, 4, 1, 5]], "B")
    fields = {name: getattr(chunk, name) for name in ("local", "span", "length", "id", "backbone", "layout")}
    placed = kvp.apply_patch(chunk, None, 3)
    for kv in (placed, jax.vmap(lambda kv: kv)(placed), kvp.core.to_local(layout, chunk.kv, chunk.local)):
        for call in (
            lambda kv=kv: kvp.Chunk(kv=kv, **fields),
            lambda kv=kv: kvp.form_patch(chunk, kv, 2, ["A"]),
            lambda kv=kv: kvp.accumulate(None, kv, chunk, ["A"]),
            lambda kv=kv: kvp.removal_patch(chunk, kv, chunk.kv, 2, ["A"], ["A", "B"]),
            lambda kv=kv: kvp.apply_patch(chunk, None, 3, base=kv),
            lambda kv=kv: kvp.to_engine(layout, kv, chunk.local, 3),
            lambda kv=kv: kvp.core.to_local(layout, kv, chunk.local),
        ):
            with pytest.raises(LayoutError, match="expected it phase-free"):
                call()
    for call in (
        lambda: kvp.to_phase_free(layout, chunk.kv, chunk.local, 3),
        lambda: kvp.relocate(layout, prefilled[1].kv, 0, 3),
    ):
        with pytest.raises(LayoutError, match="phase-free; expected it in the engine frame or in the local frame"):
            call()
    # Of a plain dictionary nothing is known: it is taken at its word.
    assert kvp.to_engine(layout, dict(chunk.kv), chunk.local, 0)


@pytest.mark.nightly
def test_kv_keeps_its_frame_through_a_checkpoint(backbone, prefilled, tmp_path):
    import orbax.checkpoint as ocp

    engine = prefilled[2]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "kv", {"kv": engine})
        checkpointer.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"kv": engine})
        again = checkpointer.restore(tmp_path / "kv", like)["kv"]
    assert type(again) is type(engine)
    assert all(np.array_equal(again[name], engine[name]) for name in engine)


def test_a_question_that_was_not_moved_is_refused(backbone, prefilled):
    tokens, _, engine = prefilled
    two = jax.tree.map(lambda value: jnp.repeat(value, 2, axis=1), engine)
    rows = tokens_of(backbone, 2)
    for question, context in ((tokens, engine), (tokens.take(0, 1), engine), (rows, two)):
        for call in (backbone.prefill, lambda given, kv: backbone.generate(given, 2, context=kv)):
            with pytest.raises(InputError, match=rf"row 0.*position 0.*{T} tokens; expected.*shift\("):
                call(question, context)
    one = rows._replace(positions=np.stack([rows.positions[0] + T, rows.positions[1]]))
    with pytest.raises(InputError, match="row 1 at position 0"):
        backbone.prefill(one, two)


@pytest.mark.nightly
def test_what_stands_at_position_0_on_purpose_is_taken(backbone, prefilled):
    two = jax.tree.map(lambda value: jnp.repeat(value, 2, axis=1), prefilled[2])
    rows = tokens_of(backbone, 2, T)
    padded = rows._replace(positions=rows.positions * np.r_[0, 0, 0, [1] * (T - 3)][:, None])  # padding in front
    backbone.prefill(padded, two)
    mask = np.concatenate([np.ones((2, 1, T, T), bool), np.tri(T, dtype=bool)[None, None].repeat(2, 0)], axis=3)
    mask[0, ..., :T] = False  # the first row has no context: the other's is longer
    beside = rows._replace(positions=np.stack([rows.positions[0] - T, rows.positions[1]]))
    for given in (mask, jnp.asarray(mask)):
        backbone.prefill(beside, two, given)
    swapped = mask[::-1]
    with pytest.raises(InputError, match="row 0"):
        backbone.prefill(beside, two, swapped)
    one_axis = rows._replace(positions=rows.positions * np.array([1, 0, 1]))  # 0 on one axis is no beginning
    backbone.prefill(one_axis, two)


def test_a_prompt_that_was_not_embedded_is_told(backbone, prefilled):
    engine, prompt, slots = prefilled[2], backbone.prepare([[1, 2, 3]]), np.array([[2]])
    for given in (prompt, prompt["input_ids"], [1, 2, 3], None):
        for call in (
            lambda given=given: backbone.prefill(given),
            lambda given=given: backbone.generate(given, 2),
            lambda given=given: backbone.decode(given, engine, slots),
            lambda given=given: backbone.recompute(given, engine, slots),
        ):
            with pytest.raises(InputError, match=r"expected Tokens, which backbone\.embed\(\*\*backbone\.prepare"):
                call()


def test_a_missing_batch_axis_is_told(backbone, prefilled):
    tokens, _, engine = prefilled
    bare = jax.tree.map(lambda value: value[0], tokens)
    rest = tokens.shift(T)
    for call in (
        lambda: backbone.generate(bare, 2),
        lambda: backbone.prefill(bare),
        lambda: backbone.generate(rest, 2, context=jax.tree.map(lambda value: value[:, 0], engine)),
        lambda: backbone.generate(tokens_of(backbone, 2, T), 2, context=engine),
        lambda: backbone.decode(rest.take(0, 1), engine, np.array([2])),
    ):
        with pytest.raises(ShapeError, match="expected"):
            call()


def test_a_foreign_cache_is_told(backbone, prefilled):
    tokens, _, engine = prefilled
    one = tokens.take(0, 1).shift(T)
    for cache in (
        (engine["k"], engine["v"]),
        {"k": engine["k"]},
        {name: value[..., :-1] for name, value in engine.items()},
        {**engine, "v": engine["v"][:, :, :3]},
    ):
        for call in (
            lambda cache=cache: backbone.decode(one, cache, np.array([[2]])),
            lambda cache=cache: backbone.recompute(one, cache, np.array([[2]])),
        ):
            with pytest.raises(KVPatchError, match=r"(decode|recompute): cache.*expected"):
                call()


def test_a_mask_that_is_added_to_scores_is_refused(backbone, prefilled):
    tokens, _, engine = prefilled
    causal, last = np.tril(np.ones((T, T), bool))[None, None], tokens.take(T - 1, T)
    for mask in (np.where(causal, 0.0, -np.inf).astype(np.float32), causal.astype(np.int32)):
        for call in (
            lambda mask=mask: backbone.prefill(tokens, mask=mask),
            lambda mask=mask: backbone.generate(tokens, 2, mask=mask),
            lambda mask=mask: backbone.recompute(tokens, engine, np.arange(T)[None], mask=mask),
            lambda mask=mask: backbone.decode(last, engine, np.array([[T - 1]]), mask[..., -1:, :]),
        ):
            with pytest.raises(ShapeError, match=f"mask: got {mask.dtype}; expected an array of bool"):
                call()
        with pytest.raises(ShapeError, match=f"keep: got {mask.dtype}; expected an array of bool"):
            backbone.recompute(tokens, engine, np.arange(T)[None], np.ones((2, 1, T), mask.dtype))


@pytest.mark.parametrize("wrong", [-1, 320, 2**31])
def test_ids_outside_the_vocabulary_are_refused(backbone, wrong):
    with pytest.raises(InputError, match=f"token ids: got {wrong}; expected 0 … 319"):
        backbone.embed(np.array([[1, 2, wrong]], np.int64))
