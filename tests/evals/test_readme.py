"""The code in the documents runs as it is printed."""

import re
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(blocks: list[str], name: str) -> dict:
    space = {"__name__": "__main__"}
    exec(compile("\n".join(blocks), name, "exec"), space)
    return space


def test_readme_shows_the_example():
    assert python_blocks(ROOT / "README.md")[0] == (ROOT / "docs" / "example.py").read_text("utf-8")


def test_readme_shows_cells_of_the_results():
    """The README's table is the results page's, with fewer columns: no figure stands in one of them alone."""
    table = r"^\| way of reuse .*?\n\n"
    shown, whole = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in found.group().splitlines() if line]
        for path in (ROOT / "README.md", ROOT / "docs" / "results.md")
        if (found := re.search(table, path.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    )
    columns = [whole[0].index(name) for name in shown[0]]
    assert shown == [[row[column] for column in columns] for row in whole]


def test_readme_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = run(python_blocks(ROOT / "README.md"), "README.md")
    said = [line.split() for line in capsys.readouterr().out.splitlines() if " right " in line]
    assert len(said) == 6
    assert space["patch"].nbytes < 0.3 * space["page"].nbytes
    right = lambda column: sum(line[3] == line[column] for line in said)  # ask cell right R blind B patched P
    assert right(7) >= right(5)


def test_start_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    blocks = [(ROOT / "docs" / "example.py").read_text("utf-8"), *python_blocks(ROOT / "docs" / "start.md")]
    space = run(blocks, "docs/start.md")
    assert space["both_patches"]["k"].shape[0] == 2


def test_agents_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = run(python_blocks(ROOT / "docs" / "guides" / "agents.md"), "docs/guides/agents.md")
    assert len(space["costs"]) == 5


@pytest.mark.slow
def test_windows_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = run(python_blocks(ROOT / "docs" / "guides" / "windows.md"), "docs/guides/windows.md")
    assert len(space["window"].pieces) == 4  # the pinned one, two that stayed, the new one
    assert space["answer"].shape == (1, 1)


@pytest.mark.slow
def test_generation_page_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    space = run(python_blocks(ROOT / "docs" / "guides" / "generation.md"), "docs/guides/generation.md")
    assert space["both"].shape == (2, 4)


OPERATORS = ROOT / "docs" / "guides" / "operators.md"


def test_operators_page_runs_as_far_as_patches_are_applied():
    """Frames, forming, applying, and what is refused; the rest of the page is read as a program."""
    before, _ = OPERATORS.read_text("utf-8").split("\n## Bytes\n")
    blocks = python_blocks(OPERATORS)
    first = len(re.findall(r"^```python\n", before, re.MULTILINE))
    assert 0 < first < len(blocks)
    space = run(blocks[:first], "docs/guides/operators.md")
    assert space["patch"].ranks == {"k": 12, "v": 12}
    compile("\n".join(blocks[first:]), "docs/guides/operators.md", "exec")


@pytest.mark.slow
def test_operators_page_runs():
    space = run(python_blocks(OPERATORS), "docs/guides/operators.md")
    assert space["kvp"].__name__ == "kvpatch_jax"


def test_commands_of_the_readme():
    text = (ROOT / "README.md").read_text("utf-8").splitlines()
    for extras, what in (("evals", "python -m evals.run"), ("evals,test", "pytest -n auto")):
        assert f"python3 -m venv .venv && .venv/bin/pip install -e '.[{extras}]' && .venv/bin/{what}" in text
