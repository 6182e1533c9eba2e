"""A name of the hub loads the model of its repository, and offline from the cache; what fails says what to do."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import load
from kvpatch_jax.models.hub import snapshot
from tests.goldens.load import write_checkpoint
from tests.models.fake_hub import COMMIT, FakeHub, serving

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


def cached_files(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}


def test_a_name_loads_the_model_of_its_repository(hub):
    backbone, same = load(NAME), load(hub.repositories[NAME])
    jax.tree.map(np.testing.assert_array_equal, backbone.parameters, same.parameters)
    assert backbone.fingerprint == same.fingerprint


@pytest.mark.parametrize("pinned", [None, "main"])
def test_what_is_downloaded_is_what_is_read_and_answers_without_a_network(pinned, hub, monkeypatch):
    path = snapshot(NAME, pinned)
    assert path.name == COMMIT
    assert cached_files(path) == WHOLE

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
