"""A prefill after cached KV, a recomputation and steps over a cache equal one prefill, wherever it stands.

Two ways to the same numbers must agree to 1e-5 of the largest magnitude. Families with linear attention are in
`test_linear_attention.py`, contexts in pages in `test_paged_prefill.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.core import relocate, to_engine
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from tests.goldens.load import write_checkpoint
from tests.goldens.table import FAMILIES
from tests.models.conftest import REGIMES
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.tolerances import assert_close_to_largest

LIMITS = {"phi3_short": 32, "llama_dynamic": 14}
"""Positions from here on belong to another regime."""
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
SOME = ("qwen3_vl", "deepseek_v3", "gemma3_text", "glm", "qwen3_window", "qwen2_5_vl", "llava_next", "kimi_vl")
SOME += ("gemma3", "gemma4", "qwen3_omni")

pytestmark = pytest.mark.usefixtures("highest_precision")
close = functools.partial(assert_close_to_largest, bar=1e-5)


def marked(names, *fast):
    return [pytest.param(name, marks=() if name in fast else pytest.mark.nightly) for name in names]


@pytest.fixture(scope="session")
def prefilled(golden):
    """`prefilled(family)`: the backbone, tokens of a prompt (with an image or a sound where there are), its prefill,
    and its cache."""

    @functools.cache
    def run(family):
        cases = FAMILIES[family].cases
        prompt = golden(family, next((name for name in ("mixed", "one_image") if name in cases), "text"))
        out = prompt.backbone.prefill(prompt.tokens, logits="all")
        return prompt.backbone, prompt.tokens, out, cached(prompt.backbone, out, prompt.tokens)

    return run


def cached(backbone, out, tokens):
    return to_engine(backbone.layout, out.kv, tokens.positions, 0)


def close_kv(kv, expected, name=""):
    assert set(kv) == set(expected)
    for channel, value in expected.items():
        close(np.asarray(kv[channel], np.float32), value, f"{name} {channel}")


def bits(kv):
    return {name: np.asarray(value).tobytes() for name, value in kv.items()}


@pytest.mark.parametrize("family", marked([name for name in FAMILIES if name not in LINEAR], "deepseek_v3"))
def test_moved_kv_is_that_of_the_forward_at_its_new_place(golden, family, tmp_path):
    """Forwards at p and p + δ have the same phase-free KV; keys moved either way are those of the forward there."""
    case = next((name for name in ("mixed", "one_image") if name in FAMILIES[family].cases), "text")
    prompt = golden(family, case)
    backbone = load(write_checkpoint(family, tmp_path), regime=REGIMES.get(family))  # angles are exact
    places = prompt.arrays["position_ids"][None] if FAMILIES[family].first else None
    tokens = backbone.embed(prompt.ids, places, **prompt.inputs)
    out = backbone.prefill(tokens, logits="all")
    engine = cached(backbone, out, tokens)
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
        there = backbone.prefill(tokens._replace(positions=places), logits="all")
        close(there.logits, out.logits, f"logits at {delta}")
        close_kv(there.kv, out.kv, f"phase-free at {delta}")
        forward = to_engine(backbone.layout, there.kv, places, 0)
        close_kv(relocate(backbone.layout, engine, tokens.positions, places), forward, f"relocated by {delta}")
        if delta.dtype == np.int32:
            close_kv(to_engine(backbone.layout, out.kv, tokens.positions, delta), forward, f"to_engine at {delta}")
        turning = backbone.layout.names[1 if backbone.layout.kind == "mla" else 0]
        assert jnp.abs(forward[turning] - engine[turning]).max() > 1e-3 * jnp.abs(forward[turning]).max()


@pytest.mark.parametrize("family", marked(SOME, "qwen3_window"))
def test_recompute_writes_each_layers_set_of_tokens_and_no_other_bit(prefilled, family):
    """Of all tokens it is the prefill; another set, or another order of slots, compiles nothing."""
    backbone, tokens, out, engine = prefilled(family)
    layers, length = backbone.layout.layers, tokens.embeddings.shape[1]
    slots, spoilt = np.arange(length)[None], {name: value + 1 for name, value in engine.items()}
    keep = np.ones((layers, 1, length), bool)
    step = backbone.recompute(tokens, spoilt, slots, keep, logits="all")
    close(step.logits, out.logits, "logits")
    close_kv(step.cache, engine, "recomputed")
    nested = np.arange(length) < np.linspace(length, 5, layers).astype(int)[:, None, None]  # each inside the one below
    with compilations() as compiled:
        none = backbone.recompute(tokens, spoilt, slots, ~keep, logits="all").cache
        some = backbone.recompute(tokens, spoilt, slots, nested, logits="all").cache
        order = np.arange(length)[::-1]
        turned = backbone.recompute(tokens, spoilt, order[None].copy(), keep, logits="all").cache
        odd = np.arange(1, length, 2)
        beside = backbone.recompute(tokens, spoilt, slots, keep & np.isin(slots, odd), logits="all")
    assert not [name for name in compiled if "recompute" in name]
    assert bits(none) == bits(spoilt)

    # What is written sees the cache at the others, as if these had not been run.
    chosen = jax.tree.map(lambda leaf: placed(np.asarray(leaf)[:, odd]), tokens)
    alone = backbone.recompute(chosen, spoilt, odd[None], logits="all")
    close(np.asarray(beside.logits)[:, odd], np.asarray(alone.logits), "logits of some")
    close_kv(beside.cache, alone.cache, "some")
    for name, value in engine.items():
        rows = [layer for layer in range(layers) if backbone.layout.rows_of(name, [layer])]
        written = (np.asarray(some[name]) != np.asarray(spoilt[name])).any((-2, -1))
        assert np.array_equal(written, nested[rows]), name
        close(np.where(nested[rows][..., None, None], some[name], value), value, name)
        # The lowest layer's KV depends on no other token.
        if 0 in rows:
            close(np.asarray(turned[name])[0, 0][order], np.asarray(value)[0, 0], f"turned {name}")


@pytest.mark.parametrize("family", marked(SOME, "qwen3_window"))
def test_resuming_at_a_layer_is_the_prefill(prefilled, family):
    """From the residual that enters a layer, deepstack features and all, behind a context too."""
    backbone, tokens, out, engine = prefilled(family)
    sources = backbone.config.text.sources
    layers = len(sources)
    # Above a layer whose KV is read by another one, a cache has to hold it.
    last = min(source for layer, source in enumerate(sources) if source < layer or layer == layers - 1)
    tapped = backbone.prefill(tokens, hidden_at=tuple(range(1, layers + 1)), logits="all")
    close(tapped.logits, out.logits, "logits with taps")
    for layer in {1, last}:
        entering = tokens._replace(embeddings=tapped.hidden[layer])
        resumed = backbone.prefill(entering, start_layer=layer, logits="all")
        close(resumed.logits, out.logits, f"logits from {layer}")
        rows = {name: np.asarray(backbone.layout.rows_of(name, range(layer, layers)), int) for name in out.kv}
        close_kv(resumed.kv, {name: value[rows[name]] for name, value in out.kv.items()}, f"from {layer}")
    if tokens.ahead is None:
        entering = tokens._replace(embeddings=tapped.hidden[last])
        context = {name: value[:, :, :3] for name, value in engine.items()}
        rest = entering.take(3, tokens.embeddings.shape[1])
        after = backbone.prefill(rest, context, start_layer=last, logits="all")
        close(after.logits, out.logits[:, 3:], "logits behind a context")


@pytest.mark.parametrize("family", marked(SOME, "gemma3", "deepseek_v3"))
def test_steps_over_a_cache_are_the_prefill(prefilled, family):
    backbone, tokens, out, engine = prefilled(family)
    length, cut = tokens.embeddings.shape[1], tokens.embeddings.shape[1] - 3
    cache, logits = {name: value.at[:, :, cut:].set(0) for name, value in engine.items()}, []
    for place in range(cut, length):
        with compilations() as compiled:
            step = backbone.decode(tokens.take(place, place + 1), cache, np.array([[place]]))
        assert place == cut or not [name for name in compiled if "recompute" in name]
        cache = step.cache
        logits.append(step.logits[0, 0])
    close(np.stack(logits), np.asarray(out.logits)[0, cut:], "logits")
    close_kv(cache, engine, "cache")


@pytest.mark.parametrize("family", marked(("qwen3_window", "deepseek_v3", "llama3_1", "qwen2_window"), "qwen3_window"))
def test_chunks_behind_a_context_are_one_prefill(prefilled, family):
    """For several rows, under a mask too; the last chunk begins inside the one before."""
    backbone, prompt, _, _ = prefilled(family)
    tokens = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), prompt)
    tokens = tokens._replace(embeddings=jnp.asarray(np.stack([prompt.embeddings[0], prompt.embeddings[0, ::-1]])))
    cut = 5
    seen = np.tri(14, dtype=bool)[None, None] & (np.random.default_rng(0).random((2, 1, 14, 14)) < 0.6)
    seen[..., np.arange(14), np.arange(14)] = True
    for mask in (None, seen):
        full = backbone.prefill(tokens, mask=mask, logits="all")
        context = {name: value[:, :, :cut] for name, value in cached(backbone, full, tokens).items()}
        rest, part = tokens.take(cut, 14), None if mask is None else mask[:, :, cut:]
        chunks = backbone.prefill(rest, context, part, logits="all", chunk=4)
        close(chunks.logits, full.logits[:, cut:], "logits")
        close_kv(chunks.kv, {name: value[:, :, cut:] for name, value in full.kv.items()}, "chunks")
        if mask is None:
            rows = np.array([[8, 0, 3, 3], [1, 2, 0, 8]])
            some = backbone.prefill(rest, context, logits=rows, chunk=4).logits
            close(some, np.take_along_axis(np.asarray(full.logits), rows[..., None] + cut, 1), "logits of some tokens")
