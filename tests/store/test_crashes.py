"""SIGKILL at random moments, of processes that share roots: nothing acknowledged is lost, torn, back or over budget."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax.store import files, index
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.objects import Objects

REPOSITORY = Path(__file__).parents[2]


def run_drill(folder: Path, *options: str, timeout: float) -> dict:
    command = [sys.executable, str(Path(__file__).with_name("crash_drill.py")), str(folder), *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_nothing_acknowledged_is_lost_by_kills(folder):
    result = run_drill(folder, "--kills", "10", "--processes", "4", "--pause", "0.15", timeout=120)
    assert result["faults"] == []
    assert result["acknowledged"] > 20


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_nothing_acknowledged_is_lost_by_many_kills(folder, seed):
    result = run_drill(folder, "--kills", "300", "--processes", "32", "--seed", str(seed), timeout=1200)
    assert result["faults"] == []
    assert result["acknowledged"] > 1000


class Killed(BaseException):
    """Stands for the end of the process."""


class System:
    """Stands for `os` in a module of the store; the process ends before its call number `limit` of those that write."""

    NAMES = ("open", "rename", "unlink", "fsync", "writev", "makedirs")

    def __init__(self, limit: int):
        self.limit, self.count = limit, 0

    def __getattr__(self, name: str):
        value = getattr(os, name)
        if name not in self.NAMES:
            return value

        def call(*arguments, **options):
            self.count += 1
            if self.count > self.limit:
                raise Killed
            return value(*arguments, **options)

        return call


@pytest.mark.parametrize("damage", ["new", "lost index", "marked"])
def test_a_root_opens_after_an_end_at_any_step_of_its_creation(folder, monkeypatch, damage):
    """Also of its index's remaking."""
    steps = 0
    name = f"{0:032x}/enc"
    for limit in range(60):
        root = folder / str(limit)
        if damage != "new":
            store = Objects(root, secret=b"s" * 16)
            store.put([(name, Encoded("encoder", {}, {"output": np.arange(3)}))])
            store.close()
        if damage == "lost index":
            (root / "index.sqlite").unlink()
        elif damage == "marked":
            (root / "damaged").touch()

        system = System(limit)
        with monkeypatch.context() as patch:
            patch.setattr(index, "os", system)
            patch.setattr(files, "os", system)
            try:
                Objects(root, secret=b"s" * 16).close()
                break
            except Killed:
                steps += 1

        store = Objects(root, secret=b"s" * 16)
        if damage == "new":
            assert store.put([(name, Encoded("encoder", {}, {"output": np.arange(3)}))]) == [True]
        stored = store.read(name)
        assert stored is not None
        assert stored.arrays["output"].tolist() == [0, 1, 2]
        store.close()
    assert 10 < steps < 60
