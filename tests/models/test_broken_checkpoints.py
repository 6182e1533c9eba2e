"""`load` refuses what is no checkpoint, or a damaged one, by a typed error of one line, soon and in little memory."""

import os
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.errors import ConfigError, KVPatchError, WeightsError
from kvpatch_jax.models import load
from kvpatch_jax.models.families.parsed import MOST_LAYERS
from tests.goldens.load import write_checkpoint

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SECONDS = 2.0
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def directory(tiny_directory, tmp_path) -> Path:
    """A copy of the tiny InternVL, to be damaged."""
    return shutil.copytree(tiny_directory("internvl"), tmp_path / "model")


def refused(given: Any, message: str, error: type[KVPatchError] = ConfigError, **options: Any) -> None:
    """Holds an error of `load` against what it is to say: one line, within two seconds of this process's time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(error, match=message) as raised:
        load(given, **options)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 2500
    assert "expected" in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < SECONDS


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
        ({"buckets": 64}, "buckets 64; expected a Buckets, or None"),
        ({"revision": ""}, "revision ''; expected a commit, tag or branch, or None"),
    ],
)
def test_an_argument_that_is_none_is_refused(tiny_directory, options, message):
    refused(tiny_directory("internvl"), f"load: got {message}", **options)


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
