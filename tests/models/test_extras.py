"""Packages of the extra `models` are imported when they are needed, and named with the extra when they are absent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpatch_jax.errors import ConfigError, MissingExtraError
from kvpatch_jax.models import load
from kvpatch_jax.models.inputs.chat import ChatTemplate
from kvpatch_jax.utils.optional_packages import require
from tests.goldens.load import write_chatting, write_checkpoint

ROOT = Path(__file__).parents[2]
COMMAND = r"pip install 'kvpatch_jax\[models\]'"


@pytest.fixture
def hidden(monkeypatch):
    """Hides packages from the import system."""

    def hide(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


def test_an_image_file_without_pillow_names_the_extra(tmp_path, hidden):
    backbone = load(write_checkpoint("qwen2_5_vl", tmp_path))
    (tmp_path / "page.png").write_bytes(b"\x89PNG")
    hidden("PIL", "PIL.Image", "PIL.ImageOps")
    with pytest.raises(MissingExtraError, match=f"Pillow: got .*{COMMAND}"):
        backbone.prepare([tmp_path / "page.png"])


def test_a_tokenizer_without_its_package_names_the_extra(tmp_path, hidden):
    directory = write_checkpoint("qwen2_5_vl", tmp_path)
    (directory / "tokenizer.json").write_text("{}")
    hidden("tokenizers")
    with pytest.raises(MissingExtraError, match=f"tokenizers: got .*{COMMAND}"):
        load(directory)


def test_a_chat_template_without_jinja2_names_the_extra(hidden):
    hidden("jinja2")
    with pytest.raises(MissingExtraError, match=f"jinja2: got .*{COMMAND}"):
        ChatTemplate("{{ messages }}").render([])


def test_a_module_that_transformers_lacks_leaves_what_is_imported_of_it():
    kept = require("transformers.utils.logging", "transformers")
    with pytest.raises(MissingExtraError, match=r"No module named 'transformers\.models\.none'"):
        require("transformers.models.none.module", "transformers")
    assert sys.modules["transformers.utils.logging"] is kept


def run(code, tmp_path, *arguments):
    """Runs a program in a process of its own that finds packages of `tmp_path` too; it must not say anything."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


EVERYTHING = """
import importlib, pkgutil, sys
names = ("PIL", "av", "gguf", "huggingface_hub", "jinja2", "tokenizers", "torch", "torchvision", "transformers")
sys.modules.update(dict.fromkeys(names))
import kvpatch_jax.models
for module in pkgutil.walk_packages(kvpatch_jax.models.__path__, "kvpatch_jax.models."):
    importlib.import_module(module.name)
"""


def test_everything_is_imported_without_any_of_them(tmp_path):
    run(EVERYTHING, tmp_path)


CHAT = """
import logging
import sys
import numpy as np
from kvpatch_jax.models import load
logging.getLogger("kvpatch_jax.utils.compiling").setLevel(logging.ERROR)  # on a busy machine
backbone, image = load(sys.argv[1]), np.full((24, 32, 3), 99, np.uint8)
content = [{"type": "image", "image": image}, {"type": "text", "text": "What <|im_end|>?"}]
prompt = backbone.chat([{"role": "user", "content": content}])
assert prompt["pixel_values"].shape[1:] == (96,)
assert np.asarray(backbone.prefill(backbone.embed(**prompt)).logits).any()
assert getattr(sys.modules.get("torch"), "__file__", "broken") in (sys.argv[2], "broken")
"""


@pytest.mark.parametrize(
    ("torch", "known"),
    [("raise ModuleNotFoundError", False), ("", True), ("raise RuntimeError", False), ("raise RuntimeError", True)],
)
def test_a_chat_whatever_torch_is(tmp_path, torch, known):
    """Absent, empty or broken, with or without the metadata of an installed package."""
    directory = write_chatting("qwen2_5_vl", tmp_path / "model")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    if known:
        (tmp_path / "torch-9.0.dist-info").mkdir()
        (tmp_path / "torch-9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.0\n")
    run(CHAT, tmp_path, directory, tmp_path / "torch" / "__init__.py")


def test_a_directory_that_is_not_there_is_no_name_of_the_hub(tmp_path):
    with pytest.raises(ConfigError, match=r"got no such file; expected .*, or .*load\('owner/name'\)"):
        load(tmp_path / "a" / "b")
