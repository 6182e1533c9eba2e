"""Agents' loops as a data set of the harness: what every prompt costs in each way of reuse, and what answers lose.

A loop is episodes under a policy. Tokens are counted in pieces at the sizes of real agents: sessions run a small model
and say which pieces took a forward, the other ways are priced. A probe is a policy, or "recorded": windows as a trace
has them.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets, ModelBackbone
from kvpatch_jax.traces import Trace

from ..harness import intervals
from ..harness.datasets import Run
from ..harness.frame import Row, measured_row
from ..harness.parts import Part, Record
from ..harness.runner import loaded
from . import computer_use, costs, mooncake
from .drawn import drawn_episode
from .episodes import OMITTED, Prompt, PromptPiece, episodes_of, recorded_prompts
from .policies import POLICIES, prompts_of
from .replay import SESSIONS, SessionReplay, reordered_divergence

REPREFILL, PREFIX, ORDERED = "re-prefill", "prefix cache", "ordered prefix cache"
PRICED = (REPREFILL, PREFIX, ORDERED, "remember")
"""Arms that need no model to be counted."""
ARMS = (REPREFILL, PREFIX, ORDERED, *SESSIONS)
RECORDED, ALONE = "recorded", "tokens alone"
"""The probe of a trace's own windows; the model of rows that no model was run for."""
READERS = {"ours": Trace.read, "mooncake": mooncake.read_mooncake, "computer_use": computer_use.read_computer_use}
SETTINGS = {"steps": 40, "long": 200, "every": 4, "trace": "", "format": "ours", "placeholder": OMITTED}
"""Rounds of a drawn episode, with a model and without; a round in so many is asked; a trace's file, its format, and the
text that policies put in place of its screenshots."""


class LoopDataset:
    """Loops of agents; see `harness.datasets.RecordedDataset`."""

    name, probes = "loops", (*POLICIES, RECORDED)

    def parts(self, run: Run) -> list[Part]:
        """Lists the parts: an episode under a policy, by one model or none.

        Raises:
          InputError: an unknown probe, method, setting or format.
        """
        settings = {**SETTINGS, **run.settings}
        for what, values, known in (
            ("methods", run.methods, ARMS),
            ("settings", run.settings, SETTINGS),
            ("settings.format", [settings["format"]], READERS),
        ):
            if unknown := [value for value in values if value not in known]:
                raise InputError(f"loops.{what}: got {unknown[0]!r}; expected some of {', '.join(known)}")
        if settings["trace"]:
            episodes, probes = range(1), run.probes_of(self) if run.probes else (RECORDED,)
        else:
            episodes, probes = range(run.n), run.probes_of(self, len(POLICIES))

        parts = []
        for number, probe in itertools.product(episodes, probes):
            for model, path in {ALONE: "", **run.models}.items():
                prompts = functools.partial(prompts_of_probe, probe, settings, run.seed + number, contents=bool(path))
                arms = [arm for arm in run.methods or ARMS if path or arm in PRICED]
                place, every = (probe, model, number), settings["every"]
                measure = functools.partial(measure_loop, prompts, arms, path, every, place)
                parts.append(Part(f"loops.{probe}, {model}, episode {number}", measure, 1.0 if path else 0.02))
        return parts

    def rows(self, records: Mapping[str, Iterable[Record]]) -> list[Row]:
        """Makes rows: tokens computed at a step, over the prefix cache's, KL and the share of decisions that stay."""
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for part in records.values():
            for record in part:
                groups.setdefault((record["probe"], record["model"], record["arm"]), []).append(record)

        rows = []
        for (probe, model, arm), episodes in groups.items():
            spent, cluster = _joined(episodes, "tokens")
            row = functools.partial(measured_row, probe, model, arm)
            rows.append(row("tokens", intervals.mean(spent, cluster)))
            cached = groups.get((probe, model, PREFIX))
            if cached:
                rows.append(row("over_prefix_cache", intervals.ratio(spent, _joined(cached, "tokens")[0], cluster)))
            kl, cluster = _joined(episodes, "kl")
            if len(kl):
                flips, _ = _joined(episodes, "flips")
                rows.append(row("kl", intervals.mean(kl, cluster)))
                rows.append(row("decisions", intervals.mean(1 - flips, cluster)))
        return rows


LOOPS = LoopDataset()


def _joined(episodes: Sequence[Record], field: str) -> tuple[np.ndarray, np.ndarray]:
    """Joins a field of all episodes, in their order, and the episode of each value."""
    ordered = sorted(episodes, key=lambda record: record["episode"])
    values = [np.asarray(record[field], float) for record in ordered]
    numbers = [np.full(len(part), record["episode"]) for part, record in zip(values, ordered, strict=True)]
    return np.concatenate(values), np.concatenate(numbers)


def prompts_of_probe(probe: str, settings: Mapping[str, Any], seed: int, *, contents: bool) -> list[Prompt]:
    """Lists the prompts of a probe: drawn, or of a trace."""
    if not settings["trace"] and probe != RECORDED:
        kind, steps = "opened" if probe == "reopened" else "walk", settings["steps" if contents else "long"]
        return prompts_of(drawn_episode(kind, f"episode {seed}", seed, steps, contents=contents), POLICIES[probe])

    trace = READERS[settings["format"]](Path(settings["trace"]))
    if probe == RECORDED:
        prompts = list(recorded_prompts(trace))
    else:
        episodes = episodes_of(trace, settings["placeholder"])
        prompts = [prompt for episode in episodes for prompt in prompts_of(episode, POLICIES[probe])]
    if contents and any(piece.shown.item is None for prompt in prompts for piece in prompt.pieces):
        raise InputError(f"loops.trace: got {settings['trace']}, whose contents are not known; expected no models")
    return prompts


def measure_loop(
    make_prompts: Any, arms: Sequence[str], path: str, every: int, names: tuple[str, str, int]
) -> Iterator[Record]:
    """Serves the prompts of a loop in every way.

    Args:
      make_prompts: makes the prompts. path: of the model; "": none.
      every: a prompt in so many is asked. names: probe, model and episode.

    Yields:
      A record of each arm: "tokens" computed at every prompt; "kl" and "flips" of every answer that was compared.
    """
    prompts: list[Prompt] = make_prompts()
    # Prompts of all lengths compile few programs where a model pads to powers of two.
    backbone = loaded(path, buckets=Buckets(64, 1)) if path else None
    for arm in arms:
        spent, kls, flips = list[int](), list[float](), list[int]()
        with contextlib.ExitStack() as stack:
            way = _Session(backbone, arm, stack) if backbone and arm in SESSIONS else _Priced(backbone, arm)
            for number, prompt in enumerate(prompts):
                spent.append(costs.tokens(way.computed(prompt)))
                if backbone is not None and arm not in (REPREFILL, PREFIX) and number % every == every - 1:
                    kl, flipped = way.divergence(prompt)
                    kls += [float(f"{value:.6g}") for value in kl]
                    flips += flipped
        record = dict(zip(("probe", "model", "episode"), names, strict=True))
        yield {**record, "arm": arm, "tokens": spent, "kl": kls, "flips": flips}


class _Priced:
    """A way whose computed pieces follow from the prompts alone."""

    def __init__(self, backbone: ModelBackbone | None, arm: str):
        self.backbone, self.arm = backbone, arm
        self.cache, self.survivors = costs.PrefixCache(), dict[str, costs.Survivors]()
        self.order: Sequence[PromptPiece] = ()

    def computed(self, prompt: Prompt) -> Sequence[PromptPiece]:
        if self.arm == REPREFILL:
            return prompt.pieces
        if self.arm == "remember":
            return self.survivors.setdefault(prompt.session, costs.Survivors()).computed(prompt.pieces)
        self.order = self.cache.ordered(prompt.pieces) if self.arm == ORDERED else prompt.pieces
        return self.cache.computed(self.order)

    def divergence(self, prompt: Prompt) -> tuple[list[float], list[int]]:
        assert self.backbone is not None  # only with a model are answers compared
        return reordered_divergence(self.backbone, prompt.pieces, self.order, prompt.questions)


class _Session:
    """A way that a session serves, one for each session of the loop."""

    def __init__(self, backbone: ModelBackbone, arm: str, stack: contextlib.ExitStack):
        self.backbone, self.arm, self.stack = backbone, arm, stack
        self.sessions: dict[str, SessionReplay] = {}

    def computed(self, prompt: Prompt) -> Sequence[PromptPiece]:
        if prompt.session not in self.sessions:
            replay = self.sessions[prompt.session] = SessionReplay(self.backbone, self.arm)
            self.stack.callback(replay.close)
        return self.sessions[prompt.session].serve(prompt.pieces)

    def divergence(self, prompt: Prompt) -> tuple[list[float], list[int]]:
        return self.sessions[prompt.session].divergence(prompt.questions)
