"""Code of the documents runs as somebody types it: processes of their own, from a checkout's root, without PYTHONPATH.

The blocks of a page are one program from top to bottom. By default the README's block, the landing page,
`docs/example.py` and one guide run, and all pages are read as programs.
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

import numpy as np
import pytest
from PIL import Image

import kvpatch_jax as kvp
from evals import small_task

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"


def blocks_of(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


PAGES = [path for path in sorted(DOCS.rglob("*.md")) if blocks_of(path)]
FAST = ("certificates",)
"""Pages that run by default; others take more than a few seconds."""
FIRST = {DOCS / "start.md": (DOCS / "example.py").read_text("utf-8")}
"""What a page shows from a file, in front of its blocks."""
HOLDS = {
    "agents": ["str(audited) == str(answer)", "audited.kl < 0.1", "session.closed"],
    "batches": ["(report.answered, report.failed) == (1, 0)"],
    "certificates": ["alone > 0", "among > 0", "mixed > 0"],
    "checkpoint": ["int(counts.sum()) == counts.shape[0] * 2 * tokens.embeddings.shape[1]"],  # two experts a token
    "hybrids": ["np.allclose(whole['state'], again['state'], atol=1e-5)"],
    "index": ["session.closed"],
    "extending": ["page_error < 1e-5", "right['blind'] < right['deep_half']"],
    "generation": ["both.shape == (2, 4)"],
    "operators": ["patch.ranks == {'k': 12, 'v': 12}"],
    "plans": ["executor.ledger['ApplyPatch'].launches == 1"],
    "remotes": [
        "found.id == chunk.id",
        "lease is not None and others is None and formed is chunk and not lease.held",
        "{'conditions', 'no lost update', 'one winner'} <= set(broken)",
        "[path.endswith('.kv.safetensors') for path in Service.values] == [True]",
    ],
    "repairs": ["repaired.flops > 0", "set(repaired.cache) == {'k', 'v'}"],
    "serving": ["backbone.text(answer[0]) == 'b5'", "kv['k'].shape[1] == len(slots)"],
    "start": ["both_patches['k'].shape[0] == 2"],
    "store": [
        "sources == ['computed', 'store']",
        "found.id == chunk.id",
        "(brought, soon.id, both[1]) == (1, chunk.id, None)",
        "from_host == 2 and not lease.held",
    ],
    "traces": ["[event.op for event in trace.events] == ['add']"],
    "vllm-chunks": ["(len(ids), len(other)) == (1, 2)"],
    "what-to-keep": ["base.encoding == 'k6v6g32'", "kept < 2 * chunk.nbytes"],
    "windows": ["len(window.pieces) == 4", "answer.shape == (1, 1)"],  # pinned, two that stayed, the new one
}
"""What holds at a page's end besides."""


def run(arguments: list[str], folder: Path, typed: str | None = None, cwd: Path = ROOT) -> str:
    """Runs Python as a user would; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "error", *arguments]
    environment["TMPDIR"] = str(folder)
    done = subprocess.run(
        command, input=typed, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def program(page: Path) -> str:
    return "\n".join([FIRST.get(page, ""), *blocks_of(page)])


# ------------------------------------------------------------------------------------------------ the README


def test_the_readme_prints_what_it_says(tmp_path: Path):
    (block,) = blocks_of(README)
    said = run(["-"], tmp_path, block)
    assert said == blocks_of(README, "text")[0]
    words = dict(line.split() for line in said.splitlines())
    right = [words[name] for name in ("2-legend.png", "3-legend.png", "recalled")]
    assert right == ["fill7"] * 3


def test_the_sessions_docstring_is_the_same_program():
    shown = (kvp.Session.__doc__ or "").split("\n\n", 1)[1].split("\n    A session is")[0]
    assert ast.dump(ast.parse(textwrap.dedent(shown))) == ast.dump(ast.parse(blocks_of(README)[0]))


@pytest.mark.parametrize("anywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_example_runs(anywhere: bool, tmp_path: Path):
    """A patch is right where blind reuse is not."""
    script, cwd = (str(DOCS / "example.py"), tmp_path) if anywhere else ("docs/example.py", ROOT)
    said = run([script], tmp_path, cwd=cwd)
    answers = [line.split() for line in said.splitlines() if " right " in line]  # ask cell right R blind B patched P
    assert len(answers) == 6
    assert [line[7] for line in answers] == [line[3] for line in answers]
    assert any(line[5] != line[3] for line in answers)


def test_the_landing_page_prints_what_it_says(tmp_path: Path):
    (block,), (said,) = blocks_of(DOCS / "index.md"), blocks_of(DOCS / "index.md", "text")
    assert run(["-"], tmp_path, block) == said


def test_the_screenshots_are_the_small_tasks():
    """Held-out drawings, as the sentences around them say."""
    legends, pages = small_task.render(small_task.sample_contexts(np.random.default_rng(7), 1))
    files = sorted((DOCS / "pictures" / "screenshots").glob("*.png"))
    assert [path.stem for path in files] == ["1-legend", "2-legend", "3-legend", "4-page"]
    for path, pixels in zip(files, [*legends[0], pages[0]], strict=True):
        assert (np.asarray(Image.open(path)) == pixels).all()


# ---------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_a_program_whose_imports_are_there(page: Path):
    for statement in ast.walk(ast.parse(program(page), str(page))):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([statement], []), str(page), "exec"), {})


@pytest.mark.parametrize(
    "page",
    [page if page.stem in FAST else pytest.param(page, marks=pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_page_runs(page: Path, tmp_path: Path):
    held = [f"assert {what}, {what!r}" for what in HOLDS[page.stem]]
    run(["-"], tmp_path, "\n".join([program(page), *held, ""]))


def test_what_is_not_run_cannot_be():
    """A block of another mark than `python` needs an engine, a cluster, files of the reader's own, or a package."""
    left = {path.stem: len(blocks_of(path, "py")) for path in DOCS.rglob("*.md") if blocks_of(path, "py")}
    assert left == {
        "adding-a-family": 1,
        "batches": 2,
        "checkpoint": 4,
        "data-formats": 1,
        "harnesses": 1,
        "traces": 1,
        "vllm": 1,
    }
    assert not blocks_of(README, "py")


def test_guides_use_every_public_name():
    """Nothing is on the face of the package that no page shows."""
    pages = [README, DOCS / "example.py", *DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("notebooks/*.md")]
    text = "".join(page.read_text("utf-8") for page in pages)
    shown = lambda name: re.search(
        rf"\b(kvp|kvpatch_jax)\.{name}\b|kvpatch_jax import[^\n]*\b{name}\b|`{name}[`(.]", text
    )
    assert [name for name in kvp.__all__ if not shown(name)] == []


# ------------------------------------------------------------------------------------------------- commands


@functools.cache
def flags() -> set[str]:
    """Every flag that a program of the repository defines; training has one for each field of a recipe."""
    files = [path for part in ("evals", "pallas_kernels", "kvpatch_jax") for path in (ROOT / part).rglob("*.py")]
    text = "".join(path.read_text("utf-8") for path in files)
    defined = [r"DEFINE_\w+\(\s*\"([\w-]+)\"", r"\"--([\w-]+)\"", r"(?m)^    (\w+): \w"]
    return {"help", *(name for pattern in defined for name in re.findall(pattern, text))}


def commands() -> list[tuple[str, str]]:
    paths = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
    found = []
    for path in paths:
        for block in blocks_of(path, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                found += [(path.stem, part.strip()) for part in line.split("&&") if "python -m " in part]
    return found


def test_programs_in_shell_blocks_exist_and_take_the_flags():
    assert len(commands()) > 20
    for page, command in commands():
        words = shlex.split(command, comments=True)
        module = words[words.index("-m") + 1]
        if module in ("venv", "lmms_eval"):
            continue
        assert importlib.util.find_spec(module), (page, command)
        for word in words:
            if word.startswith("--"):
                name = word[2:].partition("=")[0]
                assert {name, name.removeprefix("no")} & flags(), (page, command)


def test_commands_of_the_readme():
    text = README.read_text("utf-8").splitlines()
    for extras, what in (("evals", "python -m evals.run"), ("evals,test", "pytest -n auto")):
        assert f"python3 -m venv .venv && .venv/bin/pip install -e '.[{extras}]' && .venv/bin/{what}" in text
