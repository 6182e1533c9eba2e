"""Pages split over devices are written as on one device, in place; only what is read goes between devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "cases", [("joined, each filled up, encoded",), pytest.param((), id="all", marks=pytest.mark.nightly)]
)
def test_over_devices_as_on_one(cases):
    """The checks of `split_pages.py`, with four devices. LLVM tries less hard, on both sides alike."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, str(Path(__file__).with_name("split_pages.py")), *cases]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
