"""What reorder, slide and recall do to the answers, beside a re-prefill of the window that is left.

Nothing of a window is prefilled again by an arm but where its description says so. Patches are formed by a full SVD.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.patching import orders_of

from ..arms.patches import some_channels
from ..arms.reused_page import KV
from ..probes.window.common import setting
from ..probes.window.image_sequence import Image
from ..probes.window.operations import without
from ..sheets_task.packed_answers import PackedAnswers
from ..sheets_task.task import KINDS, SheetsContexts, SheetsQuestions, ask, latest
from .image_window import ImageWindow, WindowImages

RANK = 32
"""Of every patch: the smallest that suffices on the sheets task (docs/experiments/hybrids.md)."""
REFERENCE, BLIND = "re-prefill", "blind"
SLIDE_KINDS = ("page", "sheet", "survivor", "evicted")
REORDER_QUESTIONS = {"page": 2, "chain": 6, "override": 3, "aggregate": 4}
RECALL_QUESTIONS = {"page": 2, "chain": 8, "override": 4}
"""Inks whose cells are all defined are rare where sheets of other contexts stand, and so aggregates are left out."""


class MeasuredPart(NamedTuple):
    """What all arms answered in one setting of an operation.

    Attributes:
      part: names the setting.
      kinds: names of the kinds of question, by number.
      questions: those asked.
      answers: by arm, the reference among them.
    """

    part: str
    kinds: tuple[str, ...]
    questions: SheetsQuestions
    answers: Mapping[str, PackedAnswers]


Operation = Callable[[WindowImages, np.random.Generator], Iterator[MeasuredPart]]


def measure_reorder(images: WindowImages, rng: np.random.Generator) -> Iterator[MeasuredPart]:
    """Serves everything from canonicals, the sheets in every order and the page behind them.

    Arms, all about the page: "blind"; "transfer", the patch of the first order (of the second where the first is
    tested); "orbit", the mean over the other orders; "oracle", the order's own. Of hybrids also "orbit.rows_only".
    """
    orders = orders_of(len(images.sheets))
    windows = [images.window([*(images.sheets[place] for place in order), images.page]) for order in orders]
    prefilled = [window.prefilled() for window in windows]
    page, place = images.page.chunk, len(images.sheets)
    total, own = None, []
    for window, parts in zip(windows, prefilled, strict=True):
        total = kvp.accumulate(total, parts[place], page, window.antecedent(place))
        own.append(patch_of(images.page, parts[place], window, place))
    assert total is not None

    for number, (order, window, parts) in enumerate(zip(orders, windows, prefilled, strict=True)):
        orbit = kvp.orbit_patch(without(total, parts[place]), RANK, method="exact")
        patches = {BLIND: None, "transfer": own[number == 0], "orbit": orbit, "oracle": own[number]}
        sheets = [window.served(sheet) for sheet in range(place)]
        pieces = {arm: [*sheets, window.served(place, patch)] for arm, patch in with_rows_only(patches).items()}

        contexts = reordered(images.contexts, np.array(order))
        questions = ask(contexts, rng, REORDER_QUESTIONS)
        # All orders are one setting: none is another's exception.
        yield MeasuredPart("", KINDS, questions, answers_of(window, parts, pieces, questions))


def measure_slide(images: WindowImages, rng: np.random.Generator) -> Iterator[MeasuredPart]:
    """Lets one sheet leave, then two; the page and the sheets that stay move up.

    Arms, about all that stay: "keep", their KV as it is, rotated and composed; "removal", with a patch that was formed
    in another context (the same image behind other sheets, as many of which left); "oracle", with the removal patch of
    the context that is scored; "blind", canonicals. Scored against a re-prefill of what stays. Questions about what
    left ("evicted") have answers that this reference cannot know.
    """
    whole = images.window([*images.sheets, images.page])
    conditioned = whole.prefilled()

    def behind_others(place: int, gone: int) -> KV:
        """Prefills an image behind other contexts' sheets, the first `gone` of them left out."""
        foreign = images.foreign_sheets(1)[gone:place]
        return images.window([*foreign, whole.images[place]]).prefilled()[-1]

    for gone in range(1, len(images.sheets)):
        left = images.window(whole.images[gone:])
        target = left.prefilled()
        pieces: dict[str, list[KV]] = {"keep": [], "removal": [], "oracle": [], BLIND: []}
        for place, kv in enumerate(target):
            before = place + gone
            old, new = whole.antecedent(before), left.antecedent(place)
            base = {"base": conditioned[before], "base_antecedent": old}
            elsewhere = behind_others(before, gone), behind_others(before, 0)
            for arm, (after, at_first) in {"oracle": (kv, conditioned[before]), "removal": elsewhere}.items():
                chunk = left.images[place].chunk
                patch = kvp.removal_patch(chunk, after, at_first, RANK, new, old, method="exact")
                pieces[arm].append(left.served(place, patch, **base))
            pieces["keep"].append(left.served(place, **base))
            pieces[BLIND].append(left.served(place))

        questions = slide_questions(images.contexts, rng, gone)
        part = setting(gone=gone)
        yield MeasuredPart(part, SLIDE_KINDS, questions, answers_of(left, target, pieces, questions))


def measure_recall(images: WindowImages, rng: np.random.Generator) -> Iterator[MeasuredPart]:
    """Brings the page back into a window whose oldest sheets, none to all, other sheets have replaced.

    Every sheet was prefilled once, behind those in front of it then, and is kept as it is. Arms, all behind the sheets
    as they are kept: "blind"; "stale", the patch formed when the page left; "fresh", formed of a prefill of the page
    behind the window as it is kept; "oracle", of the re-prefill that is the reference. Of hybrids also
    "fresh.rows_only".
    """
    window = images.window(images.sheets)
    held = window.prefilled()
    stale = patch_of(images.page, window.behind(held, images.page), window, len(window))

    newer = images.foreign_sheets(1)
    for turnover in range(len(images.sheets) + 1):
        if turnover:
            # The oldest makes room before the next one is prefilled.
            window, held = images.window(window.images[1:]), held[1:]
            next_sheet = newer[turnover - 1]
            held.append(window.behind(held, next_sheet))
            window = images.window([*window.images, next_sheet])

        now, place = images.window([*window.images, images.page]), len(window)
        parts = now.prefilled()
        patches = {
            BLIND: None,
            "stale": stale,
            "fresh": patch_of(images.page, window.behind(held, images.page), now, place),
            "oracle": patch_of(images.page, parts[place], now, place),
        }
        kept = [now.placed(sheet, kv) for sheet, kv in enumerate(held)]
        pieces = {arm: [*kept, now.served(place, patch)] for arm, patch in with_rows_only(patches).items()}

        replaced = np.arange(len(window)) < turnover
        # New sheets stand behind those that stayed.
        contexts = reordered(with_foreign(images.contexts, replaced), np.roll(np.arange(len(window)), -turnover))
        questions = ask(contexts, rng, RECALL_QUESTIONS)
        part = setting(turnover=turnover)
        yield MeasuredPart(part, KINDS, questions, answers_of(now, parts, pieces, questions))


OPERATIONS: Mapping[str, Operation] = {"reorder": measure_reorder, "slide": measure_slide, "recall": measure_recall}


def answers_of(
    window: ImageWindow, parts: list[KV], pieces: Mapping[str, list[KV]], questions: SheetsQuestions
) -> dict[str, PackedAnswers]:
    """Asks the reference, whose phase-free KV is `parts`, and every arm."""
    reference = [window.placed(place, kv) for place, kv in enumerate(parts)]
    return {arm: window.ask(own, questions) for arm, own in {REFERENCE: reference, **pieces}.items()}


def patch_of(image: Image, conditioned: KV, window: ImageWindow, place: int) -> kvp.Patch:
    """Forms the patch of an image behind what stands in front of a place, as factors."""
    return kvp.form_patch(image.chunk, conditioned, RANK, window.antecedent(place), method="exact", dense=False)


def with_rows_only(patches: Mapping[str, kvp.Patch | None]) -> dict[str, kvp.Patch | None]:
    """Adds, for a hybrid model, the rows' part of the patch that a window would form."""
    found = dict(patches)
    for arm in ("orbit", "fresh"):
        patch = patches.get(arm)
        if patch is not None and patch.metadata.layout.parts:
            rows = {channel.name for channel in patch.metadata.layout.token_channels}
            found[f"{arm}.rows_only"] = some_channels(patch, rows)
    return found


# ---------------------------------------------------------------------------------------------------- what is meant


def reordered(contexts: SheetsContexts, order: np.ndarray) -> SheetsContexts:
    """Gives the meaning of contexts whose sheets stand in another order, int [sheets]."""
    return _with_sheets(contexts, lambda own: own[:, order])


def with_foreign(contexts: SheetsContexts, which: np.ndarray) -> SheetsContexts:
    """Gives the meaning after some sheets, bool [sheets], were swapped for those of the next context."""
    return _with_sheets(contexts, lambda own: np.where(which[None, :, None], np.roll(own, -1, axis=0), own))


def _with_sheets(contexts: SheetsContexts, change: Callable[[np.ndarray], np.ndarray]) -> SheetsContexts:
    names = ("sheet_address", "sheet_fill", "sheet_stripe")
    return dataclasses.replace(contexts, **{name: change(getattr(contexts, name)) for name in names})


def slide_questions(contexts: SheetsContexts, rng: np.random.Generator, gone: int) -> SheetsQuestions:
    """Asks after the first `gone` sheets left; kinds are numbers of `SLIDE_KINDS`.

    Chain questions through a sheet that stayed are "survivor", through one that left, and none that stayed, "evicted".
    """
    stays = np.broadcast_to(np.arange(contexts.sheets) >= gone, (len(contexts), contexts.sheets))
    known = ask(contexts, rng, {"page": 2, "sheet": 3, "chain": 6}, stays)
    of_all = ask(contexts, rng, {"chain": 8})

    address = np.take_along_axis(contexts.page_address, np.maximum(of_all.cell, 0), axis=1)
    lost = np.take_along_axis(latest(contexts, stays)[2], address, axis=1) == 0
    evicted = np.where(lost[:, of_all.own], of_all.answer, -1)

    names = {"page": "page", "sheet": "sheet", "chain": "survivor"}
    kinds = [SLIDE_KINDS.index(names[KINDS[kind]]) for kind in known.kind]
    return SheetsQuestions(
        ids=np.concatenate([known.ids, of_all.ids], axis=1),
        answer=np.concatenate([known.answer, evicted], axis=1).astype(np.int32),
        own=np.concatenate([known.own, len(known.kind) + of_all.own]),
        step=np.concatenate([known.step, of_all.step]),
        kind=np.array(kinds + [SLIDE_KINDS.index("evicted")] * len(of_all.kind)),
        cell=np.concatenate([known.cell, of_all.cell], axis=1),
    )
