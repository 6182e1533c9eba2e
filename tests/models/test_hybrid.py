"""What layers with linear attention keep of tokens, however these are run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PARTS, Buckets, EngineKV, Paged, compose, to_engine, transition_of
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.decoding.generation import pad_rows
from kvpatch_jax.pool import make_pool
from tests.goldens.load import write_checkpoint
from tests.shared.tolerances import assert_close_to_largest

pytestmark = pytest.mark.usefixtures("highest_precision")

close = functools.partial(assert_close_to_largest, bar=2e-5)


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


def test_text_model_under_the_names_of_a_whole_release(tmp_path):
    """As transformers saves a text model that it read out of a whole release; what stands beside it is passed over."""
    plain = write_checkpoint("qwen3_5_text", tmp_path / "plain")
    whole = write_checkpoint("qwen3_5_text", tmp_path / "whole")
    tensors = {
        name.replace("model.", "model.language_model."): value
        for name, value in load_file(plain / "model.safetensors").items()
    }
    beside = dict.fromkeys(("model.visual.merger.norm.weight", "mtp.norm.weight"), np.ones(3, np.float32))
    save_file(tensors | beside, whole / "model.safetensors")
    expected, found = load(plain, angles="float32"), load(whole, angles="float32")
    jax.tree.map(np.testing.assert_array_equal, found.parameters, expected.parameters)
    assert found.fingerprint == expected.fingerprint


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [70, 2])
def test_two_prefills_equal_one(backbone, tokens, whole, cut):
    """The second reads state and tail of the first: also where that is shorter than the convolution reads."""
    first, second = tokens.take(0, cut), tokens.take(cut, 90)
    before = backbone.prefill(first)
    after = backbone.prefill(second, engine(backbone, before, first), logits="all")
    close(after.logits, whole.logits[:, cut:], "logits")
    composed = compose(transition_of(before.kv), transition_of(after.kv), 90 - cut)
    close_kv(composed, transition_of(whole.kv), "composed")


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


def paged(backbone, held, length, buckets=None):
    """A context in pages, its slots in any order among others, beside its transition; and slots that are free."""
    order = np.random.default_rng(0).permutation(128).astype(np.int32)
    pool = make_pool(backbone.layout, 16, 8, jnp.float32)
    for name, value in pool.items():
        flat = np.full((value.shape[0], 128, *value.shape[3:]), np.nan, np.float32)
        flat[:, order[:length]] = np.asarray(held[name])[:, 0, :length]
        pool[name] = jnp.asarray(flat.reshape(value.shape))
    return Paged.of(pool, order[None, :length], buckets, transition_of(held)), order[None, length:]


@pytest.mark.nightly
def test_pages_equal_contiguous(backbone, tokens, whole):
    """A prefill, tokens that are made and steps: the transition travels beside the pool."""
    first = tokens.take(0, 84)
    held = engine(backbone, backbone.prefill(first), first)
    context, slots = paged(backbone, held, 84)
    out = backbone.prefill(tokens.take(84, 90), context, logits="all")
    close(out.logits, whole.logits[:, 84:], "logits")
    assert np.array_equal(backbone.generate(tokens.take(84, 90), 5, context), backbone.generate(tokens, 5))

    step = backbone.decode(tokens.take(84, 88), context, slots[:, :4], logits="all")
    close(step.logits, whole.logits[:, 84:88], "logits of steps")
    step = backbone.recompute(tokens.take(88, 90), step.cache, slots[:, 4:6], logits="all")
    close(step.logits, whole.logits[:, 88:], "logits of steps behind them")
    close_kv(step.cache.transition, transition_of(whole.kv), "in pages")
    with pytest.raises(InputError, match="slots of 2 tokens that the context holds"):
        backbone.recompute(tokens.take(88, 90), step.cache, slots[:, 4:6])


def test_what_linear_attention_cannot_do_is_refused(backbone, tokens, whole):
    cache, few = engine(backbone, whole, tokens), tokens.take(10, 12)
    slots = np.array([[10, 11]])
    with pytest.raises(InputError, match=r"recompute: got .* of a model with linear attention"):
        backbone.recompute(few, cache, slots)
    with pytest.raises(InputError, match="some layers or sets of tokens"):
        backbone.recompute(few, cache, slots, keep=np.ones((4, 1, 2), bool))
    with pytest.raises(InputError, match="linear attention, which compares no keys"):
        backbone.attention(few, cache, layers=(1,), reduce=lambda seen: seen.query, slots=slots)


# ------------------------------------------------------------------------------------------------ one layer alone


# -------------------------------------------------------------------------------------------------- configurations
