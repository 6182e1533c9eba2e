"""Tables as text."""

from collections.abc import Sequence


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Makes a Markdown table, one line of text a row, without a last line break."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def aligned_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Makes a table for a terminal: columns padded to their widest cell, two spaces apart."""
    columns = []
    for cells in zip(head, *lines, strict=True):
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(row) for row in zip(*columns, strict=True))
