"""Many agents at once: throughput and time to the first token, with reuse off, with prefix reuse only, and ours.

Every agent looks at images one after the other, asks a question after each, and keeps the first image and the last
few. All ways run on the same driver: answers grow together, one launch for the next token of all, and edits take turns
with them. They differ only in what is prefilled at a step:

* `re-prefill`: the whole window, as one prompt.
* `prefix`: what stands behind the longest prefix that the agent's last prompt has in common with this one, by whole
  images. Of a window that slides, that is its first image.
* `window`: the image that came in, behind the survivors, which turn.

A run of each way warms up. Ways take turns; times are on the clock, with what else the machine does in them.
"""

import concurrent.futures
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.session import Sessions
from kvpatch_jax.window import Costs, Edits, Entry, Window

from ..compilation import Compilations
from ..results.environment import environment
from ..results.tables import markdown_table
from .checkpoints import tiny_config
from .window_material import Material, random_material, shipped_material, span

BACKBONE = "qwen2_5_vl"
PAGE = 16
WAYS = ("re-prefill", "prefix", "window")


@dataclasses.dataclass(frozen=True)
class Load:
    """How many agents, images each looks at, images kept behind the first, tokens of an answer, answers at a time."""

    agents: int = 16
    images: int = 10
    keep: int = 4
    steps: int = 8
    batch: int = 8


def run(*, repeats: int = 5, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures every way `repeats` times, in turns.

    Args:
      seed: of images and questions. quick: a tiny random model and few agents: shows that it runs.
    """
    if quick:
        load, material = Load(3, 4, 2, 3, 2), random_material(6, seed, tiny_config("Qwen2ForCausalLM"), tokens=32)
        repeats = 1
    else:
        load, material = Load(), shipped_material(BACKBONE, 24, seed)
    compilations, shown = Compilations(), Shown(material, load)
    ways: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    warm = {way: one_run(shown, way, compilations) for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            ways[way].append(one_run(shown, way, compilations))
    told = {way: found.pop("answers") for way, found in warm.items()}
    for found in ways.values():
        for each in found:
            each.pop("answers")
    agreed = {way: _agreement(told["re-prefill"], told[way]) for way in WAYS}
    config = {"seed": seed, "repeats": repeats, "quick": quick, "backbone": material.name, **dataclasses.asdict(load)}
    config["image_tokens"] = sorted({image.embeddings.shape[1] for image in material.images})
    parts = {way: {"warm_up": warm[way], "runs": ways[way], "agreement": agreed[way]} for way in WAYS}
    return {"config": config, "environment": environment(), "ways": parts}


class Shown:
    """What agents look at: images by number, prompts of several of them joined once."""

    def __init__(self, material: Material, load: Load):
        """Nothing joined yet."""
        self.material, self.load = material, load
        self._joined: dict[tuple[int, ...], Tokens] = {}
        self._lock = threading.Lock()

    def image(self, agent: int, step: int) -> int:
        """Which image an agent sees at a step; agents begin at different ones."""
        return (agent * 5 + step) % len(self.material.images)

    def wanted(self, agent: int, step: int) -> tuple[int, ...]:
        """The images of an agent's window at a step: the first, and the last ones."""
        seen = [self.image(agent, number) for number in range(step + 1)]
        return (*seen[:1], *seen[1:][-self.load.keep :])

    def tokens(self, images: tuple[int, ...]) -> Tokens:
        """Images one behind the other, from position 0 on."""
        with self._lock:
            if images not in self._joined:
                start, embeddings, positions = 0, [], []
                for number in images:
                    own = self.material.images[number]
                    embeddings.append(np.asarray(own.embeddings))
                    positions.append(np.asarray(own.positions) + start)
                    start += span(own)
                self._joined[images] = Tokens(np.concatenate(embeddings, 1), np.concatenate(positions, 1))  # pyright: ignore
            return self._joined[images]

    def pages(self) -> int:
        """Enough for every agent's window and answer, each on pages of its own."""
        longest = max(image.embeddings.shape[1] for image in self.material.images)
        asked = max(question.embeddings.shape[1] for question in self.material.questions)
        of_window = (self.load.keep + 2) * -(-longest // PAGE)
        return self.load.agents * (of_window + -(-(asked + self.load.steps) // PAGE))


class Agent:
    """One agent's window, by one way.

    Attributes:
      first: seconds from an image's arrival to the answer's first token. between: to each further token.
    """

    def __init__(self, shown: Shown, sessions: Sessions, number: int, way: str):
        """An empty window."""
        self.shown, self.shared, self.number, self.way = shown, sessions.shared, number, way
        costs = Costs.of(shown.material.backbone, sessions.shared.executor.dtype)
        self.window = Window.empty(costs, lead=0 if way != "window" else None, branch=sessions.name())
        self.held: list[tuple[str, tuple[int, ...]]] = []
        self.first: list[float] = []
        self.between: list[float] = []
        self.answers: list[list[int]] = []

    def live(self) -> None:
        """Looks at every image, and asks after each."""
        questions = self.shown.material.questions
        for step in range(self.shown.load.images):
            begun = time.perf_counter()
            edits = self._placed(step)
            self.shared.run(self.window, edits)
            question = questions[self.shown.image(self.number, step) % len(questions)]
            said: list[int] = []
            how: tuple[Any, ...] = (None, self.shown.load.steps, None, None, ())
            for piece in self.shared.answer(self.window, question, *how):
                now = time.perf_counter()
                (self.between if said else self.first).append(now - begun)
                begun = now
                said.append(int(piece.ids[0]))
            self.answers.append(said)

    def _placed(self, step: int) -> Edits:
        """Moves the window on to a step; the edits are still to be run."""
        wanted = self.shown.wanted(self.number, step)
        gone: list[tuple[str, tuple[int, ...]]] = []
        if self.way == "window":
            kept = wanted[:-1]
            gone = [piece for piece in self.held if piece[1][0] not in kept]
        else:
            while self.held and (self.way == "re-prefill" or self._front() != wanted[: len(self._front())]):
                gone.append(self.held.pop())
        self.held = [piece for piece in self.held if piece not in gone]
        edits: Edits = ()
        if gone:
            self.window, edits = self.window.evict(*(id for id, _ in gone))
        images = wanted[len(self._front()) :]
        id, tokens = f"{self.number}: {step}", self.shown.tokens(images)
        self.held.append((id, images))
        self.shared.provide(id, tokens, tokens.embeddings.shape[1], id)
        self.window, placed = self.window.append(Entry.of_tokens(id, tokens, id, kind="chunk"))
        for old, _ in gone:
            self.shared.forget(old)
        return (*edits, *placed)

    def _front(self) -> tuple[int, ...]:
        return tuple(image for _, images in self.held for image in images)


def one_run(shown: Shown, way: str, compilations: Compilations) -> dict[str, Any]:
    """Has all agents live once, on threads; what it took."""
    load, before = shown.load, compilations.count
    dtype = shown.material.images[0].embeddings.dtype
    with Sessions(
        shown.material.backbone, pages=shown.pages(), page_size=PAGE, batch=load.batch, timeout=600.0, dtype=dtype
    ) as sessions:
        agents = [Agent(shown, sessions, number, way) for number in range(load.agents)]
        begun, spent = time.perf_counter(), time.process_time()
        with concurrent.futures.ThreadPoolExecutor(len(agents)) as threads:
            list(threads.map(Agent.live, agents))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - spent
        stats, ledger = sessions.stats(), sessions.shared.executor.ledger.total
    tokens = sum(len(said) for agent in agents for said in agent.answers)
    first, between = ([value for agent in agents for value in getattr(agent, word)] for word in ("first", "between"))
    return {
        "seconds": seconds,
        "cpu": cpu,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "first": _quantiles(first),
        "between": _quantiles(between),
        "flops": ledger.flops,
        "padded_flops": ledger.padded_flops,
        "launches": stats.steps,
        "programs": stats.programs,
        "compilations": compilations.count - before,
        "answers": [agent.answers for agent in agents],
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": float(np.quantile(values, share / 100)) for share in (50, 99)}


def _agreement(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """Share of answers that begin with the same token."""
    pairs = [pair for all_of in zip(expected, found, strict=True) for pair in zip(*all_of, strict=True)]
    return sum(one[0] == other[0] for one, other in pairs) / len(pairs)


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Figures of every way: what, median over runs, and its extremes."""
    figures: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "tokens per second": lambda each: each["tokens_per_second"],
        "tokens per CPU second": lambda each: each["tokens_per_cpu_second"],
        "first token, p50, seconds": lambda each: each["first"]["p50"],
        "first token, p99, seconds": lambda each: each["first"]["p99"],
        "per token, p50, seconds": lambda each: each["between"]["p50"],
        "per token, p99, seconds": lambda each: each["between"]["p99"],
        "GFLOPs": lambda each: each["flops"] / 1e9,
        "GFLOPs with padding": lambda each: each["padded_flops"] / 1e9,
        "launches of answers": lambda each: float(each["launches"]),
        "compilations": lambda each: float(each["compilations"]),
    }
    found = []
    for way, part in result["ways"].items():
        for what, of in figures.items():
            values = [of(each) for each in part["runs"]]
            row = {"way": way, "what": what, "value": statistics.median(values), "n": len(values)}
            found.append(row | {"low": min(values), "high": max(values)})
        same = part["agreement"]
        found.append(
            {"way": way, "what": "first tokens as re-prefill's", "value": same, "n": 1, "low": same, "high": same}
        )
    return found


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown: a line for each figure, a column for each way."""
    by_figure: dict[str, dict[str, str]] = {}
    for row in rows(result):
        spread = f" ({row['low']:.3g} to {row['high']:.3g})" if row["n"] > 1 else ""
        by_figure.setdefault(row["what"], {})[row["way"]] = f"{row['value']:.3g}{spread}"
    lines = [(what, *(found[way] for way in WAYS)) for what, found in by_figure.items()]
    return markdown_table(("what", *WAYS), lines) + "\n"
