"""Any region of a tensor is read as NumPy has it, and a file that lies, changes or ends is an error."""

import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvpatch_jax.errors import WeightsError
from kvpatch_jax.models.checkpoints import (
    SafetensorsSource,
    TensorEntry,
    filling,
    load_weights,
)

TYPES = ["float64", "float32", "float16", "bfloat16"]


def draw(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(math.prod(shape)).standard_normal(shape) * 3
    return np.asarray(values, jnp.dtype(dtype))


def write(root: Path, **tensors: np.ndarray) -> SafetensorsSource:
    save_file(tensors, root / "model.safetensors")
    return SafetensorsSource(root)


# ----------------------------------------------------------------------------------------------- regions and types


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("filling")


@given(data=st.data())
def test_any_region_in_any_order_and_type_is_numpys(root, data):
    """Pieces of a few bytes, so that every shape falls apart in every way."""
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    spans = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    stored, dtype = (data.draw(st.sampled_from(TYPES)) for _ in range(2))
    values = draw(shape, stored)
    source = write(root, before=draw((3,), "float32"), tensor=values, behind=draw((5,), "float16"))
    expected = np.asarray(values[tuple(slice(*span) for span in spans)], jnp.dtype(dtype)).transpose(order)

    out = np.zeros(expected.shape, jnp.dtype(dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "PIECE", data.draw(st.sampled_from([1, 24, 100, 1 << 20])))
        for piece in filling.pieces(spans, values.dtype.itemsize, data.draw(st.booleans())):
            place = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(piece, spans, strict=True))
            part = source.read("tensor", tuple(slice(*span) for span in piece))
            filling.convert(part, out.transpose(np.argsort(order))[(*place, ...)])
        region = tuple(slice(*span) for span in spans)
        assert np.array_equal(source.read("tensor", region), values[region])
    assert out.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_a_number_that_is_not_finite_is_named_with_its_place(tmp_path, dtype, wrong):
    info = ml_dtypes.finfo(jnp.dtype("float32" if dtype == "float64" else dtype))
    values = np.asarray([[info.max, info.min], [info.smallest_subnormal, -0.0], [1, 2]], jnp.dtype(dtype))
    entries, expected = [TensorEntry("tensor", ("a",))], {("a",): jax.ShapeDtypeStruct((3, 2), jnp.float32)}
    assert np.array_equal(load_weights(write(tmp_path, tensor=values), entries, expected)["a"], values)

    values[2, 1] = wrong
    source = write(tmp_path, tensor=values)
    with pytest.raises(WeightsError, match=r"tensor 'tensor': got -?(nan|inf) at \[2, 1\]; expected finite"):
        load_weights(source, entries, expected)

    # Bounds may be infinite, and never NaN.
    bounds = [TensorEntry("tensor", ("a",), infinite=True)]
    if np.isnan(wrong):
        with pytest.raises(WeightsError, match=r"got -?nan at \[2, 1\]"):
            load_weights(source, bounds, expected)
    else:
        assert load_weights(source, bounds, expected)["a"][2, 1] == wrong


# --------------------------------------------------------------------------------------------------- whole loads


def big(root: Path) -> tuple[list[TensorEntry], dict, dict[str, np.ndarray]]:
    """Parameters above the size at which threads share the work, stacked and transposed, and one below it."""
    tensors = {f"layers.{layer}.w": draw((700, 520), "bfloat16") + layer for layer in range(7)}
    tensors |= {"embed": draw((5000, 450), "float32"), "norm": draw((9,), "float32")}
    save_file(tensors, root / "model.safetensors")
    entries = [
        TensorEntry("layers.{layer}.w", ("layers", "kernel"), permute=(1, 0)),
        TensorEntry("embed", ("embed",)),
        TensorEntry("norm", ("norm",)),
    ]
    shapes = {("layers", "kernel"): (7, 520, 700), ("embed",): (5000, 450), ("norm",): (9,)}
    return entries, {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}, tensors


def test_threads_fill_what_one_thread_fills_and_name_the_first_wrong_tensor(tmp_path, monkeypatch):
    entries, expected, tensors = big(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    params = load_weights(SafetensorsSource(tmp_path), entries, expected)
    for layer in range(7):
        assert np.array_equal(params["layers"]["kernel"][layer], tensors[f"layers.{layer}.w"].T.astype(np.float32))
    assert np.array_equal(params["embed"], tensors["embed"])
    assert np.array_equal(params["norm"], tensors["norm"])

    for layer in (2, 5):
        tensors[f"layers.{layer}.w"][600, 7] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"'layers\.2\.w': got nan at \[600, 7\]"):
        load_weights(SafetensorsSource(tmp_path), entries, expected)


# ---------------------------------------------------------------------------------------- files that are not as said


def test_a_file_that_changes_or_ends_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    entries, expected, _ = big(tmp_path)
    path = tmp_path / "model.safetensors"
    source, content = SafetensorsSource(tmp_path), path.read_bytes()
    path.write_bytes(content)  # the same again: nobody could tell from some other content in time
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    with pytest.raises(WeightsError, match="was written to while it was read"):
        load_weights(source, entries, expected)

    source = SafetensorsSource(tmp_path)
    os.truncate(path, 1 << 20)
    ends = r"model\.safetensors: got the end of the file; expected \d+ bytes from byte \d+ on"
    with pytest.raises(WeightsError, match=ends):
        load_weights(source, entries, expected)
