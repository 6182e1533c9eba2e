"""Packages of the extra `models` are imported when they are needed, and named with the extra when they are absent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpatch_jax.errors import ConfigError, MissingExtraError
from kvpatch_jax.models import load
from kvpatch_jax.models.inputs.chat import ChatTemplate
from tests.goldens.load import write_checkpoint

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


def test_models_is_imported_without_any_of_them():
    names = ("PIL", "tokenizers", "jinja2", "huggingface_hub")
    absent = f"import sys; sys.modules.update(dict.fromkeys({names})); import kvpatch_jax.models"
    subprocess.run([sys.executable, "-c", absent], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize(
    ("torch", "known"),
    [("raise ModuleNotFoundError", False), ("", True), ("raise RuntimeError", False), ("raise RuntimeError", True)],
)
def test_transformers_is_imported_whatever_torch_is(tmp_path, torch, known):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    if known:
        (tmp_path / "torch-9.0.dist-info").mkdir()
        (tmp_path / "torch-9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.0\n")
    code = """
from kvpatch_jax.utils.optional_packages import require
processor = require("transformers.models.clip.image_processing_pil_clip", "transformers").CLIPImageProcessorPil()
assert processor.size["shortest_edge"] == 224
require("transformers.models.auto.tokenization_auto", "transformers").AutoTokenizer
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_a_directory_that_is_not_there_is_no_name_of_the_hub(tmp_path):
    with pytest.raises(ConfigError, match=r"got no such file; expected .*, or .*load\('owner/name'\)"):
        load(tmp_path / "a" / "b")
