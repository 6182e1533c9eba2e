"""Fidelity against the number of pieces rebuilt: a cascade's order beside every other one, on the small model.

A window of three legends and three pages; the first legend is replaced. The five pieces behind it still have the KV
that the old one gave them. Rebuilding a piece places its patch of rank 32, formed of a prefill of the window as it is
now. Every subset is read, so that the best order is known. Losses that the cascade orders by were measured on other
contexts: of each piece, what is lost where it alone is not rebuilt.
"""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import Buckets, ModelBackbone, load

from .. import small_task
from ..probes.window.common import patch_of
from ..probes.window.image_sequence import ImageSequence, cut, joined, read
from ..probes.window.probe_images import foreign_legends, load_probe_images
from ..results.intervals import ratio
from ..results.tables import markdown_table
from ..trained import MAIN, shipped
from .rebuild_cascade import Dependent, rebuild

CONTEXTS = 8
QUESTIONS = {"chain": 6, "override": 4, "aggregate": 4, "page": 2}
Subset = frozenset[int]


def measure(seed: int = 0, contexts: int = CONTEXTS) -> dict[str, Any]:
    """Measures losses on some contexts, and what cascades and other orders leave on others."""
    backbone = load(shipped(MAIN), dtype="float32", buckets=Buckets())
    with tempfile.TemporaryDirectory() as folder:
        calibrated, _ = _losses(backbone, seed + 1, contexts, Path(folder))
        kl, sizes = _losses(backbone, seed + 2, contexts, Path(folder))

    print("cascade: every subset read", flush=True)
    places = range(len(sizes))
    whole = frozenset(places)
    lost = {place: float(calibrated[whole - {place}].mean()) for place in places}
    mean = {subset: float(values.mean()) for subset, values in kl.items()}

    by_size = {place: float(size) for place, size in enumerate(sizes)}
    orders = {
        "cascade": _cascade_order(lost, sizes),
        "by tokens alone": _cascade_order(by_size, sizes),
        "from the front": tuple(places),
        "from the back": tuple(places)[::-1],
    }
    orders["best order"] = min(itertools.permutations(places), key=lambda order: sum(_curve(mean, order)))
    curves = {name: _curve(mean, order) for name, order in orders.items()}
    counts = range(len(sizes) + 1)
    curves["any"] = []
    for count in counts:
        curves["any"].append(np.mean([mean[frozenset(chosen)] for chosen in itertools.combinations(places, count)]))

    cluster = np.repeat(np.arange(contexts), kl[whole].shape[1])
    flat = {subset: values.ravel() for subset, values in kl.items()}
    area = {name: np.sum(_curve(flat, order), axis=0) for name, order in orders.items()}
    predicted, over_best = [], {}
    for count in counts:
        predicted.append(sum(lost[place] for place in orders["cascade"][count:]))
    for name in orders:
        over_best[name] = list(ratio(area[name], area["best order"], cluster)[:3])

    return {
        "contexts": contexts,
        "pieces": ["legend", "legend", "page", "another page", "another page"],
        "orders": {name: list(order) for name, order in orders.items()},
        "curves": {name: np.asarray(curve, float).tolist() for name, curve in curves.items()},
        "predicted": predicted,
        "area over the best order's": over_best,
    }


def _cascade_order(losses: Mapping[int, float], sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the order in which a cascade places patches that are stored: every step costs what its tokens take."""
    pieces = [Dependent(str(place), max(losses[place], 1e-9), 1.0, float(size)) for place, size in enumerate(sizes)]
    # A forward costs more than all patches, so that none is run.
    dear = [piece._replace(form=1e9) for piece in pieces]
    return tuple(int(step.id) for step in rebuild(dear, 0.0).steps)


def _curve(kl: Mapping[Subset, Any], order: Sequence[int]) -> list[Any]:
    return [kl[frozenset(order[:count])] for count in range(len(order) + 1)]


def _losses(backbone: ModelBackbone, seed: int, count: int, folder: Path) -> tuple[dict[Subset, np.ndarray], list[int]]:
    """Measures KL to re-prefill of every subset of pieces that could be rebuilt, [B, Q] each; tokens of the pieces."""
    rng = np.random.default_rng([seed, 16])
    contexts = small_task.sample_contexts(rng, count)
    images = load_probe_images(backbone, contexts, np.arange(count), seed, folder)

    # The window before and after another context's legend takes the place of its first one.
    pages = [images.page, images.page.of_others(1), images.page.of_others(2)]
    rest, lead, other = [*images.legends[1:], *pages], images.front(True), foreign_legends(images, 3)[0]
    old = ImageSequence(images.backbone, [*lead, other, *rest])
    new = ImageSequence(images.backbone, [*lead, images.legends[0], *rest])
    before, after = old.prefill(), new.prefill()
    questions = small_task.ask(contexts, rng, QUESTIONS)

    first = len(lead) + 1
    exact, stale = new.engine(after), new.engine([*after[:first], *before[first:]])
    served = {}
    for place in range(first, len(new)):
        served[place] = new.serve(place, patch_of(new.images[place], after[place], new.antecedent(place)))

    caches, subsets = {"re-prefill": exact}, {}
    for size in range(len(served) + 1):
        for chosen in itertools.combinations(range(len(served)), size):
            pieces = [cut(stale, where) for where in new.slices]
            for which in chosen:
                pieces[first + which] = served[first + which]
            caches[str(chosen)], subsets[str(chosen)] = joined(pieces), frozenset(chosen)

    answers = read(new, caches, questions)
    kl = {subset: answers[name].divergence_from(answers["re-prefill"]) for name, subset in subsets.items()}
    return kl, [new.images[place].size for place in served]


def table(result: Mapping[str, Any]) -> str:
    """Formats KL by the number of pieces rebuilt, of every order."""
    counts = range(len(result["predicted"]))
    lines = []
    for name, curve in result["curves"].items():
        area = result["area over the best order's"].get(name)
        shown = "" if area is None else f"{area[0]:.2f} ({area[1]:.2f}–{area[2]:.2f})"
        lines.append([name, *(f"{value:.4f}" for value in curve), shown])

    lines.append(["left, as the cascade predicts", *(f"{value:.4f}" for value in result["predicted"]), ""])
    head = ("rebuilt", *map(str, counts), "sum over the best order's")
    return "KL to re-prefill, nats, by the number of pieces rebuilt:\n\n" + markdown_table(head, lines)
