"""Many chunks: 8, 16 and 32 images in the window, every one served from the cache and moved, not the page alone."""

from collections.abc import Callable

import numpy as np

from ... import small_task
from ..results_table import ResultsTable
from .common import Step, add, patch_of, setting
from .image_sequence import KV, AgentLoop, Image, ImageSequence, joined, read
from .probe_images import ProbeImages

RANK = 16
QUESTIONS = {"page": 2, "legend": 2, "chain": 6, "aggregate": 4, "override": 4}


def images_in_front(stock: ProbeImages, count: int, first: int = 1) -> list[Image]:
    """Lists `count` images of other contexts: three legends and a page of each in turn."""
    own = [*stock.legends, stock.page]
    return [own[number % len(own)].of_others(first + number // len(own)) for number in range(count)]


def measure_many(
    table: ResultsTable, stock: ProbeImages, count: int, lead: bool, rng: np.random.Generator, step: Step
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
    others = images_in_front(stock, count - len(own))
    line = ImageSequence(stock.backbone, [*front, *others, *own])
    parts = line.prefill()

    # The same images, those of others turned by half and the own legends by one: every chunk but the lead has moved.
    half = len(others) // 2
    turned = [*front, *others[half:], *others[:half], *stock.legends[1:], stock.legends[0], stock.page]
    arranged = ImageSequence(stock.backbone, turned)
    formed = {}
    for place, (image, kv) in enumerate(zip(turned, arranged.prefill(), strict=True)):
        formed[image.chunk.id] = patch_of(image, kv, arranged.antecedent(place), RANK)

    earlier = images_in_front(stock, count // 2, first=1 + len(others) // len(own))
    history = [*earlier, *others, *own]
    windows = [history[max(0, last - count) : last] for last in range(1, len(history) + 1)]
    room = max(sum(image.size for image in [*front, *window]) for window in windows)
    loop = AgentLoop(stock.backbone, room, stock.lead if lead else None).slid(history, count, len(front))
    blind = loop.only(range(len(loop.held) - 1))
    blind.held = [(image, image.canonical) for image, _ in blind.held]

    places = range(len(line))

    def own_patch(place):
        return patch_of(line.images[place], parts[place], line.antecedent(place), RANK)

    # Made one by one: a cache of 32 images as large as pages takes most of a gigabyte.
    caches: dict[str, Callable[[], KV]] = {
        "re-prefill": lambda: line.engine(parts),
        "blind": lambda: joined([line.serve(place) for place in places]),
        "transfer": lambda: joined([line.serve(place, formed[line.images[place].chunk.id]) for place in places]),
        "oracle": lambda: joined([line.serve(place, own_patch(place)) for place in places]),
        "kept": lambda: line.engine(loop.parts),
        "blind_fresh_page": lambda: line.engine([*blind.parts, blind.prefill(stock.page)]),
    }
    questions = small_task.ask(stock.contexts, rng, QUESTIONS)
    said = {}
    for name, make in caches.items():
        said |= read(line, {name: make()}, questions)
    add(table, "many", part, questions, stock.clusters, said)
    step(f"many {part}")
