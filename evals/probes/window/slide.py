"""Slide: the oldest legends leave. What do the chunks that stay need, under either promise?"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvpatch_jax as kvp

from ... import small_task
from ...small_task import KINDS, LEGENDS, VOCABULARY, Contexts, Questions
from ..results_table import ResultsTable
from .common import RANK, Step, add, asked_through, setting
from .image_sequence import KV, ImageSequence, read, read_in_one
from .probe_images import ProbeImages, foreign_legends

SLIDE_KINDS = ("page", "legend", "survivor", "evicted", "aggregate")
QUESTIONS = {"page": 2, "legend": 3, "chain": 8, "aggregate": 4}


def measure_slide(table: ResultsTable, stock: ProbeImages, lead: bool, rng: np.random.Generator, step: Step) -> None:
    """Lets one, two, then all three legends leave; the page and the legends that stay move up.

    Arms: "keep", survivors' KV as it is, only turned; "removal", with a patch formed in another context (the same
    chunk behind other legends, as many of which left); "oracle", with the removal patch of the context that is scored;
    "blind", canonicals; "blind_behind_lead", canonicals that were prefilled behind the lead (where the page alone is
    left, that is the re-prefill, and left out). Probe "window.slide" is scored against a re-prefill of what is left
    (forget), "window.slide.remember" against one forward over everything in which the questions do not see what left.
    Adds items of both.
    """
    front, backbone = stock.front(lead), stock.backbone
    full = ImageSequence(backbone, [*front, *stock.legends, stock.page])
    conditioned, band = full.prefill(), np.tri(len(full), dtype=bool)
    elsewhere = {place: _last(stock, full, place, lead, 0) for place in range(len(front) + 1, len(full))}

    for gone in range(1, LEGENDS + 1):
        part, first = setting(gone=gone, lead=lead), len(front) + gone
        stays = [*range(len(front)), *range(first, len(full))]
        left = ImageSequence(backbone, [full.images[place] for place in stays])
        target = left.prefill()

        lead_kv = {place: left.serve(place) for place in range(len(front))}
        pieces = {name: dict(lead_kv) for name in ("keep", "removal", "oracle", "blind")}

        for place, before in enumerate(stays):
            if place in lead_kv:
                continue

            chunk, old, new = left.images[place].chunk, full.antecedent(before), left.antecedent(place)
            kept: dict[str, Any] = {"base": conditioned[before], "base_antecedent": old}
            own = _removal(chunk, target[place], conditioned[before], new, old)
            others = _removal(chunk, _last(stock, full, before, lead, gone), elsewhere[before], new, old)
            pieces["keep"][place] = left.serve(place, **kept)
            pieces["removal"][place] = left.serve(place, others, **kept)
            pieces["oracle"][place] = left.serve(place, own, **kept)
            pieces["blind"][place] = left.serve(place)

        whole = left.engine(target)
        caches = {"re-prefill": whole, **{name: left.with_served(whole, served) for name, served in pieces.items()}}
        if lead and gone < LEGENDS:
            caches["blind_behind_lead"] = left.engine(_behind_lead(stock, left))

        questions, kind = slide_questions(stock.contexts, rng, gone)
        said = read(left, caches, questions)
        add(table, "slide", part, questions, stock.clusters, said, kind=kind, kinds=SLIDE_KINDS)

        # Nothing is cached here, and nothing moves: an independent account of what remembering means.
        sees = [place in stays for place in range(len(full))]
        said["re-prefill"] = read_in_one(full, questions, band, sees)
        add(table, "slide.remember", part, questions, stock.clusters, said, kind=kind, kinds=SLIDE_KINDS)
        step(f"slide {part}")


def _last(stock: ProbeImages, full: ImageSequence, place: int, lead: bool, gone: int) -> KV:
    """Prefills an image of the line behind other contexts' legends, the first `gone` of them left out."""
    front = stock.front(lead)
    foreign = foreign_legends(stock, 1)[gone : place - len(front)]
    return ImageSequence(stock.backbone, [*front, *foreign, full.images[place]]).prefill()[-1]


def _removal(chunk: kvp.Chunk, target: KV, base: KV, left: Sequence[str], before: Sequence[str]) -> kvp.Patch:
    return kvp.removal_patch(chunk, target, base, RANK, left, before, method="exact")


def _behind_lead(stock: ProbeImages, left: ImageSequence) -> list[KV]:
    """Canonicals that were prefilled right behind the lead, the lead's own first."""

    def behind(image):
        return ImageSequence(stock.backbone, [stock.lead, image]).prefill()[-1]

    return [left.images[0].canonical, *(behind(image) for image in left.images[1:])]


def slide_questions(contexts: Contexts, rng: np.random.Generator, gone: int) -> tuple[Questions, np.ndarray]:
    """Asks after the first `gone` legends left, and sorts the questions by what they need: numbers of SLIDE_KINDS.

    Chain questions through a legend that stayed are "survivor", through one that left "evicted", whose truth a
    re-prefill cannot know; "aggregate" asks for rows over all three. Legends that left are not asked about.
    """
    left = np.zeros(LEGENDS, bool)
    left[contexts.order[0, :gone]] = True
    questions = small_task.ask(contexts, rng, QUESTIONS)
    chain, legend = (questions.kind == KINDS.index(name) for name in ("chain", "legend"))
    where = np.where(asked_through(contexts, questions, left), "evicted", "survivor")
    names = np.where(chain, where, np.array(KINDS)[questions.kind])
    kind = np.array([SLIDE_KINDS.index(name) for name in names.ravel()]).reshape(names.shape)

    glyph = questions.argument - VOCABULARY.glyph
    defined = contexts.legend_glyph[:, left].reshape(len(contexts), -1)
    about_gone = legend & (glyph[..., None] == defined[:, None, :]).any(axis=-1)
    return dataclasses.replace(questions, valid=questions.valid & ~about_gone), kind
