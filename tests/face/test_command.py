"""The command `kvpatch` describes the installation, runs a checkout's programs, and refuses other words by name."""

import importlib.metadata

import pytest

import kvpatch_jax
from kvpatch_jax import __main__ as command


def test_it_lists_versions_devices_and_missing_extras(monkeypatch: pytest.MonkeyPatch, capsys):
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
