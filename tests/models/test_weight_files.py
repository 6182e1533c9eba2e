"""Safetensors load and save bit for bit, whole or in shards; a damaged file or wrong tensor is refused by name."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax.errors import WeightsError
from kvpatch_jax.models.checkpoints import SafetensorsSource, TensorEntry, flatten_params, load_weights, save_weights
from tests.goldens.redraw import redraw_all

ENTRIES = [
    TensorEntry("embed.weight", ("embedding",)),
    TensorEntry("layers.{layer}.proj.weight", ("layers", "kernel"), permute=(1, 0)),
    TensorEntry("layers.{layer}.experts.{expert}.weight", ("layers", "experts"), permute=(1, 0)),
    TensorEntry("layers.{layer}.norm.weight", ("norm_{layer}", "weight")),
    TensorEntry("stem.weight", ("stem", "kernel"), permute=(1, 2, 0)),
    TensorEntry("patch.weight", ("patch", "kernel"), permute=(1, 2, 3, 4, 0), file_shape=(6, 3, 2, 2, 2)),
]
SHAPES = {
    ("embedding",): (5, 4),
    ("layers", "kernel"): (3, 4, 7),
    ("layers", "experts"): (3, 2, 4, 2),
    **{(f"norm_{layer}", "weight"): (4,) for layer in range(3)},
    ("stem", "kernel"): (3, 2, 5),
    ("patch", "kernel"): (24, 6),
}
EXPECTED = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()}


WEIGHTS = "model.safetensors"


def file_tensors() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (5, 4), "patch.weight": (6, 3, 2, 2, 2)}
    shapes["stem.weight"] = (5, 3, 2)
    for layer in range(3):
        shapes |= {f"layers.{layer}.proj.weight": (7, 4), f"layers.{layer}.norm.weight": (4,)}
        shapes |= {f"layers.{layer}.experts.{expert}.weight": (2, 4) for expert in range(2)}
    return redraw_all(shapes)


def write_shards(root: Path, tensors: dict[str, np.ndarray]) -> None:
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, root / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_load_permutes_stacks_and_flattens(tmp_path, sharded):
    tensors = file_tensors()
    write_shards(tmp_path, tensors) if sharded else save_file(tensors, tmp_path / WEIGHTS)
    params = load_weights(SafetensorsSource(tmp_path), ENTRIES, EXPECTED)
    assert {path: leaf.shape for path, leaf in flatten_params(params).items()} == SHAPES
    for layer in range(3):
        assert np.array_equal(params["layers"]["kernel"][layer], tensors[f"layers.{layer}.proj.weight"].T)
        assert np.array_equal(params[f"norm_{layer}"]["weight"], tensors[f"layers.{layer}.norm.weight"])
        for expert in range(2):
            value = tensors[f"layers.{layer}.experts.{expert}.weight"]
            assert np.array_equal(params["layers"]["experts"][layer, expert], value.T)
    assert np.array_equal(params["embedding"], tensors["embed.weight"])
    assert np.array_equal(params["stem"]["kernel"], tensors["stem.weight"].transpose(1, 2, 0))
    assert np.array_equal(params["patch"]["kernel"], tensors["patch.weight"].reshape(6, 24).T)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_saved_weights_are_those_that_were_loaded(tmp_path, dtype):
    tensors = {name: value.astype(dtype) for name, value in file_tensors().items()}
    save_file(tensors, tmp_path / WEIGHTS)
    typed = {path: jax.ShapeDtypeStruct(leaf.shape, dtype) for path, leaf in EXPECTED.items()}
    params = load_weights(SafetensorsSource(tmp_path), ENTRIES, typed)
    path = save_weights(tmp_path / "again", params, ENTRIES)
    again = load_file(path)
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        assert again[name].dtype == value.dtype
        assert again[name].tobytes() == value.tobytes(), name
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    save_file(file_tensors(), tmp_path / WEIGHTS)
    before = (tmp_path / WEIGHTS).read_bytes()
    with pytest.raises(WeightsError):
        save_weights(tmp_path, {"other": jnp.zeros((5, 4))}, ENTRIES)
    assert (tmp_path / WEIGHTS).read_bytes() == before


PROJ = "layers.1.proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({PROJ: None}, r"no tensor 'layers\.1\.proj\.weight'; .*shape \(7, 4\).*has 'embed\.weight'"),
        ({PROJ: np.ones((4, 7), np.float32)}, r"shape \(4, 7\); expected \(7, 4\)"),
        ({PROJ: np.ones((7, 4), np.int32)}, r"'layers\.1\.proj\.weight' of type I32; expected one of F"),
        (dict.fromkeys(file_tensors()), r"no tensor 'embed\.weight', 'layers\.0\.\S* .* and \d more; .*has 'other'"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, change, message):
    tensors = file_tensors() | {"other": np.ones(3, np.float32)} | change
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / WEIGHTS)
    with pytest.raises(WeightsError, match=message):
        load_weights(SafetensorsSource(tmp_path), ENTRIES, EXPECTED)


def test_a_whole_file_is_taken_before_an_index_of_shards(tmp_path):
    """As transformers does: shards of an earlier save may lie beside it."""
    write_shards(tmp_path, {name: value + 1 for name, value in file_tensors().items()})
    save_file(file_tensors(), tmp_path / WEIGHTS)
    source = SafetensorsSource(tmp_path)
    assert all(np.array_equal(source.read(name), value) for name, value in file_tensors().items())


def test_a_tensor_in_two_shards_is_refused_with_both(tmp_path):
    write_shards(tmp_path, file_tensors())
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"embed.weight": np.zeros((5, 4), np.float32)}, second)
    with pytest.raises(
        WeightsError, match=r"'embed\.weight' in two shards, model-00001-\S+ and model-00002-\S+; expected"
    ):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "that is no index"),
        ('{"weight_map": {"a": "absent.safetensors"}}', r"absent\.safetensors.*expected one that is there"),
        ('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "expected it in model-00001"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path, text, message):
    write_shards(tmp_path, file_tensors())
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("keep", [5, 900])
def test_a_file_that_was_cut_short_is_refused(tmp_path, keep):
    path = tmp_path / WEIGHTS
    save_file(file_tensors(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors: got a damaged"):
        load_weights(SafetensorsSource(tmp_path), ENTRIES, EXPECTED)
