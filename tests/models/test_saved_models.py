"""A saved model is read again bit for bit, here and by transformers, and a fingerprint tells models apart."""

import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvpatch_jax.models import load, save
from kvpatch_jax.models.checkpoints import flatten_params
from kvpatch_jax.models.fingerprint import fingerprint_of
from kvpatch_jax.models.inputs.processors import process_images
from tests.goldens.load import GOLDENS, write_checkpoint
from tests.goldens.table import FAMILIES
from tests.models.conftest import REGIMES

WIDE = ("correction", "decay_rate", "decay_bias")
"""Parameters of float32 in every file."""
LAYOUTS = ("deepseek_v3", "phi3_short", "qwen3_5_moe_text")
"""Experts and shared ones above a dense layer; fused projections; fused experts and linear attention."""
RELAID = ("qwen3_vl_moe", "qwen3_5_moe")
"""Experts are written as released; the goldens have them otherwise."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in LAYOUTS else pytest.mark.nightly) for name in FAMILIES]
)
def test_a_saved_model_is_the_one_that_was_read(tiny, family, tmp_path):
    backbone = tiny(family)
    original = load_file(write_checkpoint(family, tmp_path / "original") / "model.safetensors")
    written = load_file(copy := save(backbone, tmp_path / "copy") / "model.safetensors")
    names = {name for name in written if family not in RELAID or ".experts." not in name}
    assert names <= original.keys()
    assert all(written[name].tobytes() == original[name].tobytes() for name in names)
    again = load(tmp_path / "copy", angles="float32", regime=REGIMES.get(family))
    assert again.config.text == backbone.config.text
    assert again.layout == backbone.layout
    assert again.fingerprint == backbone.fingerprint
    host = again.replaced(jax.device_get(again.parameters))  # where no shape compiles a program
    half = load(cast := save(host, tmp_path / "half", dtype="bfloat16"), regime=REGIMES.get(family))
    assert (cast / copy.name).stat().st_size < 0.6 * copy.stat().st_size
    assert half.fingerprint != again.fingerprint
    for path, leaf in flatten_params(half.parameters).items():
        assert leaf.dtype == ("float32" if path[-1] in WIDE else "bfloat16"), path


def test_the_fingerprint_follows_a_weight(tiny):
    backbone = tiny("llama2")
    values = jax.tree.map(np.array, backbone.parameters)
    assert backbone.replaced(values).fingerprint == backbone.fingerprint
    values["decoder"]["norm"]["weight"][3] *= np.float32(1.0001)
    assert backbone.replaced(values).fingerprint != backbone.fingerprint


SHIPPED = sorted(path.parent for path in (Path(__file__).parents[2] / "evals" / "trained").glob("*/*/config.json"))
TEXT = "Where is the total of 12.5? It's\n\n here: q7 <|im_start|>"
NO_CLASS = {"deepseek_vl2", "deepseek_vl2_tiny", "phi3_v"}
"""Families whose configuration transformers has no class for; so has Kimi-VL's released form."""
PROCESSORS = ("qwen2_5_vl", "llava", "qwen2")
OTHER_PROCESSORS = {path.parent.name for path in GOLDENS.glob("*/preprocessor_config.json")} - {*NO_CLASS, *PROCESSORS}
MORE = [pytest.param(name, marks=pytest.mark.nightly) for name in sorted(OTHER_PROCESSORS)]


def described(config: Any) -> dict[str, Any]:
    """A configuration as a table, without who wrote it, its precision and what its tensors show."""
    drop = ("dtype", "transformers_version", "_name_or_path", "tie_word_embeddings")
    strip = lambda value: (
        {key: strip(part) for key, part in value.items() if key not in drop} if isinstance(value, dict) else value
    )
    return strip(config.to_dict())


@pytest.mark.parametrize("family", [*PROCESSORS, *MORE])
def test_transformers_reads_in_a_saved_directory_what_was_in_the_first(family, tmp_path):
    from transformers import AutoConfig, AutoImageProcessor

    first = write_checkpoint(family, tmp_path / "first")
    backbone = load(first)
    saved = save(backbone, tmp_path / "saved")
    again = load(saved)
    assert again.image_config == backbone.image_config
    before, after = AutoConfig.from_pretrained(first), AutoConfig.from_pretrained(saved)
    assert type(before) is type(after)
    assert described(before) == described(after)
    if family not in ("kimi_vl", "qwen2"):  # Kimi's image processor needs torchvision; Qwen2 has none
        before, after = (AutoImageProcessor.from_pretrained(root, backend="pil") for root in (first, saved))
        assert type(before) is type(after)
        image = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
        expected = before(image, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(after(image, return_tensors="np")["pixel_values"], expected)
        np.testing.assert_array_equal(process_images([image], again.image_config)["pixel_values"], expected)


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_transformers_reads_what_is_shipped_and_what_is_saved_of_it(directory, tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast

    saved = save(load(directory), tmp_path / "saved")
    expected = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    for root in (directory, saved):
        if directory.name != "kimi_vl":
            assert AutoConfig.from_pretrained(root).model_type in directory.name
            assert AutoImageProcessor.from_pretrained(root).patch_size > 0
        # transformers takes its own tokenizer's rules for Qwen3.5, whatever the files say.
        reader = PreTrainedTokenizerFast if directory.name == "qwen3_5" else AutoTokenizer
        assert reader.from_pretrained(root)(TEXT)["input_ids"] == expected


def parameters() -> dict:
    draw = np.random.default_rng(0).standard_normal
    return {
        "layers": {"kernel": draw((3, 5, 4), np.float32), "bias": draw((3, 4), np.float32)},
        "norm": np.ones(4, np.float32),
        "scale": np.full((), 2, np.float32),
        "none": np.zeros((0, 3), np.float32),
    }


def changed(path: tuple[str, ...], change) -> dict:
    values = parameters()
    owner = values
    for part in path[:-1]:
        owner = owner[part]
    owner[path[-1]] = change(owner[path[-1]])
    return values


LARGE = np.repeat(np.arange(5, dtype=np.float32), 1 << 21).reshape(5, 1 << 21)
CHANGES = {
    "one unit in the last place": changed(
        ("norm",), lambda a: a * np.array([1, 1, np.nextafter(np.float32(1), 2), 1], np.float32)
    ),
    "zero's sign": changed(("norm",), lambda a: a * np.array([0, 1, 1, 1], np.float32)),
    "zero's other sign": changed(("norm",), lambda a: a * np.array([-0.0, 1, 1, 1], np.float32)),
    "two rows in each other's place": changed(("layers", "kernel"), lambda a: a[:, [1, 0, 2, 3, 4]]),
    "two layers in each other's place": changed(("layers", "kernel"), lambda a: a[[1, 0, 2]]),
    "the same bytes in another shape": changed(("layers", "kernel"), lambda a: a.reshape(3, 4, 5)),
    "the same bytes in another type": changed(("layers", "kernel"), lambda a: a.view(np.int32)),
    "rounded": changed(("layers", "kernel"), lambda a: a.astype(jnp.bfloat16)),
    "another scalar": changed(("scale",), lambda a: np.full_like(a, 3)),
    "empty in another shape": changed(("none",), lambda a: a.reshape(3, 0)),
    "under another name": {"more": parameters()},
    "one less": {name: value for name, value in parameters().items() if name != "none"},
}


def test_every_other_content_has_another_fingerprint():
    fingerprints = {name: fingerprint_of([b"settings"], values) for name, values in CHANGES.items()}
    fingerprints["itself"] = fingerprint_of([b"settings"], parameters())
    fingerprints["other settings"] = fingerprint_of([b"setting", b"s"], parameters())
    assert len(set(fingerprints.values())) == len(fingerprints)


def test_large_parameters_have_other_fingerprints_in_another_order():
    """Five rows of 8 MiB, whichever of them share a piece of 16 MiB."""
    orders = ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [2, 3, 0, 1, 4], [0, 1, 2, 4, 3], [0, 1, 2, 3])
    fingerprints = {fingerprint_of([], {"large": LARGE[order]}) for order in orders}
    assert len(fingerprints) == len(orders)


def test_threads_and_where_it_lies_do_not_change_it(monkeypatch):
    expected = fingerprint_of([], parameters())
    assert fingerprint_of([], jax.tree.map(jnp.asarray, parameters())) == expected
    assert fingerprint_of([], changed(("layers", "kernel"), np.asfortranarray)) == expected
    assert fingerprint_of([], dict(reversed(parameters().items()))) == expected
    values = {"large": jax.device_put(LARGE)}
    expected = fingerprint_of([], {"large": LARGE})
    assert fingerprint_of([], values) == expected
    elsewhere = types.SimpleNamespace(platform="gpu")  # from an accelerator it is fetched by pieces
    monkeypatch.setattr(type(values["large"]), "devices", lambda _: [elsewhere])
    assert fingerprint_of([], values) == expected
