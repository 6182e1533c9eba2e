"""Code and commands of the documents run as somebody types them, and tables are those of the committed rows.

The `python` blocks of a page are one program from top to bottom, in a process of its own from a checkout's root. By
default the first blocks of README and `start`, `docs/example.py` and one guide run; all pages are read as programs.
"""

import ast
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kvpatch_jax as kvp
from evals.harness.pages import filled_pages

ROOT = Path(__file__).parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"


def blocks_of(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


PAGES = [path for path in sorted(DOCS.rglob("*.md")) if blocks_of(path)]
FAST = ("measure",)
"""Pages that run by default; others take more than a few seconds."""
FIRST = {DOCS / "start.md": (DOCS / "example.py").read_text("utf-8")}
"""What a page shows from a file, in front of its blocks."""
HOLDS = {
    "extending": "page_error < 1e-5 and chain['blind'] < chain['lower_half.share=0.5']",
    "hybrids": "np.allclose(together['state'], again['state'], atol=1e-5)",
    "jax-model": "error < 0.05",
    "operators": "kv['k'].shape[1] == len(slots) and repaired.flops > 0",
}
"""What holds at the end of a page that asserts nothing itself."""


def run(arguments: list[str], folder: Path, typed: str | None = None, cwd: Path = ROOT) -> str:
    """Runs Python as a user would; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TMPDIR": str(folder), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(
        command, input=typed, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def program(page: Path) -> str:
    return "\n".join([FIRST.get(page, ""), *blocks_of(page)])


@pytest.mark.parametrize("page", [README, DOCS / "start.md"], ids=lambda page: page.stem)
def test_a_first_block_prints_what_it_says(page: Path, tmp_path: Path):
    block, printed = blocks_of(page)[0], blocks_of(page, "text")[0]
    assert run(["-"], tmp_path, block) == printed


def test_the_sessions_docstring_is_readmes_program():
    shown = (kvp.Session.__doc__ or "").split("\n\n", 1)[1].split("\n    A session is")[0]
    assert ast.dump(ast.parse(textwrap.dedent(shown))) == ast.dump(ast.parse(blocks_of(README)[0]))


def test_the_example_s_patch_is_right_where_blind_reuse_is_not(tmp_path: Path):
    printed = run([str(DOCS / "example.py")], tmp_path, cwd=tmp_path)
    lines = [re.search(r"right (\S+) +blind (\S+) +patched (\S+)", line) for line in printed.splitlines()]
    answers = [match.groups() for match in lines if match]
    assert len(answers) >= 4
    assert all(patched == right for right, _, patched in answers)
    assert any(blind != right for right, blind, _ in answers)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_a_program_whose_imports_are_there(page: Path):
    for statement in ast.walk(ast.parse(program(page), str(page))):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([statement], []), str(page), "exec"), {})


@pytest.mark.parametrize(
    "page",
    [page if page.stem in FAST else pytest.param(page, marks=pytest.mark.nightly) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_page_runs(page: Path, tmp_path: Path):
    holds = f"assert {HOLDS[page.stem]}" if page.stem in HOLDS else ""
    run(["-"], tmp_path, f"{program(page)}\n{holds}\n")


def test_guides_use_every_public_name():
    """Nothing is on the face of the package that no page shows."""
    pages = [README, DOCS / "example.py", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md")]
    text = "".join(page.read_text("utf-8") for page in pages)
    pattern = r"\b(kvp|kvpatch_jax)\.{0}\b|kvpatch_jax import[^\n]*\b{0}\b|`{0}[`(.]"
    assert [name for name in kvp.__all__ if not re.search(pattern.format(name), text)] == []


def test_tables_of_pages_are_those_of_the_committed_rows():
    pages = filled_pages()
    assert README in pages
    assert [path.name for path, text in pages.items() if path.read_text("utf-8") != text] == []


@functools.cache
def flags() -> set[str]:
    """Every flag that a program of the repository defines; training has one for each field of its recipe."""
    files = [path for part in ("evals", "pallas_kernels", "kvpatch_jax") for path in (ROOT / part).rglob("*.py")]
    text = "".join(path.read_text("utf-8") for path in files)
    patterns = [r"DEFINE_\w+\(\s*\"([\w-]+)\"", r"\"--([\w-]+)\"", r"(?m)^    (\w+): \w"]
    return {"help", *(name for pattern in patterns for name in re.findall(pattern, text))}


def commands() -> list[tuple[str, str]]:
    lines = []
    for path in [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]:
        for block in blocks_of(path, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                lines += [(path.stem, part.strip()) for part in line.split("&&") if "python -m " in part]
        lines += [(path.stem, part) for part in re.findall(r"`(python -m [^`]+)`", path.read_text("utf-8"))]
    return lines


def test_programs_of_the_pages_exist_and_take_the_flags():
    assert len(commands()) > 15
    for page, command in commands():
        words = shlex.split(command, comments=True)
        module = words[words.index("-m") + 1]
        if module in ("venv", "lmms_eval", "pytest"):
            continue
        assert importlib.util.find_spec(module), (page, command)
        for word in words:
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                assert {name, name.removeprefix("no")} & flags(), (page, command)
