"""Tables as text."""

from collections.abc import Sequence


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Makes a Markdown table, one line of text a row, without a last line break."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def aligned_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Makes a table for a terminal: columns padded to their widest cell, two spaces apart."""
    rows = [head, *lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row) for row in padded)
