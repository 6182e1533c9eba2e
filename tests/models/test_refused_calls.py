"""A call that a model cannot compute, or that would mix frames, is refused with a typed error before it runs."""
# pyright: reportArgumentType=false

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import InputError, KVPatchError, LayoutError, ShapeError
from kvpatch_jax.models import Sampling, load, pad_rows
from kvpatch_jax.models.decoding.sampling import draw_of
from tests.goldens.load import golden_arrays, golden_prompt
from tests.shared.arrays import placed
from tests.shared.compilations import compilations

pytestmark = pytest.mark.usefixtures("unchecked")

AHEAD = np.tri(14, dtype=bool)[None, None].copy()
AHEAD[..., 2, 9] = True
KEEP = np.arange(14) < np.array([14, 9, 4])[:, None, None]


@pytest.fixture(scope="module")
def backbone(tiny):
    return tiny("llama2")


@pytest.fixture(scope="module")
def tokens(backbone):
    return backbone.embed(np.arange(3, 17)[None])


@pytest.fixture(scope="module")
def cache(backbone):
    return {name: placed(np.zeros((3, 1, 14, 4, 16), np.float32)) for name in backbone.layout.names}


REFUSED: list[tuple[str, dict[str, Any], type[KVPatchError], str]] = [
    ("prefill", {"logits": "first"}, InputError, "got logits 'first'; expected 'last', 'all' or indices [B, n]"),
    ("prefill", {"logits": np.array([3])}, InputError, "got logits of shape (1,); expected 'last', 'all' or indices"),
    ("prefill", {"logits": np.array([[14]])}, InputError, "got logits of tokens [[14]]; expected indices from 0 to 13"),
    ("prefill", {"chunk": 0}, InputError, "chunk: got 0; expected a number of tokens, at least 1"),
    ("prefill", {"chunk": 4, "mask": AHEAD}, InputError, "token 2 sees token 9, which is in a later chunk of 4"),
    ("prefill", {"start_layer": 4}, ShapeError, "expected layers of this decoder, 0…3"),
    ("recompute", {"keep": KEEP[::-1]}, ShapeError, "each inside the one below"),
    ("recompute", {"keep": KEEP[:2]}, ShapeError, "per layer (3)"),
    ("recompute", {"stop_layer": 4}, ShapeError, "expected a part of the layers 0 to 3"),
    ("recompute", {"start_layer": 2, "hidden_at": (1,)}, ShapeError, "and residuals inside it"),
    ("recompute", {"slots": np.zeros((1, 3), np.int32)}, ShapeError, "got slots of shape (1, 3); expected (1, 14)"),
    *(
        (call, options, error, "expected")  # a stream too is refused before its first token
        for call in ("generate", "stream")
        for options, error in (
            ({"steps": -1}, InputError),
            ({"stop": (300_000,)}, InputError),
            ({"lengths": [15]}, ShapeError),
            ({"sampling": Sampling(0.5)}, InputError),  # without a key
        )
    ),
]


@pytest.mark.parametrize(("call", "options", "error", "message"), REFUSED, ids=str)
def test_calls(backbone, tokens, cache, call, options, error, message):
    if call == "recompute":
        options = {"cache": cache, "slots": np.arange(14)[None], **options}
    elif call != "prefill":
        options = {"steps": 3, **options}
    with compilations() as compiled, pytest.raises(error, match=re.escape(message)):
        getattr(backbone, call)(tokens, **options)
    assert not compiled


def test_prompts_of_nothing(backbone, tokens):
    narrow = placed(np.asarray(tokens.embeddings)[..., :3])
    with pytest.raises(InputError, match="no prompts; expected"):
        pad_rows([])
    with pytest.raises(ShapeError, match="expected"):
        pad_rows([tokens, tokens._replace(embeddings=narrow)])
    assert backbone.generate(tokens, 0).shape == (1, 0)
    for empty in (tokens.take(0, 0), jax.tree.map(lambda leaf: leaf[:0], tokens.on_host())):
        for call in (backbone.prefill, lambda none: backbone.generate(none, 3), lambda none: backbone.stream(none, 3)):
            with pytest.raises(ShapeError, match="expected at least one row and one token"):
                call(empty)
    with pytest.raises(ShapeError, match=r"token ids \(0, 4\); expected at least one row"):
        backbone.embed(np.zeros((0, 4), np.int32))
    with pytest.raises(InputError, match="at most 64 bits"):
        draw_of(Sampling(0.7), 2**63, ())
    with pytest.raises(InputError, match=r"features: got some for .*, which takes no images"):
        backbone.embed(np.arange(4)[None], features=np.zeros((1, 2, 4), np.float32))


def test_images_that_do_not_match_their_prompt(tiny):
    backbone, family = tiny("qwen2_5_vl"), "qwen2_5_vl"
    gold = golden_prompt(backbone, family, "two_images")
    places = golden_arrays(family, "two_images")["position_ids"][None]
    ids, grid, pixels = gold["input_ids"], gold["image_grid_thw"], gold["pixel_values"]
    with pytest.raises(InputError, match=r"pixel_values: got shape \(96, 96\); expected \(100, 96\)"):
        backbone.embed(ids, places, pixels[4:], grid)
    with pytest.raises(InputError, match="input_ids: got 25 image placeholders; expected 15"):
        backbone.embed(ids, places, pixels[:60], grid[:1])
    with pytest.raises(InputError, match="2 rows without position_ids"):
        backbone.embed(np.concatenate([ids, ids]))
    with pytest.raises(InputError, match=r"features: got shape .*; expected \("):
        backbone.embed(ids, places, features=np.zeros((1, 24, 48), np.float32))

    with pytest.raises(InputError, match=r"'which page\?'.*tokenizer.json\); expected token ids"):
        backbone.prepare(["which page?"])
    with pytest.raises(InputError, match="type dict; expected text, token ids or an image"):
        backbone.prepare([[1], {"image": "page.png"}])


T = 10


@pytest.fixture(scope="module")
def qwen(qwen2_5_vl_directory):
    """M-RoPE: three axes."""
    return load(qwen2_5_vl_directory)


def tokens_of(qwen, rows: int = 1, start: int = 0, length: int = T) -> Tokens:
    ids = np.random.default_rng(rows).integers(0, 40, (rows, length))
    places = np.broadcast_to((start + np.arange(length))[None, :, None], (rows, length, 3))
    return qwen.embed(ids, places)


@pytest.fixture(scope="module")
def prefilled(qwen):
    tokens = tokens_of(qwen)
    out = qwen.prefill(tokens)
    return tokens.on_host(), out, jax.device_get(kvp.to_engine(qwen.layout, out.kv, tokens.positions, 0))


def refused(error: type[KVPatchError], message: str, *calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(error, match=message):
            call()


def test_phase_free_kv_is_refused_as_a_context(qwen, prefilled):
    tokens, out, _ = prefilled
    rest, step, slots = tokens.shift(T), tokens.take(0, 1).shift(T), np.array([[2]])
    for kv in (out.kv, jax.jit(lambda kv: kv)(out.kv), kvp.core.to_local(qwen.layout, out.kv, tokens.positions)):
        refused(
            LayoutError,
            "expected it in the engine frame",
            lambda kv=kv: qwen.prefill(rest, kv),
            lambda kv=kv: qwen.generate(rest, 2, context=kv),
            lambda kv=kv: qwen.decode(step, kv, slots),
            lambda kv=kv: qwen.recompute(step, kv, slots),
        )


def test_engine_frame_kv_is_refused_where_phase_free_belongs(qwen, prefilled):
    layout, chunk = qwen.layout, kvp.make_chunk(qwen, [[3, 1, 4, 1, 5] * 2], "B")
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


def test_a_question_that_was_not_moved_is_refused_unless_the_mask_hides_what_is_in_front(qwen, prefilled):
    tokens, _, engine = prefilled
    two = jax.tree.map(lambda value: np.repeat(value, 2, axis=1), engine)
    rows, moved = tokens_of(qwen, 2), tokens_of(qwen, 2, T)
    for question, context in ((tokens, engine), (rows, two)):
        refused(
            InputError,
            rf"row 0.*position 0.*{T} tokens; expected.*shift\(",
            lambda question=question, context=context: qwen.prefill(question, context),
            lambda question=question, context=context: qwen.generate(question, 2, context=context),
        )
    second = rows._replace(positions=np.stack([moved.positions[0], rows.positions[1]]))
    refused(InputError, "row 1 at position 0", lambda: qwen.prefill(second, two))

    # Padding in front stands at 0; a row that the mask keeps from the context has none.
    padded = moved._replace(positions=moved.positions * (np.arange(T) > 2)[:, None])
    assert np.isfinite(qwen.prefill(padded, two).logits).all()
    mask = np.concatenate([np.ones((2, 1, T, T), bool), np.tri(T, dtype=bool)[None, None].repeat(2, 0)], axis=3)
    mask[0, ..., :T] = False
    beside = rows._replace(positions=np.stack([rows.positions[0], moved.positions[1]]))
    assert np.isfinite(qwen.prefill(beside, two, mask).logits).all()
    refused(InputError, "row 0", lambda: qwen.prefill(beside, two, mask[::-1]))


def test_prompts_that_are_no_tokens_and_missing_axes_are_refused(qwen, prefilled):
    (tokens, _, engine), slots = prefilled, np.array([[2]])
    for prompt in (qwen.prepare([[1, 2, 3]]), [1, 2, 3]):
        refused(
            InputError,
            r"expected Tokens, which backbone\.embed\(\*\*backbone\.prepare",
            lambda prompt=prompt: qwen.prefill(prompt),
            lambda prompt=prompt: qwen.generate(prompt, 2),
            lambda prompt=prompt: qwen.decode(prompt, engine, slots),
            lambda prompt=prompt: qwen.recompute(prompt, engine, slots),
        )
    bare, rest = jax.tree.map(lambda value: value[0], tokens), tokens.shift(T)
    refused(
        ShapeError,
        "expected",
        lambda: qwen.generate(bare, 2),
        lambda: qwen.prefill(bare),
        lambda: qwen.generate(rest, 2, context=jax.tree.map(lambda value: value[:, 0], engine)),
        lambda: qwen.generate(tokens_of(qwen, 2, T), 2, context=engine),
        lambda: qwen.decode(rest.take(0, 1), engine, np.array([2])),
    )
    for wrong in (-1, 320, 2**31):
        message = f"token ids: got {wrong}; expected 0 … 319"
        refused(InputError, message, lambda wrong=wrong: qwen.embed(np.array([[1, wrong]], np.int64)))


def test_foreign_caches_and_added_masks_are_refused(qwen, prefilled):
    tokens, _, engine = prefilled
    step, last, every = tokens.take(0, 1).shift(T), tokens.take(T - 1, T), np.arange(T)[None]
    for cache in ((engine["k"], engine["v"]), {"k": engine["k"]}, {**engine, "v": engine["v"][:, :, :3]}):
        refused(
            KVPatchError,
            r"(decode|recompute): cache.*expected",
            lambda cache=cache: qwen.decode(step, cache, np.array([[2]])),
            lambda cache=cache: qwen.recompute(step, cache, np.array([[2]])),
        )
    mask = np.where(np.tri(T, dtype=bool)[None, None], 0.0, -np.inf).astype(np.float32)
    refused(
        ShapeError,
        "(mask|keep): got float32; expected an array of bool",
        lambda: qwen.prefill(tokens, mask=mask),
        lambda: qwen.generate(tokens, 2, mask=mask),
        lambda: qwen.recompute(tokens, engine, every, mask=mask),
        lambda: qwen.recompute(tokens, engine, every, np.ones((2, 1, T), np.float32)),
        lambda: qwen.decode(last, engine, np.array([[T - 1]]), mask[..., -1:, :]),
    )
