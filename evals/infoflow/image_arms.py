"""Arms on images that were cut: rows of a page's visual tokens, each part prefilled alone from its own start.

The legends in front stand as a prefill of the whole prompt has them. Axis letters: B contexts, Q questions.
"""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.repair import Repaired, SplicedCache
from models import ModelBackbone

from .. import small_task
from ..arms.reused_page import cut, joined
from ..repairs.pages import QUESTIONS, RepairPages
from ..small_task import scenes, task
from ..small_task.reader import VISIBLE, SceneReader
from .plan import ASKING, IMAGE_METHODS, RANDOM, SHARE, InfoFlowPlan
from .splits import Parts, row_parts

Record = dict[str, Any]
DIGITS = 4


def page_parts(reader: SceneReader, count: int) -> Parts:
    """Cuts the page's tokens into parts of whole rows."""
    form = reader.page.form
    return row_parts(form.chunk_ids[-1] == form.image_token, task.ROWS, count)


def cut_page(reader: SceneReader, parts: Parts) -> SplicedCache:
    """Prefills each part of the page alone, and splices all where they stand behind the legends."""
    page, backbone = reader.page, reader.scene.backbone
    own, pieces = page.tokens.take(page.slots.start, page.slots.stop), [cut(page.front, slice(0, page.slots.start))]
    for first, last in parts:
        part = page.alone.take(first, last)
        # Of positions with several axes each begins at 0, so that cells keep their distances.
        positions = np.asarray(part.positions)
        kv = backbone.prefill(part._replace(positions=positions - positions[:, :1])).kv
        pieces.append(dict(kvp.to_engine(backbone.layout, kv, np.asarray(own.positions)[:, first:last], 0)))
    return page.splice().replace(cache=joined(pieces), chunks=parts, conditioned=None, recorded=None)


def records_of(backbone: ModelBackbone, name: str, plan: InfoFlowPlan, number: int) -> Iterator[Record]:
    """Measures every method on one batch of contexts, by the number of parts that the page was cut into."""
    with tempfile.TemporaryDirectory() as folder:
        scene, rng = scenes.scene_at(backbone, plan.seed, number, Path(folder), plan.batch)
        reader = SceneReader(scene, small_task.ask(scene.contexts, rng, QUESTIONS))

    questions, keep = reader.questions, reader.asked(VISIBLE).valid
    reference = reader.read(reader.page.reference, VISIBLE)
    clusters = number * plan.batch + np.arange(plan.batch)
    labels = {
        "backbone": name,
        "kind": [reader.kinds[kind] for kind in questions.kind[keep]],
        "cluster": np.broadcast_to(clusters[:, None], keep.shape)[keep].tolist(),
    }
    right = (reference.predicted == questions.answer)[keep].astype(int).tolist()
    none = [0.0] * int(keep.sum())
    yield {**labels, "cut": 0, "arm": "baseline", "kl": none, "flips": none, "right": right, "count": 0.0}

    for parts in plan.cuts:
        pages = RepairPages(reader, cut_page(reader, page_parts(reader, parts)))
        for arm, repair in IMAGE_METHODS.items():
            asks = arm in ASKING
            splice = pages.asked(VISIBLE) if asks else pages.splice
            own = functools.partial(repair, seed=number) if arm == RANDOM else repair
            repaired = own(backbone, splice, SHARE if arm != "blind" else 0.0)
            answers = (pages.read_asked if asks else pages.read)(repaired, VISIBLE)
            kl = answers.divergence_from(reference)[keep]
            yield {
                **labels,
                "cut": parts,
                "arm": arm,
                "kl": [float(f"{value:.{DIGITS}g}") for value in kl],
                "flips": (answers.predicted != reference.predicted)[keep].astype(int).tolist(),
                "right": (answers.predicted == questions.answer)[keep].astype(int).tolist(),
                "count": chosen_count(repaired),
            }


def chosen_count(repaired: Repaired) -> float:
    """Returns how many tokens of a row were recomputed in the deepest layer, the mean over rows."""
    return float(np.asarray(repaired.chosen)[-1].sum(axis=-1).mean())
