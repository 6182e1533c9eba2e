"""The notebooks of the site run from top to bottom, each as a plain program in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.md"))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path):
    cells = re.findall(r"^```\{code-cell\}.*?\n(.*?)^```$", notebook.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(cells) >= 3
    program = tmp_path / f"{notebook.stem}.py"
    program.write_text("\n".join(cells), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout
