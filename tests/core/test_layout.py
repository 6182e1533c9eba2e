"""Layouts and frames: what is stored, what rotates, and that frames invert."""
# pyright: reportArgumentType=false, reportCallIssue=false

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, LayoutError, ShapeError
from tests.shared.operator_cases import LAYOUTS, kv_of, local_of


def starts(layout: kvp.KVLayout, base: int):
    return base if layout.rope.axes is None else np.array([base, base + 3, base - 5], np.int32)


def test_layouts_have_the_papers_bytes_per_token():
    qwen = kvp.KVLayout.gqa(28, 4, 128, kvp.Rope(1e6, 128, sections=(16, 24, 24)))
    kimi = kvp.KVLayout.mla(27, 512, 64, rope=kvp.Rope(8e5, 64))
    assert (qwen.names, qwen.bytes_per_token(jnp.bfloat16)) == (("k", "v"), 57_344)
    assert (kimi.names, kimi.bytes_per_token(jnp.bfloat16)) == (("ckv", "kpe"), 31_104)
    assert [c.rotates for c in qwen.channels] == [True, False]
    assert [c.rotates for c in kimi.channels] == [False, True]
    assert hash(qwen) == hash(kvp.KVLayout.gqa(28, 4, 128, kvp.Rope(1e6, 128, sections=(16, 24, 24))))


@pytest.mark.parametrize("name", LAYOUTS)
def test_frames_invert(name: str):
    layout = LAYOUTS[name]
    kv, local, start = kv_of(layout, 12), local_of(layout, 12), starts(layout, 123_456 if name != "yarn" else 40)
    engine = kvp.to_engine(layout, kv, local, start)
    back = kvp.to_phase_free(layout, engine, local, start)
    for channel in layout.channels:
        np.testing.assert_allclose(back[channel.name], kv[channel.name], atol=3e-6)
        if channel.rotates:
            assert np.abs(engine[channel.name] - kv[channel.name]).max() > 0.1
        else:
            assert engine[channel.name] is kv[channel.name]
    near = kvp.to_phase_free(layout, kvp.core.to_local(layout, kv, local), local)
    np.testing.assert_allclose(near[layout.names[0]], kv[layout.names[0]], atol=3e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_relocate_is_the_engine_frame_at_the_new_place(name: str):
    layout = LAYOUTS[name]
    kv, local = kv_of(layout, 12), local_of(layout, 12)
    old, new = starts(layout, 999_000), 17
    there = kvp.to_engine(layout, kv, local, new)
    moved = kvp.relocate(layout, kvp.to_engine(layout, kv, local, old), old, new)
    full = kvp.relocate(layout, kvp.to_engine(layout, kv, local, old), local + np.float32(old), local + np.float32(new))
    for channel in layout.names:
        np.testing.assert_allclose(moved[channel], there[channel], atol=6e-6)
        np.testing.assert_allclose(full[channel], there[channel], atol=6e-6)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("far", [2**31, 2**32 + 5, -(2**31) - 1, 2**63, 2**70])
def test_positions_beyond_int32_are_refused_not_wrapped(far: int):
    layout = LAYOUTS["gqa"]
    kv, local = kv_of(layout, 12), local_of(layout, 12)
    far_away = [far, np.full(12, far)]
    if -(2**63) <= far < 2**64:
        far_away += [np.asarray(far), np.arange(12, dtype=np.uint64 if far > 0 else np.int64) + np.asarray(far)]
    refused = lambda: pytest.raises(InputError, match="expected")
    for position in far_away:
        with refused():
            kvp.relocate(layout, kv, position, 3)
        with refused():
            kvp.relocate(layout, kv, 3, position)
    for start in far_away[:1] + far_away[2:3]:
        with refused():
            kvp.to_engine(layout, kv, local, start)
    if 0 < far < 2**32:
        with refused():
            kvp.to_engine(layout, kv, local, jnp.asarray(far, jnp.uint32))
    if far_away[1].dtype.kind in "iu":
        with refused():
            kvp.core.rope.rope_tables(layout.rope, far_away[1])


def test_attention_scaling_is_in_the_engine_frame_and_not_in_relocation():
    layout = LAYOUTS["yarn"]
    kv, local = kv_of(layout, 12), local_of(layout, 12)
    scale = layout.rope.attention_scaling
    assert scale > 1.1
    norm = lambda x: np.linalg.norm(np.asarray(x["k"]), axis=-1)
    engine = kvp.to_engine(layout, kv, local, 7)
    np.testing.assert_allclose(norm(engine), norm(kv) * scale, rtol=1e-5)
    np.testing.assert_allclose(norm(kvp.relocate(layout, engine, 7, 40)), norm(engine), rtol=1e-5)


def test_bfloat16_moves_within_one_unit_of_recompute():
    """Storing phase-free in bf16 and turning once exceeds recompute's error by at most one ulp of the row's top."""
    layout = LAYOUTS["gqa"]
    kv, local = kv_of(layout, 64), local_of(layout, 64)
    exact = np.asarray(kvp.to_engine(layout, kv, local, 100_000)["k"])
    recompute = np.asarray(jnp.asarray(exact).astype(jnp.bfloat16).astype(jnp.float32))
    stored = {name: value.astype(jnp.bfloat16) for name, value in kv.items()}
    moved = np.asarray(kvp.to_engine(layout, stored, local, 100_000)["k"].astype(jnp.float32))
    top = np.abs(exact).max(-1)
    ulp = 2.0 ** (np.floor(np.log2(top)) - 7)
    assert (np.abs(moved - exact).max(-1) <= np.abs(recompute - exact).max(-1) + ulp).all()


def test_kv_that_does_not_fit_its_layout_is_refused(unchecked):
    layout = LAYOUTS["gqa"]
    kv, local = kv_of(layout, 6), local_of(layout, 6)
    with pytest.raises(LayoutError, match="channels"):
        kvp.to_engine(layout, {"k": kv["k"]}, local, 0)
    with pytest.raises(ShapeError, match="expected"):
        kvp.to_engine(layout, kv | {"v": kv["v"][:, :5]}, local, 0)
    with pytest.raises(ShapeError, match="int32"):
        kvp.to_engine(layout, kv | {"v": kv["v"].astype(jnp.int32)}, local, 0)
    with pytest.raises(InputError, match="start"):
        kvp.to_engine(layout, kv, local, 1.5)
    with pytest.raises(InputError, match="start"):
        kvp.to_engine(
            LAYOUTS["blocked"], kv_of(LAYOUTS["blocked"], 6), local_of(LAYOUTS["blocked"], 6), np.zeros(2, int)
        )
    with pytest.raises(LayoutError, match="rope"):
        kvp.KVLayout.gqa(2, 2, 32, kvp.Rope(1e4, 16))
    with pytest.raises(LayoutError, match="'q'"):
        layout.channel("q")


def test_positions_that_would_broadcast_or_round_are_refused(unchecked):
    layout = LAYOUTS["gqa"]
    kv = {channel.name: np.zeros((layout.layers, 2, 5, channel.heads, channel.width)) for channel in layout.channels}
    local, engine = np.arange(5), kvp.to_engine(layout, kv, np.arange(5), 0)
    for call in (
        lambda: kvp.to_engine(layout, kv, local, np.zeros(3, np.int32)),
        lambda: kvp.to_engine(layout, kv, local, np.zeros(0, np.int32)),
        lambda: kvp.to_engine(layout, kv, np.zeros((3, 5)), 0),
        lambda: kvp.to_engine(layout, kv, local + 16777217.0, 0),
        lambda: kvp.relocate(layout, engine, 0, 16777217.0),
        lambda: kvp.relocate(layout, engine, np.zeros((3, 5)), 0),
        lambda: kvp.relocate(layout, engine, 0, np.zeros((1, 1, 5))),
        lambda: kvp.relocate(layout, engine, 0, np.zeros(4)),
    ):
        with pytest.raises(InputError, match=r"got .*expected"):
            call()
    exact = kvp.relocate(layout, engine, 0, 16777217)
    assert kvp.relocate(layout, engine, np.zeros((2, 5)), local)["k"].shape == exact["k"].shape
