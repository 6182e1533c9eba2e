"""The Protocol on the tiny Qwen2.5-VL: decode, recompute, resume, masks, relocation, prompts, and directories.

Against transformers to 2e-4 of the largest magnitude, against ourselves to 1e-5.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from kvpatch_jax.backbone import Backbone, Tokens
from kvpatch_jax.core import relocate, to_engine
from kvpatch_jax.errors import ConfigError, InputError, ShapeError, WeightsError
from kvpatch_jax.models import load, save
from kvpatch_jax.models.checkpoints import flatten_params
from tests.compilations import compilations
from tests.goldens.load import golden_arrays

GOLDEN, OWN = 2e-4, 1e-5
FAMILY = "qwen2_5_vl"
WEIGHTS = "model.safetensors"


pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbone(qwen2_5_vl_directory):
    return load(qwen2_5_vl_directory)


@pytest.fixture(scope="module")
def gold():
    return golden_arrays(FAMILY, "two_images")


@pytest.fixture(scope="module")
def prefilled(backbone, gold):
    """Two images: tokens, what a prefill gives (with the residual at every layer), and its engine-frame cache."""
    with jax.default_matmul_precision("highest"):
        tokens = tokens_of(backbone, gold)
        out = backbone.prefill(tokens, hidden_at=tuple(range(backbone.layout.layers)), logits="all")
        return tokens, out, to_engine(backbone.layout, out.kv, tokens.positions, 0)


def tokens_of(backbone, gold) -> Tokens:
    vision = {name: gold[name] for name in ("pixel_values", "image_grid_thw") if name in gold}
    return backbone.embed(gold["input_ids"][None], gold["position_ids"][None], **vision)


def text_of(backbone, ids, start=0) -> Tokens:
    """Token ids [B,T] at positions start, start + 1, … on every axis."""
    ids = np.asarray(ids)
    places = np.asarray(start) + np.arange(ids.shape[1])[None, :, None]
    return backbone.embed(ids, np.broadcast_to(places, (*ids.shape, 3)))


def close(found, expected, bar=OWN, what=""):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape, what
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= bar, f"{what}: off by {error:.2e} of the largest magnitude"


def same_bits(first, second) -> bool:
    return all(np.asarray(first[name]).tobytes() == np.asarray(second[name]).tobytes() for name in second)


def grow(cache, room):
    return {name: jnp.pad(value, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))) for name, value in cache.items()}


# ---------------------------------------------------------------------------------------------------- forward


def test_it_is_a_backbone(backbone):
    assert isinstance(backbone, Backbone)


def test_cached_decode_equals_the_whole_forward_and_transformers(backbone):
    gold = golden_arrays(FAMILY, "one_image")
    tokens, steps = tokens_of(backbone, gold), len(gold["decode_tokens"])
    size = tokens.embeddings.shape[1]
    out = backbone.prefill(tokens)
    cache = grow(to_engine(backbone.layout, out.kv, tokens.positions, 0), steps)
    parts, found = [tokens], []
    for step, (token, place) in enumerate(zip(gold["decode_tokens"], gold["decode_positions"], strict=True)):
        parts.append(text_of(backbone, [[token]], place))
        logits, cache, _ = backbone.decode(parts[-1], cache, np.array([[size + step]]))
        found.append(logits[0, -1])
    close(np.stack(found), gold["decode_logits"], GOLDEN, "decode logits")
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
    full = backbone.prefill(whole, logits="all")
    close(np.stack(found), full.logits[0, size:], what="decode against the whole forward")
    for name, value in to_engine(backbone.layout, full.kv, whole.positions, 0).items():
        close(cache[name], value, what=f"cache {name} after decoding")


def test_recompute_of_all_tokens_equals_prefill(backbone, prefilled):
    tokens, out, engine = prefilled
    slots = np.arange(tokens.embeddings.shape[1])[None]
    empty = {name: jnp.zeros_like(value) for name, value in engine.items()}
    step = backbone.recompute(tokens, empty, slots, logits="all")
    close(step.logits, out.logits, what="logits")
    for name, value in engine.items():
        close(step.cache[name], value, what=name)


@pytest.mark.slow
def test_recompute_writes_each_layers_own_set(backbone, prefilled):
    tokens, _, engine = prefilled
    T = tokens.embeddings.shape[1]
    spoilt = {name: value + 1 for name, value in engine.items()}
    keep = np.arange(T) < np.array([T, 20, 9])[:, None, None]  # each inside the one below
    cache = backbone.recompute(tokens, spoilt, np.arange(T)[None], keep).cache
    for name, value in engine.items():
        found, before = np.asarray(cache[name]), np.asarray(spoilt[name])
        assert np.array_equal((found != before).any((-2, -1)), keep)
        close(np.where(keep[..., None, None], found, value), value, what=name)  # a prefix set sees nothing spoilt


def test_recompute_refuses_sets_that_are_not_nested(backbone, prefilled):
    tokens, _, engine = prefilled
    T = tokens.embeddings.shape[1]
    keep = np.ones((backbone.layout.layers, 1, T), bool)
    keep[1, 0, 5] = False
    with pytest.raises(ShapeError, match="inside the one below"):
        backbone.recompute(tokens, engine, np.arange(T)[None], keep)
    with pytest.raises(ShapeError, match=r"per layer \(3\)"):
        backbone.recompute(tokens, engine, np.arange(T)[None], np.ones((2, 1, T), bool))


@pytest.mark.parametrize("layer", [2])
def test_resuming_at_a_layer_equals_prefill(backbone, prefilled, layer):
    tokens, out, engine = prefilled
    cut = 22  # behind the first image
    rest = Tokens(out.hidden[layer][:, cut:], tokens.positions[:, cut:])
    context = {name: value[:, :, :cut] for name, value in engine.items()}
    resumed = backbone.prefill(rest, context, start_layer=layer, logits="all")
    close(resumed.logits, out.logits[:, cut:], what="logits")
    for name, value in out.kv.items():
        close(resumed.kv[name], value[layer:, :, cut:], what=name)


def test_layers_that_are_not_there(backbone, prefilled):
    tokens, _, _ = prefilled
    with pytest.raises(ShapeError, match="layers: got 4…3; expected layers of this decoder, 0…3"):
        backbone.prefill(tokens, start_layer=4)
    with pytest.raises(ShapeError, match=r"hidden_at: got \(5,\)"):
        backbone.prefill(tokens, hidden_at=(5,))


@pytest.mark.slow
def test_masked_prefill_equals_transformers(backbone, prefilled):
    tokens, _, _ = prefilled
    gold = golden_arrays(FAMILY, "masked")
    layers = backbone.layout.layers
    out = backbone.prefill(
        tokens, mask=gold["allowed"][None, None], hidden_at=tuple(range(1, layers + 1)), logits="all"
    )
    for layer in range(layers):
        close(out.hidden[layer + 1][0], gold["hidden"][layer], GOLDEN, f"hidden {layer}")
    for name, value in to_engine(backbone.layout, out.kv, tokens.positions, 0).items():
        close(value[:, 0], gold[name], GOLDEN, name)
    close(out.logits[0], gold["logits"], GOLDEN, "logits")


@pytest.mark.slow
def test_a_chunk_behind_a_blocking_mask_equals_it_alone_and_moved(backbone, prefilled):
    tokens, unmasked, _ = prefilled
    first, last = (int(place) for place in golden_arrays(FAMILY, "masked")["second"])
    T = tokens.embeddings.shape[1]
    mask = np.tril(np.ones((T, T), bool))
    mask[first:last, :first] = False
    out = backbone.prefill(tokens, mask=mask[None, None], hidden_at=())
    alone = tokens.take(first, last)
    start = int(alone.positions[0, 0, 0])
    canonical = backbone.prefill(alone._replace(positions=alone.positions - start)).kv
    moved = to_engine(backbone.layout, canonical, alone.positions - start, start)
    behind = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    for name, value in canonical.items():
        close(out.kv[name][:, :, first:last], value, what=f"phase-free {name}")
        close(behind[name][:, :, first:last], moved[name], what=f"engine {name}")
        deficit = np.abs(np.asarray(unmasked.kv[name])[1:, :, first:last] - np.asarray(value)[1:]).max()
        assert deficit > 1e-2 * np.abs(np.asarray(value)).max()  # without the mask, conditioning is there to be lost


@pytest.mark.parametrize("delta", [1, 37, 1000, 100_000, (37, 1000, 5)], ids=str)
def test_relocation_through_the_model(backbone, prefilled, delta):
    """Forwards at p and p + δ have the same phase-free KV; moved keys equal those of the forward at the new place."""
    tokens, out, engine = prefilled
    places = tokens.positions + jnp.asarray(delta, jnp.int32)
    layers = tuple(range(backbone.layout.layers))
    there = backbone.prefill(tokens._replace(positions=places), hidden_at=layers, logits="all")
    close(there.logits, out.logits, what="logits")
    forward = to_engine(backbone.layout, there.kv, places, 0)
    moved = to_engine(backbone.layout, out.kv, tokens.positions, delta)
    rotated = relocate(backbone.layout, engine, tokens.positions, places)
    for name, value in out.kv.items():
        close(there.kv[name], value, what=f"phase-free {name}")
        close(moved[name], forward[name], what=f"to_engine {name}")
        close(rotated[name], forward[name], what=f"relocate {name}")


@pytest.mark.slow
def test_generate_equals_the_argmax_of_the_whole_forward(backbone):
    gold = golden_arrays(FAMILY, "text")
    ids = np.stack([gold["input_ids"], gold["input_ids"][::-1]])
    tokens, steps = text_of(backbone, ids), 4
    found = np.asarray(backbone.generate(tokens, steps))
    whole = backbone.prefill(text_of(backbone, np.concatenate([ids, found], axis=1)), logits="all")
    expected = np.argmax(np.asarray(whole.logits)[:, ids.shape[1] - 1 : -1], axis=-1)
    assert np.array_equal(found, expected)
    for fewer in (0, 1):
        assert np.array_equal(backbone.generate(tokens, fewer), expected[:, :fewer])


@pytest.mark.slow
def test_generate_behind_a_context_equals_generate_of_all(backbone):
    gold = golden_arrays(FAMILY, "text")
    ids = np.stack([gold["input_ids"], gold["input_ids"][::-1]])
    tokens, steps, cut = text_of(backbone, ids), 4, 9
    expected = np.asarray(backbone.generate(tokens, steps))
    context = {
        name: value[:, :, :cut]
        for name, value in to_engine(backbone.layout, backbone.prefill(tokens).kv, tokens.positions, 0).items()
    }
    assert np.array_equal(backbone.generate(tokens.take(cut, ids.shape[1]), steps, context), expected)


@pytest.mark.slow
def test_another_prompt_place_or_slot_does_not_compile_again(backbone, gold, prefilled):
    tokens, _, engine = prefilled
    T = tokens.embeddings.shape[1]
    slots, keep = np.arange(T)[None], np.ones((backbone.layout.layers, 1, T), bool)
    context = {name: value[:, :, :9] for name, value in engine.items()}
    rows = tokens.take(20, 30)

    def use(tokens, rows, context, engine, slots, keep):
        backbone.prefill(tokens)
        backbone.prefill(rows, context)
        backbone.recompute(tokens, engine, slots, keep)
        backbone.recompute(rows, engine, slots[:, :10])
        backbone.decode(rows.take(0, 1), engine, slots[:, :1])
        backbone.generate(rows, 2)

    use(tokens, rows, context, engine, slots, keep)
    pixels = gold["pixel_values"][::-1] * np.float32(0.5)
    with compilations() as compiled:
        other = backbone.embed(gold["input_ids"][None], gold["position_ids"][None] + 7, pixels, gold["image_grid_thw"])
    assert not compiled
    twice = {name: 2 * value for name, value in engine.items()}
    none = {name: value[:, :, :9] for name, value in twice.items()}
    with compilations() as compiled:
        use(other, other.take(3, 13), none, twice, slots[:, ::-1], ~keep)
    assert not compiled


# ---------------------------------------------------------------------------------------------------- prompts


def test_prepare_two_images_and_token_ids(backbone, gold):
    ids = gold["input_ids"].tolist()
    prompt = backbone.prepare([ids[:5], gold["image.0"], gold["image.1"], tuple(ids[-4:])])
    for name in ("input_ids", "position_ids"):
        assert np.array_equal(prompt[name][0], gold[name])
    for name in ("pixel_values", "image_grid_thw"):
        assert np.array_equal(prompt[name], gold[name])
    close(backbone.embed(**prompt).embeddings[0], gold["inputs_embeds"], GOLDEN, "embeddings")


def test_prepare_reads_files_and_pil_images_alike(backbone, gold, tmp_path):
    image = Image.fromarray(gold["image.0"])
    image.save(tmp_path / "page.png")
    prompts = [backbone.prepare([[1, 2], source]) for source in (gold["image.0"], image, tmp_path / "page.png")]
    for prompt in prompts[1:]:
        assert same_bits(prompt, prompts[0])
    assert set(backbone.prepare([[1, 2]])) == {"input_ids", "position_ids"}


def test_prepare_refuses(backbone, gold, tmp_path):
    with pytest.raises(InputError, match=r"'which page\?'.*tokenizer.json\); expected token ids"):
        backbone.prepare(["which page?"])
    for item in (3.5, {"image": "page.png"}, None, ["one", "two"]):
        with pytest.raises(InputError, match=f"type {type(item).__name__}; expected text, token ids or an image"):
            backbone.prepare([[1], item])
    half = tmp_path / "half.jpeg"
    Image.fromarray(gold["image.0"]).resize((200, 200)).save(half)
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    with pytest.raises(InputError, match=r"half\.jpeg: got no image that can be read"):
        backbone.prepare([[1], half])


def test_embed_refuses_what_does_not_match(backbone, gold):
    ids, places, grid = gold["input_ids"][None], gold["position_ids"][None], gold["image_grid_thw"]
    with pytest.raises(InputError, match=r"pixel_values: got shape \(96, 96\); expected \(100, 96\)"):
        backbone.embed(ids, places, gold["pixel_values"][4:], grid)
    with pytest.raises(InputError, match="input_ids: got 25 image placeholders; expected 15"):
        backbone.embed(ids, places, gold["pixel_values"][:60], grid[:1])
    with pytest.raises(InputError, match="2 rows without position_ids"):
        backbone.embed(np.concatenate([ids, ids]))


# ------------------------------------------------------------------------------------------------ directories


def test_save_and_load_round_trip(backbone, tmp_path):
    again = load(save(backbone, tmp_path / "copy"))
    assert same_bits(flatten_params(again.parameters), flatten_params(backbone.parameters))
    assert again.config == backbone.config
    assert again.image_config == backbone.image_config
    assert again.fingerprint == backbone.fingerprint
    assert again.layout == backbone.layout


def test_the_fingerprint_follows_a_weight(backbone):
    values = jax.tree.map(lambda leaf: leaf, backbone.parameters)
    values["decoder"]["norm"]["weight"] = values["decoder"]["norm"]["weight"].at[3].multiply(1.0001)
    assert backbone.replaced(values).fingerprint != backbone.fingerprint
    assert backbone.replaced(backbone.parameters).fingerprint == backbone.fingerprint


def missing(tensors, name):
    return {other: value for other, value in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, r"; expected shape \(32, 64\)"),
        (lambda tensors, name: tensors | {name: tensors[name][:-1]}, r"of shape \(31, 64\); expected \(32, 64\)"),
        (lambda tensors, name: missing(tensors, name) | {name: tensors[name].astype(np.int32)}, "of type I32"),
    ],
)
def test_a_damaged_tensor_is_named(checkpoint, damage, message):
    name = "layers.1.self_attn.k_proj.weight"
    directory = checkpoint(FAMILY)
    tensors = load_file(directory / WEIGHTS)
    name = next(full for full in tensors if full.endswith(name))
    save_file(damage(tensors, name), directory / WEIGHTS)
    with pytest.raises(WeightsError, match=f"{name}' ?{message}"):
        load(directory)


def test_an_unexpected_tensor_is_named(checkpoint):
    directory = checkpoint(FAMILY)
    save_file(load_file(directory / WEIGHTS) | {"adapter.weight": np.zeros(3, np.float32)}, directory / WEIGHTS)
    with pytest.raises(WeightsError, match=r"'adapter\.weight' \(1 such in all\)"):
        load(directory)


def test_a_directory_without_weights_or_configuration(checkpoint, tmp_path):
    directory = checkpoint(FAMILY)
    (directory / WEIGHTS).unlink()
    with pytest.raises(WeightsError, match=WEIGHTS):
        load(directory)
    with pytest.raises(ConfigError, match=r"config\.json: got no such file"):
        load(tmp_path)


def test_an_unknown_architecture_lists_the_known_ones(checkpoint):
    directory = checkpoint(FAMILY)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"architectures": ["OtherForCausalLM"]}))
    message = r"OtherForCausalLM.*expected one of \[.*'Qwen2_5_VLForConditionalGeneration'"
    with pytest.raises(ConfigError, match=message):
        load(directory)
