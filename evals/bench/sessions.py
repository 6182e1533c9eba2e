"""Many agents at once: throughput and time to the first token, with reuse off, with prefix reuse only, and ours.

Every agent looks at images one after the other, asks a question after each, and keeps the first image and the last
few. All arms run on the same driver: answers grow together, one launch for the next token of all, and edits take turns
with them. They differ only in what is prefilled at a step:

* `re-prefill`: the whole window, as one prompt.
* `prefix`: what follows the longest prefix that the agent's last prompt has in common with this one, by whole images.
  Of a window that slides, that is its first image.
* `window`: the image that came in, after the survivors, which rotate.

A run of each arm warms up. Arms take turns; times are on the clock, with whatever else the machine does in them.
"""

import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.session import Sessions
from kvpatch_jax.window import Costs, Edits, Entry, Window

from ..compilation import Compilations
from ..results.environment import environment
from .benchmark import Benchmark, Row, measured_row
from .checkpoints import tiny_config
from .loop_workload import LoopWorkload, join_pieces, length_of, random_workload, shipped_workload

BACKBONE = "qwen2_5_vl"
PAGE = 16
ARMS = ("re-prefill", "prefix", "window")
FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "tokens per second": lambda run: run["tokens_per_second"],
    "tokens per CPU second": lambda run: run["tokens_per_cpu_second"],
    "first token, p50, seconds": lambda run: run["first"]["p50"],
    "first token, p99, seconds": lambda run: run["first"]["p99"],
    "per token, p50, seconds": lambda run: run["between"]["p50"],
    "per token, p99, seconds": lambda run: run["between"]["p99"],
    "GFLOPs": lambda run: run["flops"] / 1e9,
    "GFLOPs with padding": lambda run: run["padded_flops"] / 1e9,
    "launches of answers": lambda run: float(run["launches"]),
    "compilations": lambda run: float(run["compilations"]),
}
"""What rows show of a run."""


@dataclasses.dataclass(frozen=True)
class AgentLoad:
    """How many agents, images each looks at, images kept after the first, tokens of an answer, answers at a time."""

    agents: int = 16
    images: int = 10
    keep: int = 4
    steps: int = 8
    batch: int = 8


def run(*, repeats: int = 5, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures every arm `repeats` times, in turns.

    Args:
      seed: of images and questions.
      quick: a tiny random model and few agents: a preview, not a measurement.
    """
    if quick:
        load, repeats = AgentLoad(3, 4, 2, 3, 2), 1
        workload = random_workload(6, seed, tiny_config("Qwen2ForCausalLM"), tokens=32)
    else:
        load, workload = AgentLoad(), shipped_workload(BACKBONE, 24, seed)

    compilations, views = Compilations(), AgentViews(workload, load)
    warm_ups = {arm: one_run(views, arm, compilations) for arm in ARMS}
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        for arm in ARMS:
            runs[arm].append(one_run(views, arm, compilations))

    # Answers are compared once, and not kept.
    answers = {arm: warm_up.pop("answers") for arm, warm_up in warm_ups.items()}
    for measured in runs.values():
        for measured_run in measured:
            measured_run.pop("answers")

    agreement = {arm: first_token_agreement(answers["re-prefill"], answers[arm]) for arm in ARMS}

    config = {"seed": seed, "repeats": repeats, "quick": quick, "backbone": workload.name, **dataclasses.asdict(load)}
    config["image_tokens"] = sorted({length_of(image) for image in workload.images})
    arms = {arm: {"warm_up": warm_ups[arm], "runs": runs[arm], "agreement": agreement[arm]} for arm in ARMS}
    return {"config": config, "environment": environment(), "arms": arms, "rows": rows_of(arms)}


def rows_of(arms: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Makes a row per figure and arm, the arms of a figure next to each other."""
    rows = []
    for metric, figure in FIGURES.items():
        for arm, part in arms.items():
            rows.append(measured_row(metric, [figure(measured) for measured in part["runs"]], arm=arm))
    for arm, part in arms.items():
        rows.append(measured_row("first tokens as re-prefill's", [part["agreement"]], arm=arm))
    return rows


def first_token_agreement(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """Computes the share of answers that begin with the same token."""
    same = []
    for expected_answers, found_answers in zip(expected, found, strict=True):
        same += [a[0] == b[0] for a, b in zip(expected_answers, found_answers, strict=True)]
    return sum(same) / len(same)


def one_run(views: "AgentViews", arm: str, compilations: Compilations) -> dict[str, Any]:
    """Runs all agents once, on threads; returns what it took."""
    load, before = views.load, compilations.count
    dtype = views.workload.images[0].embeddings.dtype
    options = {"pages": views.pages(), "page_size": PAGE, "batch": load.batch, "timeout": 600.0, "dtype": dtype}

    with Sessions(views.workload.backbone, **options) as sessions:
        agents = [LoopAgent(views, sessions, number, arm) for number in range(load.agents)]
        begun, spent = time.perf_counter(), time.process_time()
        with concurrent.futures.ThreadPoolExecutor(len(agents)) as threads:
            list(threads.map(LoopAgent.live, agents))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - spent
        stats, ledger = sessions.stats(), sessions.shared.executor.ledger.total

    tokens = sum(map(len, itertools.chain.from_iterable(agent.answers for agent in agents)))
    return {
        "seconds": seconds,
        "cpu": cpu,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "first": _quantiles(agent.first for agent in agents),
        "between": _quantiles(agent.between for agent in agents),
        "flops": ledger.flops,
        "padded_flops": ledger.padded_flops,
        "launches": stats.steps,
        "programs": stats.programs,
        "compilations": compilations.count - before,
        "answers": [agent.answers for agent in agents],
    }


def _quantiles(parts: Iterable[Sequence[float]]) -> dict[str, float]:
    """Computes quantiles of the values of all agents."""
    values = list(itertools.chain.from_iterable(parts))
    return {f"p{share}": float(np.quantile(values, share / 100)) for share in (50, 99)}


class AgentViews:
    """What agents look at: images by number, prompts of several of them joined once."""

    def __init__(self, workload: LoopWorkload, load: AgentLoad):
        """Has joined nothing yet."""
        self.workload, self.load = workload, load
        self._joined: dict[tuple[int, ...], Tokens] = {}
        self._lock = threading.Lock()

    def image(self, agent: int, step: int) -> int:
        """Returns which image an agent sees at a step; agents begin at different ones."""
        return (agent * 5 + step) % len(self.workload.images)

    def window(self, agent: int, step: int) -> tuple[int, ...]:
        """Returns the images of an agent's window at a step: the first, and the last ones."""
        seen = [self.image(agent, number) for number in range(step + 1)]
        return (*seen[:1], *seen[1:][-self.load.keep :])

    def tokens(self, images: tuple[int, ...]) -> Tokens:
        """Joins images, from position 0 on."""
        with self._lock:
            if images not in self._joined:
                pieces = [(str(number), self.workload.images[number]) for number in images]
                self._joined[images] = join_pieces(pieces)[1]
            return self._joined[images]

    def pages(self) -> int:
        """Counts pages for every agent's window and answer, each piece on pages of its own."""
        longest = max(map(length_of, self.workload.images))
        asked = max(map(length_of, self.workload.questions))
        of_window = (self.load.keep + 2) * -(-longest // PAGE)
        return self.load.agents * (of_window + -(-(asked + self.load.steps) // PAGE))


class LoopAgent:
    """One agent's window, served by one arm.

    Attributes:
      first: seconds from an image's arrival to the answer's first token.
      between: seconds to each further token.
      answers: token ids of each answer.
    """

    def __init__(self, views: AgentViews, sessions: Sessions, number: int, arm: str):
        """Starts with an empty window."""
        self.views, self.shared, self.number, self.arm = views, sessions.shared, number, arm
        costs = Costs.of(views.workload.backbone, sessions.shared.executor.dtype)
        self.window = Window.empty(costs, lead=0 if arm != "window" else None, branch=sessions.name())
        self.held: list[tuple[str, tuple[int, ...]]] = []
        self.first: list[float] = []
        self.between: list[float] = []
        self.answers: list[list[int]] = []

    def live(self) -> None:
        """Looks at every image, and asks after each."""
        questions = self.views.workload.questions
        for step in range(self.views.load.images):
            begun = time.perf_counter()
            edits = self._plan(step)
            self.shared.run(self.window, edits)
            question = questions[self.views.image(self.number, step) % len(questions)]
            answer: list[int] = []

            for piece in self.shared.answer(self.window, question, None, self.views.load.steps, None, None, ()):
                now = time.perf_counter()
                (self.between if answer else self.first).append(now - begun)
                begun = now
                answer.append(int(piece.ids[0]))

            self.answers.append(answer)

    def _plan(self, step: int) -> Edits:
        """Moves the window value on to a step; returns the edits, which are still to be run."""
        wanted = self.views.window(self.number, step)
        evicted: list[tuple[str, tuple[int, ...]]] = []
        if self.arm == "window":
            evicted = [piece for piece in self.held if piece[1][0] not in wanted[:-1]]
        else:
            while self.held and (self.arm == "re-prefill" or self._images() != wanted[: len(self._images())]):
                evicted.append(self.held.pop())

        self.held = [piece for piece in self.held if piece not in evicted]
        edits: Edits = ()
        if evicted:
            self.window, edits = self.window.evict(*(id for id, _ in evicted))

        images = wanted[len(self._images()) :]
        id, tokens = f"{self.number}: {step}", self.views.tokens(images)
        self.held.append((id, images))
        self.shared.provide(id, tokens, length_of(tokens), id)
        self.window, placed = self.window.append(Entry.of_tokens(id, tokens, id, kind="chunk"))
        for old, _ in evicted:
            self.shared.forget(old)
        return (*edits, *placed)

    def _images(self) -> tuple[int, ...]:
        """Returns the images held, in order."""
        return tuple(itertools.chain.from_iterable(images for _, images in self.held))


BENCHMARK = Benchmark("sessions", run, ("arm",))
