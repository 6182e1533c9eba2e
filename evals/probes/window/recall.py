"""Recall: the evicted page comes back after 0 to 3 of the window's three legends were replaced by new ones."""

import numpy as np

from ... import small_task
from ...small_task import LEGENDS
from ..results_table import ResultsTable
from .common import Step, add, patch_of, setting
from .image_sequence import AgentLoop, ImageSequence, read, read_in_one
from .probe_images import ProbeImages, foreign_legends, with_foreign

QUESTIONS = {"chain": 6, "override": 4, "aggregate": 4, "page": 2}


def measure_recall(table: ResultsTable, stock: ProbeImages, lead: bool, rng: np.random.Generator, step: Step) -> None:
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
    behind = _ids(loop)
    stale = patch_of(stock.page, loop.prefill(stock.page), behind)

    for turnover in range(LEGENDS + 1):
        part = setting(turnover=turnover, lead=lead)
        now = loop.slid(newer[:turnover], LEGENDS, len(front))
        line = ImageSequence(stock.backbone, [*now.line.images, stock.page])
        place, ids = len(line) - 1, _ids(now)
        remaining = now.only(range(len(front) + LEGENDS - turnover))
        patches = {
            "blind": None,
            "stale": stale,
            "fixed_earlier": patch_of(stock.page, remaining.prefill(stock.page), _ids(remaining)),
            "fresh": patch_of(stock.page, now.prefill(stock.page), ids),
        }
        parts = line.prefill()
        page = parts[-1]
        patches["oracle"] = patch_of(stock.page, page, ids)
        kept = line.engine([*now.parts, page])
        caches = {name: line.with_served(kept, {place: line.serve(place, patch)}) for name, patch in patches.items()}
        caches["re-prefill"] = line.engine(parts)

        contexts = with_foreign(stock.contexts, np.arange(LEGENDS) < turnover, 1)
        # New legends stand behind the old ones that stayed: the order is turned with them.
        contexts = contexts.reordered(np.roll(np.arange(LEGENDS), -turnover))
        questions = small_task.ask(contexts, rng, QUESTIONS)
        said = read(line, caches, questions)
        add(table, "recall", part, questions, stock.clusters, said)

        history = ImageSequence(stock.backbone, [*front, *older, *stock.legends, *newer[:turnover], stock.page])
        band, sees = bands(len(history), len(front), LEGENDS)
        said["oracle"] = said.pop("fresh")
        if not turnover:
            # Nothing has changed: these too were made of what the reference is made of.
            del said["stale"], said["fixed_earlier"]

        said["re-prefill"] = read_in_one(history, questions, band, sees.tolist())
        add(table, "recall.remember", part, questions, stock.clusters, said)
        step(f"recall {part}")


def bands(count: int, front: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Says who saw whom in a history whose last image, the page, saw the whole window.

    Args:
      count: images, the lead and the page among them. front: 1 with a lead, else 0. window: legends held at most.

    Returns:
      bool [n, n], which image looked at which; bool [n], what stands in the window at the end.
    """
    number = np.arange(count)
    apart = number[:, None] - number[None, :]
    # A legend makes room before it is prefilled, so it sees one fewer than the window holds; the page sees them all.
    reach = np.where(number == count - 1, window, window - 1)[:, None]
    band = (apart >= 0) & ((apart <= reach) | (number < front)[None, :])
    return band, band[-1]


def _ids(loop: AgentLoop) -> tuple[str, ...]:
    return tuple(image.chunk.id for image, _ in loop.held)
