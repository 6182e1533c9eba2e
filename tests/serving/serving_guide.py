"""The tables of docs/experiments/vllm.md, from `results.json`: `python tests/serving/serving_guide.py` writes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
GUIDE = HERE.parents[1] / "docs" / "experiments" / "vllm.md"

PLUMBING = {
    "the whole front as one leading chunk, from the store": ["forms exact"],
    "the first chunk leading, the rest prefilled by the engine": ["forms leading", "serves leading"],
    "the second with a patch of rank 16": ["forms stored", "serves stored"],
    "the second bare": ["forms bare"],
    "a plain request behind that one": ["forms plain_after_bare"],
    "an object damaged on the disk: not matched, computed by the engine": ["serves damaged"],
    "a splice that fails, recomputed without async scheduling": ["serves not_loaded"],
}
"""Rows of the first table: scenario and answer; where there are several, in the process that formed and in another."""
KINDS_OF_MODEL = {
    "128": "heads of 128",
    "64": "heads of 64",
    "llama3": "heads of 64, bfloat16, Llama 3's rope",
    "qwen3": "Qwen3, heads of 128, bfloat16",
}
"""Of `tiny_model.KINDS`, whose import needs more than this file's."""
LOOPS = ("sliding", "reopened", "appended")
LEAST_TIMED = 8
"""Contexts below which times are not shown."""
KINDS = ("page", "legend", "chain", "aggregate")


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Makes the tables by name."""
    return {
        "plumbing": _plumbing(results),
        "together": _together(results),
        "trained": _trained(results["trained"]),
        "reordered": _reordered(results["reordered"]),
        "certified": _certified(results["certified"]),
        "pretrained": _pretrained(results["pretrained"]),
        "documents": _loops(results, ("documents",)),
        "loops": _loops(results, LOOPS),
        "shared": _shared(results),
    }


def _loops(results: dict[str, Any], loops: Sequence[str]) -> str:
    heads = [
        "loop",
        "way",
        "tokens of its prompts",
        "prefilled",
        "× prefix cache",
        "right",
        "KL to a re-prefill: mean",
        "largest",
    ]
    heads += ["other first tokens", "within its bound", "chunks served"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for loop in loops:
        ways = results[loop]["ways"]
        alone = ways["prefix cache"]["prefilled_tokens"]
        for way, own in ways.items():
            right = own["right"]
            bounded = f"{own['within_their_bounds']} of {own['bounded']}" if way in ("exact", "forget") else ""
            points = ", ".join(f"{count} {point}" for point, count in own["points"].items())
            kl = ["", ""] if way == "re-prefill" else [_interval(own["kl"]), f"{own['largest_kl']:.2g}"]
            cells = [loop, way, f"{own['prompt_tokens']:,}", f"{own['prefilled_tokens']:,}"]
            cells += [
                f"{own['prefilled_tokens'] / alone:.3f}",
                f"{right['value']:.3f} [{right['low']:.3f}, {right['high']:.3f}]",
            ]
            cells += [*kl, "" if way == "re-prefill" else f"{own['flips']['value']:.1%}", bounded, points]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _interval(found: dict[str, float]) -> str:
    """A divergence with its interval; below zero there is only rounding."""
    value, low, high = (max(found[name], 0.0) for name in ("value", "low", "high"))
    return f"{value:.2g} [{low:.2g}, {high:.2g}]" if high >= 1e-6 else f"{value:.2g}"


def _plumbing(results: dict[str, Any]) -> str:
    rows = [f"| | {' | '.join(KINDS_OF_MODEL.values())} |", f"|---|{'---|' * len(KINDS_OF_MODEL)}"]
    for what, places in PLUMBING.items():
        cells = [_plumbed(results, kind, places) for kind in KINDS_OF_MODEL]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    moved = [results[f"forms, {kind}"].get("first_layer") for kind in KINDS_OF_MODEL]
    cells = ["not run" if own is None else f"{own['k']:.1g} / {own['v']:.1g}" for own in moved]
    rows.append(f"| the second, moved, in the lowest layer: keys / values beside the prefill's | {' | '.join(cells)} |")
    return "\n".join(rows)


def _plumbed(results: dict[str, Any], kind: str, places: list[str]) -> str:
    """Tokens and log-probabilities of an answer, in every scenario that has it."""
    found = []
    for place in places:
        scenario, answer = place.split()
        own = results.get(f"{scenario}, {kind}", {})
        found += [own[answer]] if answer in own else []
    tokens = " / ".join(f"{own['tokens_equal_in_front']} of {own['of']}" for own in found)
    apart = " / ".join(f"{own['largest_difference_of_log_probabilities']:.2g}" for own in found)
    return f"{tokens}; {apart}" if found else "not run"


def _together(results: dict[str, Any]) -> str:
    alone = results["preempted, 128"]
    whole = lambda answers: sum(own["tokens_equal_in_front"] == own["of"] for own in answers)
    ours = [
        ("with the connector, four kinds of plans; no async scheduling", "mixed, 128"),
        ("with the connector; async scheduling, the engine mended", "mended, 128"),
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
    many = results["many, 128"]
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
        right = " | ".join(map(_share, each))
        first, others = own["prefilled_tokens_of_the_first_question"], own["prefilled_tokens_of_the_others"]
        apart = own["difference_from_our_executor"]["largest"]
        seconds = own["median_seconds_of_the_first_question"]
        rows.append(f"| {way} | {right} | {first:.0f} / {others:.0f} | {1000 * seconds:.0f} | {apart:.1g} |")
    return "\n".join(rows)


def _reordered(found: dict[str, Any]) -> str:
    orders, timed = found["orders"], found["timed"] >= LEAST_TIMED
    heads = [f"{order}: tokens prefilled, first question / others" for order in orders]
    heads += [f"{order}: first question, ms" for order in orders] if timed else []
    rows = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for way in orders["reordered"]:
        each = [own[way] for own in orders.values()]
        cells = [
            f"{own['prefilled_tokens_of_the_first_question']:.0f} / {own['prefilled_tokens_of_the_others']:.0f}"
            for own in each
        ]
        for own in each if timed else ():
            low, middle, high = (1000 * seconds for seconds in own["seconds_of_the_first_question"])
            cells.append(f"{middle:.0f} ({low:.0f} to {high:.0f})")
        rows.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _certified(found: dict[str, Any]) -> str:
    rows = [
        "| chunks in the store | nats asked for | served | bound told | lost: mean | largest | answers within it |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in found["bounds"].items():
        if len(own["served"]) == 1:
            continue  # only the leading chunk, which is exact
        tenant, asked = name.split()
        chunks = {"blind": "bare", "rank8": "patches of rank 8", "rank16": "patches of rank 16"}[tenant]
        served = ", ".join(f"{point} {rank}" if rank else point for point, rank in own["served"])
        rows.append(
            f"| {chunks} | {asked} | {served} | {own['promised']:.2g} | {own['mean']:.1e} | {own['largest']:.1e} | "
            f"{own['within']:.3f} of {own['answers']} |"
        )
    return "\n".join(rows)


def _pretrained(found: dict[str, Any]) -> str:
    count, steps = len(found["texts"]), found["of"]
    rows = [
        f"| | answers of {steps} tokens equal | first tokens equal | tokens equal in front, mean | largest difference "
        "of log-probabilities: median / largest | tokens prefilled |",
        "|---|---|---|---|---|---|",
    ]
    for way, own in found["ways"].items():
        apart = own["largest_difference"]
        rows.append(
            f"| {way} | {own['answers_equal']} of {count} | {own['first_tokens_equal']} of {count} | "
            f"{own['mean_tokens_equal_in_front']:.1f} | {apart['median']:.2g} / {apart['largest']:.2g} | "
            f"{own['computed_tokens']:.0f} |"
        )
    return "\n".join(rows)


def _shared(results: dict[str, Any]) -> str:
    heads = ["remote store", "what happens", "engine", "answers", "equal to its prefill", "tokens of its prompts"]
    heads += ["from the store", "calls of the remote store a request", "seconds a request: median, longest"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind in ("file", "valkey"):
        found = results[f"shared, {kind}"]
        told: list[tuple[str, str, dict[str, Any]]] = []
        for word in ("in turn", "at once"):
            told += [(word, name, found[word][name]) for name in ("one", "two")]
        told += [("two is killed", "one, going on", found["killed"]["other"])]
        told += [("two is killed", "two, started again", found["killed"]["revived"])]
        silent = found.get("silent")
        if silent is not None:
            told += [("the server is stopped", name, own) for name, own in silent["during"].items()]
            told += [("the server goes on", "both", silent["after"])]
        for word, name, own in told:
            calls = f"{min(own['calls'])} to {max(own['calls'])}"
            seconds = sorted(own["seconds"])
            cells = [kind, word, name, str(own["answers"]), str(own["equal"]), f"{own['prompt_tokens']:,}"]
            cells += [f"{own['served_tokens']:,}", calls, f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


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
