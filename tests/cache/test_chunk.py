"""A chunk checks and copies what it is made of, and its content changes with every number and with no padding."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import copy
import dataclasses
import hashlib
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Chunk, decode_chunk, encode_chunk, examine
from kvpatch_jax.core import KVEncoding, KVLayout, PackedArray, Rope
from kvpatch_jax.errors import InputError, LayoutError, NotFiniteError, ShapeError
from tests.shared import transition_cases as hybrid
from tests.shared.operator_cases import LAYOUTS, chunk_of, kv_of, local_of

PARTS = sorted(hybrid.PARTS)


def changed(value: Any, place: Any, number: Any = None) -> np.ndarray:
    """A copy with some numbers negated, or set."""
    other = np.array(value)
    other[place] = -other[place] if number is None else number
    return other


def spoilt(name: str) -> dict:
    return {channel: changed(value, (-1,) * 4, np.nan) for channel, value in kv_of(LAYOUTS[name], 24).items()}


def rotated(name: str) -> dict:
    return kvp.to_engine(LAYOUTS[name], kv_of(LAYOUTS[name], 24), np.arange(24), 3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv": lambda: kv_of(LAYOUTS["mla"], 24)}, LayoutError, "ckv"),
        ({"kv": lambda: spoilt("gqa")}, NotFiniteError, "'k'"),
        ({"kv": lambda: rotated("gqa")}, LayoutError, "phase-free"),
        ({"local": np.zeros(23, np.float32)}, InputError, "23"),
        ({"local": np.arange(24) + 2**24, "span": 2**25}, InputError, r"below 2\*\*24"),
        ({"local": np.full(24, np.nan, np.float32)}, InputError, "positions from nan"),
        ({"length": 25}, InputError, "25"),
        ({"span": 23}, InputError, "span 23; expected at least 24"),
        ({"id": 3}, InputError, "chunk: id: got a int"),
        ({"lead": ""}, InputError, "lead ''"),
    ],
)
def test_chunks_of_invalid_parts_are_refused(unchecked, change, error, words):
    with pytest.raises(error, match=words):
        chunk_of("gqa", **{word: value() if callable(value) else value for word, value in change.items()})


def test_packed_kv_is_refused_without_its_encoding_or_with_damaged_scales(unchecked):
    chunk = encode_chunk(chunk_of("gqa"), "k4v4")
    broken = dataclasses.replace(chunk.kv["k"], scale=chunk.kv["k"].scale.at[0, 0, 0].set(jnp.nan))
    for error, words, change in (
        (NotFiniteError, "'k'", {"kv": {**chunk.kv, "k": broken}}),
        (InputError, "packed", {"encoding": None}),
    ):
        with pytest.raises(error, match=words):
            dataclasses.replace(chunk, **change)


def test_padding_is_of_zeros():
    chunk = chunk_of("blocked", tokens=10)
    wide = chunk.pad(16)
    assert (wide.tokens, wide.length, wide.span) == (16, 10, chunk.span)
    for channel in chunk.layout.names:
        np.testing.assert_array_equal(wide.kv[channel][:, :10], chunk.kv[channel])
        assert not wide.kv[channel][:, 10:].any()
    np.testing.assert_array_equal(wide.local[:10], chunk.local)
    assert chunk.nbytes == 10 * chunk.layout.bytes_per_token(jnp.float32)
    with pytest.raises(ShapeError, match="at least 10"):
        chunk.pad(9)


def test_arrays_that_change_later_change_no_chunk():
    layout = LAYOUTS["gqa"]
    kv = {name: np.array(value) for name, value in kv_of(layout, 24).items()}
    local, encoder = local_of(layout, 24), np.ones((4, 6), np.float32)
    view = local[:]
    view.flags.writeable = False  # whoever has what it is a view of can write all the same
    first, seen = kv["k"].copy(), chunk_of("gqa", local=view)
    chunk = chunk_of("gqa", kv=kv, local=local, encoder=encoder)
    kv["k"][:] = 0
    kv["v"] = kv["k"]
    local[:] = encoder[:] = 5
    np.testing.assert_array_equal(chunk.kv["k"], first)
    assert np.asarray(chunk.kv["v"]).any()
    assert (np.asarray(chunk.encoder) == 1).all()
    assert np.asarray(chunk.local)[-1] == np.asarray(seen.local)[-1] == 23
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(chunk.kv["k"])[:] = 1


# ------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_any_one_number_makes_another_content(dtype):
    chunk, rng = chunk_of("gqa", dtype=dtype, length=20), np.random.default_rng(0)
    others = []
    for name in ("k", "v"):
        for _ in range(8):
            place = tuple(int(rng.integers(size)) for size in (3, 20, 2, 16))
            others.append({**chunk.kv, name: changed(chunk.kv[name], place)})
    host = {name: np.asarray(value) for name, value in chunk.kv.items()}
    others += [{name: np.flip(value, axis) for name, value in host.items()} for axis in (0, 1, -1)]
    others.append({"k": host["v"], "v": host["k"]})
    contents = {dataclasses.replace(chunk, kv=kv).content for kv in others}
    assert len(contents | {chunk.content}) == len(others) + 1


def test_the_same_kv_is_the_same_content_wherever_it_lies():
    chunk = chunk_of("gqa", length=20)
    host = {name: np.asarray(value) for name, value in chunk.kv.items()}
    noise = {name: changed(value, (slice(None), slice(20, None)), 7) for name, value in host.items()}
    copies = [dataclasses.replace(chunk, kv=host), chunk.pad(32), dataclasses.replace(chunk.pad(32), span=30)]
    copies += [pickle.loads(pickle.dumps(chunk)), copy.deepcopy(chunk), dataclasses.replace(chunk, kv=noise)]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.NamedSharding(mesh, jax.P("x"))
    copies.append(dataclasses.replace(chunk, kv={name: jax.device_put(value, place) for name, value in host.items()}))
    assert {own.content for own in copies} == {chunk.content}


def test_a_given_content_stays_and_costs_no_pass(monkeypatch):
    """And applying never computes one: what is not known is not asked for."""
    chunk = chunk_of("gqa", content="digest of the pixels")
    small = dataclasses.replace(chunk, kv={name: value.astype(jnp.bfloat16) for name, value in chunk.kv.items()})
    assert small.content == chunk.content == chunk.pad(32).content == "digest of the pixels"
    monkeypatch.setattr(hashlib, "blake2b", lambda *_, **__: pytest.fail("a digest of kv"))
    kvp.apply_patch(chunk, None, 3, ["A"])


def test_a_computed_content_outlives_encoding_in_every_copy():
    plain = chunk_of("gqa")
    chunk = encode_chunk(plain, "k2v2")
    for own in (chunk, decode_chunk(chunk)):
        assert dataclasses.replace(own).content == plain.content
    assert dataclasses.replace(chunk, content=None).content != plain.content


# ----------------------------------------------------------------------------------------------- hybrid models


def test_padding_leaves_a_transition_and_its_content():
    chunk = hybrid.chunk_of(length=2, rows=jnp.bfloat16)
    assert chunk.nbytes == hybrid.LAYOUT.bytes_per_token() * chunk.tokens + hybrid.LAYOUT.transition_bytes()
    padded = chunk.pad(11)
    assert (padded.tokens, padded.length, padded.content) == (11, 2, chunk.content)
    assert all(padded.kv[name] is chunk.kv[name] for name in PARTS)
    # As computed from the arrays again, not only as carried over.
    assert dataclasses.replace(padded, kv=dict(padded.kv)).content == chunk.content
    batch = hybrid.chunk_of(batch=(2,))
    assert (batch.tokens, batch.batch) == (hybrid.TOKENS, 2)


def test_content_is_of_every_number_of_a_transition():
    """Of two tokens: fewer than any part has rows, so that a part that was masked by the length would go unseen."""
    chunk, kv = hybrid.chunk_of(length=2), hybrid.drawn()
    of = lambda name, value: dataclasses.replace(chunk, kv={**kv, name: value}, content=None).content
    for name in PARTS:
        for place in (0, -1):
            assert of(name, changed(kv[name], np.unravel_index(place % kv[name].size, kv[name].shape))) != chunk.content
        assert not examine(kv | {name: changed(kv[name], (-1,) * 4, np.nan)}, 2)[1]
    assert of("k", changed(kv["k"], (slice(None), slice(2, None)))) == chunk.content
    assert examine(kv, 2)[1]


def test_what_is_no_chunk_of_a_hybrid_layout_is_refused(unchecked):
    layout, kv, local = hybrid.LAYOUT, hybrid.drawn(), np.arange(hybrid.TOKENS, dtype=np.float32)
    packed = encode_chunk(hybrid.chunk_of(), "k4v4").kv
    without = {name: value for name, value in kv.items() if name != "tail"}
    cases: list[tuple[Any, ...]] = [
        (without, LayoutError, "got channels", {}),
        ({**packed, "v": kv["v"]}, InputError, r"expected \['k', 'v'\] packed", {"encoding": "k4v4g32"}),
    ]
    # A transition where rows are expected, a state of other heads, one row too few.
    for name, value in (("k", kv["state"]), ("state", kv["state"][:, :, :2]), ("tail", kv["tail"][:, 1:])):
        cases.append((kv | {name: value}, ShapeError, rf"\['{name}'\]: got shape", {}))
    cases.append((kv | {"tail": changed(kv["tail"], (-1,) * 4, np.inf)}, NotFiniteError, r"\['tail'\]: got 1", {}))
    for value, error, message, options in cases:
        fields = {"layout": layout, "backbone": "backbone", **options}
        with pytest.raises(error, match=message):
            Chunk(value, local, hybrid.TOKENS, hybrid.TOKENS, "page", **fields)
    with pytest.raises(LayoutError, match="with a transition to cut to tokens 1 to 3"):
        layout.between(kv, 1, 3)
    assert layout.of_layers(kv, (0, 2))["map"].shape[0] == 1


def test_few_bits_pack_the_rows_and_round_the_transition():
    chunk = hybrid.chunk_of(length=5)
    few = encode_chunk(chunk, "k4v4")
    assert (few.content, few.nbytes) == (chunk.content, KVEncoding.of("k4v4").nbytes(hybrid.LAYOUT, hybrid.TOKENS))
    layout = KVLayout.gqa(2, 2, 8, Rope(1e4, 8))
    rows = Chunk({name: chunk.kv[name] for name in "kv"}, chunk.local, 7, 5, "page", layout, "b")
    alone, placed = encode_chunk(rows, "k4v4"), kvp.apply_patch(few, start=3)
    for name, value in few.kv.items():
        assert isinstance(value, PackedArray) == (name not in PARTS)
        if name in PARTS:
            assert value.dtype == placed[name].dtype == jnp.bfloat16
            assert (np.abs(np.asarray(value, np.float32) - chunk.kv[name]) <= 2**-8 * np.abs(chunk.kv[name])).all()
            assert (np.asarray(placed[name]) == np.asarray(value)).all()
        else:
            assert (np.asarray(value) == np.asarray(alone.kv[name])).all()
