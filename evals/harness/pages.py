"""Tables of pages and reports: one pivot of the rows by a declared spec, one template. Prose is written by people.

`python -m evals.harness.pages` fills the blocks `<!-- name -->` … `<!-- /name -->` of the pages that configurations
name, from committed rows, and writes their full tables as CSV; `--check` says which files would change.
"""

import base64
import csv
import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import program
from .frame import Lookup

ROOT = Path(__file__).resolve().parents[2]

# -------------------------------------------------------------------------------------------------------- cells


def share(value: float) -> str:
    """Writes a share in per cent, two digits where it is small."""
    percent = 100 * value
    if percent == 0 or percent >= 10:
        return f"{percent:.0f} %"
    return f"{percent:.0f} %" if percent >= 2 else f"{percent:.1f} %"


NUMBERS: dict[str, Callable[[float], str]] = {
    "share": share,
    "three": "{:.3f}".format,
    "two": "{:.2f}".format,
    "nats": "{:.2g}".format,
    "whole": lambda value: f"{round(value):,}".replace(",", " "),
}
"""Forms of numbers; "nats" is for those of several orders of magnitude, "whole" puts thousands apart."""


def cell(row: Any, form: str) -> str:
    """Writes a statistic: "share", "three", "two", "nats" or "whole", with its interval where the form ends in "±"."""
    number = NUMBERS[form.rstrip("±")]
    if not math.isfinite(row.value):
        return "–"
    spread = math.isfinite(row.low) and math.isfinite(row.high) and row.low != row.high
    if not form.endswith("±") or not spread:
        return number(row.value)
    return f"{number(row.value)} ({number(row.low)} to {number(row.high)})"


# ------------------------------------------------------------------------------------------------------ tables


def labelled(line: str | Sequence[str]) -> tuple[str, str]:
    """Returns the value of a table's line, and what it is called there."""
    return (line, line) if isinstance(line, str) else (line[0], line[1])


def pivot(lookup: Lookup, table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Makes a table of rows by its spec.

    Args:
      lookup: the rows of a run.
      table: down: "arm", "model", "probe" or "metric", what lines differ in. lines: their values, or [value, label]
        pairs; left out: all that occur. columns: tables with `head`, and `metric`, `arm`, `probe`, `model` where they
        differ from the spec's own; `form` as of `cell`. Other keys: the default of each coordinate.

    Returns:
      The head, and lines of cells; what was not measured is "–", and a line without any number is left out.
    """
    down, columns = table.get("down", "arm"), table["columns"]
    default = {name: table[name] for name in ("probe", "model", "arm", "metric") if name in table}
    lines = table.get("lines") or lookup.values(down, default)
    body = []
    for line in lines:
        value, words = labelled(line)
        cells = []
        for column in columns:
            place = {**default, down: value, **{name: column[name] for name in column if name not in ("head", "form")}}
            cells.append(cell(lookup.get(**place), column.get("form", table.get("form", "three"))))
        if set(cells) != {"–"}:
            body.append([words, *cells])
    return [table.get("corner", down), *(column["head"] for column in columns)], body


def markdown(lookup: Lookup, table: Mapping[str, Any]) -> str:
    """Makes a table in Markdown."""
    head, body = pivot(lookup, table)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def comma_separated(lookup: Lookup, table: Mapping[str, Any]) -> str:
    """Makes a table as CSV, with the cells that a page has."""
    head, body = pivot(lookup, table)
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([head, *body])
    return file.getvalue()


def shown(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a page shows of a table: `shown` names lines by their values, and columns by their heads."""
    part = table.get("shown", {})
    lines = [line for line in table.get("lines", ()) if labelled(line)[0] in part.get("lines", labelled(line))]
    columns = [column for column in table["columns"] if column["head"] in part.get("columns", [column["head"]])]
    return {**table, "lines": lines, "columns": columns}


def sentence(lookup: Lookup, text: str) -> str:
    """Fills numbers into a sentence: {{ value("three", arm="blind", metric="accuracy.chain", …) }}."""
    import jinja2

    def value(form: str, **place: str) -> str:
        return cell(lookup.get(**place), form)

    return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text).render(value=value)


def fill(text: str, name: str, content: str) -> str:
    """Puts content into a page's block. Raises ValueError for a page without it."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"page: got no block {name!r}; expected <!-- {name} --> and <!-- /{name} -->")
    return pattern.sub(lambda match: f"{match[1]}\n{content.strip()}\n\n{match[2]}", text)


def filled_pages() -> dict[Path, str]:
    """Fills every page and full table that a configuration's tables name; returns the texts by path."""
    from . import config

    pages, read = dict[Path, str](), functools.cache(Lookup.read)
    for name in config.names():
        for table in config.read_config(name).tables:
            if "csv" in table:
                pages[ROOT / table["csv"]] = comma_separated(read(ROOT / table["rows"]), table)
            if "page" not in table:
                continue
            lookup, page = read(ROOT / table["rows"]), ROOT / table["page"]
            before = sentence(lookup, table["text"]) + "\n\n" if "text" in table else ""
            content = before + (markdown(lookup, shown(table)) if "columns" in table else "")
            pages[page] = fill(pages.get(page) or page.read_text(), table["name"], content)
    return pages


# ------------------------------------------------------------------------------------------------------ reports


def write_report(
    results: Mapping[str, Any], report: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], out: Path
) -> Path:
    """Writes report.html beside results.json: a sentence, pictures, the first table, links to all rows.

    Args:
      results: {"config", "environment", "rows"}.
      report: sentence, notes, and `pictures`: files of `out` or of the checkout, each with its caption, in this order.
      tables: the specs; the first stands open, the others are folded.
    """
    import jinja2

    lookup = Lookup(results["rows"])
    folder = Path(__file__).with_name("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    pictures = []
    for name, caption in report.get("pictures", ()):
        path = next((folder / name for folder in (out, ROOT) if (folder / name).exists()), None)
        if path is not None:
            pictures.append((base64.b64encode(path.read_bytes()).decode(), caption))
    pivots = [(table.get("title", ""), *pivot(lookup, table)) for table in tables if "columns" in table]
    text = environment.get_template("report.html.j2").render(
        title=results["config"].get("title") or results["config"]["name"],
        sentence=sentence(lookup, report.get("sentence", "")),
        notes=report.get("notes", ()),
        pictures=pictures,
        tables=[(title, head, body) for title, head, body in pivots if body],
        config=results["config"],
        environment=results["environment"],
        count=len(results["rows"]),
    )
    path = out / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def main() -> None:
    """Fills the pages, or says which are not up to date."""
    from absl import flags

    pages = filled_pages()
    stale = {path: text for path, text in pages.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(ROOT))
        if not flags.FLAGS.check:
            path.write_text(text)
    if flags.FLAGS.check and stale:
        raise SystemExit("error: these pages differ from their rows; expected python -m evals.harness.pages to be run")


if __name__ == "__main__":
    from absl import flags

    flags.DEFINE_boolean("check", False, "change nothing; status 1 where a page differs from its rows")
    program.start(main)
