"""The window's operations as probes: reorder, slide and recall, and many chunks.

Every probe serves images in several ways, asks the same questions over each cache, and adds the answers to the table.
`small` probes are those of the default run, named "reorder", "slide" and "recall": no lead, fewer arms, one setting.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.core import AnyArray
from kvpatch_jax.patching import Accumulated, orders_of

from ... import small_task
from ...small_task import KINDS, LEGENDS, VOCABULARY, Contexts, Questions, scenes
from ...small_task.scenes import Scene
from ..results_table import ResultsTable
from .common import RANK, Step, add, asked_through, patch_of, setting
from .image_sequence import KV, AgentLoop, Image, ImageSequence, joined, read, read_in_one
from .probe_images import ProbeImages, foreign_legends, scene_images, with_foreign

ORBIT_RANK, MANY_RANK = 16, 16
REORDER_QUESTIONS = {"chain": 4, "aggregate": 3, "override": 4, "page": 1}
SLIDE_KINDS = ("page", "legend", "survivor", "evicted", "aggregate")
SLIDE_QUESTIONS = {"page": 2, "legend": 3, "chain": 8, "aggregate": 4}
SMALL_SLIDE_KINDS, SMALL_SLIDE_QUESTIONS = ("survivor", "evicted", "aggregate"), {"chain": 8, "aggregate": 4}
RECALL_QUESTIONS = {"chain": 6, "override": 4, "aggregate": 4, "page": 2}
SMALL_RECALL_QUESTIONS = {"chain": 8, "aggregate": 4, "page": 1}
MANY_QUESTIONS = {"page": 2, "legend": 2, "chain": 6, "aggregate": 4, "override": 4}


def measure_small(
    table: ResultsTable,
    probe: str,
    scene: Scene,
    rng: np.random.Generator,
    clusters: np.ndarray,
    folder: Path,
    step: Step,
) -> None:
    """Runs one of the default run's probes over a scene, "reorder", "slide" or "recall"; adds items of that name."""
    if probe == "recall":
        measure_small_recall(table, scene, rng, clusters, folder, step)
        return
    measure = {"reorder": measure_reorder, "slide": measure_slide}[probe]
    measure(table, scene_images(scene, clusters), rng, step, small=True)


# ---------------------------------------------------------------------------------------------------------- reorder


def measure_reorder(
    table: ResultsTable,
    stock: ProbeImages,
    rng: np.random.Generator,
    step: Step,
    *,
    count: int = LEGENDS,
    most: int = 6,
    lead: bool = False,
    small: bool = False,
) -> None:
    """Serves the page behind `count` images in every order, all or `most` of them.

    The images are the three legends and, beyond them, legends that do not matter. Arms: "orbit", the mean over the
    other orders; "transfer", the first order's patch (the second's where the first is tested; in the small probe there
    too the first's); "oracle" ("exact" in the small probe), the order's own patch, which was formed of the very prefill
    it is scored against. Override questions depend on the order. Adds items "window.reorder" and a row of the order
    effect.
    """
    part, label = ("", "reorder") if small else (setting(k=count, lead=lead), "window.reorder")
    front, images = stock.front(lead), [*stock.legends, *stock.distractors][:count]
    orders = orders_of(count, most)
    lines = []
    for order in orders:
        lines.append(ImageSequence(stock.backbone, [*front, *(images[place] for place in order), stock.page]))
    conditioned = [line.prefill() for line in lines]
    pages, place = [parts[-1] for parts in conditioned], len(lines[0]) - 1
    total = None
    for kv in pages:
        total = kvp.accumulate(total, kv, stock.page.chunk, lines[0].antecedent(place))
    assert total is not None

    # How far an order moves the deficit: root mean of ‖Δπ − Δid‖² / ‖Δid‖² over the other orders π, per context.
    first = _apart(pages[0], stock.page.canonical)
    apart = np.stack([_apart(kv, pages[0]) / first for kv in pages[1:]], axis=1)
    arm = ".".join(["order", *([part] if part else [])])
    table.sample(label, arm, "relative_order_effect", np.sqrt(apart).mean(axis=1), stock.clusters)

    own = []
    for line, kv in zip(lines, pages, strict=True):
        own.append(patch_of(stock.page, kv, line.antecedent(place), ORBIT_RANK))

    for number, (order, line, parts) in enumerate(zip(orders, lines, conditioned, strict=True)):
        patches = {
            "blind": None,
            "transfer": own[1 if number == 0 and not small else 0],
            "orbit": kvp.orbit_patch(without(total, pages[number]), ORBIT_RANK, method="exact"),
            "exact" if small else "oracle": own[number],
        }
        whole = line.engine(parts)
        caches = {"re-prefill": whole}
        for name, patch in patches.items():
            caches[name] = line.with_served(whole, {place: line.serve(place, patch)})

        contexts = stock.contexts.reordered(np.array([image for image in order if image < LEGENDS]))
        questions = small_task.ask(contexts, rng, REORDER_QUESTIONS)
        add(table, label, part, questions, stock.clusters, read(line, caches, questions))
        step(f"reorder {part}".strip())


def without(total: Accumulated, conditioned: Mapping[str, AnyArray]) -> Accumulated:
    """Takes one order out of a sum over orders: the mean of what is left never saw it."""
    gone = kvp.accumulate(None, conditioned, total.chunk, total.antecedent)
    left = {name: value - gone.total[name] for name, value in total.total.items()}
    return Accumulated(left, total.count - 1, total.chunk, total.antecedent)


def _apart(a: KV, b: KV) -> np.ndarray:
    """Computes the squared distance per context, [B]."""
    total = np.zeros(1)
    for name, value in a.items():
        change = np.asarray(value, np.float64) - np.asarray(b[name], np.float64)
        total = total + (change**2).sum(axis=(0, 2, 3, 4))
    return total


def orbit_against_exact(table: ResultsTable) -> None:
    """Adds rows orbit / orbit_minus_exact.<kind>: the orbit patch's accuracy minus the order's own patch's, paired."""
    items = table.probes.get(("reorder", ""))
    if items is None:
        return

    for kind, metric, interval in items.paired("orbit", "exact"):
        if metric == "accuracy":
            table.row("reorder", "orbit", f"orbit_minus_exact.{kind}", interval)


# ------------------------------------------------------------------------------------------------------------ slide


def measure_slide(
    table: ResultsTable,
    stock: ProbeImages,
    rng: np.random.Generator,
    step: Step,
    *,
    lead: bool = False,
    small: bool = False,
) -> None:
    """Lets one, two, then all three legends leave; the page and the legends that stay move up.

    Arms: "keep", survivors' KV as it is, only rotated; "removal", with a patch formed in another context (the same
    chunk behind other legends, as many of which left); "oracle", with the removal patch of the context that is scored;
    "blind", canonicals; "blind_behind_lead", canonicals that were prefilled behind the lead (where the page alone is
    left, that is the re-prefill, and left out). Probe "window.slide" is scored against a re-prefill of what is left
    (forget), "window.slide.remember" against one forward over everything in which the questions do not see what left.
    Adds items of both. The small probe lets one leave, and calls the oracle "removal".
    """
    front, backbone = stock.front(lead), stock.backbone
    full = ImageSequence(backbone, [*front, *stock.legends, stock.page])
    conditioned = full.prefill()

    def behind_others(place: int, gone: int) -> KV:
        """Prefills an image behind other contexts' legends, the first `gone` of them left out."""
        foreign = foreign_legends(stock, 1)[gone : place - len(front)]
        return ImageSequence(backbone, [*front, *foreign, full.images[place]]).prefill()[-1]

    elsewhere = {} if small else {place: behind_others(place, 0) for place in range(len(front) + 1, len(full))}

    for gone in range(1, 2 if small else LEGENDS + 1):
        first = len(front) + gone
        stays = [*range(len(front)), *range(first, len(full))]
        left = ImageSequence(backbone, [full.images[place] for place in stays])
        target = left.prefill()
        served_lead = {place: left.serve(place) for place in range(len(front))}
        pieces = {name: dict(served_lead) for name in ("keep", "removal", "oracle", "blind")}

        for place, before in list(enumerate(stays))[len(front) :]:
            chunk, old, new = left.images[place].chunk, full.antecedent(before), left.antecedent(place)
            kept: dict[str, Any] = {"base": conditioned[before], "base_antecedent": old}
            formed = {"oracle": (target[place], conditioned[before])}
            if not small:
                formed["removal"] = (behind_others(before, gone), elsewhere[before])
            for name, (after, base) in formed.items():
                patch = kvp.removal_patch(chunk, after, base, RANK, new, old, method="exact")
                pieces[name][place] = left.serve(place, patch, **kept)
            pieces["keep"][place] = left.serve(place, **kept)
            pieces["blind"][place] = left.serve(place)

        if small:
            pieces["removal"] = pieces.pop("oracle")
        whole = left.engine(target)
        caches = {"re-prefill": whole, **{name: left.with_served(whole, served) for name, served in pieces.items()}}
        if small:
            questions, kind = slide_questions(stock.contexts, rng, gone, SMALL_SLIDE_QUESTIONS, SMALL_SLIDE_KINDS)
            said = read(left, caches, questions)
            add(table, "slide", "", questions, stock.clusters, said, kind=kind, kinds=SMALL_SLIDE_KINDS)
            step("slide")
            continue

        if lead and gone < LEGENDS:
            behind = [ImageSequence(backbone, [*front, image]).prefill()[-1] for image in left.images[1:]]
            caches["blind_behind_lead"] = left.engine([left.images[0].canonical, *behind])

        part = setting(gone=gone, lead=lead)
        questions, kind = slide_questions(stock.contexts, rng, gone)
        said = read(left, caches, questions)
        add(table, "window.slide", part, questions, stock.clusters, said, kind=kind, kinds=SLIDE_KINDS)

        # Nothing is cached here, and nothing moves: an independent account of what remembering means.
        sees, band = [place in stays for place in range(len(full))], np.tri(len(full), dtype=bool)
        said["re-prefill"] = read_in_one(full, questions, band, sees)
        add(table, "window.slide.remember", part, questions, stock.clusters, said, kind=kind, kinds=SLIDE_KINDS)
        step(f"slide {part}")


def slide_questions(
    contexts: Contexts,
    rng: np.random.Generator,
    gone: int,
    wanted: dict[str, int] = SLIDE_QUESTIONS,
    kinds: Sequence[str] = SLIDE_KINDS,
) -> tuple[Questions, np.ndarray]:
    """Asks after the first `gone` legends left, and sorts the questions by what they need: numbers of `kinds`.

    Chain questions through a legend that stayed are "survivor", through one that left "evicted", whose truth a
    re-prefill cannot know; "aggregate" asks for rows over all three. Legends that left are not asked about.
    """
    left = np.zeros(LEGENDS, bool)
    left[contexts.order[0, :gone]] = True
    questions = small_task.ask(contexts, rng, wanted)
    chain, legend = (questions.kind == KINDS.index(name) for name in ("chain", "legend"))
    where = np.where(asked_through(contexts, questions, left), "evicted", "survivor")
    names = np.where(chain, where, np.array(KINDS)[questions.kind])
    kind = np.array([kinds.index(name) for name in names.ravel()]).reshape(names.shape)

    glyph = questions.argument - VOCABULARY.glyph
    defined = contexts.legend_glyph[:, left].reshape(len(contexts), -1)
    about_gone = legend & (glyph[..., None] == defined[:, None, :]).any(axis=-1)
    return dataclasses.replace(questions, valid=questions.valid & ~about_gone), kind


# ----------------------------------------------------------------------------------------------------------- recall


def measure_recall(
    table: ResultsTable, stock: ProbeImages, rng: np.random.Generator, step: Step, *, lead: bool = False
) -> None:
    """Runs a window of three legends over a history of nine; the page was seen and evicted in its middle.

    Every legend was prefilled once, behind the two in front of it, and is kept as it is; so the page meets legends that
    remember others. Arms, all with the legends as the loop keeps them: "blind"; "stale", the patch formed when the page
    left; "fixed_earlier", a patch formed behind those of the old legends that still stand in front (the part of its
    earlier context that has not changed, there to be formed and stored at any time); "fresh", formed of a prefill of
    the page behind the window as it is kept; "oracle", formed of the re-prefill that is the reference. Probe
    "window.recall" is scored against a re-prefill of the window (forget), "window.recall.remember" against one forward
    over the history under the band of what each chunk saw; there the fresh patch is made of what the reference is made
    of, and is called oracle. Adds items of both.
    """
    older, newer = foreign_legends(stock, 2), foreign_legends(stock, 1)
    front = stock.front(lead)
    room = sum(image.size for image in [*front, *stock.legends, stock.page])
    loop = AgentLoop(stock.backbone, room, stock.lead if lead else None)
    for image in older:
        loop.append(image)
    loop = loop.slid(stock.legends, LEGENDS, len(front))
    stale = patch_of(stock.page, loop.prefill(stock.page), loop.ids)

    for turnover in range(LEGENDS + 1):
        part = setting(turnover=turnover, lead=lead)
        now = loop.slid(newer[:turnover], LEGENDS, len(front))
        line = ImageSequence(stock.backbone, [*now.line.images, stock.page])
        place, parts = len(line) - 1, line.prefill()
        remaining = now.only(range(len(front) + LEGENDS - turnover))
        patches = {
            "blind": None,
            "stale": stale,
            "fixed_earlier": patch_of(stock.page, remaining.prefill(stock.page), remaining.ids),
            "fresh": patch_of(stock.page, now.prefill(stock.page), now.ids),
            "oracle": patch_of(stock.page, parts[-1], now.ids),
        }
        kept = line.engine([*now.parts, parts[-1]])
        caches = {name: line.with_served(kept, {place: line.serve(place, patch)}) for name, patch in patches.items()}
        caches["re-prefill"] = line.engine(parts)

        contexts = with_foreign(stock.contexts, np.arange(LEGENDS) < turnover, 1)
        # New legends stand behind the old ones that stayed: the order is rotated with them.
        contexts = contexts.reordered(np.roll(np.arange(LEGENDS), -turnover))
        questions = small_task.ask(contexts, rng, RECALL_QUESTIONS)
        said = read(line, caches, questions)
        add(table, "window.recall", part, questions, stock.clusters, said)

        history = ImageSequence(stock.backbone, [*front, *older, *stock.legends, *newer[:turnover], stock.page])
        band, sees = bands(len(history), len(front), LEGENDS)
        said["oracle"] = said.pop("fresh")
        if not turnover:
            # Nothing has changed: these too were made of what the reference is made of.
            del said["stale"], said["fixed_earlier"]

        said["re-prefill"] = read_in_one(history, questions, band, sees.tolist())
        add(table, "window.recall.remember", part, questions, stock.clusters, said)
        step(f"recall {part}")


def bands(count: int, front: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Says who saw whom in a history whose last image, the page, saw the whole window.

    Args:
      count: images, the lead and the page among them.
      front: 1 with a lead, else 0.
      window: legends held at most.

    Returns:
      bool [n, n], which image looked at which; bool [n], what stands in the window at the end.
    """
    number = np.arange(count)
    apart = number[:, None] - number[None, :]
    # A legend makes room before it is prefilled, so it sees one fewer than the window holds; the page sees them all.
    reach = np.where(number == count - 1, window, window - 1)[:, None]
    band = (apart >= 0) & ((apart <= reach) | (number < front)[None, :])
    return band, band[-1]


def measure_small_recall(
    table: ResultsTable, scene: Scene, rng: np.random.Generator, clusters: np.ndarray, folder: Path, step: Step
) -> None:
    """Puts the evicted page back behind legends of which 0 … 3 have changed their colours.

    Arms: blind, the patch frozen at eviction (stale), a fresh patch on the context as it is now, re-prefill. Adds a
    part of items "recall" per turnover.

    Args:
      folder: where the recoloured legends are written as PNG files.
    """
    frozen = None
    for turnover in range(LEGENDS + 1):
        contexts = small_task.recolour(scene.contexts, rng, turnover)
        now = scenes.load_scene(scene.backbone, contexts, folder, scene) if turnover else scene
        stock = scene_images(now, clusters)
        line = ImageSequence(stock.backbone, [*stock.legends, stock.page])
        parts, place = line.prefill(), len(line) - 1
        fresh = patch_of(stock.page, parts[-1], line.antecedent(place))
        frozen = fresh if frozen is None else frozen

        whole = line.engine(parts)
        caches = {"re-prefill": whole}
        for name, patch in {"blind": None, "stale": frozen, "fresh": fresh}.items():
            caches[name] = line.with_served(whole, {place: line.serve(place, patch)})
        questions = small_task.ask(contexts, rng, SMALL_RECALL_QUESTIONS)
        said = read(line, caches, questions)
        add(table, "recall", f"turnover={turnover}", questions, clusters, said)
        step("recall")


# ------------------------------------------------------------------------------------------------------ many chunks


def measure_many(
    table: ResultsTable, stock: ProbeImages, rng: np.random.Generator, step: Step, *, count: int, lead: bool
) -> None:
    """Fills a window with `count` images, the context's own three legends and page last, and serves all from the cache.

    The models were trained with four images; that the own legends come last keeps the truth what it was. Arms:
    "kept", a loop over half as many images again, each prefilled once behind the window and kept while the oldest
    leave; "transfer", every image by a patch of rank 16 formed in another arrangement; "oracle", every image by its
    own patch of that rank; "blind", canonicals; "blind_fresh_page", canonicals with the page prefilled behind them.
    The reference is a re-prefill of the window. Adds items "window.many".
    """
    part, front = setting(chunks=count, lead=lead), stock.front(lead)
    own = [*stock.legends, stock.page]

    def images_in_front(number: int, first: int) -> list[Image]:
        """Lists images of other contexts: three legends and a page of each in turn."""
        return [own[index % len(own)].of_others(first + index // len(own)) for index in range(number)]

    others = images_in_front(count - len(own), 1)
    line = ImageSequence(stock.backbone, [*front, *others, *own])
    parts = line.prefill()

    # The same images, those of others turned by half and the own legends by one: every chunk but the lead has moved.
    half = len(others) // 2
    turned = [*front, *others[half:], *others[:half], *stock.legends[1:], stock.legends[0], stock.page]
    arranged = ImageSequence(stock.backbone, turned)
    formed = {}
    for place, (image, kv) in enumerate(zip(turned, arranged.prefill(), strict=True)):
        formed[image.chunk.id] = patch_of(image, kv, arranged.antecedent(place), MANY_RANK)

    earlier = images_in_front(count // 2, 1 + len(others) // len(own))
    history = [*earlier, *others, *own]
    # Room for the largest window of the history, so that every append runs one program.
    windows = [history[max(0, last - count) : last] for last in range(1, len(history) + 1)]
    room = max(ImageSequence(stock.backbone, [*front, *window]).size for window in windows)
    loop = AgentLoop(stock.backbone, room, stock.lead if lead else None).slid(history, count, len(front))
    blind = loop.only(range(len(loop.held) - 1))
    blind.held = [(image, image.canonical) for image, _ in blind.held]

    places = range(len(line))

    def own_patch(place):
        return patch_of(line.images[place], parts[place], line.antecedent(place), MANY_RANK)

    # Made one by one: a cache of 32 images as large as pages takes most of a gigabyte.
    caches: dict[str, Callable[[], KV]] = {
        "re-prefill": lambda: line.engine(parts),
        "blind": lambda: joined([line.serve(place) for place in places]),
        "transfer": lambda: joined([line.serve(place, formed[line.images[place].chunk.id]) for place in places]),
        "oracle": lambda: joined([line.serve(place, own_patch(place)) for place in places]),
        "kept": lambda: line.engine(loop.parts),
        "blind_fresh_page": lambda: line.engine([*blind.parts, blind.prefill(stock.page)]),
    }
    questions = small_task.ask(stock.contexts, rng, MANY_QUESTIONS)
    said = {}
    for name, make in caches.items():
        said |= read(line, {name: make()}, questions)
    add(table, "window.many", part, questions, stock.clusters, said)
    step(f"many {part}")
