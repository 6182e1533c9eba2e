"""Revisits: an agent goes back to images it has seen, in a sliding window, and starts again over the same store.

Each way of running a session visits the same images several times: the first time over an empty store, then the very
same trace (an agent that restarts), then other orders. What a window promises is computed by a session that reuses
nothing and is given the same images.
"""

import random
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.plan import OnlineCertificate
from kvpatch_jax.session import embedded
from kvpatch_jax.session.logit_comparison import compared

from .. import small_task
from ..results.intervals import mean

WAYS: dict[str, dict[str, Any]] = {
    "no prefills stored": {"prefills": 0},
    "default": {},
    "certificate that learns": {"certificate": "online"},
    "uncertified": {"uncertified": True, "rank": 0},
}
"""Options of a session by way; all of them over a store."""
STEPS = 30
"""Random revisits of a visit."""
VISITS = ("first", "same trace", "other order 1", "other order 2", "other order 3")


class Visit(NamedTuple):
    """One visit: the image of every step, and the question asked after it."""

    name: str
    images: tuple[int, ...]
    questions: tuple[str, ...]


def run(backbone: Any, *, images: int = 8, window: int = 4, steps: int = STEPS, seed: int = 0) -> dict[str, Any]:
    """Replays revisits in every way.

    Args:
      images: distinct images, a multiple of four: three legends and a page of each context.
      window: chunks that stay.
      steps: random revisits of a visit, after each image was seen once.

    Returns:
      "config" and "rows": one for each way and visit, and for each baseline.
    """
    contexts = small_task.sample_contexts(np.random.default_rng(seed), images // 4)
    legends, pages = small_task.render(contexts)
    shown = [*legends.reshape(-1, *legends.shape[2:]), *pages]
    visits = _visits(contexts, images, window, steps, seed)

    rows: list[dict[str, Any]] = []
    truth, caches = {}, dict[str, set[tuple[int, ...]]]()
    for visit in visits:
        row, truth[visit.name] = _replay(backbone, None, shown, visit, window, {}, None)
        rows.append(row | {"way": "no store", "visit": visit.name})
        rows += _baselines(visit, [row["chunk tokens"][number] for number in range(images)], window, caches)

    for way, options in WAYS.items():
        # A certificate that learns goes on over the visits, as one beside a store does.
        if options.get("certificate") == "online":
            options = {"certificate": OnlineCertificate(backbone.fingerprint)}
        with tempfile.TemporaryDirectory() as folder, kvp.ChunkStore(folder) as store:
            for visit in visits:
                row, _ = _replay(backbone, store, shown, visit, window, options, truth[visit.name])
                rows.append(row | {"way": way, "visit": visit.name})

    for row in rows:
        row.pop("chunk tokens", None)
    return {"config": {"images": images, "window": window, "steps": steps, "seed": seed}, "rows": rows}


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Formats the rows: what a visit computed, what came back without a forward, and how far answers are off."""
    head = [
        "way",
        "visit",
        "revisits served without a forward",
        "prefilled tokens",
        "GFLOP of edits",
        "KL",
        "largest KL",
    ]
    lines = []
    for row in found["rows"]:
        hits = f"{row['hits']} of {row['revisits']}" if "hits" in row else ""
        flops = f"{row['flops'] / 1e9:.2f}" if "flops" in row else ""
        kl = "" if row.get("kl") is None else f"{row['kl']:.2g} [{row['low']:.2g}, {row['high']:.2g}]"
        most = "" if row.get("kl") is None else f"{row['most']:.2g}"
        lines.append([row["way"], row["visit"], hits, str(row["tokens"]), flops, kl, most])
    return head, lines


def _visits(contexts: Any, images: int, window: int, steps: int, seed: int) -> list[Visit]:
    names = small_task.VOCABULARY.names
    asked = small_task.ask(contexts, np.random.default_rng(seed + 1), {"chain": 8})
    texts = [
        f"{names[int(ask)]} {names[int(argument)]}"
        for ask, argument in zip(asked.ask.flat, asked.argument.flat, strict=True)
    ]
    visits = []
    for number, name in enumerate(VISITS):
        # The same trace is drawn from the seed of the first.
        draw = random.Random(1000 * seed + max(number - 1, 0))
        order = list(range(images))
        for _ in range(steps):
            # What is in the window is read there: the lead, and the images shown last.
            order.append(draw.choice([image for image in range(1, images) if image not in order[-window:]]))
        visits.append(Visit(name, tuple(order), tuple(draw.choice(texts) for _ in order)))
    return visits


def _replay(
    backbone: Any,
    store: Any,
    shown: Sequence[np.ndarray],
    visit: Visit,
    window: int,
    options: dict[str, Any],
    truth: list[np.ndarray] | None,
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Replays one visit. Returns its row, and the logits of each question's first token of an answer."""
    logits, losses = [], []
    with kvp.Session(backbone, store, keep=window, **options) as session:
        tokens_of = {}
        for step, (number, question) in enumerate(zip(visit.images, visit.questions, strict=True)):
            session.add(shown[number])
            # The agent asks, which is what a certificate that learns audits.
            str(session.ask(question, steps=1))
            asked = embedded(backbone, [question])
            # Audits use the same pool from a thread of their own.
            with session.runtime.locked():
                out = session.runtime.executor.prefill(session.window, asked.tokens, asked.length)
                logits.append(np.asarray(out.logits[0], np.float32)[:1])
            if truth is not None:
                losses.append(float(compared(truth[step], logits[-1])[0][0]))
            tokens_of[number] = session.window.pieces[-1].entry.tokens
        stats = session.stats()

    # On the first visit nobody knows an image that is met for the first time.
    known = len(visit.images)
    if store is None or visit.name == VISITS[0]:
        known -= len(set(visit.images))
    row: dict[str, Any] = {
        "hits": stats.hits,
        "revisits": known,
        "forwards": stats.forwards,
        "tokens": stats.tokens,
        "flops": stats.flops,
        "kl": None,
        "chunk tokens": tokens_of,
    }
    if losses:
        interval = mean(np.array(losses), np.arange(len(losses)))
        row |= {"kl": interval.value, "low": interval.low, "high": interval.high, "most": max(losses)}
    return row, logits


def _baselines(
    visit: Visit, tokens: Sequence[int], window: int, caches: dict[str, set[tuple[int, ...]]]
) -> list[dict[str, Any]]:
    """Counts the tokens that agents prefill without this library. Questions are left out, as everywhere.

    A prefix cache is as good as one can be: unbounded, and it knows every prefix that was ever computed, in this visit
    or, "kept over visits" as our store is, in all of them. The first image is pinned, as a session pins it.

    Args:
      caches: prefixes by way, which this adds to; those kept over visits come in as earlier visits left them.
    """
    rows = []
    batched = f"evicting {2 * window} to {window}"
    for way, low, high in (
        ("re-prefill", window, window),
        ("prefix cache, one leaves at a time", window, window),
        ("the same, kept over visits", window, window),
        (f"prefix cache, {batched}", window, 2 * window),
        (f"the same {batched}, kept over visits", window, 2 * window),
    ):
        seen = caches.setdefault(way, set()) if way.endswith("kept over visits") else set()
        lead, held, computed = visit.images[0], list[int](), 0
        for step, number in enumerate(visit.images):
            if step:
                held = [*(held[-(low - 1) :] if len(held) == high else held), number]
            prompt = (lead, *held)
            for end in range(1, len(prompt) + 1):
                if way == "re-prefill" or prompt[:end] not in seen:
                    computed += tokens[prompt[end - 1]]
                    seen.add(prompt[:end])
        rows.append({"way": way, "visit": visit.name, "tokens": computed})
    return rows
