"""Pages split over devices are written as on one device, in place; only what is read goes between devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFAULT = ("two heads repeated, packed", "joined, each filled up, encoded")
SLOW = ("a head on each", "two on each, packed", "joined, three on each, filled up", "joined, repeated and filled up")


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
def found():
    return findings(DEFAULT)


@pytest.fixture(scope="module")
def more_found():
    return findings(SLOW)


def check_case(case):
    """Bit-equal to one device; written pages are the given ones; only what is read goes between devices."""
    for name, own in case.items():
        assert own["same"], name
        assert own["temporary"] < own["pool"] / 8, name
        if name == "read":
            assert own["whole"], name
            assert not own["donated"], name
            assert own["between_devices"], "else the devices' heads did not meet, or the text was not understood"
            assert max(own["between_devices"]) < own["pool"] / 16, name
        else:
            assert own["lies_alike"], name
            assert own["donated"], name
            assert own["aliased"] == own["pool"], name
            assert own["between_devices"] == [], name


@pytest.mark.parametrize("name", DEFAULT)
def test_over_devices_as_on_one(found, name):
    check_case(found["cases"][name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", SLOW)
def test_over_devices_as_on_one_in_every_form(more_found, name):
    check_case(more_found["cases"][name])


def test_latents_are_whole_on_each_device(found):
    assert found["latents"]


def test_the_connector_writes_them_and_forms_on_one_device(found):
    assert found["connected"] == {"written": True, "same": True, "on_one_device": True}


def test_pages_that_lie_otherwise_are_refused(found):
    expected = {
        "by pages": ("LayoutError", "[2, 1, 1, 1, 1] parts", "axis 2 alone"),
        "by width": ("LayoutError", "[1, 1, 1, 1, 2] parts"),
        "unlike": ("ShapeError", "all alike"),
        "explicit": ("LayoutError", "Auto axes"),
        "three heads": ("ShapeError", "over 2 devices", "3 heads shared or repeated evenly"),
        "not repeated": ("ShapeError", "over 4 devices", "expected rows of (8, 1, 128)"),
    }
    assert found["refused"].keys() == expected.keys()
    for name, words in expected.items():
        for word in words:
            assert word in found["refused"][name]
