"""The report of an agent's loop: each step's methods compared with a re-prefill, and a table to be sent back."""

import collections
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax.session import compared

from ..harness.frame import aligned_table

METHODS = ("session", "prefix cache", "re-prefill")


class Served(NamedTuple):
    """How a method served a step.

    Attributes:
      computed: tokens of pieces that ran through the decoder.
      seconds: until the answer's first token.
      bytes: of the KV that serves the window.
      logits: of the first token. answer: its text.
    """

    computed: int
    seconds: float
    bytes: int
    logits: np.ndarray
    answer: str


def compared_answers(served: Mapping[str, Served]) -> dict[str, dict[str, Any]]:
    """Compares the first token and the answer of each method with re-prefill's."""
    figures, reference = {}, served["re-prefill"]
    for method, (computed, seconds, size, logits, answer) in served.items():
        kl = float(compared(reference.logits, logits)[0][0])
        figures[method] = {"computed": computed, "seconds": seconds, "bytes": size, "kl": kl}
        figures[method] |= {"answer": answer, "same": answer == reference.answer}
    return figures


def image_sizes(shots: Sequence[Path], tokens: Sequence[int]) -> dict[str, int]:
    """Counts images by their size in pixels and tokens."""
    from PIL import Image

    words = list[str]()
    for shot, count in zip(shots, tokens, strict=True):
        with Image.open(shot) as image:
            words.append(f"{image.width} × {image.height}, {count} tokens")
    return dict(collections.Counter(words))


def table(results: Mapping[str, Any]) -> str:
    """Formats the results of `agent.json`: a line for each method, and under them what was measured where."""
    steps, about, machine = results["steps"], results["config"], results["environment"]
    lines, total = [], sum(step["methods"]["re-prefill"]["computed"] for step in steps)
    for method in METHODS:
        figures = [step["methods"][method] for step in steps]
        computed = sum(figure["computed"] for figure in figures)
        seconds, kl = (statistics.median(figure[name] for figure in figures) for name in ("seconds", "kl"))
        largest = max(figure["kl"] for figure in figures)
        same = f"{sum(figure['same'] for figure in figures)} of {len(figures)}"
        cells = [f"{computed}", f"{computed / total:.0%}", f"{seconds:.3g}", f"{kl:.2g} ({largest:.2g})", same]
        lines.append([method, *cells])
    head = ["method", "tokens computed", "share", "seconds per step", "median KL (largest)", "same decisions"]

    held = [f"{method} {steps[-1]['methods'][method]['bytes'] / 2**20:.1f} MiB" for method in METHODS]
    images = [f"{count} of {size}" for size, count in about["images"].items()]
    lead = f"a lead of {about['lead']} tokens" if about["lead"] else "the first one, which is pinned"
    recalls = sum(step["op"] == "recall" for step in steps)
    notes = {
        "device": f"{machine['device']}, jax {machine['jax']}, {machine['machine']}, {machine['cores']} cores",
        "model": f"{about['model']}, {about['dtype']}, fingerprint {about['fingerprint'][:16]}",
        "images": "; ".join(images),
        "window": f"{about['keep']} screenshots after {lead}; {len(steps)} steps, {recalls} of them recalls",
        "question": f"{about['question']!r}, {about['question_tokens']} tokens (frame: {about['frame']}); not counted",
        "answers": f"greedy, at most {about['answer_tokens']} tokens; a decision is the whole answer",
        "KV held": f"{', '.join(held)}, at the last step",
        "seconds": "median; from a screenshot's file to the first token, tower included; second of two passes",
        "KL": "of the first token from the re-prefill's, in nats",
        "command": about["command"],
    }
    return "\n".join([aligned_table(head, lines), "", *(f"{name:<10}{note}" for name, note in notes.items())])
