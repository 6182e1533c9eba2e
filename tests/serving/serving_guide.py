"""The tables of docs/guides/vllm.md, from `results.json`: `python tests/serving/serving_guide.py` writes them anew."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
GUIDE = HERE.parents[1] / "docs" / "guides" / "vllm.md"

PLUMBING = {
    "the whole front as one leading chunk, from the store": ["forms exact"],
    "the first chunk leading, the rest prefilled by the engine": ["forms leading", "serves leading"],
    "the second with a patch of rank 16": ["forms stored", "serves stored"],
    "the second bare": ["forms bare"],
    "a plain request behind that one, salts taken away": ["forms plain_after_bare_without_salt"],
    "a plain request behind that one": ["forms plain_after_bare"],
    "an object damaged on the disk: not matched, computed by the engine": ["serves damaged"],
    "a splice that fails, recomputed without async scheduling": ["serves not_loaded"],
}
"""Rows of the first table: scenario and answer; where there are several, in the process that formed and in another."""
KINDS = ("page", "legend", "chain", "aggregate")


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Makes the tables by name."""
    return {"plumbing": _plumbing(results), "together": _together(results), "trained": _trained(results["trained"])}


def _plumbing(results: dict[str, Any]) -> str:
    rows = [
        "| | heads of 128: tokens | log-probabilities | heads of 64: tokens | log-probabilities |",
        "|---|---|---|---|---|",
    ]
    for what, places in PLUMBING.items():
        cells = []
        for width in (128, 64):
            found = []
            for place in places:
                scenario, answer = place.split()
                own = results.get(f"{scenario}, heads of {width}")
                found += [] if own is None else [own[answer]]
            tokens = " / ".join(f"{own['tokens_equal_in_front']} of {own['of']}" for own in found)
            apart = " / ".join(f"{own['largest_difference_of_log_probabilities']:.2g}" for own in found)
            cells += [tokens or "not run", apart or "not run"]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _together(results: dict[str, Any]) -> str:
    alone = results["preempted, heads of 128"]
    whole = lambda answers: sum(own["tokens_equal_in_front"] == own["of"] for own in answers)
    ours = [
        ("with the connector, four kinds of plans; no async scheduling", "mixed, heads of 128"),
        ("the same, heads of 64", "mixed, heads of 64"),
        ("with the connector; async scheduling, the engine mended", "mended, heads of 128"),
    ]
    rows = [
        "| eight requests at once, a pool too small | preemptions | answers equal to one at a time |",
        "|---|---|---|",
    ]
    rows += [
        f"| no connector; async scheduling | {alone['preemptions']} | {whole(alone['together'])} of 8 |",
        f"| no connector; async scheduling, the engine mended | {alone['preemptions_mended']} | "
        f"{sum(kept == alone['together'][0]['of'] for kept in alone['mended'])} of 8 |",
    ]
    for what, key in ours:
        if key in results:
            rows.append(f"| {what} | {results[key]['preemptions']} | {whole(results[key]['together'])} of 8 |")
    many = results["many, heads of 128"]
    right, of = (sum(many[name].values()) for name in ("equal_to_alone", "requests"))
    rows.append(
        f"| {of} requests, at most eight at once, five kinds of plans; no async scheduling | {many['preemptions']} | "
        f"{right} of {of} |"
    )
    return "\n".join(rows)


def _trained(found: dict[str, Any]) -> str:
    kinds = " | ".join(f"{kind} (n {found['ways']['blind']['right'][kind]['n']})" for kind in KINDS)
    rows = [
        f"| | {kinds} | tokens prefilled: first question / others | first question, ms | from our executor |",
        f"|---|{'---|' * len(KINDS)}---|---|---|",
    ]
    for way, own in found["ways"].items():
        each = [own["right"][kind] for kind in KINDS]
        right = " | ".join(f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for one in each)
        first, others = own["prefilled_tokens_of_the_first_question"], own["prefilled_tokens_of_the_others"]
        apart = own["difference_from_our_executor"]["largest"]
        seconds = own["median_seconds_of_the_first_question"]
        rows.append(f"| {way} | {right} | {first:.0f} / {others:.0f} | {1000 * seconds:.0f} | {apart:.1g} |")
    return "\n".join(rows)


def marked(name: str, text: str) -> tuple[int, int]:
    """Where a table stands in a text: between `<!-- engine: NAME -->` and `<!-- end -->`."""
    begin = text.index(f"<!-- engine: {name} -->\n") + len(f"<!-- engine: {name} -->\n")
    return begin, text.index("<!-- end -->", begin)


def write() -> None:
    """Writes the tables into the guide."""
    text = GUIDE.read_text()
    for name, table in tables(json.loads(RESULTS.read_text())).items():
        begin, end = marked(name, text)
        text = f"{text[:begin]}\n{table}\n\n{text[end:]}"
    GUIDE.write_text(text)


if __name__ == "__main__":
    write()
