"""Every kind of family against itself: other places, steps over a cache, chunks, resuming, padding, kept features.

What the forward computes is held against transformers by `test_parity.py`; here two ways to the same numbers must agree
to 1e-5 of the largest magnitude. One family of each kind of attention runs by default, the rest is slow.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvpatch_jax.backbone import joined_tokens
from kvpatch_jax.core import Buckets, relocate, to_engine
from kvpatch_jax.errors import InputError, ShapeError
from kvpatch_jax.models import ModelBackbone, load, save
from kvpatch_jax.models.checkpoints import flatten_params
from kvpatch_jax.models.decoding.generation import pad_rows
from tests.goldens.load import golden_config, write_checkpoint
from tests.goldens.table import FAMILIES
from tests.models.conftest import REGIMES
from tests.shared.compilations import compilations

BAR = 1e-5
SLOW = pytest.mark.nightly
LIMITS = {"phi3_short": 32, "llama_dynamic": 14}
"""Positions from here on belong to another regime."""
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""`test_hybrid.py` has what these keep of tokens."""
DEFAULT = ("deepseek_v3", "gemma3_text")
SOME = ("qwen3_vl", *DEFAULT, "glm", "qwen3_window", "qwen2_5_vl", "llava_next", "kimi_vl", "gemma4", "qwen3_omni")

pytestmark = pytest.mark.usefixtures("highest_precision")


def marked(names, fast=DEFAULT):
    return [pytest.param(name, marks=() if name in fast else SLOW) for name in names]


@pytest.fixture(scope="session")
def made(golden, tmp_path_factory):
    """`made(family)`: the backbone with exact angles, tokens of a prompt (with an image or a sound where there are),
    its prefill with the residual at every layer, and its cache."""

    @functools.cache
    def prefilled(family):
        cases = FAMILIES[family].cases
        given = golden(family, next((name for name in ("mixed", "one_image") if name in cases), "text"))
        directory = write_checkpoint(family, tmp_path_factory.mktemp("exact") / family)
        backbone = load(directory, regime=REGIMES.get(family))
        places = given.arrays["position_ids"][None] if FAMILIES[family].first else None
        tokens = backbone.embed(given.ids, places, **given.inputs)
        out = everything(backbone, tokens)
        return backbone, tokens, out, cached(backbone, out, tokens)

    return prefilled


def everything(backbone, tokens, **how):
    return backbone.prefill(tokens, hidden_at=tuple(range(1, backbone.layout.layers + 1)), logits="all", **how)


def cached(backbone, out, tokens, start=0):
    return to_engine(backbone.layout, out.kv, tokens.positions, start)


def close(found, expected, what=""):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape, what
    if expected.size:
        error = np.abs(found - expected).max() / np.abs(expected).max()
        assert error <= BAR, f"{what}: off by {error:.2e} of the largest magnitude"


def close_kv(found, expected, what=""):
    assert set(found) == set(expected)
    for name, value in expected.items():
        close(found[name], value, f"{what} {name}")


def bits(kv):
    return {name: np.asarray(value).tobytes() for name, value in kv.items()}


@pytest.mark.parametrize("family", marked([name for name in FAMILIES if name not in LINEAR], ("deepseek_v3",)))
def test_relocation(made, family):
    """Forwards at p and p + δ have the same phase-free KV; keys moved either way are those of the forward there."""
    backbone, tokens, out, engine = made(family)
    moves: list[Any] = [np.array(delta, np.int32) for delta in (1, 1000, 100_000)]
    if tokens.positions.ndim == 3:  # the axes may move apart
        moves.append(np.array([5, 1000, 70], np.int32))
    if tokens.positions.dtype == np.float32:
        moves.append(np.array(40.6875, np.float32))
    for delta in moves:
        places = tokens.positions + delta
        if family in LIMITS and int(places.max()) >= LIMITS[family]:
            with pytest.raises(InputError, match=f"expected below {LIMITS[family]}"):
                backbone.prefill(tokens._replace(positions=places))
            with pytest.raises(InputError):
                relocate(backbone.layout, engine, tokens.positions, places)
            continue
        there = everything(backbone, tokens._replace(positions=places))
        close(there.logits, out.logits, f"logits at {delta}")
        close_kv(there.kv, out.kv, f"phase-free at {delta}")
        forward = to_engine(backbone.layout, there.kv, places, 0)
        close_kv(relocate(backbone.layout, engine, tokens.positions, places), forward, f"relocated by {delta}")
        if delta.dtype == np.int32:
            close_kv(to_engine(backbone.layout, out.kv, tokens.positions, delta), forward, f"to_engine at {delta}")
        turning = backbone.layout.names[1 if backbone.layout.kind == "mla" else 0]
        assert jnp.abs(forward[turning] - engine[turning]).max() > 1e-3 * jnp.abs(forward[turning]).max()


@pytest.mark.parametrize("family", marked(SOME, ("deepseek_v3",)))
def test_recompute_of_all_is_prefill_and_of_none_changes_no_bit(made, family):
    backbone, tokens, out, engine = made(family)
    length = tokens.embeddings.shape[1]
    slots, spoilt = np.arange(length)[None], {name: value + 1 for name, value in engine.items()}
    keep = np.ones((backbone.layout.layers, 1, length), bool)
    step = backbone.recompute(tokens, spoilt, slots, keep, logits="all")
    close(step.logits, out.logits, "logits")
    close_kv(step.cache, engine, "recomputed")
    assert bits(backbone.recompute(tokens, spoilt, slots, ~keep, logits="all").cache) == bits(spoilt)


@SLOW
def test_recompute_writes_each_layers_own_set(made, unchecked):
    backbone, tokens, _, engine = made("qwen2_5_vl")
    length = tokens.embeddings.shape[1]
    spoilt, slots = {name: value + 1 for name, value in engine.items()}, np.arange(length)[None]
    keep = np.arange(length) < np.array([length, 20, 9])[:, None, None]  # each inside the one below
    cache = backbone.recompute(tokens, spoilt, slots, keep).cache
    for name, value in engine.items():
        found, before = np.asarray(cache[name]), np.asarray(spoilt[name])
        assert np.array_equal((found != before).any((-2, -1)), keep)
        close(np.where(keep[..., None, None], found, value), value, name)
    with pytest.raises(ShapeError, match="inside the one below"):
        backbone.recompute(tokens, engine, slots, keep[::-1])
    with pytest.raises(ShapeError, match=r"per layer \(3\)"):
        backbone.recompute(tokens, engine, slots, keep[:2])


@pytest.mark.parametrize("family", marked(SOME, ()))
def test_resuming_at_a_layer_is_the_prefill(made, family):
    """From the residual that enters a layer, deepstack features and all, behind a context too."""
    backbone, tokens, out, engine = made(family)
    # Above a layer whose KV is read by another one, a cache has to hold it.
    sources = backbone.config.text.sources
    last = min(source for layer, source in enumerate(sources) if source < layer or layer == len(sources) - 1)
    for layer in {1, last}:
        entering = tokens._replace(embeddings=out.hidden[layer])
        resumed = backbone.prefill(entering, start_layer=layer, logits="all")
        close(resumed.logits, out.logits, f"logits from {layer}")
        rows = {name: np.asarray(backbone.layout.rows_of(name, range(layer, len(sources))), int) for name in out.kv}
        close_kv(resumed.kv, {name: value[rows[name]] for name, value in out.kv.items()}, f"from {layer}")
    if tokens.ahead is None:
        context = {name: value[:, :, :3] for name, value in engine.items()}
        behind = backbone.prefill(entering.take(3, len(tokens.embeddings[0])), context, start_layer=last, logits="all")
        close(behind.logits, out.logits[:, 3:], "logits behind a context")


@pytest.mark.parametrize("family", marked(SOME, ("gemma3_text",)))
def test_steps_over_a_cache_are_the_whole_forward(made, family):
    backbone, tokens, out, engine = made(family)
    length, cut = tokens.embeddings.shape[1], tokens.embeddings.shape[1] - 3
    cache, found = {name: value.at[:, :, cut:].set(0) for name, value in engine.items()}, []
    for place in range(cut, length):
        logits, cache, _ = backbone.decode(tokens.take(place, place + 1), cache, np.array([[place]]))
        found.append(logits[0, 0])
    close(np.stack(found), out.logits[0, cut:], "logits")
    close_kv(cache, engine, "cache")


@pytest.mark.parametrize("family", marked(("deepseek_v3", "llama3_1", "qwen2_window", "qwen3_window"), ()))
def test_chunked_prefill_behind_a_context(made, family):
    """Under a mask too, for several rows; the last chunk begins inside the one before."""
    backbone, one, _, _ = made(family)
    tokens = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), one)
    tokens = tokens._replace(embeddings=tokens.embeddings.at[1].set(tokens.embeddings[0, ::-1]))
    cut = 5
    before = tokens.take(0, cut)
    context = cached(backbone, backbone.prefill(before), before)
    rest = tokens.take(cut, 14)
    mask = np.tri(9, 14, cut, dtype=bool)[None, None] & (np.random.default_rng(0).random((2, 1, 9, 14)) < 0.6)
    mask[..., np.arange(9), cut + np.arange(9)] = True
    for given in (None, mask):
        whole = backbone.prefill(rest, context, given, logits="all")
        found = backbone.prefill(rest, context, given, logits="all", chunk=4)
        close(found.logits, whole.logits, "logits")
        close_kv(found.kv, whole.kv, "chunks")
    rows = np.array([[8, 0, 3, 3], [1, 2, 0, 8]])
    some = backbone.prefill(rest, context, logits=rows, chunk=4).logits
    whole = backbone.prefill(rest, context, logits="all").logits
    close(some, np.take_along_axis(np.asarray(whole), rows[..., None], 1), "logits of some tokens")


def test_what_a_prefill_cannot_be_asked_for(made, unchecked):
    backbone, tokens, _, _ = made("deepseek_v3")
    for logits, message in {
        "first": "got logits 'first'; expected 'last', 'all' or indices [B, n]",
        (3,): "got logits of shape (1,); expected 'last', 'all' or indices [1, n]",
        ((14,),): "got logits of tokens [[14]]; expected indices from 0 to 13",
    }.items():
        with pytest.raises(InputError, match=re.escape(message)):
            backbone.prefill(tokens, logits=logits if isinstance(logits, str) else np.array(logits))
    with pytest.raises(InputError, match="chunk: got 0; expected a number of tokens, at least 1"):
        backbone.prefill(tokens, chunk=0)
    ahead = np.tri(14, dtype=bool)[None, None].copy()
    ahead[..., 2, 9] = True
    with pytest.raises(InputError, match="token 2 sees token 9, which is in a later chunk of 4"):
        backbone.prefill(tokens, mask=ahead, chunk=4)


@pytest.mark.parametrize("family", marked(SOME, ()))
def test_a_chunk_that_may_not_look_back_is_itself_alone(made, family):
    """B blind to A in place, by mask, has the phase-free KV of B alone at its own start."""
    backbone, tokens, out, _ = made(family)
    cut, length = 3, tokens.embeddings.shape[1]
    ahead = 0 if tokens.ahead is None else np.asarray(tokens.ahead)[0]
    places = np.arange(length)
    mask = (places <= (places + ahead)[:, None])[None, None].copy()
    mask[..., cut:, :cut] = False
    masked = backbone.prefill(tokens, mask=mask)
    chunk = tokens.take(cut, length)
    alone = backbone.prefill(chunk._replace(positions=chunk.positions - chunk.positions[:, :1]))
    close_kv({name: value[:, :, cut:] for name, value in masked.kv.items()}, alone.kv, "blind")
    apart = max(float(jnp.abs(out.kv[name][:, :, cut:] - alone.kv[name]).max()) for name in alone.kv)
    assert apart > 1e-3  # without the mask, conditioning is there to be lost


@pytest.mark.parametrize("family", marked(SOME, ()))
def test_rows_of_unequal_lengths_and_contexts_answer_as_alone(golden, family):
    """Padded rows in one batch, and a prompt behind a part of itself: the tokens that transformers makes."""
    cases = [case for case in FAMILIES[family].cases if case in ("text", "one_image")]
    prompts = [golden(family, case) for case in cases]
    backbone, steps = prompts[0].backbone, 3
    expected = [prompt.arrays["generated"][:steps].tolist() for prompt in prompts]
    tokens = [prompt.tokens for prompt in prompts]
    short = tokens[0].take(0, tokens[0].embeddings.shape[1] - 4)
    rows, lengths = pad_rows([*tokens, short])
    made = np.asarray(backbone.generate(rows, steps, lengths=lengths, stop=()))
    counts = [len(answer) for answer in expected]
    assert [row[:count].tolist() for row, count in zip(made, counts, strict=False)] == expected
    assert np.array_equal(made[-1], backbone.generate(short, steps, stop=())[0])

    cut, first = 4, tokens[0]
    context = cached(backbone, backbone.prefill(first.take(0, cut)), first.take(0, cut))
    rest = first.take(cut, first.embeddings.shape[1])
    assert backbone.generate(rest, steps, context, stop=())[0, : counts[0]].tolist() == expected[0]


@SLOW
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_omni", "qwen3_omni", "gemma3", "mistral3", "deepseek_v3"])
def test_buckets_and_kept_features_change_nothing(golden, made, family, tmp_path):
    """Padding to buckets; what `encode` gives stands for pixels and sounds, bit for bit, and no tower runs."""
    cases = FAMILIES[family].cases
    case = next((name for name in ("mixed", "two_images") if name in cases), "text")
    backbone, _, inputs, tokens = given = golden(family, case)
    padded = load(write_checkpoint(family, tmp_path), angles="float32", buckets=Buckets())
    found = padded.embed(given.ids, **inputs)
    close(found.embeddings, tokens.embeddings, "embeddings")
    close(padded.prefill(found).logits, backbone.prefill(tokens).logits, "logits")
    features = backbone.encode(given.ids, **inputs)
    if not inputs:
        assert features is None
        with pytest.raises(InputError, match=r"features: got some for .*, which takes no images"):
            backbone.embed(given.ids, features=np.zeros((1, 2, 4), np.float32))
        return
    with compilations() as compiled:
        again = backbone.embed(given.ids, **inputs, features=features)
    assert not any("encode" in name for name in compiled)
    jax.tree.map(np.testing.assert_array_equal, again, tokens)
    with pytest.raises(InputError, match=r"features: got shape .*; expected \("):
        backbone.embed(given.ids, **inputs, features=features[:, 1:])


@SLOW
def test_another_prompt_place_or_slot_does_not_compile_again(golden, made):
    backbone, _, inputs, tokens = given = golden("qwen2_5_vl", "two_images")
    engine = cached(backbone, backbone.prefill(tokens), tokens)
    length = tokens.embeddings.shape[1]
    slots, keep = np.arange(length)[None], np.ones((backbone.layout.layers, 1, length), bool)
    context = {name: value[:, :, :9] for name, value in engine.items()}

    def use(tokens, rows, context, engine, slots, keep):
        backbone.prefill(tokens)
        backbone.prefill(rows, context)
        backbone.recompute(tokens, engine, slots, keep)
        backbone.decode(rows.take(0, 1), engine, slots[:, :1])
        backbone.generate(rows, 2)

    use(tokens, tokens.take(20, 30), context, engine, slots, keep)
    turned = inputs | {"pixel_values": inputs["pixel_values"][::-1] * np.float32(0.5)}
    with compilations() as compiled:
        other = backbone.embed(given.ids, given.arrays["position_ids"][None] + 7, **turned)
    assert not compiled
    twice = {name: 2 * value for name, value in engine.items()}
    none = {name: value[:, :, :9] for name, value in twice.items()}
    with compilations() as compiled:
        use(other, other.take(3, 13), none, twice, slots[:, ::-1], ~keep)
    assert not compiled


@pytest.mark.parametrize("family", marked(FAMILIES, ("deepseek_v3",)))
def test_saved_and_loaded_again(tiny, family, tmp_path):
    """`save` writes the tensors that were read: fused ones, experts and stacks of layers included."""
    backbone = tiny(family)
    assert isinstance(backbone, ModelBackbone)
    original = load_file(write_checkpoint(family, tmp_path / "original") / "model.safetensors")
    written = load_file(save(backbone, tmp_path / "copy") / "model.safetensors")
    assert written.keys() <= original.keys()
    assert all(written[name].tobytes() == original[name].tobytes() for name in written)
    again = load(tmp_path / "copy", angles="float32", regime=REGIMES.get(family))
    assert again.config.text == backbone.config.text
    assert again.layout == backbone.layout
    assert again.fingerprint == backbone.fingerprint
    half = load(save(again, tmp_path / "half", dtype="bfloat16"), regime=REGIMES.get(family))
    wide = ("correction", "decay_rate", "decay_bias")
    for path, leaf in flatten_params(half.parameters).items():
        assert leaf.dtype == ("float32" if path[-1] in wide else "bfloat16"), path


def test_released_keys_mean_the_same(tmp_path):
    """`rope_theta` and `rope_scaling` beside the sizes, as files of transformers 4 have them."""
    for family in ("llama3_1", "glm", "phi3_short", "deepseek_v3"):
        raw = golden_config(family)
        table = raw.pop("rope_parameters")
        kind, share = table.pop("rope_type"), table.pop("partial_rotary_factor", None)
        released = {"rope_theta": table.pop("rope_theta"), "torch_dtype": raw.pop("dtype"), "rope_parameters": None}
        released |= {} if share is None else {"partial_rotary_factor": share}
        released["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **table}
        newer = load(write_checkpoint(family, tmp_path / family / "new"))
        assert load(write_checkpoint(family, tmp_path / family, **released)).config.text == newer.config.text


def test_joined_prompts_are_one_prompt(golden):
    backbone, _, _, tokens = golden("llama2", "text")
    parts = [tokens.take(0, 6), tokens.take(6, 14)]
    joined = joined_tokens(parts)
    assert np.array_equal(backbone.generate(joined, 3, stop=()), backbone.generate(tokens, 3, stop=()))
