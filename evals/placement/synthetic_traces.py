"""Traces of agents in the sizes of a released model, without images, and what their windows request.

The kinds are those of `evals.traces`, whose images are small. Here an image has as many tokens as Qwen2.5-VL gives it,
windows are longer, and many seeds are generated in no time. `requests_of` reads recorded traces too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Costs, Entry, Window

from ..bench.checkpoints import SEVEN_BILLION, shape_costs
from ..traces.window_tracker import changed, with_room
from .trace_replay import WindowRequest

LEAD = 64
"""Tokens of the text in front."""
STEPS = 24
PAGES, TOPICS, RETRIEVED = 14, 5, 5
"""Of the pages: documents, topics that recur, and documents retrieved for a question."""


def released_costs() -> Costs:
    """Returns costs of Qwen2.5-VL-7B's shape in bfloat16."""
    return shape_costs("qwen2.5-vl-7b's shape", SEVEN_BILLION)


class SyntheticTrace:
    """Events of a trace that is generated, and its random numbers."""

    def __init__(self, seed: int, kind: str):
        """Creates a trace without events."""
        self.random = np.random.default_rng([seed, list(KINDS).index(kind)])
        self.events: list[Event] = []

    def record(self, session: str, op: Any, **fields: Any) -> None:
        """Appends an event."""
        self.events.append(Event(float(len(self.events)), session, op, **fields))

    def begin(self, session: str) -> None:
        """Appends the text in front."""
        self.record(session, "add", chunk="system", content="system", tokens=LEAD, span=LEAD, kind="text")

    def look(self, session: str, name: str, tokens: int, order_free: bool = False) -> None:
        """Appends an image that comes in."""
        self.record(session, "add", chunk=name, content=name, tokens=tokens, span=tokens, order_free=order_free)

    def ask(self, session: str) -> None:
        """Appends a question."""
        self.record(session, "ask", text="what is to be seen?")


def screenshots(trace: SyntheticTrace, steps: int) -> None:
    """Looks at a new screenshot at each step; the last four stay, and now and then an old screen returns."""
    trace.begin("agent")
    held: list[str] = []
    seen: set[str] = set()

    for step in range(steps):
        trace.record("agent", "slide", keep=3)
        held = held[-3:]
        name, screens = f"screen {step}", [f"screen {number}" for number in range(step)]
        gone = [screen for screen in screens if screen not in held]
        if gone and trace.random.random() < 0.25:
            name = str(trace.random.choice(gone[-8:]))

        # A screen whose step was spent on an old one was never seen.
        if name in seen:
            trace.record("agent", "recall", chunk=name)
        else:
            trace.look("agent", name, 1296)

        seen.add(name)
        held.append(name)
        trace.ask("agent")


def video(trace: SyntheticTrace, steps: int) -> None:
    """Looks at eight frames, the newest last; every third step looks back at three that left, in any order."""
    trace.begin("agent")
    held: list[str] = []
    seen: list[str] = []

    for step in range(steps):
        if step % 3 == 2 and len(seen) > 8:
            key_frames = [name for name in seen if name not in held][:4]
            chosen = trace.random.choice(key_frames, min(3, len(key_frames)), replace=False)
            back = [str(name) for name in chosen]
            trace.record("agent", "slide", keep=8 - len(back))
            held = held[-(8 - len(back)) :]
            for name in back:
                trace.record("agent", "recall", chunk=name)
            held += back
        else:
            trace.record("agent", "slide", keep=7)
            trace.look("agent", f"frame {step}", 360, order_free=True)
            held = [*held[-7:], f"frame {step}"]
            seen.append(f"frame {step}")
        trace.ask("agent")


def pages(trace: SyntheticTrace, steps: int) -> None:
    """Retrieves five of fourteen pages for each question, ranked; topics recur, their rankings never quite the same."""
    trace.begin("agent")
    topics = [trace.random.permutation(PAGES)[: RETRIEVED + 1] for _ in range(TOPICS)]
    favour = 1 / np.arange(1, TOPICS + 1)
    seen, held = set[str](), list[str]()
    sizes = [int(trace.random.integers(500, 1100)) for _ in range(PAGES)]

    for _ in range(steps):
        topic = topics[int(trace.random.choice(TOPICS, p=favour / favour.sum()))]
        score = -np.arange(len(topic)) + trace.random.normal(0, 1.5, len(topic))
        retrieved = [int(topic[place]) for place in np.argsort(-score)[:RETRIEVED]]
        for name in held:
            trace.record("agent", "evict", chunk=name)
        held = [f"page {number}" for number in retrieved]

        for number, name in zip(retrieved, held, strict=True):
            if name in seen:
                trace.record("agent", "recall", chunk=name)
            else:
                trace.look("agent", name, sizes[number], order_free=True)
            seen.add(name)

        trace.ask("agent")


def tree(trace: SyntheticTrace, steps: int) -> None:
    """Searches over one image: at each node three crops are tried and the best continues, three levels deep."""
    number, search = 0, 0
    crops = [f"crop {place}" for place in range(9)]
    while number < steps:
        best = f"search {search}"
        trace.begin(best)
        trace.look(best, "image", 1296)
        taken: list[str] = []
        weight = trace.random.dirichlet(np.full(9, 0.5)) + 0.02

        for _ in range(3):
            left = [crop for crop in crops if crop not in taken]
            chance = np.array([weight[crops.index(crop)] for crop in left])
            tried = trace.random.choice(left, 3, replace=False, p=chance / chance.sum())
            names = []

            for branch, crop in enumerate(tried):
                name = f"{best}/{branch}"
                trace.record(best, "fork", branch=name)
                trace.look(name, str(crop), 576, order_free=True)
                trace.ask(name)
                names.append(name)
                number += 1

            chosen = int(trace.random.integers(3))
            for name in [*names, best]:
                if name != names[chosen]:
                    trace.record(name, "close")

            taken.append(str(tried[chosen]))
            best = names[chosen]

        trace.record(best, "close")
        search += 1


KINDS: dict[str, tuple[Callable[[SyntheticTrace, int], None], str]] = {
    "screenshots": (screenshots, "remember"),
    "video": (video, "remember"),
    "pages": (pages, "forget"),
    "tree": (tree, "remember"),
}
"""By kind: what draws its events, and what its windows promise."""


def synthetic_trace(kind: str, seed: int, steps: int = STEPS) -> Trace:
    """Generates a trace, a function of kind, seed and steps."""
    trace, (draw, promise) = SyntheticTrace(seed, kind), KINDS[kind]
    draw(trace, steps)
    parameters = {"seed": seed, "steps": steps, "promise": promise, "lead": None}
    return Trace(tuple(trace.events), kind, parameters)


def requests_of(trace: Trace, costs: Costs, tokens: int = 576) -> list[WindowRequest]:
    """Returns what the windows of a trace request at each question, in order.

    Args:
      tokens: of pieces whose number of tokens the trace does not state.
    """
    lead = trace.parameters.get("lead")
    empty = Window.empty(costs, lead=lead if isinstance(lead, int) else None)
    windows: dict[str, Window] = {}
    parents: dict[str, str] = {}
    requests = []

    for event in trace:
        window = windows.get(event.session, empty)
        if event.op == "ask":
            entries = tuple(piece.entry for piece in window.pieces)
            requests.append(WindowRequest(event.session, entries, parents.get(event.session)))
        elif event.branch is not None:
            windows[event.branch], parents[event.branch] = window, event.session
        elif event.op == "close":
            windows.pop(event.session, None)
            continue
        else:
            window = with_room(window, event)
            returned = event.op == "recall" and event.chunk in window  # sessions record that too
            entry, size = None, event.tokens or tokens
            if event.op in ("add", "replace"):
                span = event.span or size
                entry = Entry(event.chunk or "", event.content, size, span, event.kind, event.order_free)
            window = window if returned else changed(window, event, entry)

        windows[event.session] = window

    return requests


def canonical_bytes(requests: Sequence[WindowRequest], costs: Costs) -> int:
    """Returns the bytes of the canonicals of all chunks that are requested."""
    sizes: dict[str, int] = {}
    for request in requests:
        sizes |= {entry.id: entry.tokens for entry in request.pieces if entry.kind == "chunk"}
    return costs.kv_bytes * sum(sizes.values())
