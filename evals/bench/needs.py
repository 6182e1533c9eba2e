"""Disposability: what `Session.needs` reports of a chunk, beside prefilling the window without it. Kamera App. E.

The paper's test is one decode with a patch off; it reports no measurement of it. Here windows of the small task (three
legends and a page, the first legend pinned) are asked questions of every kind about what each chunk shows. The truth is
an ablation by re-prefill: the window without the chunk, prefilled again, beside the window with it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.session import UNCHANGED, EmbeddedInput, PrivateRuntime, compared, embedded, prefilled_logits
from models import Buckets, load

from .. import small_task
from ..results import intervals
from ..results.tables import markdown_table
from ..trained import MAIN, shipped
from .benchmark import Benchmark

CONTEXTS, QUICK = 32, 2
KINDS = {"page": 1, "legend": 1, "chain": 1, "aggregate": 1}
METHODS = ("out", "erased", "bare")
"""How a session ablates a chunk; attributes of a `DisposabilityReport`."""


@dataclasses.dataclass(frozen=True)
class AblationItem:
    """One chunk and one question: whether the answer changes without the chunk, by re-prefill and by a session.

    Attributes:
      context: which window.
      chunk: its place in the window.
      kind: of the question.
      ablated: re-prefill without the chunk gives another answer.
      changed: whether the session's answer changes, by method.
    """

    context: int
    chunk: int
    kind: str
    ablated: bool
    changed: dict[str, bool]


def run(*, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures, and counts agreement.

    Returns:
      The settings, a confusion table for each method, and shares with 95 % intervals over contexts.
    """
    count = QUICK if quick else CONTEXTS
    items = list(_items(count, seed))
    by_kind = {}
    for kind in KINDS:
        of_kind = [item for item in items if item.kind == kind]
        by_kind[kind] = {method: confusion(of_kind, method) for method in METHODS[:2]}

    return {
        "model": MAIN,
        "contexts": count,
        "bound": UNCHANGED,
        "kinds": list(KINDS),
        "ways": {method: confusion(items, method) for method in METHODS},
        "by_kind": by_kind,
    }


def _items(count: int, seed: int) -> Sequence[AblationItem]:
    """Asks every question about every chunk of `count` windows but the pinned one."""
    backbone = load(shipped(MAIN), dtype="float32", buckets=Buckets())
    contexts = small_task.sample_contexts(np.random.default_rng(seed), count)
    legends, pages = small_task.render(contexts)
    questions = small_task.ask(contexts, np.random.default_rng(seed + 1), KINDS)
    words = small_task.VOCABULARY.names
    runtime, items = PrivateRuntime(backbone, pages=128), list[AblationItem]()

    for context in range(count):
        with kvp.Session(backbone, runtime=runtime, branch=f"context {context}") as session:
            images = [*legends[context][contexts.order[context]], pages[context]]
            names = [session.add(image) for image in images]
            pieces = [embedded(backbone, [image]) for image in images]

            for number, kind in enumerate(KINDS):
                text = f"{words[questions.ask[context, number]]} {words[questions.argument[context, number]]}"
                question = embedded(backbone, [kvp.Text(text)])
                whole = _re_prefill(backbone, pieces, question)

                for place in range(1, len(names)):
                    without = [*pieces[:place], *pieces[place + 1 :]]
                    kl, flipped = compared(whole, _re_prefill(backbone, without, question))
                    ablated = bool(flipped[0]) or float(kl[0]) > UNCHANGED

                    report = session.needs(names[place], kvp.Text(text), steps=1, erased=True)
                    changed = {}
                    for method in METHODS:
                        answer = getattr(report, method)
                        changed[method] = answer is not None and answer.changed(UNCHANGED)
                    items.append(AblationItem(context, place, kind, ablated, changed))

    return items


def _re_prefill(backbone: Any, pieces: list[EmbeddedInput], question: EmbeddedInput) -> np.ndarray:
    """Computes logits of the answer after a prefill of pieces."""
    starts = np.cumsum([0, *(piece.span for piece in pieces)]).tolist()
    placed = list(zip(pieces, starts[:-1], strict=True))
    return prefilled_logits(backbone, placed, question, starts[-1], question.length, 1)


def confusion(items: Sequence[AblationItem], method: str) -> dict[str, Any]:
    """Counts the confusion table of one method: the ablation against the session."""
    needed = np.array([item.ablated for item in items])
    reported = np.array([item.changed[method] for item in items])
    cluster = np.array([item.context for item in items])
    table = {
        "needed, said needed": int((needed & reported).sum()),
        "needed, said disposable": int((needed & ~reported).sum()),
        "disposable, said needed": int((~needed & reported).sum()),
        "disposable, said disposable": int((~needed & ~reported).sum()),
    }
    agreement = intervals.mean(needed == reported, cluster)
    return {"table": table, "agreement": [agreement.value, agreement.low, agreement.high], "n": len(items)}


def table(result: dict[str, Any]) -> str:
    """Formats the confusion tables as Markdown."""
    tables = [(method, "all", found) for method, found in result["ways"].items()]
    for kind, methods in result["by_kind"].items():
        tables += [(method, kind, found) for method, found in methods.items()]
    lines = []

    for method, kind, found in tables:
        value, low, high = found["agreement"]
        counts = map(str, found["table"].values())
        lines.append([method, kind, *counts, f"{value:.3f} [{low:.3f}, {high:.3f}]"])

    head = ["method", "questions", "needed: said needed", "said disposable", "disposable: said needed"]
    about = (
        f"{result['model']}, {result['contexts']} contexts, {result['bound']} nats count as no change; the truth is a"
    )
    text = markdown_table([*head, "said disposable", "agreement"], lines)
    return f"{about} re-prefill without the chunk.\n\n{text}\n"


BENCHMARK = Benchmark("needs", run, table=table)
