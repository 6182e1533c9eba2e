"""Every image family against itself (1e-5 of the largest magnitude): another place, recompute, resuming, a blind chunk.

One family by default, the others marked slow; of the one, what `test_backbone.py` has for another family is slow too.
The prompt is text, an image, text.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.core import relocate, to_engine
from kvpatch_jax.models import load
from tests.goldens.load import golden_arrays, write_checkpoint

BAR = 1e-5
FAMILIES = [
    "qwen3_vl",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("kimi_vl", "llava_next", "gemma4", "qwen3_omni")),
]
INPUTS = ("pixel_values", "image_grid_thw", "image_sizes", "num_patches", "pixel_attention_mask")
INPUTS += ("high_res_pixel_values", "image_position_ids", "pixel_values_local", "num_local_patches")
INPUTS += ("tile_grids",)
DELTAS = (1, 37, 1000, 100_000)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


pytestmark = pytest.mark.usefixtures("highest_precision")


class PreparedPrompt:
    """A tiny backbone, a prompt with one image, and its prefill with the residual at every layer."""

    def __init__(self, family, directory):
        self.backbone = load(write_checkpoint(family, directory))
        gold = golden_arrays(family, "one_image")
        self.tokens = self.backbone.embed(
            gold["input_ids"][None], **{name: gold[name] for name in INPUTS if name in gold}
        )
        self.out = self.run(self.tokens)
        self.engine = self.turned(self.out.kv, self.tokens.positions)
        self.length = self.tokens.embeddings.shape[1]

    def run(self, tokens, **given):
        layers = tuple(range(1, self.backbone.layout.layers + 1))
        return self.backbone.prefill(tokens, hidden_at=layers, logits="all", **given)

    def turned(self, kv, positions, start=0):
        return to_engine(self.backbone.layout, kv, positions, start)


@pytest.fixture(scope="module")
def prompt(family, tmp_path_factory):
    with jax.default_matmul_precision("highest"):
        return PreparedPrompt(family, tmp_path_factory.mktemp(family))


def close(found, expected, what=""):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape, what
    assert np.abs(expected).max() > 0, what
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= BAR, f"{what}: off by {error:.2e} of the largest magnitude"


def each_close(found, expected, what=""):
    assert set(found) == set(expected)
    for name, value in expected.items():
        if not value.size:
            assert found[name].shape == value.shape, name
            continue
        close(found[name], value, f"{what} {name}")


@pytest.mark.slow
def test_relocation_through_the_model(prompt):
    """Forwards at p and p + δ have the same phase-free KV; keys moved either way are the forward's at the new place."""
    layout, tokens = prompt.backbone.layout, prompt.tokens
    moves = [np.array(delta, np.int32) for delta in DELTAS]
    if tokens.positions.ndim == 3:  # the axes may move apart: one image's place is three numbers
        moves.append(np.array([5, 1000, 70], np.int32))
    for delta in moves:
        places = tokens.positions + delta
        there = prompt.run(tokens._replace(positions=places))
        close(there.logits, prompt.out.logits, f"logits at {delta}")
        each_close(there.kv, prompt.out.kv, f"phase-free at {delta}")
        forward = prompt.turned(there.kv, places)
        each_close(
            relocate(layout, prompt.turned(there.kv, tokens.positions), tokens.positions, places), forward, "moved"
        )
        each_close(prompt.turned(prompt.out.kv, tokens.positions, delta), forward, f"to_engine at {delta}")
        turning = layout.names[0] if layout.kind != "mla" else layout.names[1]
        assert jnp.abs(forward[turning] - prompt.engine[turning]).max() > 1e-3 * jnp.abs(forward[turning]).max()


@pytest.mark.slow
def test_recompute_of_all_equals_prefill_and_of_none_changes_no_bit(prompt):
    slots = np.arange(prompt.length)[None]
    keep = np.ones((prompt.backbone.layout.layers, *slots.shape), bool)
    spoilt = {name: value + 1 for name, value in prompt.engine.items()}
    step = prompt.backbone.recompute(prompt.tokens, spoilt, slots, keep, logits="all")
    close(step.logits, prompt.out.logits, "logits")
    each_close(step.cache, prompt.engine, "recomputed")
    untouched = prompt.backbone.recompute(prompt.tokens, spoilt, slots, ~keep, logits="all").cache
    for name, value in spoilt.items():
        assert np.asarray(untouched[name]).tobytes() == np.asarray(value).tobytes()


@pytest.mark.slow
def test_resuming_at_a_layer_equals_prefill(prompt):
    """From the residual that enters a layer, deepstack features and all."""
    # Above a layer whose KV is read by another one, a cache has to hold it.
    config = prompt.backbone.config.text
    last = min(source for layer, source in enumerate(config.sources) if source < layer or layer == config.layers - 1)
    for layer in range(1, last + 1):
        entering = prompt.tokens._replace(embeddings=prompt.out.hidden[layer])
        resumed = prompt.backbone.prefill(entering, start_layer=layer, logits="all")
        close(resumed.logits, prompt.out.logits, f"logits from {layer}")
        layout, above = prompt.backbone.layout, {}
        for name, value in prompt.out.kv.items():
            above[name] = value[np.asarray(layout.rows_of(name, range(layer, layout.layers)), int)]
        each_close(resumed.kv, above, f"from {layer}")


@pytest.mark.slow
def test_decode_over_a_cache_equals_the_whole_forward(prompt):
    """The last tokens one by one over the cache of those before."""
    last = 3
    cut = prompt.length - last
    cache = {name: value.at[:, :, cut:].set(0) for name, value in prompt.engine.items()}
    found = []
    for place in range(cut, prompt.length):
        logits, cache, _ = prompt.backbone.decode(prompt.tokens.take(place, place + 1), cache, np.array([[place]]))
        found.append(logits[0, 0])
    close(np.stack(found), prompt.out.logits[0, cut:], "logits")
    each_close(cache, prompt.engine, "cache")


@pytest.mark.slow
def test_a_chunk_that_may_not_look_back_equals_itself_alone(prompt):
    """B blind to A in place, by mask, has the phase-free KV of B alone at its own start."""
    cut = 3
    ahead = 0 if prompt.tokens.ahead is None else np.asarray(prompt.tokens.ahead)[0]
    places = np.arange(prompt.length)
    mask = (places <= (places + ahead)[:, None])[None, None].copy()
    mask[..., cut:, :cut] = False
    masked = prompt.run(prompt.tokens, mask=mask)
    chunk = prompt.tokens.take(cut, prompt.length)
    start = chunk.positions[:, :1]
    alone = prompt.run(chunk._replace(positions=chunk.positions - start))
    each_close({name: value[:, :, cut:] for name, value in masked.kv.items()}, alone.kv, "blind")
    apart = max(float(jnp.abs(prompt.out.kv[name][:, :, cut:] - alone.kv[name]).max()) for name in alone.kv)
    assert apart > 1e-3
