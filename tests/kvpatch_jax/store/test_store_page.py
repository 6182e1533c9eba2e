"""The code of the store's guide runs as it is printed, and the tests of its threat model exist."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = DOCS / "guides" / "store.md"
SECURITY = DOCS / "reference" / "security.md"


def test_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    space: dict = {}
    for block in blocks:
        exec(compile(block, "docs/guides/store.md", "exec"), space)
    assert set(space["placed"]) == {"k", "v"}
    assert space["found"].id == space["chunk"].id
    assert space["texts"] == ["How far is ", " from ", "? TEXT#1 is text here."]
    assert space["sources"] == ["computed", "store"]
    assert [chunk.id for chunk in space["loaded"].chunks] == [space["found"].id]


def test_every_threat_has_a_test_that_exists():
    written = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    table = SECURITY.read_text("utf-8").partition("| threat |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert all(f"def {name}(" in written for name in named), row
