"""The code of the store's page runs as it is printed, and its tests exist."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "store.md"


def test_the_page_runs():
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    space: dict = {}
    exec(compile(block, "docs/store.md", "exec"), space)
    assert set(space["placed"]) == {"k", "v"}
    assert space["found"].id == space["chunk"].id


def test_tests_that_the_page_names_exist():
    written = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text("utf-8")))
    assert len(named) == 5
    assert all(f"def {name}(" in written for name in named)
