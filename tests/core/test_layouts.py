"""Layers of unlike kinds turn and are patched by their own ropes and widths, and a layout says what each keeps."""
# pyright: reportArgumentType=false

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax import relocate, to_engine, to_phase_free
from kvpatch_jax.cache import Chunk, same_storage
from kvpatch_jax.core import Channel, KVLayout, Rope, Scaling, check_uniform
from kvpatch_jax.errors import LayoutError, ShapeError
from kvpatch_jax.patching import apply_patch, form_patch
from tests.shared.operator_cases import placed_in_float64

LAYERS, TOKENS, START = 5, 6, 31
FULL, LOCAL = Rope(1e4, 8), Rope(30.0, 4, cached="pairs", width=6)
CHANNELS = (
    Channel("k", 1, 8, 8, layers=(1, 4)),
    Channel("v", 1, 8, layers=(1, 4)),
    Channel("k_local", 2, 6, 4, LOCAL, (0, 3)),
    Channel("v_local", 2, 6, layers=(0, 3)),
)
"""Two kinds with unlike heads, widths and ropes; layer 2 keeps nothing (it reads another's)."""
LAYOUT = KVLayout("gqa", LAYERS, CHANNELS, FULL)
PLAIN = KVLayout.gqa(LAYERS, 2, 8, FULL)
LOCALS = np.arange(TOKENS, dtype=np.float32)


def drawn(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {c.name: (LAYOUT.depth(c.name), TOKENS, c.heads, c.width) for c in CHANNELS}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def chunk_of(seed: int = 0) -> Chunk:
    return Chunk(drawn(seed), LOCALS, TOKENS, TOKENS, "page", LAYOUT, "backbone")


def expected(kv: dict[str, np.ndarray], start: int) -> dict[str, np.ndarray]:
    return placed_in_float64(LAYOUT, kv, LOCALS, start)


def all_close(found, wanted, bar=2e-6):
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert np.abs(np.asarray(found[name]) - value).max() <= bar * np.abs(value).max(), name


def test_layouts_have_the_papers_bytes_per_token():
    qwen = KVLayout.gqa(28, 4, 128, Rope(1e6, 128, sections=(16, 24, 24)))
    kimi = KVLayout.mla(27, 512, 64, rope=Rope(8e5, 64))
    assert (qwen.names, qwen.bytes_per_token(jnp.bfloat16)) == (("k", "v"), 57_344)
    assert (kimi.names, kimi.bytes_per_token(jnp.bfloat16)) == (("ckv", "kpe"), 31_104)
    assert [c.rotates for c in (*qwen.channels, *kimi.channels)] == [True, False, False, True]
    assert hash(qwen) == hash(KVLayout.gqa(28, 4, 128, Rope(1e6, 128, sections=(16, 24, 24))))


def test_layouts_of_equal_storage_differ_in_angles_only():
    base = Rope(1e4, 16, sections=(4, 2, 2), order="interleaved")
    layout = KVLayout.gqa(2, 2, 16, base)
    with_rope = lambda **fields: KVLayout.gqa(2, 2, 16, dataclasses.replace(base, **fields))
    assert same_storage(layout, with_rope(angles="float32"))
    for fields in ({"theta": 2e4}, {"cached": "pairs"}, {"order": "blocked"}, {"sections": (3, 3, 2)}):
        assert not same_storage(layout, with_rope(**fields))
    assert not same_storage(layout, with_rope(scaling=Scaling("yarn", factor=4, original=64)))
    assert not same_storage(layout, KVLayout.gqa(3, 2, 16, base))
    assert not same_storage(layout, KVLayout.mha(2, 2, 16, base))


def test_a_layout_says_what_each_channel_keeps():
    assert (LAYOUT.uniform, PLAIN.uniform) == (False, True)
    assert LAYOUT.ropes == (FULL, LOCAL)
    assert PLAIN.ropes == (FULL,)
    assert [LAYOUT.layers_of(name) for name in LAYOUT.names] == [(1, 4), (1, 4), (0, 3), (0, 3)]
    assert tuple(PLAIN.layers_of("v")) == tuple(range(LAYERS))
    assert LAYOUT.rows_of("k_local", (1, 3, 4)) == (1,)
    assert LAYOUT.numbers == 2 * (8 + 8) + 2 * (12 + 12)
    assert LAYOUT.bytes_per_token("float32") == 4 * LAYOUT.numbers
    floats = LAYOUT.with_angles("float32")
    assert {rope.angles for rope in floats.ropes} == {"float32"}
    assert floats.with_angles("exact") == LAYOUT


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (Channel("k", 1, 8, 8, FULL), "by another rope"),
        (Channel("k", 1, 8, 8, layers=(1, 5)), "expected some of 0 to 4"),
        (Channel("k", 1, 12, 12, Rope(1e4, 12, sections=(2, 2, 2))), "expected the axes of the layout's rope, None"),
        (Channel("k", 1, 8, 8, Rope(1e4, 8, scaling=Scaling("dynamic", 2.0, 16, length=16))), "depend on no length"),
        (Channel("k", 1, 6, 4), "expected the rope's 8 and 8"),
    ],
)
def test_channels_that_do_not_fit_are_refused(channel, message):
    with pytest.raises(LayoutError, match=message):
        KVLayout("gqa", LAYERS, (channel,), FULL)
    for layers in ((), (2, 1), (-1,)):
        with pytest.raises(LayoutError, match="layers"):
            Channel("k", 1, 8, 8, layers=layers)
    with pytest.raises(LayoutError, match="channel 'k' has layers of its own; expected layers of one kind"):
        check_uniform(LAYOUT, "anything")


def test_every_channel_turns_by_its_own_rope():
    kv, local = drawn(), LOCALS
    engine = to_engine(LAYOUT, kv, local, START)
    all_close(engine, expected(kv, START))
    all_close(to_phase_free(LAYOUT, engine, local, START), kv)
    all_close(relocate(LAYOUT, engine, START, 7), expected(kv, 7))
    with pytest.raises(ShapeError, match=r"expected \[2, ..., T, 1, 8\]"):
        to_engine(LAYOUT, kv | {"k": np.zeros((5, TOKENS, 1, 8), np.float32)}, local, 0)


def test_a_patch_corrects_the_layers_that_it_covers_better_by_rank():
    """Of layers 0 to 2, where two channels keep one row each; in the others nothing changes."""
    base, target, chunk = drawn(), drawn(1), chunk_of()
    left = []
    for rank in (1, 3, 6):
        patch = form_patch(chunk, target, rank, (), layers=(0, 1, 2), method="exact", dense=False)
        found = apply_patch(chunk, patch, START)
        wanted, plain, error = expected(target, START), expected(base, START), 0.0
        for name in found:
            covered = np.isin(LAYOUT.layers_of(name), (0, 1, 2))
            error += np.square(np.asarray(found[name])[covered] - wanted[name][covered]).sum()
            assert np.abs(np.asarray(found[name])[~covered] - plain[name][~covered]).max(initial=0) <= 2e-6 * 4
        left.append(error)
    assert all(after < before for before, after in itertools.pairwise(left))
    assert left[-1] <= 1e-9 * left[0]
