"""Without optional packages everything imports, and what needs one names its extra and the command."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpatch_jax.errors import MissingExtraError
from kvpatch_jax.models import load
from kvpatch_jax.utils.optional_packages import require
from tests.goldens.load import write_chatting, write_checkpoint
from tests.models.gguf_files import converted, metadata_of, tiny_tensors, write_gguf

ROOT = Path(__file__).parents[2]


def read_image(root: Path) -> None:
    (root / "page.png").write_bytes(b"\x89PNG")
    load(write_checkpoint("qwen2_5_vl", root)).prepare([root / "page.png"])


def read_tokenizer(root: Path) -> None:
    (write_checkpoint("qwen2_5_vl", root) / "tokenizer.json").write_text("{}")
    load(root)


def read_gguf(root: Path) -> None:
    load(write_gguf(root / "m.gguf", metadata_of("llama"), converted(tiny_tensors("llama"), "llama")))


@pytest.mark.parametrize(
    ("packages", "use", "message"),
    [
        (["PIL", "PIL.Image", "PIL.ImageOps"], read_image, r"Pillow: got .*pip install 'kvpatch_jax\[models\]'"),
        (["tokenizers"], read_tokenizer, r"tokenizers: got .*pip install 'kvpatch_jax\[models\]'"),
        (
            ["huggingface_hub"],
            lambda _: load("someone/tiny-model"),
            r"huggingface_hub: .*pip install 'kvpatch_jax\[models\]'",
        ),
        (["gguf", "gguf.gguf_reader"], read_gguf, r"gguf.*: got .*kvpatch_jax\[gguf\]"),
    ],
)
def test_what_needs_a_package_names_its_extra(packages, use, message, tmp_path, monkeypatch):
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=message):
        use(tmp_path)


def test_a_module_that_transformers_lacks_leaves_what_is_imported_of_it():
    kept = require("transformers.utils.logging", "transformers")
    with pytest.raises(MissingExtraError, match=r"No module named 'transformers\.models\.none'"):
        require("transformers.models.none.module", "transformers")
    assert sys.modules["transformers.utils.logging"] is kept


def run(code, folder, *arguments):
    """Runs a program in a process of its own that finds packages of `folder` first; it must not say anything."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


EVERYTHING = """
import importlib, pickle, pkgutil, sys
names = ("PIL", "av", "gguf", "huggingface_hub", "jinja2", "tokenizers", "torch", "torchvision", "transformers")
sys.modules.update(dict.fromkeys(names))
import models
import kvpatch_jax.models
for module in pkgutil.walk_packages(kvpatch_jax.models.__path__, "kvpatch_jax.models."):
    importlib.import_module(module.name)
assert models.mine
load = kvpatch_jax.models.load
assert load.__module__.startswith("kvpatch_jax.models.")
assert pickle.loads(pickle.dumps(load)) is load
"""


def test_everything_is_imported_without_any_of_them_beside_a_users_own_models(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("mine = True\n")
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


@pytest.mark.nightly
@pytest.mark.parametrize(("torch", "known"), [("", True), ("raise RuntimeError", False), ("raise RuntimeError", True)])
def test_a_chat_whatever_torch_is(tmp_path, torch, known):
    """Empty or broken, with or without the metadata of an installed package."""
    directory = write_chatting("qwen2_5_vl", tmp_path / "model")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    if known:
        (tmp_path / "torch-9.0.dist-info").mkdir()
        (tmp_path / "torch-9.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.0\n")
    run(CHAT, tmp_path, directory, tmp_path / "torch" / "__init__.py")


@pytest.mark.nightly
def test_a_wheel_has_one_package_of_ours_and_the_kernels(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [Path(name).parts for name in zipfile.ZipFile(wheel).namelist()]
    assert {parts[0] for parts in names if not parts[0].endswith(".dist-info")} == {"kvpatch_jax", "pallas_kernels"}
    assert ("kvpatch_jax", "models", "families", "registry.py") in names
