"""Users import `kvpatch_jax.models`, whatever else is called `models`: in a clone and from a wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import pickle
import models
import kvpatch_jax.models
from kvpatch_jax.models import load
assert models.mine
assert load.__module__.startswith("kvpatch_jax.models.")
assert pickle.loads(pickle.dumps(load)) is kvpatch_jax.models.load
"""


def test_a_users_own_folder_of_that_name_shadows_nothing(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("mine = True\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment, check=True)


@pytest.mark.nightly
def test_a_wheel_has_one_package_of_ours_and_the_kernels(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [Path(name).parts for name in zipfile.ZipFile(wheel).namelist()]
    assert {parts[0] for parts in names if not parts[0].endswith(".dist-info")} == {"kvpatch_jax", "pallas_kernels"}
    assert ("kvpatch_jax", "models", "families", "registry.py") in names
