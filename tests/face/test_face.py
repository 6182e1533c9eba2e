"""Importing loads only what is asked for, every public name is there, and the command refuses other words by name."""

import importlib.metadata
import subprocess
import sys

import pytest

import kvpatch_jax
import kvpatch_jax as kvp
from kvpatch_jax import __main__ as command

PROGRAM = """
import sys
import jax, jax.numpy

sys.modules["fcntl"] = None  # as where there is none
before = set(sys.modules)
import kvpatch_jax as kvp

new = set(sys.modules) - before
for name in ("kvpatch_jax.store", "kvpatch_jax.pool", "kvpatch_jax.batch", "kvpatch_jax.repair", "kvpatch_jax.models",
             "flax", "orbax", "einops", "cryptography", "PIL", "tokenizers", "jinja2", "absl.app",
             "jax.experimental.pallas"):
    loaded = sorted(module for module in new if module == name or module.startswith(name + "."))
    assert not loaded, loaded
assert kvp.pool.make_pool and kvp.pool.RAGGED and kvp.repair.METHODS and kvp.core.deficit.e90
try:
    kvp.ChunkStore
except AttributeError as error:
    assert "fcntl" in str(error)
else:
    raise AssertionError("a store without fcntl")
import pydoc
assert not hasattr(kvp, "ChunkStore") and not hasattr(kvp, "store") and hasattr(kvp, "form_patch")
assert "form_patch(" in pydoc.render_doc(kvp, renderer=pydoc.plaintext)
"""


def test_importing_loads_nothing_that_is_not_asked_for():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


def test_all_names_are_there():
    assert all(hasattr(kvp, name) for name in kvp.__all__)
    assert kvp.__all__ == sorted(kvp.__all__) == dir(kvp)
    assert kvp.ChunkStore is kvp.store.ChunkStore
    with pytest.raises(AttributeError, match=r"no attribute 'splice'; expected one of .*apply_patch"):
        getattr(kvp, "spl" + "ice")


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_lists_versions_devices_and_missing_extras(monkeypatch: pytest.MonkeyPatch, capsys):
    lines = {
        "kvpatch_jax": [
            "jax>=0.11",
            'pillow>=11; extra == "models"',
            'no-such-package>=1; extra == "store"',
            'jax[fast]>=0.11; extra == "fast"',
            'kvpatch_jax[models,store]; extra == "all"',
        ],
        "jax": ['no-such-plugin==1; extra == "fast"', 'nothing; extra == "slow"'],
    }
    monkeypatch.setattr(command, "requires", lambda name: lines.get(name))
    store = ["no-such-package"]
    assert command.missing_packages() == {"models": [], "store": store, "fast": ["no-such-plugin"], "all": store}
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert kvpatch_jax.__version__ == importlib.metadata.version("kvpatch_jax")
    assert f"kvpatch_jax {kvpatch_jax.__version__}, jax " in printed
    assert "missing no-such-package: pip install 'kvpatch_jax[store]'" in printed
    assert "cpu" in printed


def test_other_words_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    assert command.main(["--help"]) == 0
    assert "kvpatch measure" in capsys.readouterr().out
    assert command.main(["frobnicate"]) == 2
    assert "got 'frobnicate'; expected store, run" in capsys.readouterr().err
    assert command.main(["store", "ls", str(tmp_path / "nothing")]) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["run"]) == 2
    assert "expected the folder of a checkout" in capsys.readouterr().err
