"""The text families against transformers (2e-4 of the largest magnitude) and against themselves (1e-5).

By default the forwards of all but mere variants, and the whole Protocol for one family of each kind of attention
(decoding for latent attention alone, generating for none: `test_backbone.py` and `test_generation.py` have the grouped
one); the rest is marked slow.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import relocate, to_engine
from kvpatch_jax.errors import InputError, WeightsError
from kvpatch_jax.models import load, save
from kvpatch_jax.models.checkpoints import flatten_params
from tests.goldens.load_text import text_arrays, text_config, text_families, write_text_checkpoint

GOLDEN, OWN = 2e-4, 1e-5
REGIMES = {"phi3_long": "long", "llama_dynamic": 14}
LATENT = ("deepseek_v3",)
UNLIKE = ("gemma3_text", "gemma4_text")
KINDS = ("glm", *LATENT, *UNLIKE, "qwen3_moe")
DELTAS = (1, 37, 1000, 100_000)
REACH = {"phi3_short": 32, "llama_dynamic": 14}


pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """`loaded(family)`: the tiny backbone, kept for the module."""
    kept = {}

    def get(family):
        if family not in kept:
            directory = write_text_checkpoint(family, tmp_path_factory.mktemp("text") / family)
            kept[family] = load(directory, regime=REGIMES.get(family))
        return kept[family]

    return get


def some(families=KINDS):
    """These models, all but the one with latent attention marked slow."""
    return [pytest.param(name, marks=() if name in LATENT else pytest.mark.slow) for name in families]


def close(found, expected, bar=OWN, what=""):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape, what
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= bar, f"{what}: off by {error:.2e} of the largest magnitude"


def everything(backbone, tokens):
    """A prefill with the residual at every layer: one compilation serves every test of a family."""
    return backbone.prefill(tokens, hidden_at=tuple(range(1, backbone.layout.layers + 1)), logits="all")


def prompt(backbone, gold) -> Tokens:
    return backbone.embed(gold["input_ids"][None], gold["position_ids"][None])


@pytest.mark.parametrize("family", some(text_families()))
def test_forward_equals_transformers(loaded, family):
    backbone, gold = loaded(family), text_arrays(family)
    tokens = prompt(backbone, gold)
    out = everything(backbone, tokens)
    for layer, hidden in enumerate(gold["hidden"]):
        close(out.hidden[layer + 1][0], hidden, GOLDEN, f"hidden {layer}")
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    # Channels of layers of unlike kinds follow one another: keys, values, keys, values.
    for number, name in enumerate(backbone.layout.names):
        side, layers = ("first", "second")[number % 2], backbone.layout.layers_of(name)
        stored = gold[side] if side in gold else {layer: gold[f"{side}.{layer}"] for layer in layers}
        close(engine[name][:, 0], np.stack([stored[layer] for layer in layers]), GOLDEN, name)
    close(out.logits[0], gold["logits"], GOLDEN, "logits")


@pytest.mark.slow
@pytest.mark.parametrize("family", some())
def test_cached_decode_equals_transformers_and_the_whole_forward(loaded, family):
    backbone, gold = loaded(family), text_arrays(family)
    if "decode_tokens" not in gold:
        pytest.skip("its regime ends with the prompt")
    tokens, steps = prompt(backbone, gold), len(gold["decode_tokens"])
    size = tokens.embeddings.shape[1]
    room = lambda value: jnp.pad(value, ((0, 0), (0, 0), (0, steps), (0, 0), (0, 0)))
    engine = to_engine(backbone.layout, everything(backbone, tokens).kv, tokens.positions, 0)
    cache, found, parts = {name: room(value) for name, value in engine.items()}, [], [tokens]
    for step, token in enumerate(gold["decode_tokens"]):
        parts.append(backbone.embed(np.array([[token]]), gold["position_ids"][None, -1:] + 1 + step))
        logits, cache, _ = backbone.decode(parts[-1], cache, np.array([[size + step]]))
        found.append(logits[0, -1])
    close(np.stack(found), gold["decode_logits"], GOLDEN, "decode logits")
    full = everything(backbone, jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts))
    close(np.stack(found), full.logits[0, size:], what="decode against the whole forward")
    whole = to_engine(backbone.layout, full.kv, np.concatenate([part.positions for part in parts], axis=1), 0)
    for name, value in whole.items():
        close(cache[name], value, what=f"cache {name} after decoding")


@pytest.mark.parametrize("family", some())
def test_relocation_through_the_model(loaded, family):
    """Forwards at p and p + δ have the same phase-free KV; moved keys equal those of the forward at the new place."""
    backbone, gold = loaded(family), text_arrays(family)
    tokens = prompt(backbone, gold)
    out = everything(backbone, tokens)
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    for delta in DELTAS:
        places = tokens.positions + delta
        if family in REACH and int(places.max()) >= REACH[family]:
            with pytest.raises(InputError, match=f"expected below {REACH[family]}"):
                backbone.prefill(tokens._replace(positions=places))
            with pytest.raises(InputError):
                to_engine(backbone.layout, out.kv, tokens.positions, delta)
            with pytest.raises(InputError):
                relocate(backbone.layout, engine, tokens.positions, places)
            continue
        there = everything(backbone, tokens._replace(positions=places))
        close(there.logits, out.logits, what=f"logits at {delta}")
        forward = to_engine(backbone.layout, there.kv, places, 0)
        moved = to_engine(backbone.layout, out.kv, tokens.positions, delta)
        rotated = relocate(backbone.layout, engine, tokens.positions, places)
        for name, value in out.kv.items():
            close(there.kv[name], value, what=f"phase-free {name} at {delta}")
            close(moved[name], forward[name], what=f"to_engine {name} at {delta}")
            close(rotated[name], forward[name], what=f"relocate {name} at {delta}")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm", "deepseek_v3"])
def test_recompute_of_all_equals_prefill_and_of_none_changes_no_bit(loaded, family):
    backbone, gold = loaded(family), text_arrays(family)
    tokens = prompt(backbone, gold)
    out = everything(backbone, tokens)
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    slots = np.arange(tokens.embeddings.shape[1])[None]
    keep = np.ones((backbone.layout.layers, *slots.shape), bool)
    spoilt = {name: value + 1 for name, value in engine.items()}
    step = backbone.recompute(tokens, spoilt, slots, keep, logits="all")
    close(step.logits, out.logits, what="logits")
    for name, value in engine.items():
        close(step.cache[name], value, what=name)
    untouched = backbone.recompute(tokens, spoilt, slots, ~keep, logits="all").cache
    for name, value in spoilt.items():
        assert np.asarray(untouched[name]).tobytes() == np.asarray(value).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", some())
def test_generate_and_a_context_equal_the_whole_forward(loaded, family):
    backbone, gold = loaded(family), text_arrays(family)
    if "decode_tokens" not in gold:
        pytest.skip("its regime ends with the prompt")
    tokens, cut, steps = prompt(backbone, gold), 6, len(gold["decode_tokens"])
    out = everything(backbone, tokens)
    context = {
        name: value[:, :, :cut] for name, value in to_engine(backbone.layout, out.kv, tokens.positions, 0).items()
    }
    rest = tokens.take(cut, tokens.embeddings.shape[1])
    # The golden goes on behind the checkpoint's end token.
    assert np.array_equal(backbone.generate(rest, steps, context, stop=())[0], gold["decode_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3_text"])
@pytest.mark.parametrize("layer", [1])
def test_resuming_at_a_layer_equals_prefill(loaded, family, layer):
    backbone, gold = loaded(family), text_arrays(family)
    tokens = prompt(backbone, gold)
    out = everything(backbone, tokens)
    resumed = backbone.prefill(tokens._replace(embeddings=out.hidden[layer]), start_layer=layer, logits="all")
    close(resumed.logits, out.logits, what="logits")
    for name, value in out.kv.items():
        above = backbone.layout.rows_of(name, range(layer, backbone.layout.layers))
        if above:
            close(resumed.kv[name], value[np.asarray(above)], what=name)
        else:  # no layer from here on keeps the channel
            assert resumed.kv[name].shape == (0, *value.shape[1:])


@pytest.mark.parametrize("family", some())
def test_save_and_load_round_trip(loaded, family, tmp_path):
    """The file that `save` writes is the file that was read: fused tensors, experts and stacks of layers included."""
    backbone = loaded(family)
    written = load_file(save(backbone, tmp_path / "copy") / "model.safetensors")
    original = load_file(write_text_checkpoint(family, tmp_path / "original") / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[name].tobytes() == original[name].tobytes() for name in original)
    again = load(tmp_path / "copy", regime=REGIMES.get(family))
    assert again.config.text == backbone.config.text
    assert again.layout == backbone.layout
    again = load(save(again, tmp_path / "half", dtype="bfloat16"), regime=REGIMES.get(family))
    for path, leaf in flatten_params(again.parameters).items():
        assert leaf.dtype == ("float32" if path[-1] == "correction" else "bfloat16"), path
    assert again.config.text.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("family", "kind", "channels"),
    [
        ("llama2", "mha", {"k": (4, 16, 16), "v": (4, 16, 0)}),
        ("qwen3", "gqa", {"k": (2, 24, 24), "v": (2, 24, 0)}),
        ("glm", "gqa", {"k": (2, 16, 8), "v": (2, 16, 0)}),
        ("deepseek_v3", "mla", {"ckv": (1, 32, 0), "kpe": (1, 8, 8)}),
        (
            *("gemma4_text", "gqa"),
            {"k": (2, 24, 24), "v": (2, 24, 0), "k_local": (2, 16, 16), "v_local": (2, 16, 0)},
        ),
        ("gemma4_wide", "gqa", {"k": (1, 24, 24), "v": (1, 24, 0), "k_local": (2, 16, 16), "v_local": (2, 16, 0)}),
        (
            *("gemma3_text", "gqa"),
            {"k": (2, 24, 24), "v": (2, 24, 0), "k_local": (2, 24, 24), "v_local": (2, 24, 0)},
        ),
    ],
)
def test_the_layout_follows_from_the_configuration(loaded, family, kind, channels):
    layout = loaded(family).layout
    assert layout.kind == kind
    assert {c.name: (c.heads, c.width, c.rotary) for c in layout.channels} == channels
    assert layout.rope.cached == ("pairs" if family == "glm" else "half")


def test_released_keys_mean_the_same(tmp_path):
    """`rope_theta` and `rope_scaling` beside the sizes, as released files have them."""
    for family in ("llama3_1", "glm", "phi3_short", "deepseek_v3"):
        raw = text_config(family)
        table = raw.pop("rope_parameters")
        kind, share = table.pop("rope_type"), table.pop("partial_rotary_factor", None)
        raw |= {"rope_theta": table.pop("rope_theta"), "torch_dtype": raw.pop("dtype")}
        raw |= {} if share is None else {"partial_rotary_factor": share}
        raw["rope_scaling"] = None if kind == "default" else {"type": "su" if kind == "longrope" else kind, **table}
        newer = load(write_text_checkpoint(family, tmp_path / family))
        (tmp_path / family / "config.json").write_text(json.dumps(raw))
        assert load(tmp_path / family).config.text == newer.config.text


def test_text_families_take_no_images_and_ties_are_read(loaded, tmp_path):
    backbone = loaded("llama3_1")
    assert backbone.config.text.tied_embeddings
    with pytest.raises(InputError, match="LlamaForCausalLM, which takes none"):
        backbone.prepare([[1, 2], np.zeros((8, 8, 3), np.uint8)])
    with pytest.raises(InputError, match=r"\['pixel_values'\] for LlamaForCausalLM"):
        backbone.embed(np.array([[1, 2]]), pixel_values=np.zeros((4, 4), np.float32))
    prepared = backbone.prepare([[5, 6], [7]])
    assert np.array_equal(prepared["position_ids"], [[0, 1, 2]])
    assert backbone.embed(np.ones((3, 4), np.int32)).positions.shape == (3, 4)
    directory = write_text_checkpoint("kimi_vl_text", tmp_path / "kimi", n_routed_experts=16)
    with pytest.raises(WeightsError, match=r"mlp\.gate\.\w+' of shape \(8,.*expected \(16,"):
        load(directory)
