"""Disposability: what `Session.needs` says of a chunk, beside prefilling the window without it. Kamera App. E.

The paper's test is one decode with a patch off; it measured nothing of it. Here windows of the small task (three
legends and a page, the first legend pinned) are asked questions of every kind about what each chunk shows. The truth is
an ablation by re-prefill: the window without the chunk, prefilled anew, beside the window with it.
"""

import dataclasses
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.session import UNCHANGED, EmbeddedInput, PrivateRuntime, compared, embedded, prefilled_logits
from models import Buckets, load

from .. import small_task
from ..results import intervals
from ..trained import MAIN, shipped

CONTEXTS, QUICK = 32, 2
KINDS = {"page": 1, "legend": 1, "chain": 1, "aggregate": 1}


@dataclasses.dataclass(frozen=True)
class Item:
    """One chunk and one question: whether the answer changes without the chunk, by re-prefill and as a session says.

    Attributes:
      context: which window. chunk: its place in it. kind: of the question.
      ablated: re-prefill without it gives another answer. out, erased, bare: what the session found so.
    """

    context: int
    chunk: int
    kind: str
    ablated: bool
    out: bool
    erased: bool
    bare: bool


def run(seed: int = 0, quick: bool = False, **_: Any) -> dict[str, Any]:
    """Measures, and counts agreement.

    Returns:
      What was run, a confusion table for each way of asking, and shares with 95 % intervals over contexts.
    """
    count = QUICK if quick else CONTEXTS
    backbone = load(shipped(MAIN), dtype="float32", buckets=Buckets())
    contexts = small_task.sample_contexts(np.random.default_rng(seed), count)
    legends, pages = small_task.render(contexts)
    questions = small_task.ask(contexts, np.random.default_rng(seed + 1), KINDS)
    runtime, items = PrivateRuntime(backbone, pages=128), list[Item]()
    for context in range(count):
        with kvp.Session(backbone, runtime=runtime, branch=f"context {context}") as session:
            images = [*legends[context][contexts.order[context]], pages[context]]
            names = [session.add(image) for image in images]
            pieces = [embedded(backbone, [image]) for image in images]
            for number, kind in enumerate(KINDS):
                words = small_task.VOCABULARY.names
                asked = f"{words[questions.ask[context, number]]} {words[questions.argument[context, number]]}"
                question = embedded(backbone, [kvp.Text(asked)])
                whole = _truth(backbone, pieces, question)
                for place in range(1, len(names)):
                    left = [piece for other, piece in enumerate(pieces) if other != place]
                    kl, flipped = compared(whole, _truth(backbone, left, question))
                    found = session.needs(names[place], kvp.Text(asked), steps=1, erased=True)
                    ablated = bool(flipped[0]) or float(kl[0]) > UNCHANGED
                    ways = (found.out, found.erased, found.bare)
                    changed = [way is not None and way.changed(UNCHANGED) for way in ways]
                    items.append(Item(context, place, kind, ablated, *changed))
    return {
        "model": MAIN,
        "contexts": count,
        "bound": UNCHANGED,
        "kinds": list(KINDS),
        "ways": {way: _way(items, way) for way in ("out", "erased", "bare")},
        "by_kind": {
            kind: {way: _way([item for item in items if item.kind == kind], way) for way in ("out", "erased")}
            for kind in KINDS
        },
    }


def _truth(backbone: Any, pieces: list[EmbeddedInput], question: EmbeddedInput) -> np.ndarray:
    """Logits of the answer behind a prefill of pieces, one behind the other."""
    starts = np.cumsum([0, *(piece.span for piece in pieces)]).tolist()
    placed = list(zip(pieces, starts[:-1], strict=True))
    return prefilled_logits(backbone, placed, question, starts[-1], question.length, 1)


def _way(items: list[Item], way: str) -> dict[str, Any]:
    """The confusion table of one way of asking: what the ablation says, and what the session."""
    ablated = np.array([item.ablated for item in items])
    said = np.array([getattr(item, way) for item in items])
    cluster = np.array([item.context for item in items])
    table = {
        "needed, said needed": int((ablated & said).sum()),
        "needed, said disposable": int((ablated & ~said).sum()),
        "disposable, said needed": int((~ablated & said).sum()),
        "disposable, said disposable": int((~ablated & ~said).sum()),
    }
    agreement = intervals.mean(ablated == said, cluster)
    return {"table": table, "agreement": [agreement.value, agreement.low, agreement.high], "n": len(items)}


def table(result: dict[str, Any]) -> str:
    """The confusion tables, as Markdown."""
    lines = [
        f"{result['model']}, {result['contexts']} contexts, {result['bound']} nats count as no change; the truth is a "
        "re-prefill without the chunk.",
        "",
        "| asked | questions | needed: said needed | said disposable | disposable: said needed | said disposable "
        "| agreement |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [(way, "all", found) for way, found in result["ways"].items()]
    rows += [(way, kind, found) for kind, ways in result["by_kind"].items() for way, found in ways.items()]
    for way, kind, found in rows:
        value, low, high = found["agreement"]
        cells = " | ".join(str(number) for number in found["table"].values())
        lines.append(f"| {way} | {kind} | {cells} | {value:.3f} [{low:.3f}, {high:.3f}] |")
    return "\n".join(lines)
