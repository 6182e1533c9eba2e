"""The notebooks of the site run from top to bottom, each as a plain program in a process of its own.

By default they are only read as programs: the site runs them while it is built, and no site is made of one that fails.
"""

import ast
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


def program_of(notebook: Path) -> str:
    cells = re.findall(r"^```\{code-cell\}.*?\n(.*?)^```$", notebook.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(cells) >= 3
    return "\n".join(cells)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_a_program_whose_imports_are_there(notebook: Path):
    """Every module and name that it imports exists."""
    for statement in ast.walk(ast.parse(program_of(notebook), str(notebook))):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([statement], []), str(notebook), "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path):
    program = tmp_path / f"{notebook.stem}.py"
    program.write_text(program_of(notebook), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout
