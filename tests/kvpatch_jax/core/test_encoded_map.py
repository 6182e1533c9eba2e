"""Maps in factors: within the stated error of the map by NumPy's float64 decomposition, and no larger than they say."""
# pyright: reportArgumentType=false

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from transition_cases import LAYOUT, LAYOUTS, PLAIN, drawn

from kvpatch_jax.core import EncodedMap, KVEncoding, encode_kv, encode_map, is_encoded, unpack_map
from kvpatch_jax.core.encoded_map import MOST_WIDTH, check_ranks, join_layers, split_layers
from kvpatch_jax.errors import InputError, ShapeError
from tests.compilations import compilations

WIDTH = 32


def map_of(*spectra: Any, seed: int = 0) -> np.ndarray:
    """A map [layers, WIDTH, heads, WIDTH] whose heads have given singular values, a list of heads for each layer."""
    rng = np.random.default_rng(seed)
    layers = []
    for heads in spectra:
        own = []
        for values in heads:
            first, second = (np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0] for _ in range(2))
            own.append((first * np.asarray(values)) @ second)
        layers.append(np.stack(own, axis=1))
    return np.stack(layers).astype(np.float32)


def falling(rate: float) -> np.ndarray:
    return np.exp(-rate * np.arange(WIDTH))


WEAK, STRONG, GONE = falling(0.01), falling(0.5), 1e-4 * falling(0.1)
MAPS = map_of([WEAK, STRONG, GONE], [GONE, 0.9 * STRONG, 0.5 * falling(0.2)])


def by_hand(encoded: EncodedMap) -> np.ndarray:
    """Decodes in NumPy, head by head, in float64."""
    numbers, place = np.asarray(encoded.factors).astype(np.float64), 0
    value = np.zeros(encoded.shape)
    rows, width = encoded.rows, encoded.width
    for where in np.ndindex(*encoded.ranks.shape):
        rank = int(encoded.ranks[where])
        if rank == rows:
            head = numbers[place : place + rows * width].reshape(rows, width)
            place += rows * width
        else:
            head = np.zeros((rows, width))
            for _ in range(rank):
                head += np.outer(numbers[place : place + rows], numbers[place + rows : place + rows + width])
                place += rows + width
        value[(*where[:-1], slice(None), where[-1])] = head
    assert place == len(numbers)
    return value


def heads_of(map_: Any) -> np.ndarray:
    return np.moveaxis(np.asarray(map_, np.float64), -2, -3)


@pytest.mark.parametrize("error", [0.05, 0.01, 0.001, 0.0])
def test_every_head_is_within_the_error_or_whole(error: float):
    encoded = encode_map(MAPS, error)
    decoded = np.asarray(encoded)
    assert encoded.shape == decoded.shape == MAPS.shape
    assert decoded.dtype == encoded.dtype == np.float32
    np.testing.assert_allclose(decoded, by_hand(encoded), rtol=0, atol=1e-6)

    left = np.linalg.svd(heads_of(MAPS) - heads_of(decoded), compute_uv=False)[..., 0]
    sizes = np.linalg.svd(heads_of(MAPS), compute_uv=False)
    whole = encoded.ranks == WIDTH
    assert (left[~whole] <= error).all()
    rounded = heads_of(MAPS.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(heads_of(decoded)[whole], rounded[whole])
    # Never fewer directions than the error allows at all, and at a hundredth few more than that.
    least = (sizes > error).sum(-1)
    assert (encoded.ranks >= least).all()
    if error == 0.01:
        assert (encoded.ranks[~whole] <= least[~whole] + 2).all()
        # The last head needs 20 directions, and 16 take as many numbers as all of it.
        np.testing.assert_array_equal(whole, [[True, False, False], [False, False, True]])
        assert (encoded.ranks == 0).tolist() == [[False, False, True], [True, False, False]]
    if error == 0.0:
        assert whole.all()

    # A head that is dropped takes nothing, one of rank r 2·r·W numbers, and a whole one no more than it has.
    numbers = np.where(whole, WIDTH * WIDTH, 2 * WIDTH * encoded.ranks)
    assert encoded.nbytes == 2 * numbers.sum() + 4 * 6
    assert numbers.max() <= WIDTH * WIDTH
    assert (2 * WIDTH * encoded.ranks[~whole] < WIDTH * WIDTH).all()


def test_a_states_error_is_bounded_whatever_the_state():
    encoded = encode_map(MAPS, 0.02)
    rng, lost = np.random.default_rng(1), heads_of(MAPS) - heads_of(encoded)
    worst = np.swapaxes(np.linalg.svd(lost)[2][..., :1, :], -1, -2)
    for state in (rng.normal(size=(WIDTH, 5)), worst):
        moved = np.linalg.norm(lost @ state, axis=(-2, -1)) / np.linalg.norm(state, axis=(-2, -1))
        assert (moved[encoded.ranks < WIDTH] <= 0.02).all()


@pytest.mark.parametrize("name", ["row", "scalar"])
def test_a_decay_is_dropped_or_whole(name: str):
    layout = LAYOUTS[name]
    map_ = drawn(layout)["map"].copy()
    map_[1, :, 2] *= 1e-3
    map_[2] = 0
    encoded = encode_map(map_, 0.01)
    rows = map_.shape[1]
    assert encoded.ranks.tolist() == [[rows] * 3, [rows, rows, 0], [0, 0, 0]]
    wanted = map_.astype(ml_dtypes.bfloat16).astype(np.float32)
    wanted[1, :, 2] = 0
    np.testing.assert_array_equal(np.asarray(encoded), wanted)
    np.testing.assert_array_equal(by_hand(encoded), wanted)
    assert encoded.nbytes == 2 * 5 * rows + 4 * 9


def test_maps_of_other_ranks_compile_nothing_and_layers_decode_to_the_same_bits():
    first, second = encode_map(MAPS, 0.01), encode_map(map_of([STRONG] * 3, [GONE] * 3, seed=1), 0.01)
    gone = encode_map(np.zeros_like(MAPS), 0.01)
    assert (gone.nbytes, gone.factors.shape) == (4 * 6, (0,))
    np.asarray(first)
    with compilations() as compiled:
        others = [np.asarray(second), np.asarray(gone), np.asarray(first)]
    assert not compiled
    assert not others[1].any()

    layers = split_layers(first)
    assert [layer.shape for layer in layers] == [(WIDTH, 3, WIDTH)] * 2
    np.testing.assert_array_equal(np.stack([np.asarray(layer) for layer in layers]), others[2])
    joined = join_layers(layers)
    np.testing.assert_array_equal(np.asarray(joined.factors), np.asarray(first.factors))
    np.testing.assert_array_equal(joined.ranks, first.ranks)
    # Traced, as what is passed to a program of one's own.
    np.testing.assert_allclose(jax.jit(unpack_map)(first), others[2], rtol=0, atol=1e-6)
    assert first.astype(jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(first[1], others[2][1])
    assert repr(first).startswith("EncodedMap([2, 32, 3, 32] in ")


def test_arrays_that_are_no_map_are_refused():
    good = encode_map(MAPS, 0.01)
    check_ranks(good, "map")
    ranks = np.asarray(good.ranks)

    def changed(value: int) -> np.ndarray:
        other = ranks.copy()
        other[0, 1] = value
        return other

    for fields in (
        {"factors": good.factors[:-1]},
        {"factors": np.append(good.factors, good.factors[:1])},
        {"factors": np.asarray(good.factors, np.float32)},
        {"factors": good.factors[None]},
        {"ranks": ranks.astype(np.float32)},
        {"ranks": ranks.astype(np.int64)},
        *({"ranks": changed(value)} for value in (-1, 0, 16, 31, 33, 2**31 - 1, -(2**31))),
        {"rows": 2**40, "width": 2**40},
        {"rows": WIDTH - 1},
    ):
        with pytest.raises(ShapeError, match="map: got"):
            check_ranks(dataclasses.replace(good, **fields), "map")
    with pytest.raises(ShapeError, match=f"expected at most {MOST_WIDTH}"):
        encode_map(np.zeros((1, MOST_WIDTH + 1, 1, 1), np.float32), 0.1)


# --------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize("error", [0, 0.0, 0.01, 0.5, 0.125, 1e-9, 0.999999999, 1e-5])
def test_words_of_errors_are_read_back(error: float):
    for bits, group in itertools.product((4, 8), (32, None)):
        encoding = KVEncoding(bits, 3, group, error)
        assert KVEncoding.of(str(encoding)) == encoding
        assert KVEncoding.of(str(encoding).replace("_", ".")) == encoding
        # As a part of an object's name is.
        assert set(str(encoding)) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
        assert len(str(encoding)) <= 40


def test_words_and_errors_that_are_none_are_refused(unchecked):
    assert str(KVEncoding.of("k4v4m0.01")) == "k4v4g32m0_01"
    assert str(KVEncoding(4, 4, 32)) == "k4v4g32"
    assert KVEncoding.of("k4v4g32").map_error is None
    for word in ("k4v4g32m", "k4v4g32m1", "k4v4g32m1.5", "k4v4g32m-0.1", "k4v4g32mnan", "k4v4m.1", "k4v4g32m0.",
                 "k4v4g32m0.0000000001", "k4v4g32m1e-3", "m0.1", "k4v4g32m0.1g32", "k4v4g32m0.01\n"):  # fmt: skip
        with pytest.raises(InputError, match="encoding: got"):
            KVEncoding.of(word)
    for error in (-0.1, 1, 1.0, 2.5, float("nan"), float("inf"), "0.1", True, 1e-10, 0.1 + 0.2, [0.1], np.float32(0.1)):
        with pytest.raises(InputError, match=r"encoding\.map_error: got"):
            KVEncoding(map_error=error)


def test_bytes_are_bounded_and_no_transition_is_changed_by_no_error():
    kv = drawn(LAYOUT)
    encoding = KVEncoding.of("k4v4m0.01")
    encoded = encode_kv(LAYOUT, kv, encoding)
    rows = {name: np.concatenate([kv[name]] * 3)[:5] for name in "kv"}
    assert list(encode_kv(PLAIN, rows, encoding)) == ["k", "v"]
    assert sum(value.nbytes for value in encoded.values()) <= encoding.nbytes(LAYOUT, 7)
    worst = encode_kv(LAYOUT, kv, KVEncoding.of("k4v4m0"))
    assert sum(value.nbytes for value in worst.values()) == encoding.nbytes(LAYOUT, 7)
    before = encode_kv(LAYOUT, kv, KVEncoding.of("k4v4"))
    for values, decoded in ((kv, set()), (before, {"k", "v"}), (encoded, {"k", "v", "map"})):
        assert {name for name, value in values.items() if is_encoded(value)} == decoded
    assert encoding.nbytes(PLAIN, 7) == KVEncoding.of("k4v4").nbytes(PLAIN, 7)
    for name in ("state", "tail"):
        np.testing.assert_array_equal(encoded[name], before[name])
    assert isinstance(before["map"], jax.Array)
    assert before["map"].dtype == jnp.bfloat16
