"""The tables of docs/experiments/vllm.md, from `results.json`: `python tests/serving/serving_guide.py` writes them."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
GUIDE = HERE.parents[1] / "docs" / "experiments" / "vllm.md"

LOOPS = ("sliding", "reopened", "appended", "documents")
LEFT_OUT = ("re-prefill", "placeholders")
"""Ways of the loops that have no row."""
KINDS = ("chain", "aggregate")


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Makes the tables by name."""
    return {
        "trained": _trained(results["trained"]),
        "pretrained": _pretrained(results["pretrained"]),
        "loops": _loops(results),
    }


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _loops(results: dict[str, Any]) -> str:
    heads = ["loop", "way", "prefilled", "× prefix cache", "right", "KL to a re-prefill", "largest", "within its bound"]
    rows = []
    for loop in LOOPS:
        ways = results[loop]["ways"]
        alone = ways["prefix cache"]["prefilled_tokens"]
        for way, own in ways.items():
            if way in LEFT_OUT:
                continue
            bounded = f"{own['within_their_bounds']} of {own['bounded']}" if way in ("exact", "forget") else ""
            rows.append(
                [
                    loop,
                    way,
                    f"{own['prefilled_tokens']:,}",
                    f"{own['prefilled_tokens'] / alone:.3f}",
                    f"{own['right']['value']:.3f}",
                    _interval(own["kl"]),
                    f"{own['largest_kl']:.2g}",
                    bounded,
                ]
            )
    return _table(heads, rows)


def _interval(found: dict[str, float]) -> str:
    """A divergence with its interval; below 1e-6 there is only rounding."""
    value, low, high = (max(found[name], 0.0) for name in ("value", "low", "high"))
    return f"{value:.2g} [{low:.2g}, {high:.2g}]" if high >= 1e-6 else "0"


def _trained(found: dict[str, Any]) -> str:
    heads = ["", *(f"{kind} (n {found['ways']['blind']['right'][kind]['n']})" for kind in KINDS)]
    heads += ["tokens prefilled: first question / others", "from our executor"]
    rows = []
    for way, own in found["ways"].items():
        first, others = own["prefilled_tokens_of_the_first_question"], own["prefilled_tokens_of_the_others"]
        apart = own["difference_from_our_executor"]["largest"]
        shares = [_share(own["right"][kind]) for kind in KINDS]
        rows.append([way, *shares, f"{first:.0f} / {others:.0f}", f"{apart:.1g}"])
    return _table(heads, rows)


def _pretrained(found: dict[str, Any]) -> str:
    count, steps = len(found["texts"]), found["of"]
    heads = ["", f"answers of {steps} tokens equal", "first tokens equal", "median difference of log-probabilities"]
    rows = []
    for way, own in found["ways"].items():
        equal = [f"{own[name]} of {count}" for name in ("answers_equal", "first_tokens_equal")]
        cells = [way, *equal, f"{own['largest_difference']['median']:.2g}", f"{own['computed_tokens']:.0f}"]
        rows.append(cells)
    return _table([*heads, "tokens prefilled"], rows)


def _share(one: dict[str, Any]) -> str:
    return f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def marked(name: str, text: str) -> tuple[int, int]:
    """Where a table stands in a text: between `<!-- engine: NAME -->` and `<!-- end -->`."""
    begin = text.index(f"<!-- engine: {name} -->\n") + len(f"<!-- engine: {name} -->\n")
    return begin, text.index("<!-- end -->", begin)


def write() -> None:
    """Writes the tables into the guide."""
    text, results = GUIDE.read_text(), json.loads(RESULTS.read_text())
    for name, table in tables(results).items():
        begin, end = marked(name, text)
        text = f"{text[:begin]}\n{table}\n\n{text[end:]}"
    GUIDE.write_text(text)


if __name__ == "__main__":
    write()
