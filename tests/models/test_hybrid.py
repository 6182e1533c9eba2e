"""Hybrid models against transformers, and what layers with linear attention keep of tokens, however these are run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PARTS, Buckets, EngineKV, compose, to_engine, transition_of
from kvpatch_jax.errors import InputError
from models import load, save
from models.decoding.generation import pad_rows
from tests.goldens.load import golden_arrays, write_checkpoint
from tests.tolerances import assert_close_to_largest

pytestmark = pytest.mark.usefixtures("highest_precision")

close = functools.partial(assert_close_to_largest, bar=2e-5)
SLOW = pytest.mark.slow
CASES = {
    "qwen3_5": ("one_image", "text", "two_images", "video"),
    "qwen3_5_moe": ("one_image", "text"),
    "qwen3_next": ("text",),
}
INPUTS = ("pixel_values", "image_grid_thw", "video_grid_thw")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint("qwen3_5", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def backbone(directory):
    return load(directory, angles="float32")


@pytest.fixture(scope="module")
def tokens(backbone):
    """Ninety tokens: more than a block of the rule, and no multiple of one."""
    return embedded(backbone, 90)


@pytest.fixture(scope="module")
def whole(backbone, tokens):
    return backbone.prefill(tokens, logits="all")


def embedded(backbone, length, rows=1, first=0):
    ids = (np.arange(rows * length).reshape(rows, length) * 37 + 11 + first) % 290 + 3
    positions = np.broadcast_to(np.arange(length)[None, :, None], (rows, length, 3))
    return backbone.embed(ids.astype(np.int32), position_ids=positions)


def engine(backbone, out, tokens):
    return to_engine(backbone.layout, out.kv, np.asarray(tokens.positions), 0)


def close_kv(found, expected, what):
    for name, value in expected.items():
        close(found[name], value, f"{what}: {name}")


def with_room(kv, room):
    behind = ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))
    return EngineKV({name: value if name in PARTS else jnp.pad(value, behind) for name, value in kv.items()})


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=() if (family, case) == ("qwen3_5", "one_image") else SLOW)
        for family, cases in CASES.items()
        for case in cases
    ],
)
def test_equals_transformers(family, case, tmp_path):
    """Residuals, keys, values, states, tails and logits; tokens that are made; a checkpoint written and read."""
    backbone, gold = load(write_checkpoint(family, tmp_path / "a"), angles="float32"), golden_arrays(family, case)
    tokens = backbone.embed(gold["input_ids"][None], **{name: gold[name] for name in INPUTS if name in gold})
    assert np.array_equal(np.asarray(tokens.positions)[0], gold["position_ids"])
    close(tokens.embeddings[0, gold["embedded"]], gold["inputs_embeds"], "embeddings")
    layers, rows = backbone.layout.layers, gold["rows"]
    out = backbone.prefill(tokens, hidden_at=tuple(range(1, layers + 1)), logits="all")
    for layer in range(layers):
        close(out.hidden[layer + 1][0, rows], gold["hidden"][layer], f"hidden {layer}")
    held = engine(backbone, out, tokens)
    for name in ("k", "v", "state", "tail"):
        value = held[name][:, 0]
        close(value if name in PARTS else value[:, rows], gold[name], name)
    close(out.kv["k"][:, 0, rows], gold["k_phase_free"], "phase-free keys")
    close(out.logits[0, rows], gold["logits"], "logits")

    if "decode_tokens" in gold:
        assert np.array_equal(backbone.generate(tokens, len(gold["decode_tokens"]))[0], gold["decode_tokens"])
        cache, length = with_room(held, 4), tokens.embeddings.shape[1]
        for step, token in enumerate(gold["decode_tokens"]):
            place = np.full((1, 1, *np.shape(tokens.positions)[2:]), gold["decode_positions"][step])
            one = backbone.embed(np.array([[token]]), position_ids=place)
            done = backbone.decode(one, cache, np.array([[length + step]]))
            close(done.logits[0], gold["decode_logits"][step][None], f"decoded {step}")
            cache = done.cache

    again = load(save(backbone, tmp_path / "b"), angles="float32")
    assert again.config.text == backbone.config.text
    jax.tree.map(np.testing.assert_array_equal, again.parameters, backbone.parameters)


def test_released_configuration_is_the_same_model(directory, backbone, tmp_path):
    """Tensors of multi-token prediction are passed over."""
    for family in CASES:
        ours = load(write_checkpoint(family, tmp_path / family / "a"), angles="float32").config.text
        released = write_checkpoint(family, tmp_path / family / "b", "config_release.json")
        assert load(released, angles="float32").config.text == ours


@pytest.mark.parametrize("cut", [70, 2])
def test_two_prefills_equal_one(backbone, tokens, whole, cut):
    """The second reads state and tail of the first: also where that is shorter than the convolution reads."""
    first, second = tokens.take(0, cut), tokens.take(cut, 90)
    before = backbone.prefill(first)
    after = backbone.prefill(second, engine(backbone, before, first), logits="all")
    close(after.logits, whole.logits[:, cut:], "logits")
    composed = compose(transition_of(before.kv), transition_of(after.kv), 90 - cut)
    close_kv(composed, transition_of(whole.kv), "composed")


@pytest.mark.parametrize("chunk", [32, 45])
def test_stretches_equal_one_piece(backbone, tokens, whole, chunk):
    found = backbone.prefill(tokens, logits="all", chunk=chunk, hidden_at=(1, 4))
    close(found.logits, whole.logits, "logits")
    close_kv(found.kv, whole.kv, "stretches")
    cut = tokens.take(40, 90)
    context = engine(backbone, backbone.prefill(tokens.take(0, 40)), tokens.take(0, 40))
    behind = backbone.prefill(cut, context, logits="all", chunk=16)
    close(behind.logits, whole.logits[:, 40:], "logits behind a context")
    close_kv(behind.kv, backbone.prefill(cut, context).kv, "stretches behind a context")


def test_padding_changes_nothing(directory, tokens, whole):
    """Of a prompt and of the context in front of it, padded to buckets, and of rows of unequal lengths."""
    backbone = load(directory, angles="float32", buckets=Buckets(smallest=64))
    found = backbone.prefill(tokens, logits="all")
    close(found.logits, whole.logits, "logits")
    close_kv(found.kv, whole.kv, "buckets")
    first, second = tokens.take(0, 70), tokens.take(70, 90)
    after = backbone.prefill(second, engine(backbone, backbone.prefill(first), first), logits="all")
    close(after.logits, whole.logits[:, 70:], "logits behind a context")

    short = embedded(backbone, 40, first=5)
    rows, lengths = pad_rows([tokens, short])
    made = backbone.generate(rows, 6, lengths=lengths)
    assert np.array_equal(made[0], backbone.generate(tokens, 6)[0])
    assert np.array_equal(made[1], backbone.generate(short, 6)[0])


def test_mask_of_padding_leaves_it_out(backbone, tokens, whole):
    """Padding in front and in the middle, which a mask hides; a mask that hides anything else is refused."""
    places = np.r_[3:33, 40:100]
    counted = np.isin(np.arange(100), places)
    rows = np.zeros((1, 100, 48), np.float32) + 7
    positions = np.zeros((1, 100, 3), np.int32)
    rows[:, places], positions[:, places] = tokens.embeddings, tokens.positions
    mask = (np.tril(np.ones((100, 100), bool)) & counted)[None, None]
    found = backbone.prefill(Tokens(jnp.asarray(rows), positions), mask=mask, logits="all")
    close(found.logits[:, places], whole.logits, "logits")
    close_kv(transition_of(found.kv), transition_of(whole.kv), "padded")

    window = mask & ~np.tril(np.ones((100, 100), bool), -30)
    with pytest.raises(InputError, match="linear attention knows of no mask"):
        backbone.prefill(Tokens(jnp.asarray(rows), positions), mask=window)


def test_decoding_one_by_one_equals_prefill(backbone, tokens, whole):
    """The cache comes back with the transition of all its tokens, the map too."""
    first = tokens.take(0, 84)
    cache = with_room(engine(backbone, backbone.prefill(first), first), 6)
    for place in range(84, 88):
        step = backbone.decode(tokens.take(place, place + 1), cache, np.array([[place]]))
        close(step.logits[:, 0], whole.logits[:, place], f"logits {place}")
        cache = step.cache
    step = backbone.decode(tokens.take(88, 90), cache, np.array([[88, 89]]), logits="all")
    close(step.logits, whole.logits[:, 88:], "logits of two")
    close_kv(transition_of(step.cache), transition_of(whole.kv), "decoded")
    close(step.cache["k"], engine(backbone, whole, tokens)["k"], "keys")


def test_what_linear_attention_cannot_do_is_refused(backbone, tokens, whole):
    cache, few = engine(backbone, whole, tokens), tokens.take(10, 12)
    slots = np.array([[10, 11]])
    with pytest.raises(InputError, match=r"recompute: got .* of a model with linear attention"):
        backbone.recompute(few, cache, slots)
    with pytest.raises(InputError, match="some layers or sets of tokens"):
        backbone.recompute(few, cache, slots, keep=np.ones((4, 1, 2), bool))
    with pytest.raises(InputError, match="linear attention, which compares no keys"):
        backbone.attention(few, cache, layers=(1,), reduce=lambda seen: seen.query, slots=slots)
