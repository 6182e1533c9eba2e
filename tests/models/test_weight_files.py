"""Safetensors load and save bit for bit, whole or in shards; what is damaged, wrong or changed is refused by name."""

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from kvpatch_jax.errors import ConfigError, KVPatchError, WeightsError
from kvpatch_jax.models import load
from kvpatch_jax.models.checkpoints import (
    SafetensorsSource,
    TensorEntry,
    filling,
    flatten_params,
    load_weights,
    save_weights,
)
from kvpatch_jax.models.families.parsed import MOST_LAYERS
from tests.goldens.load import write_checkpoint
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


# ------------------------------------------------------------------------------------------- regions, types and threads


TYPES = ["float64", "float32", "float16", "bfloat16"]


def draw(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(math.prod(shape)).standard_normal(shape) * 3
    return np.asarray(values, jnp.dtype(dtype))


def write(root: Path, **tensors: np.ndarray) -> SafetensorsSource:
    save_file(tensors, root / "model.safetensors")
    return SafetensorsSource(root)


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


# -------------------------------------------------------------------------------------------------- damaged checkpoints


CONFIG = "config.json"


@pytest.fixture
def directory(tiny_directory, tmp_path, unchecked) -> Path:
    """A copy of the tiny InternVL, to be damaged."""
    return shutil.copytree(tiny_directory("internvl"), tmp_path / "model")


def refused(source: Any, message: str, error: type[KVPatchError] = ConfigError, **options: Any) -> None:
    """Holds an error of `load` against what it is to say, in one line."""
    with pytest.raises(error, match=message) as raised:
        load(source, **options)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 2500
    assert "expected" in str(raised.value)


def test_a_name_of_no_directory_is_refused_and_one_in_the_hubs_cache_told_where_its_files_are(directory, tmp_path):
    refused("x" * 5000, r"got 'x{79}, which cannot be read \(File name too long\); expected a checkpoint's directory")
    refused(Path("/nowhere/a/b"), r"got no such file; expected .*, or .*load\('owner/name'\)")
    root = tmp_path / "models--someone--tiny"
    (root / "snapshots").mkdir(parents=True)
    directory.rename(root / "snapshots" / "abc")
    refused(root, r"a repository in the hub's cache, whose files are in .*/models--someone--tiny/snapshots/abc$")
    assert load(root / "snapshots" / "abc").layout.layers == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": [3]}, r"ignore \[3\]; expected a list of keys and tensor names"),
        ({"ignore": ["text_confg"]}, r"ignore 'text_confg'; expected a key of .*config\.json, or"),
        ({"revision": ""}, "revision ''; expected a commit, tag or branch, or None"),
    ],
)
def test_an_argument_that_is_none_is_refused(directory, options, message):
    refused(directory, f"load: got {message}", **options)


CONTENTS = {
    "vast header": struct.pack("<Q", 1 << 62) + b"{}",
    "pointer": b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, "pipe", "no plain file of at most"),
        (CONFIG, "link", "a link to nothing; expected a Hugging Face"),
        (CONFIG, "pointer", "a pointer of Git LFS; .*`git lfs pull` fetches it"),
        (WEIGHTS, "pipe", "a broken link or no plain file"),
        (WEIGHTS, "pointer", "got a pointer of Git LFS: `git lfs pull` fetches"),
        (WEIGHTS, "vast header", "damaged"),
    ],
)
def test_what_is_no_file_of_its_kind_is_refused(directory, name, content, message):
    (directory / name).unlink()
    if content in CONTENTS:
        (directory / name).write_bytes(CONTENTS[content])
    else:
        os.mkfifo(directory / name) if content == "pipe" else (directory / name).symlink_to("/nowhere")
    refused(directory, message, ConfigError if name == CONFIG else WeightsError)


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_more_layers_than_any_model_has_are_refused_before_they_are_counted(directory, part):
    """Reading goes through layers one by one: 10⁹ of them once took the machine's memory."""
    write_checkpoint("internvl", directory, **{part: {"num_hidden_layers": 10**9}})
    refused(directory, f"num_hidden_layers {10**9}; expected at most {MOST_LAYERS} layers")


def test_a_dtype_that_no_model_here_has_is_refused_unless_another_is_asked_for(directory):
    write_checkpoint("internvl", directory, dtype="float64")
    refused(directory, "got dtype 'float64'; expected 'float32', 'bfloat16' or 'float16'")
    assert load(directory, dtype="bfloat16").config.text.dtype == "bfloat16"


def test_weights_of_another_name_or_family_are_named(directory, tiny_directory):
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")
    message = r"got pytorch_model\.bin, which is not read; expected model.safetensors, or model.safetensors.index.json"
    refused(directory, message, WeightsError)
    shutil.copy(tiny_directory("qwen2_5_vl") / WEIGHTS, directory / WEIGHTS)
    refused(directory, r"got no tensor 'language_model\.model\.embed_tokens\.weight', .*expected", WeightsError)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff\xfe{{", "no text .*expected a template in UTF-8"),
        ("chat_template.json", b'{"chat_template": 3}', "chat_template 3; expected a text, or a list"),
        ("chat_template.json", b'{"chat_template": [{"name": "a", "template": ""}]}', r"\['a'\]; expected one named"),
        ("tokenizer.json", b"{}", "expected a tokenizer"),
        ("generation_config.json", b"[]", "got a list; expected a table"),
        ("preprocessor_config.json", b'{"image_mean": "x"}', "image_mean: got 'x'"),
    ],
)
def test_what_lies_beside_the_weights_is_read_or_named(directory, name, content, message):
    (directory / name).write_bytes(content)
    refused(directory, message)
