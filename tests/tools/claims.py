"""Fills the table of claims in ARCHITECTURE.md: each test file begins with its claim, and its markers say the tiers.

python -m tests.tools.claims           # fills it
python -m tests.tools.claims --check   # fails where the page has another table, or a file has no claim
"""

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
TIERS = ("nightly", "device", "engine")
LONGEST = 120


def claim_of(path: Path) -> str:
    """Returns the claim that a test file begins with: the first line of its docstring.

    Raises:
      SystemExit: there is none that is one sentence in one line.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    claim, _, rest = docstring.partition("\n")
    if not claim.endswith(".") or rest.partition("\n")[0].strip() or len(claim) > LONGEST:
        raise SystemExit(f"{path.relative_to(ROOT)}: got {docstring[:80]!r}; expected a claim: one sentence, one line")
    return claim


def tiers_of(path: Path) -> str:
    """Returns the tiers of a test file's tests, by its markers: "default" where a test, or a case of one, has none."""
    tree = ast.parse(path.read_text("utf-8"))
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    marked = {tier for tier in TIERS if f"pytest.mark.{tier}" in attributes}
    whole = set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            whole = {tier for tier in TIERS if f"mark.{tier}" in ast.unparse(node.value)}
    if whole:
        return ", ".join(tier for tier in TIERS if tier in whole)
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    decorators = [[ast.unparse(decorator) for decorator in test.decorator_list] for test in tests]
    is_default = any(not any(f"pytest.mark.{tier}" in line for line in lines for tier in TIERS) for lines in decorators)
    # A case of a parametrised test may be marked alone.
    is_default = is_default or any("pytest.param" in line for lines in decorators for line in lines)
    return ", ".join(["default"] * is_default + [tier for tier in TIERS if tier in marked])


def table() -> str:
    """Returns the table, a row for each test file, by folder."""
    rows = ["| claim | `tests/` | tiers |", "|---|---|---|"]
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").as_posix()
        rows.append(f"| {claim_of(path).removesuffix('.').replace('|', chr(92) + '|')} | `{name}` | {tiers_of(path)} |")
    return "\n".join(rows)


def main() -> None:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    check = parser.parse_args().check
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    filled = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if not check:
        PAGE.write_text(filled, "utf-8")
    elif filled != page:
        raise SystemExit("ARCHITECTURE.md: got another table of claims; expected python -m tests.tools.claims")


if __name__ == "__main__":
    main()
