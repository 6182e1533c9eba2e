"""The table of "Extending": every file that it names exists, and holds what it is said to hold."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "docs/guides/extending.md").read_text(), re.M)
TABLE = [row for row in ROWS if "`" in row[1]]


def existing_files(cell: str) -> list[Path]:
    """Returns the paths in a cell; a later one may leave out the package or the folder of the first."""
    names = re.findall(r"`([\w/]+(?:\.py)?/?)`", cell)
    first = ROOT / names[0]
    places = [ROOT, ROOT / "kvpatch_jax", first, first.parent]
    return [next((folder / name for folder in places if (folder / name).exists()), ROOT / name) for name in names]


def test_the_table_has_its_rows():
    wanted = ("keys rotate", "a patch is formed", "eviction order of a window", "family", "page format", "arm")
    assert [word for word in wanted if not any(word in row[0] for row in TABLE)] == []


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_files_exist_and_hold_the_names_beside_them(row: tuple[str, str, str]):
    files = existing_files(row[1])
    assert [str(path) for path in files if not path.exists()] == []

    folders = [path if path.is_dir() else path.parent for path in files]
    source = "".join(module.read_text() for folder in folders for module in sorted(folder.rglob("*.py")))
    names = [name for name in re.findall(r"`(\w+)(?:\.py)?`", row[2])]
    assert [
        name for name in names if not re.search(rf"\b{name}\b", source) and not (folders[0] / f"{name}.py").exists()
    ] == []
