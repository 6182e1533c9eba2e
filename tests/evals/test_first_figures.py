"""What a reader meets first: the mean over seeds, all that lies stored, one rank, and pages that a telephone shows."""

import html.parser
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from evals.pretrained import report as pretrained
from evals.report import drawing, example, page, summary, window
from evals.report import task_report as sheets
from evals.report.figures import arm_label
from evals.rules import RULES
from tests.evals.test_pretrained_suite import few_bits
from tests.evals.test_report import LOSS, Made, made_results, repair_rows

ROOT = Path(__file__).parents[2]
SEEDS = ("qwen2_5_vl", "qwen2_5_vl_seed1", "qwen2_5_vl_seed2")
SCREEN = 390


@pytest.fixture(scope="module")
def kept() -> dict:
    return json.loads((ROOT / "docs" / "results.json").read_text("utf-8"))


def accuracies(kept: dict, arm: str, kind: str) -> list[float]:
    """Of each training seed, from the rows alone."""
    wanted = ("repair.visible", arm, f"accuracy.{kind}")
    found = {row["model"]: row["value"] for row in kept["rows"] if (row["probe"], row["arm"], row["metric"]) == wanted}
    return [found[seed] for seed in SEEDS]


def in_words(values: list[float]) -> str:
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def generated(name: str) -> str:
    return (ROOT / name).read_text("utf-8").partition("<!-- run -->")[2].partition("<!-- /run -->")[0]


# ------------------------------------------------------------------------------------------ the mean comes first


@pytest.mark.parametrize("name", ["README.md", "docs/experiments/results.md"])
def test_a_page_opens_with_the_mean_over_seeds(kept: dict, name: str):
    """The first figures for questions that need both images, and the first table, are means with their range."""
    text = " ".join(generated(name).split())
    first = re.search(r"but only (.*?) of chain questions and (.*?) of aggregate questions", text)
    assert first
    assert all(re.fullmatch(r"0\.\d+ \(0\.\d+ to 0\.\d+\)", said) for said in first.groups())
    assert list(first.groups()) == [in_words(accuracies(kept, "blind", kind)) for kind in ("chain", "aggregate")]
    line = re.search(r"\| blind reuse \|.*", generated(name))
    assert line
    assert in_words(accuracies(kept, "blind", "chain")) in line.group()


def seeded() -> dict:
    """A run of three seeds, that of the first with every probe; blind reuse takes most from the first."""
    rows = [{**row, "model": SEEDS[0]} for row in made_results()["rows"] if row["model"] == "small"]
    for seed in SEEDS[1:]:
        made = Made(seed)
        repair_rows(made, "repair.visible")
        rows += made.rows
    for row in rows:
        if (row["probe"], row["arm"], row["metric"]) == ("repair.visible", "blind", "accuracy.chain"):
            row["value"] = {SEEDS[0]: 0.2, SEEDS[1]: 0.5, SEEDS[2]: 0.8}[row["model"]]
    return {**made_results(), "config": {"command": "run", "contexts": 4}, "rows": rows}


def test_report_and_console_open_with_the_mean_over_seeds(tmp_path: Path):
    results, out = seeded(), io.StringIO()
    text = page.write_report(results, [], tmp_path / "report.html", []).read_text()
    first = text[: text.index("<nav")]
    assert "0.500 (0.200 to 0.800) of chain questions" in first
    table = text[text.index("<table") : text.index("</table>")]
    assert re.search(r"blind reuse</td><td>0\.500<small>\(0\.200 to 0\.800\)</small>", table)
    summary.print_summary(results, out)
    said = out.getvalue()
    assert "blind 0.500 (0.200 to 0.800)" in said
    assert said.index("0.500 (0.200 to 0.800)") < said.index("blind reuse 0.200")


# --------------------------------------------------------------------------------------------- the first table


def test_the_first_table_has_all_that_lies_stored(kept: dict):
    """Canonical and embeddings with it, for 1, 4 and 16 antecedents; KV(B|A) kept whole among the ways."""
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", generated("README.md"), re.MULTILINE)
    ]
    head, lines = table[0], {line[0]: line[1:4] for line in table[2:]}
    assert head[1:5] == ["kept, N = 1", "kept, N = 4", "kept, N = 16", "serving FLOPs"]
    assert lines["conditioned KV in 16 bits"] == ["100 %"] * 3
    assert lines["blind reuse"] == ["100 %", "25 %", "6 %"]
    patch = next(
        row["value"]
        for row in kept["rows"]
        if (row["probe"], row["arm"], row["metric"], row["model"])
        == ("repair.visible", "patch.rank=4", "stored_bytes", SEEDS[0])
    )
    assert lines["patch, rank 4"] == [f"{100 * (1 / count + patch):.0f} %" for count in (1, 4, 16)]
    # 128 numbers of an embedding beside six layers of 256: kept once, like the canonical.
    assert lines["ProphetKV-style, 15 % of tokens"] == [f"{100 * (1 + 1 / 12) / count:.0f} %" for count in (1, 4, 16)]


def test_the_picture_shows_the_patch_of_the_first_table(kept: dict):
    """One rule for the rank: the smallest that suffices on the mean over seeds."""
    shown = kept["config"]["example"]
    suffices = [
        rank
        for rank in RULES.arms.ranks
        if f"patch.rank={rank}" in RULES.headline_arms
        and all(
            abs(sum(accuracies(kept, f"patch.rank={rank}", kind)) - sum(accuracies(kept, "re-prefill", kind))) <= 0.03
            for kind in ("chain", "aggregate")
        )
    ]
    assert shown == f"patch.rank={suffices[0]}"
    assert f"A patch of rank {suffices[0]} answers" in " ".join(generated("README.md").split())
    assert f"| {arm_label(shown)} |" in generated("README.md")


# ------------------------------------------------------------------------------------- what is no longer so


# -------------------------------------------------------------------------------------------- on a telephone


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every kind of report, of made-up rows, with all of its figures and an example."""
    folder = tmp_path_factory.mktemp("pages")
    results = seeded()
    results["rows"] = [*results["rows"], *window_rows()]
    figures = [example_of(folder), *drawing.draw_all(results, folder / "figures")]
    figures += window.window_figures(results, folder / "figures")
    config = {"model": "m", "licences": {"python": "PSF"}, "parts_done": 1, "parts": 2, "plan": {"passages": 1}}
    kept = json.loads((ROOT / sheets.KEPT["sheets"]).read_text("utf-8"))
    sheets.write_report(kept, folder)
    return {
        "main": page.write_report(results, figures, folder / "main.html", ["a caveat"]).read_text(),
        "sheets": (folder / "report.html").read_text(),
        "pretrained": pretrained.write_report({"config": config, "rows": few_bits(0.1)}, folder).read_text(),
    }


def window_rows() -> list[dict]:
    """Of every probe of the window's suite that is drawn."""
    made = Made(SEEDS[0])
    for drawn in window.FIGURES.values():
        made.kinds = tuple(kind for kind in drawn.kinds if kind in LOSS)
        for probe in drawn.probes:
            for arm in drawn.arms:
                for varied in ("k=3", "replaced=1"):
                    made.arm(probe, f"{arm}.{varied}.lead=0", 0.5)
    return made.rows


def example_of(folder: Path) -> Path:
    legends, shown = np.zeros((3, 70, 30, 3), np.uint8), np.zeros((100, 100, 3), np.uint8)
    asked = ["1  chain: stripes, purple cell of the orange row"] * 7
    answers = {name: ["orange stripes"] * 7 for name in ("re-prefill", "blind", "patch.rank=4")}
    right = ["yellow stripes"] * 7
    colours = example.swatches()
    return example.example_figure(legends, shown, asked, answers, folder / "example.png", right, (), colours)


class Boxes(html.parser.HTMLParser):
    """Tables and pictures with the classes of what they stand in, and whether that is folded away."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.found: list[tuple[str, dict[str, str | None], set[str], bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        around = {name for _, names in self.open for name in names.split()}
        if tag in ("table", "img"):
            self.found.append((tag, dict(attrs), around, any(name == "details" for name, _ in self.open)))
        if tag not in ("img", "meta", "br", "li", "p", "link", "hr"):
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and any(name == tag for name, _ in self.open) and self.open.pop()[0] != tag:
            pass


@pytest.mark.parametrize("name", ["main", "sheets", "pretrained"])
def test_wide_tables_scroll_in_a_box_and_pictures_fit(pages: dict[str, str], name: str):
    boxes = Boxes()
    boxes.feed(pages[name])
    assert {tag for tag, *_ in boxes.found} == {"table", "img"}
    for tag, attributes, outside, folded in boxes.found:
        if tag == "table":
            assert "wide" in outside
        least = re.search(r"min-width: (\d+)px", attributes.get("style") or "")
        # The body has margins of 0.8 rem there.
        assert folded or not least or int(least[1]) <= SCREEN - 2 * 12.8, attributes.get("alt")


WIDTHS = """
const said = [];
for (const frame of document.querySelectorAll("iframe")) {
  const inner = frame.contentDocument;
  const boxes = [...inner.querySelectorAll("img")].filter(image => !image.closest("details"));
  const cut = boxes.filter(image => image.clientWidth > image.parentElement.clientWidth).map(image => image.alt);
  inner.querySelectorAll("details").forEach(folded => { folded.open = true; });
  said.push(frame.title + ":" + inner.scrollingElement.scrollWidth + ":" + cut.join(","));
}
document.body.dataset.said = said.join(";");
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_nothing_is_wider_than_a_telephone(pages: dict[str, str], tmp_path: Path):
    """As a browser lays the pages out at 390 CSS pixels, everything unfolded; pictures are whole without scrolling."""
    style = f"border: 0; width: {SCREEN}px; height: 800px"
    frames = "".join(
        f'<iframe title="{name}" style="{style}" srcdoc="{html.escape(text)}"></iframe>' for name, text in pages.items()
    )
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!doctype html><body>{frames}<script>onload = () => {{ {WIDTHS} }}</script></body>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    # As on a telephone, scrollbars take no room.
    command = [
        "chromium",
        *flags,
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        outer.as_uri(),
    ]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said = re.search(r'data-said="(.*?)"', seen)
    assert said, seen[-500:]
    assert said[1].split(";") == [f"{name}:{SCREEN}:" for name in pages]
