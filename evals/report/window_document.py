"""What docs/experiments/results.md shows of the window's suite, written from finished runs.

`python -m evals.report.window_document out/run` puts the table of every model whose results lie in the folder, or in
folders of it, between the marks of the page.
"""

import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from .figures import Results
from .window_paper import side_by_side

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experiments" / "results.md"


def finished(folder: Path) -> dict[str, Results]:
    """Reads the results of a folder, or of each model's folder in it."""
    files = [folder / "results.json", *sorted(folder.glob("*/results.json"))]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return {each["config"]["backbone"]: each for each in found if "window" in each["config"].get("suite", ())}


def block(results: Mapping[str, Results]) -> str:
    """Writes the command, how much was measured, and the table."""
    contexts = {name: each["config"]["window"]["contexts"] for name, each in results.items()}
    counts = sorted(set(contexts.values()))
    said = " and ".join(str(count) for count in counts)
    head = (
        f"`python -m evals.run --suite=window`, {', '.join(results)}: {said} contexts; reorder of more than three "
        "images and many images on the first batch of them."
    )
    return f"{textwrap.fill(head, 118, break_on_hyphens=False)}\n\n{side_by_side(results)}"


def write(results: Mapping[str, Results], page: Path = PAGE) -> None:
    """Puts the block between the marks of a page. Raises ValueError for a page without them, or no results."""
    if not results:
        raise ValueError("no results of the window's suite; expected a folder that it was run into")

    text, count = re.subn(
        r"(<!-- windows -->\n).*?(<!-- /windows -->)",
        lambda found: f"{found[1]}\n{block(results)}\n\n{found[2]}",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{page} has {count} places between <!-- windows --> and <!-- /windows -->; expected one")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(finished(Path(sys.argv[1])))
