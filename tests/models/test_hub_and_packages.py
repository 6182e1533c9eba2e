"""A model is found by its hub name, offline too; without a file, right or package the error says what to do."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from kvpatch_jax.errors import ConfigError, MissingExtraError
from kvpatch_jax.models import load
from kvpatch_jax.models.hub import snapshot
from kvpatch_jax.utils.optional_packages import require
from tests.goldens.load import write_chatting, write_checkpoint
from tests.models.fake_hub import COMMIT, FakeHub, serving
from tests.models.gguf_files import converted, metadata_of, tiny_tensors, write_gguf

# -------------------------------------------------------------------------------------------------------------- the hub


NAME = "someone/tiny-model"
WHOLE = {"config.json", "model.safetensors", "preprocessor_config.json", "chat_template.jinja"}


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[FakeHub]:
    """A hub with one small repository, and an empty cache; `huggingface_hub` has read neither from the environment."""
    with serving() as found:
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        for key, value in {
            "ENDPOINT": found.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
        found.repositories[NAME] = repository(tmp_path / "repository")
        yield found


def repository(root: Path) -> Path:
    """A checkpoint, and beside it what is not to be downloaded."""
    write_checkpoint("qwen2_5_vl", root)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "README.md", "onnx/model.onnx"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x" * 1000)
    (root / "chat_template.jinja").write_text("{{ messages }}")
    (root / "onnx" / "config.json").write_text("{}")
    return root


def test_a_name_loads_the_model_of_its_repository(hub):
    backbone, same = load(NAME), load(hub.repositories[NAME])
    jax.tree.map(np.testing.assert_array_equal, backbone.parameters, same.parameters)
    assert backbone.fingerprint == same.fingerprint


@pytest.mark.parametrize("pinned", [None, "main"])
def test_what_is_downloaded_is_what_is_read_and_answers_without_a_network(pinned, hub, monkeypatch):
    path = snapshot(NAME, pinned)
    assert path.name == COMMIT
    assert {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()} == WHOLE

    hub.requests.clear()
    assert snapshot(NAME, COMMIT) == path
    assert not [asked for asked in hub.requests if "/resolve/" in asked]  # nothing is downloaded any more

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert snapshot(NAME, pinned) == path
    assert hub.requests == []


def test_what_fails_says_what_to_do(hub, monkeypatch):
    hints = "got neither a directory on this machine nor a repository of the hub"
    with pytest.raises(ConfigError, match=hints) as refused:
        load("output/checkpoint-500")
    assert all(
        hint in str(refused.value) for hint in (hints, os.path.abspath("output/checkpoint-500"), "hf auth login")
    )
    for revision in ("no-such-branch", "f" * 40):
        with pytest.raises(ConfigError, match=f"got revision '{revision}', which it does not have"):
            load(NAME, revision=revision)
    hub.gated.add(NAME)
    with pytest.raises(ConfigError, match=rf"{NAME}: got a gated repository; .*`hf auth login`.*HF_TOKEN"):
        load(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="nothing in the hub's cache, and no answer from the hub"):
        load(NAME)


def test_an_adapter_may_be_a_name(hub, tmp_path):
    root = tmp_path / "adapter"
    root.mkdir()
    (root / "adapter_config.json").write_text(json.dumps({"peft_type": "LOHA"}))
    (root / "adapter_model.safetensors").write_bytes((hub.repositories[NAME] / "model.safetensors").read_bytes())
    hub.repositories["someone/adapter"] = root
    with pytest.raises(ConfigError, match="LOHA"):
        load(hub.repositories[NAME], adapter="someone/adapter")
    assert (snapshot("someone/adapter") / "adapter_config.json").is_file()


# ------------------------------------------------------------------------------------------------------------- packages


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
