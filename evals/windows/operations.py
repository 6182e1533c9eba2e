"""What a window's operations do to answers: sheets in another order, sheets that leave, a page that comes back.

Nothing is prefilled again by an arm unless its description says so. Everything is compared with a re-prefill of the
window that is left. Patches are formed by a full SVD.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.patching import Accumulated

from ..harness.datasets import Run
from ..harness.lines import AnyKV, BatchedPiece, Line
from ..harness.methods import BLIND, REFERENCE
from ..harness.orders import orders_of
from ..harness.runner import loaded
from ..task.contexts import DOCUMENTS, SIZES, Contexts, latest, sample
from ..task.questions import KINDS, Questions, ask
from .contents import TaskPieces, TaskTail
from .measured import Measured, WindowDataset

RANK = 32
"""Of every patch: the smallest that suffices for the hybrids of the plain drawing."""
WHOLE = 64
"""The rank at which a patch of a small hybrid's transition has all directions of its deficit."""
SIZE = "4"
SLIDE_KINDS = ("page", "sheet", "survivor", "evicted")
REORDER_QUESTIONS = {"page": 2, "chain": 6, "override": 3, "aggregate": 4}
RECALL_QUESTIONS = {"page": 2, "chain": 8, "override": 4}
"""Letters whose cells are all defined are rare where sheets of other contexts stand, so aggregates are left out."""

Operation = Callable[[TaskPieces, np.random.Generator], Iterator[Measured]]


def measure_reorder(images: TaskPieces, rng: np.random.Generator) -> Iterator[Measured]:
    """Serves everything from canonicals, the sheets in every order and the page behind them.

    Arms, all about the page: "blind"; "transfer", the patch of the first order (of the second where the first is
    tested); "orbit", of the mean over the other orders; "own", the order's own. Of hybrids also "orbit, rows".
    """
    orders = orders_of(len(images.sheets))
    lines = [images.line(*(images.sheets[place] for place in order), images.page) for order in orders]
    prefilled = [line.conditioned() for line in lines]
    page, place = images.page.chunk, len(images.sheets)
    exact = []
    for line, parts in zip(lines, prefilled, strict=True):
        exact.append(patch_of(images.page, parts[place], line.antecedent(place)))

    for number, (line, parts) in enumerate(zip(lines, prefilled, strict=True)):
        total: Accumulated | None = None
        # The mean that serves an order never saw it.
        for other, conditioned in enumerate(prefilled):
            if other != number:
                total = kvp.accumulate(total, conditioned[place], page, lines[other].antecedent(place))
        assert total is not None
        patches: dict[str, kvp.Patch | None] = {
            BLIND: None,
            "transfer": exact[number == 0],
            "orbit": kvp.orbit_patch(total, RANK, method="exact"),
            "own": exact[number],
        }
        if page.layout.parts:
            patches["orbit, rows"] = kvp.orbit_patch(total, {"rows": RANK}, method="exact")
        sheets = [line.served(sheet) for sheet in range(place)]
        served = {arm: [*sheets, line.served(place, patch)] for arm, patch in patches.items()}
        contexts = reordered(images.contexts, orders[number])
        questions = ask(contexts, rng, REORDER_QUESTIONS)
        yield answered(images, "reorder", line, parts, served, questions)


def measure_slide(images: TaskPieces, rng: np.random.Generator) -> Iterator[Measured]:
    """Lets one sheet leave, then two; the page and the sheets that stay move up.

    Arms, about all that stay: "keep", their KV as it is, rotated and composed; "removal", with a patch that was formed
    in another context (the same image behind other sheets, as many of which left); "own", with the removal patch of
    the context that is scored; "blind", canonicals. Questions about what left ("evicted") have answers that a
    re-prefill cannot know.
    """
    before = images.line(*images.sheets, images.page)
    conditioned = before.conditioned()
    foreign = [sheet.of_others() for sheet in images.sheets]

    def behind_others(place: int, gone: int) -> AnyKV:
        """Prefills an image behind other contexts' sheets, the first `gone` of them left out."""
        return images.line(*foreign[gone:place], before.pieces[place]).conditioned()[-1]

    for gone in range(1, len(images.sheets)):
        left = images.line(*before.pieces[gone:])
        target = left.conditioned()
        served: dict[str, list[AnyKV]] = {BLIND: [], "keep": [], "removal": [], "own": []}
        for place, after in enumerate(target):
            first, chunk = place + gone, left.pieces[place].chunk
            old, new = before.antecedent(first), left.antecedent(place)
            base = {"base": conditioned[first], "base_antecedent": old}
            formed = {
                "removal": (behind_others(first, gone), behind_others(first, 0)),
                "own": (after, conditioned[first]),
            }
            served[BLIND].append(left.served(place))
            served["keep"].append(left.served(place, **base))
            for arm, (later, earlier) in formed.items():
                patch = kvp.removal_patch(chunk, later, earlier, RANK, new, old, method="exact")
                served[arm].append(left.served(place, patch, **base))

        questions, kinds = slide_questions(images.contexts, rng, gone)
        yield answered(images, f"slide.gone={gone}", left, target, served, questions, SLIDE_KINDS, kinds)


def measure_recall(images: TaskPieces, rng: np.random.Generator) -> Iterator[Measured]:
    """Brings the page back into a window whose oldest sheets, none to all, other sheets have replaced.

    Every sheet was prefilled once, behind those in front of it then, and keeps its KV. Arms, all behind the sheets as
    they are kept: "blind"; "stale", the patch formed when the page left; "fresh", formed of a prefill of the page
    behind the window as it is kept; "updated", the stale patch with what it lacks folded in at the same rank; "own", of
    the re-prefill that is the reference. Of hybrids also "fresh, rows".
    """
    window, page = images.line(*images.sheets), images.page
    retained = window.conditioned()
    place = len(window)
    stale = patch_of(page, window.behind(window.placed(retained), page), window.antecedent(place))

    for turnover in range(place + 1):
        if turnover:
            # The oldest makes room before the next one is prefilled.
            window, retained = images.line(*window.pieces[1:]), retained[1:]
            newer = images.sheets[turnover - 1].of_others()
            retained = [*retained, window.behind(window.placed(retained), newer)]
            window = images.line(*window.pieces, newer)

        line, sheets = images.line(*window.pieces, page), window.placed(retained)
        parts, antecedent = line.conditioned(), line.antecedent(place)
        conditioned = window.behind(sheets, page)
        correction = kvp.correction_patch(page.chunk, stale, conditioned, RANK, antecedent, method="exact")
        patches: dict[str, kvp.Patch | None] = {
            BLIND: None,
            "stale": stale,
            "fresh": patch_of(page, conditioned, antecedent),
            "updated": kvp.update_patch(stale, correction, RANK),
            "own": patch_of(page, parts[place], antecedent),
        }
        if page.chunk.layout.parts:
            patches["fresh, rows"] = patch_of(page, conditioned, antecedent, {"rows": RANK})
        served = {arm: [*sheets, line.served(place, patch)] for arm, patch in patches.items()}

        # New sheets stand behind those that stayed.
        contexts = with_foreign(images.contexts, np.arange(place) < turnover)
        contexts = reordered(contexts, np.roll(np.arange(place), -turnover))
        questions = ask(contexts, rng, RECALL_QUESTIONS)
        yield answered(images, f"recall.turnover={turnover}", line, parts, served, questions)


def measure_parts(images: TaskPieces, rng: np.random.Generator) -> Iterator[Measured]:
    """Serves everything from canonicals, the page of a hybrid with patches of its rows, of its transition, or of both.

    "whole" is a transition's whole deficit.
    """
    line, page = images.line(*images.sheets, images.page), images.page
    if not page.chunk.layout.parts:
        raise InputError("windows.parts: got a transformer; expected a hybrid, whose chunks have a transition")
    parts, place = line.conditioned(), len(images.sheets)
    ranks: dict[str, Any] = {f"patch.rank={rank}": rank for rank in (8, 16, RANK)}
    ranks |= {
        f"rows.rank={RANK}": {"rows": RANK},
        "transition.whole": {"transition": WHOLE},
        "rows.rank=16, transition.whole": {"rows": 16, "transition": WHOLE},
    }
    sheets = [line.served(sheet) for sheet in range(place)]
    served, costs = {BLIND: [*sheets, line.served(place)]}, {}
    for arm, rank in ranks.items():
        patch = patch_of(page, parts[place], line.antecedent(place), rank)
        served[arm] = [*sheets, line.served(place, patch)]
        costs[arm] = {"stored_bytes": patch.nbytes / page.chunk.nbytes}
    questions = ask(images.contexts, rng, REORDER_QUESTIONS)
    yield answered(images, "parts", line, parts, served, questions)._replace(costs=costs)


OPERATIONS: Mapping[str, Operation] = {
    "reorder": measure_reorder,
    "slide": measure_slide,
    "recall": measure_recall,
    "parts": measure_parts,
}


def answered(
    images: TaskPieces,
    probe: str,
    line: Line,
    parts: Sequence[AnyKV],
    served: Mapping[str, Sequence[AnyKV]],
    questions: Questions,
    kinds: tuple[str, ...] = KINDS,
    numbers: np.ndarray | None = None,
) -> Measured:
    """Asks a re-prefill, whose phase-free KV is `parts`, and every arm.

    Args:
      kinds, numbers: kinds of question and the number of each question's, in place of the task's.
    """
    tail = TaskTail(images.prefix, questions, numbers)
    answers = {REFERENCE: tail.ask(line, line.placed(parts))}
    answers |= {arm: tail.ask(line, pieces) for arm, pieces in served.items()}
    return Measured(probe, kinds, tail.questions, answers, images.clusters)


def patch_of(piece: BatchedPiece, conditioned: AnyKV, antecedent: Sequence[str], rank: Any = RANK) -> kvp.Patch:
    """Forms a piece's patch behind others, as factors."""
    return kvp.form_patch(piece.chunk, conditioned, rank, antecedent, method="exact", dense=False, force=True)


# ---------------------------------------------------------------------------------------------------- what is meant


def reordered(contexts: Contexts, order: Any) -> Contexts:
    """Gives the meaning of contexts whose sheets stand in another order, int [sheets]."""
    return _with_sheets(contexts, lambda entries: entries[:, np.asarray(order)])


def with_foreign(contexts: Contexts, replaced: np.ndarray) -> Contexts:
    """Gives the meaning after some sheets, bool [sheets], were replaced by those of the next context."""
    return _with_sheets(
        contexts, lambda entries: np.where(replaced[None, :, None], np.roll(entries, -1, axis=0), entries)
    )


def _with_sheets(contexts: Contexts, change: Callable[[np.ndarray], np.ndarray]) -> Contexts:
    names = ("sheet_item", "sheet_value", "sheet_unit")
    return dataclasses.replace(contexts, **{name: change(getattr(contexts, name)) for name in names})


def slide_questions(contexts: Contexts, rng: np.random.Generator, gone: int) -> tuple[Questions, np.ndarray]:
    """Asks after the first `gone` sheets left; returns the questions and numbers of `SLIDE_KINDS`.

    Chain questions through a sheet that stayed are "survivor", through one that left, and none that stayed, "evicted".
    """
    stays = np.broadcast_to(np.arange(contexts.sheets) >= gone, (len(contexts), contexts.sheets))
    known = ask(contexts, rng, {"page": 2, "sheet": 3, "chain": 6}, stays)
    of_all = ask(contexts, rng, {"chain": 8})

    item = np.take_along_axis(contexts.page_item, np.maximum(of_all.cell, 0), axis=1)
    lost = np.take_along_axis(latest(contexts, stays)[2], item, axis=1) == 0
    evicted = np.where(lost[:, of_all.number], of_all.answer, -1)
    names = {"page": "page", "sheet": "sheet", "chain": "survivor"}
    kinds = [SLIDE_KINDS.index(names[KINDS[kind]]) for kind in known.kind]
    questions = Questions(
        ids=np.concatenate([known.ids, of_all.ids], axis=1),
        answer=np.concatenate([known.answer, evicted], axis=1).astype(np.int32),
        number=np.concatenate([known.number, len(known.kind) + of_all.number]),
        step=np.concatenate([known.step, of_all.step]),
        kind=np.concatenate([known.kind, of_all.kind]),
        cell=np.concatenate([known.cell, of_all.cell], axis=1),
    )
    return questions, np.array(kinds + [SLIDE_KINDS.index("evicted")] * len(of_all.kind))


# ------------------------------------------------------------------------------------------------------ the data set


@functools.lru_cache(maxsize=1)
def drawn_images(path: str, drawing: str, number: int, size: int, seed: int) -> TaskPieces:
    """Draws a batch of contexts, the same for every instance, and prefills its images."""
    rng = np.random.default_rng([seed, number, SIZES[SIZE].sheets])
    contexts = sample(rng, size, SIZES[SIZE], drawing=drawing)
    if drawing == "documents":
        # All of one kind: sheets of another context then speak of items that a page has.
        contexts = dataclasses.replace(contexts, document=np.full(size, number % len(DOCUMENTS)))
    backbone: ModelBackbone = loaded(path)
    return TaskPieces.of(backbone, contexts, number * 100_000 + np.arange(size))


def measure_batch(run: Run, path: str, probe: str, number: int, size: int) -> Iterator[Measured]:
    """Measures an operation on one batch: what every arm answers in each of its settings.

    settings: drawing, "documents" by default.
    """
    images = drawn_images(path, str(run.settings.get("drawing", "documents")), number, size, run.seed)
    rng = np.random.default_rng([run.seed, number, 100 + [*OPERATIONS].index(probe)])
    return OPERATIONS[probe](images, rng)


WINDOWS = WindowDataset("windows", [*OPERATIONS], ("accuracy", "difference", "kl"), measure_batch, default=3)
