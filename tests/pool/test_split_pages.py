"""Pages split over devices are written as on one device, in place; only what is read goes between devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFAULT = ("joined, each filled up, encoded",)
SLOW = (
    *("a head on each", "two heads repeated, packed", "two on each, packed"),
    *("joined, three on each, filled up", "joined, repeated and filled up"),
)


def findings(names):
    """What `split_pages.py` found of these cases, with four devices. LLVM tries less hard, on both sides alike."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    program = [sys.executable, str(Path(__file__).with_name("split_pages.py")), *names]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def few():
    return findings(DEFAULT)


@pytest.fixture(scope="module")
def many():
    return findings(SLOW)


@pytest.mark.parametrize(
    ("cases", "name"),
    [*(("few", name) for name in DEFAULT), *(pytest.param("many", name, marks=pytest.mark.nightly) for name in SLOW)],
)
def test_over_devices_as_on_one(cases, name, request):
    """Bit-equal to one device; written pages are the given ones; only what is read goes between devices."""
    for operation, result in request.getfixturevalue(cases)["cases"][name].items():
        assert result["same"], operation
        assert result["temporary"] < result["pool"] / 8, operation
        if operation == "read":
            assert result["whole"]
            assert not result["donated"]
            assert result["between_devices"], "else the devices' heads did not meet, or the text was not understood"
            assert max(result["between_devices"]) < result["pool"] / 16
        else:
            assert result["lies_alike"], operation
            assert result["donated"], operation
            assert result["aliased"] == result["pool"], operation
            assert result["between_devices"] == [], operation


def test_latents_are_whole_on_each_device_and_the_connector_forms_on_one(few):
    assert few["latents"]
    assert few["connected"] == {"written": True, "same": True, "on_one_device": True}


def test_pages_that_lie_otherwise_are_refused(few):
    expected = {
        "by pages": ("LayoutError", "[2, 1, 1, 1, 1] parts", "axis 2 alone"),
        "by width": ("LayoutError", "[1, 1, 1, 1, 2] parts"),
        "unlike": ("ShapeError", "all alike"),
        "explicit": ("LayoutError", "Auto axes"),
        "three heads": ("ShapeError", "over 2 devices", "3 heads shared or repeated evenly"),
        "not repeated": ("ShapeError", "over 4 devices", "expected rows of (8, 1, 128)"),
    }
    assert few["refused"].keys() == expected.keys()
    for name, words in expected.items():
        for word in words:
            assert word in few["refused"][name]
