"""The page of real weights: its tables against the rows that are kept beside it."""

import json
from pathlib import Path

import pytest

from evals.pretrained import document
from tests.evals.test_pretrained_suite import few_bits

CONFIG = {
    "model": "m",
    "parts_done": 1,
    "parts": 2,
    "licences": {"python": "PSF"},
    "plan": {},
    "documents": {"prose": ["d0"]},
}


def check(docs: Path) -> None:
    """Reads a page without its own code: its arms are there, what removes most first, and figures that are small."""
    found = json.loads((docs / document.SUMMARY).read_text(encoding="utf-8"))
    text = (docs / document.PAGE).read_text(encoding="utf-8")
    assert text == document.page(found)
    etas = {
        row["arm"]: row["value"] for row in found["rows"] if (row["probe"], row["metric"]) == ("text.every_arm", "eta")
    }
    etas = {arm: eta for arm, eta in etas.items() if arm in document.ARMS}
    table = text.partition("## What each arm removes")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    shown = [(cells[0].strip(), float(cells[1].split()[0])) for cells in lines if "---" not in cells[0]]
    assert [arm for arm, _ in shown] == sorted(etas, key=lambda arm: -etas[arm])
    assert [eta for _, eta in shown] == pytest.approx(sorted(etas.values(), reverse=True), abs=6e-4)
    assert found["config"]["parts_done"] == found["config"]["parts"] or "Not finished: " in text
    for name in document.FIGURES:
        assert 1_000 < (docs / document.PICTURES / f"pretrained_{name}.png").stat().st_size < 200_000


def written(folder: Path, **config: int) -> str:
    results = {"config": {**CONFIG, **config}, "cpu_seconds": 9.4, "rows": few_bits(0.01)}
    (folder / "results.json").write_text(json.dumps(results))
    return document.write(folder, folder).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_page_is_what_its_rows_say(tmp_path):
    text = " ".join(written(tmp_path).split())
    check(tmp_path)
    assert "**Not finished: 1 of 2 parts were run**, 6 passages" in text
    assert "Not among the parts that were run: greedy continuations; behaviour: copy;" in text
    assert text.index("| kv.bits=4 |") < text.index("| patch.rank=8 |")
    assert "| re-prefill | 2.000 [2.000, 2.000] |" in text
    assert "| blind | 2.200 [2.200, 2.200] | 0.200 [0.200, 0.200] |" in text
    assert "Not finished" not in written(tmp_path, parts=1)


def test_the_shipped_page_is_what_its_rows_say():
    shipped = [(document.DOCS / name).exists() for name in (document.SUMMARY, document.PAGE)]
    assert shipped in ([True, True], [False, False])
    if shipped[0]:
        check(document.DOCS)
