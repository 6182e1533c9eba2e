"""Traces of agents in the sizes of a released model, without images, and what their windows want to read.

The kinds are those of `evals.traces`, whose images are small: here an image has as many tokens as Qwen2.5-VL gives it,
windows are longer, and many seeds are drawn in no time. Traces that were recorded are read by the same function.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Costs, Entry, Window

from .trace_replay import WindowRequest

LEAD = 64
"""Tokens of the text in front."""
STEPS = 24


def released_costs() -> Costs:
    """Costs of Qwen2.5-VL-7B's shape in bfloat16: 28 layers of width 3584, 4 heads of 128 for keys and values."""
    layers, width, inner, kv = 28, 3584, 18944, 512
    token = 2 * (width * (2 * width + 2 * kv) + 3 * width * inner)
    forward = ForwardCosts((token,) * layers, (4 * width,) * layers, (0,) * layers, 2 * width * 152064)
    return Costs("qwen2.5-vl-7b's shape", layers, 4 * layers * kv, 2 * layers * kv, layers * kv, forward)


class _Drawing:
    """Events as they are drawn."""

    def __init__(self, seed: int, kind: str):
        self.random = np.random.default_rng([seed, list(KINDS).index(kind)])
        self.events: list[Event] = []

    def tell(self, session: str, op, **fields) -> None:
        self.events.append(Event(float(len(self.events)), session, op, **fields))

    def begin(self, session: str) -> None:
        self.tell(session, "add", chunk="system", content="system", tokens=LEAD, span=LEAD, kind="text")

    def look(self, session: str, name: str, tokens: int, free: bool = False) -> None:
        self.tell(session, "add", chunk=name, content=name, tokens=tokens, span=tokens, order_free=free)

    def ask(self, session: str) -> None:
        self.tell(session, "ask", text="what is to be seen?")


def screenshots(drawing: _Drawing, steps: int) -> None:
    """A new screenshot at each step, the last four stay; now and then an old screen is there again."""
    drawing.begin("agent")
    held: list[str] = []
    for step in range(steps):
        drawing.tell("agent", "slide", keep=3)
        held = held[-3:]
        back = [f"screen {number}" for number in range(step) if f"screen {number}" not in held]
        name = f"screen {step}"
        if back and drawing.random.random() < 0.25:
            name = str(drawing.random.choice(back[-8:]))
        if any(event.chunk == name for event in drawing.events):
            drawing.tell("agent", "recall", chunk=name)
        else:
            drawing.look("agent", name, 1296)
        held.append(name)
        drawing.ask("agent")


def video(drawing: _Drawing, steps: int) -> None:
    """Eight frames, the newest last; every third step looks back at three that left, in whatever order."""
    drawing.begin("agent")
    held: list[str] = []
    seen: list[str] = []
    for step in range(steps):
        if step % 3 == 2 and len(seen) > 8:
            gone = [name for name in seen if name not in held]
            keys = gone[:4]
            back = [str(name) for name in drawing.random.choice(keys, min(3, len(keys)), replace=False)]
            drawing.tell("agent", "slide", keep=8 - len(back))
            held = held[-(8 - len(back)) :]
            for name in back:
                drawing.tell("agent", "recall", chunk=name)
            held += back
        else:
            drawing.tell("agent", "slide", keep=7)
            drawing.look("agent", f"frame {step}", 360, free=True)
            held = [*held[-7:], f"frame {step}"]
            seen.append(f"frame {step}")
        drawing.ask("agent")


def pages(drawing: _Drawing, steps: int) -> None:
    """Each question retrieves five of fourteen pages, ranked; topics come back, their rankings never quite the same."""
    drawing.begin("agent")
    topics = [drawing.random.permutation(14)[:6] for _ in range(5)]
    favour = 1 / np.arange(1, 6)
    met, held = set[str](), list[str]()
    sizes = {number: int(drawing.random.integers(500, 1100)) for number in range(14)}
    for _ in range(steps):
        topic = topics[int(drawing.random.choice(5, p=favour / favour.sum()))]
        score = -np.arange(6) + drawing.random.normal(0, 1.5, 6)
        wanted = [int(topic[place]) for place in np.argsort(-score)[:5]]
        names = [f"page {number}" for number in wanted]
        for name in held:
            drawing.tell("agent", "evict", chunk=name)
        for number, name in zip(wanted, names, strict=True):
            if name in met:
                drawing.tell("agent", "recall", chunk=name)
            else:
                drawing.look("agent", name, sizes[number], free=True)
            met.add(name)
        held = names
        drawing.ask("agent")


def tree(drawing: _Drawing, steps: int) -> None:
    """Questions about one image, each a search: at each node three crops are tried, the best goes on, three deep."""
    number, search = 0, 0
    crops = [f"crop {place}" for place in range(9)]
    while number < steps:
        best = f"search {search}"
        drawing.begin(best)
        drawing.look(best, "image", 1296)
        taken: list[str] = []
        weight = drawing.random.dirichlet(np.full(9, 0.5)) + 0.02
        for _ in range(3):
            left = [crop for crop in crops if crop not in taken]
            chance = np.array([weight[crops.index(crop)] for crop in left])
            tried = drawing.random.choice(left, 3, replace=False, p=chance / chance.sum())
            names = []
            for branch, crop in enumerate(tried):
                name = f"{best}/{branch}"
                drawing.tell(best, "fork", branch=name)
                drawing.look(name, str(crop), 576, free=True)
                drawing.ask(name)
                names.append(name)
                number += 1
            chosen = int(drawing.random.integers(3))
            for name in [*names, best]:
                if name != names[chosen]:
                    drawing.tell(name, "close")
            taken.append(str(tried[chosen]))
            best = names[chosen]
        drawing.tell(best, "close")
        search += 1


_PROMISES = {"screenshots": "remember", "video": "remember", "pages": "forget", "tree": "remember"}
KINDS: dict[str, Callable[[_Drawing, int], None]] = {
    "screenshots": screenshots,
    "video": video,
    "pages": pages,
    "tree": tree,
}


def drawn(kind: str, seed: int, steps: int = STEPS) -> Trace:
    """Draws a trace: a function of kind, seed and steps alone."""
    drawing = _Drawing(seed, kind)
    KINDS[kind](drawing, steps)
    parameters = {"seed": seed, "steps": steps, "promise": _PROMISES[kind], "lead": None}
    return Trace(tuple(drawing.events), kind, parameters)


def wanted_of(trace: Trace, costs: Costs, tokens: int = 576) -> list[WindowRequest]:
    """Lists what the windows of a trace want to read at each question, in order.

    Args:
      tokens: of pieces that it tells no number of.
    """
    lead = trace.parameters.get("lead")
    begin = Window.empty(costs, lead=lead if isinstance(lead, int) else None)
    windows: dict[str, Window] = {}
    parents: dict[str, str] = {}
    found = []
    for event in trace:
        window = windows.get(event.session, begin)
        if event.op == "ask":
            parent = parents.get(event.session)
            found.append(WindowRequest(event.session, tuple(piece.entry for piece in window.pieces), parent))
        elif event.branch is not None:
            windows[event.branch], parents[event.branch] = window, event.session
        elif event.op == "close":
            windows.pop(event.session, None)
            continue
        else:
            window = _changed(window, event, tokens)
        windows[event.session] = window
    return found


def _changed(window: Window, event: Event, tokens: int) -> Window:
    """The window after one event."""
    name = event.chunk or ""
    if event.op in ("add", "recall") and event.keep is not None and event.kind == "chunk":
        window, _ = window.slide(max(event.keep - 1, 0))  # what comes in says how many stay, itself among them
    if event.op == "slide":
        return window.slide(event.keep or 0)[0]
    if event.op == "recall":
        return window if name in window else window.recall(name)[0]
    if event.op == "evict":
        return window.evict(name)[0]
    if event.op == "reorder":
        return window.reorder(event.order)[0]
    size = event.tokens or tokens
    entry = Entry(name, event.content, size, event.span or size, event.kind, event.order_free)
    return window.append(entry)[0] if event.replaced is None else window.replace(event.replaced, entry)[0]


def bytes_of_chunks(requests: Sequence[WindowRequest], costs: Costs) -> int:
    """Bytes of the canonicals of all chunks that are wanted."""
    sizes = {entry.id: entry.tokens for request in requests for entry in request.pieces if entry.kind == "chunk"}
    return costs.kv_bytes * sum(sizes.values())
