"""What a page shows runs as somebody types it, and its tables are those of the committed rows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evals.harness.pages import filled_pages

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"


def blocks_of(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


PAGES = [path for path in sorted(DOCS.rglob("*.md")) if blocks_of(path)]
FIRST = {DOCS / "start.md": (DOCS / "example.py").read_text("utf-8")}
"""What a page shows from a file, in front of its blocks."""
HOLDS = {
    "extending": "page_error < 1e-5 and chain['blind'] < chain['lower_half.share=0.5']",
    "hybrids": "np.allclose(together['state'], again['state'], atol=1e-5)",
    "jax-model": "error < 0.05",
    "operators": "kv['k'].shape[1] == len(slots) and repaired.flops > 0",
}
"""What holds at the end of a page that asserts nothing itself."""


def program(page: Path) -> str:
    return "\n".join([FIRST.get(page, ""), *blocks_of(page)])


def run(typed: str, folder: Path) -> str:
    """Runs Python in a process of its own from a checkout's root, as a user would; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TMPDIR": str(folder), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "error", "-"]
    done = subprocess.run(
        command, input=typed, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", [README, pytest.param(DOCS / "start.md", marks=pytest.mark.nightly)])
def test_a_first_block_prints_what_it_says(page: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(blocks_of(page)[0], str(page), "exec"), {})
    assert capsys.readouterr().out == blocks_of(page, "text")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path):
    holds = f"assert {HOLDS[page.stem]}" if page.stem in HOLDS else ""
    run(f"{program(page)}\n{holds}\n", tmp_path)


def test_tables_of_pages_are_those_of_the_committed_rows():
    pages = filled_pages()
    assert README in pages
    assert [path.name for path, text in pages.items() if path.read_text("utf-8") != text] == []
