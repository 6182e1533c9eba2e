"""Drift (Kamera App. D): how far may the legends change before the page's stored patch must go, and what mends it?"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp

from ... import small_task
from ...arms.reused_page import cut
from ...small_task import LEGENDS, Contexts
from ..results_table import ResultsTable
from .common import RANK, Step, add, patch_of, setting
from .image_sequence import KV, AgentLoop, Image, ImageSequence, read
from .probe_images import ProbeImages, foreign_legends, with_foreign

CORRECTION_RANK = 16
QUESTIONS = {"chain": 6, "aggregate": 4, "override": 4, "page": 2}


class Change(NamedTuple):
    """One way in which the legends in front of the page drift.

    name: of rows. images: what stands in front of the page now. contexts: what that means.
    shown: bool [legends], by storage: which of the contexts' legends stand there.
    """

    name: str
    images: list[Image]
    contexts: Contexts
    shown: np.ndarray


def changes(stock: ProbeImages) -> list[Change]:
    """Lists the ways: another order, one dropped and one doubled, 1 to 3 replaced, 1 to 3 distractors in front."""
    own, foreign, contexts = list(stock.legends), foreign_legends(stock, 1), stock.contexts
    every = np.ones(LEGENDS, bool)
    turned, doubled = np.array([1, 2, 0]), np.array([0, 1, 1])
    listed = [
        Change("reorder", [own[i] for i in turned], contexts.reordered(turned), every),
        Change("drop_duplicate", [own[i] for i in doubled], contexts.reordered(doubled), np.array([True, True, False])),
    ]

    for count in range(1, LEGENDS + 1):
        # From the middle outwards, so that one replaced legend is neither the first nor the last.
        which = np.isin(np.arange(LEGENDS), np.array([1, 2, 0])[:count])
        images = [foreign[i] if which[i] else own[i] for i in range(LEGENDS)]
        listed.append(Change(f"replaced={count}", images, with_foreign(contexts, which, 1), every))

    for count in range(1, LEGENDS + 1):
        listed.append(Change(f"distractors={count}", [*stock.distractors[:count], *own], contexts, every))
    return listed


def measure_drift(
    table: ResultsTable,
    stock: ProbeImages,
    lead: bool,
    rng: np.random.Generator,
    step: Step,
) -> None:
    """Serves the page behind legends that changed since its patch was formed; the legends as re-prefill has them.

    Arms: "blind"; "stored", the stored patch; "rebuilt" and "update", a new patch and the stored one corrected,
    formed as a window would: of a prefill of the page behind kept legends, those that are new prefilled in their places
    and the others left as they were (where every kept legend stands behind the same as before, that is the re-prefill,
    and they are left out); "oracle" and "oracle_update", the same of the re-prefill they are scored against;
    "deep" and "deepest", layers recomputed from a quarter and from the first up, out of the residual that the page had
    alone; "shallow", the lowest quarter recomputed and the stored patch above. Adds items "window.drift".
    """
    front, backbone = stock.front(lead), stock.backbone
    before = ImageSequence(backbone, [*front, *stock.legends, stock.page])
    conditioned = before.prefill()
    stored = patch_of(stock.page, conditioned[-1], before.antecedent(len(before) - 1))
    listed = changes(stock)
    # Room for the lead in both settings: what is prefilled behind a window runs one program in both.
    lines = [ImageSequence(backbone, [*stock.front(True), *change.images]) for change in listed]
    room = max(line.size for line in lines)
    known = {id(image): kv for image, kv in zip(before.images[:-1], conditioned[:-1], strict=True)}

    for change in listed:
        line = ImageSequence(backbone, [*front, *change.images, stock.page])
        parts, place = line.prefill(), len(line) - 1
        ids, whole = line.antecedent(place), line.engine(parts)
        patches = {
            "blind": None,
            "stored": stored,
            "oracle": patch_of(stock.page, parts[-1], ids),
            "oracle_update": _updated(stock, stored, parts[-1], ids),
        }

        if not kept_is_exact(before, line):
            served = as_kept(stock, line, known, room)
            patches["rebuilt"] = patch_of(stock.page, served, ids)
            patches["update"] = _updated(stock, stored, served, ids)

        pages = {name: line.serve(place, patch) for name, patch in patches.items()}
        true = cut(whole, line.slices[place])
        quarter = max(1, round(backbone.layout.layers / 4))
        pages["shallow"] = {
            name: np.concatenate([true[name][:quarter], value[quarter:]]) for name, value in pages["stored"].items()
        }
        for name, layer in {"deep": quarter, "deepest": 1}.items():
            pages[name] = deep_refresh(line, whole, pages["blind"], layer)
        caches = {name: line.with_served(whole, {place: page}) for name, page in pages.items()}
        caches["re-prefill"] = whole

        shown = np.broadcast_to(change.shown, (len(change.contexts), LEGENDS))
        questions = small_task.ask(change.contexts, rng, QUESTIONS, shown)
        part = f"{change.name}.{setting(lead=lead)}"
        add(table, "window.drift", part, questions, stock.clusters, read(line, caches, questions))
        step(f"drift {part}")


def kept_is_exact(before: ImageSequence, now: ImageSequence) -> bool:
    """Returns whether every image in front of the page that was there before stands behind the same images as it
    did.
    """
    stood = {image.chunk.id: before.antecedent(place) for place, image in enumerate(before.images)}
    ahead = [(image.chunk.id, now.antecedent(place)) for place, image in enumerate(now.images[:-1])]
    return all(stood.get(name, front) == front for name, front in ahead)


def as_kept(stock: ProbeImages, line: ImageSequence, known: dict[int, KV], room: int) -> KV:
    """Prefills the page behind the line as a window keeps it: known legends as they were, new ones in their places."""
    loop = AgentLoop(stock.backbone, room)
    for image in line.images[:-1]:
        if id(image) in known:
            loop.held.append((image, known[id(image)]))
        else:
            loop.append(image)
    return loop.prefill(stock.page)


def deep_refresh(line: ImageSequence, whole: KV, alone: KV, layer: int) -> KV:
    """Recomputes the page's layers from `layer` up, behind the legends, from the residual it had there alone."""
    backbone, place = line.backbone, len(line) - 1
    image, where = line.images[place], line.slices[place]
    hidden = backbone.prefill(image.tokens, hidden_at=(layer,)).hidden[layer]
    # The residual at the boundary already holds what was added below it; above, features are added again.
    tokens = image.tokens._replace(embeddings=hidden).shift(line.starts[place])
    context = {name: jnp.asarray(value[:, :, : where.start]) for name, value in whole.items()}
    upper = backbone.prefill(tokens, context, start_layer=layer).kv
    full = {name: np.concatenate([np.zeros_like(alone[name][:layer]), value]) for name, value in upper.items()}
    turned = kvp.to_engine(backbone.layout, full, image.tokens.positions, line.starts[place])
    return {name: np.concatenate([alone[name][:layer], value[layer:]]) for name, value in turned.items()}


def _updated(stock: ProbeImages, stored: kvp.Patch, conditioned: KV, ids: tuple[str, ...]) -> kvp.Patch:
    correction = kvp.correction_patch(stock.page.chunk, stored, conditioned, CORRECTION_RANK, ids, method="exact")
    return kvp.update_patch(stored, correction, rank=RANK)
