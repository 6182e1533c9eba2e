"""Which loops are run, and what is kept of them. A loop that is finished is not run again."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from models import ModelBackbone

from . import loop, simulation
from .loop import AnswerRecord, AuditRecord
from .measures import row_of
from .traffic import TrafficPlan, image_traffic, text_traffic

SEEDS = 20
"""Of the simulation."""
RATES = (None, 0.105, 0.12, 0.15, 0.2)
"""Shares of losses beyond the bound in the simulation. None: as measured; the others are more than the level allows."""


class LoopSpec(NamedTuple):
    """One real loop: the task ("texts", "images"), its seed, what comes at the shift, and the goal in nats."""

    task: str
    seed: int
    shift: str
    kl: float

    @property
    def name(self) -> str:
        """Its name in files and tables."""
        return f"{self.task}, {self.shift}, seed {self.seed}, goal {self.kl:g}"


@dataclasses.dataclass(frozen=True)
class OnlinePlan:
    """Sizes of the suite.

    Attributes:
      loops: the real loops. texts, images: their sizes.
      seeds: of the simulation.
    """

    loops: tuple[LoopSpec, ...]
    texts: TrafficPlan
    images: TrafficPlan
    seeds: int = SEEDS


FULL = OnlinePlan(
    loops=(
        *(LoopSpec("images", seed, "awake", 0.05) for seed in range(21, 25)),
        LoopSpec("images", 25, "noise", 0.05),
        LoopSpec("texts", 15, "code", 0.05),
        LoopSpec("texts", 16, "larger", 0.05),
        LoopSpec("texts", 17, "shuffled", 0.05),
        LoopSpec("texts", 18, "code", 0.02),
    ),
    texts=TrafficPlan(answers=360),
    images=TrafficPlan(answers=450, keep=4),
)
QUICK = OnlinePlan(
    loops=(LoopSpec("images", 0, "awake", 0.5),),
    texts=TrafficPlan(answers=12, shift_at=8, chunk=32),
    images=TrafficPlan(answers=12, shift_at=9, documents=2, keep=2),
    seeds=2,
)


class FinishedLoop(NamedTuple):
    """A real loop that was run: its records."""

    spec: LoopSpec
    shift_at: int
    answers: list[AnswerRecord]
    audits: list[AuditRecord]


def run(plan: OnlinePlan, load: Callable[[str], ModelBackbone], out: Path, most: int = 0) -> dict[str, Any]:
    """Runs the loops that are not in `out` yet, and the simulation. Returns and writes results.json.

    Args:
      load: returns the backbone of a task. most: at most so many loops now; 0 for all.
    """
    finished, done = [], 0
    for spec in plan.loops:
        file = out / f"{spec.name}.json"
        if not file.exists():
            if most and done == most:
                continue
            backbone, done = load(spec.task), done + 1
            sizes = plan.texts if spec.task == "texts" else plan.images
            if spec.task == "texts":
                traffic = text_traffic(backbone, sizes, spec.seed, spec.shift)
            else:
                traffic = image_traffic(sizes, spec.seed, spec.shift)
            answers, audits = loop.run(backbone, traffic, spec.kl)
            file.write_text(json.dumps({"shift_at": sizes.shift_at, "answers": answers, "audits": audits}))
            print(f"{spec.name}: {len(answers)} answers, {len(audits)} audits", flush=True)
        finished.append(_read(spec, file))

    results = {
        "config": {"texts": dataclasses.asdict(plan.texts), "images": dataclasses.asdict(plan.images)},
        "loops": [_row(own) for own in finished],
        "simulated": simulated_rows(finished, plan.seeds),
        "series": [_series(own) for own in finished],
    }
    (out / "results.json").write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")
    return results


def _read(spec: LoopSpec, file: Path) -> FinishedLoop:
    body = json.loads(file.read_text())
    answers = [AnswerRecord._make([*own[:-1], tuple(own[-1])]) for own in body["answers"]]
    audits = [AuditRecord(own[0], tuple(own[1]), *own[2:]) for own in body["audits"]]
    return FinishedLoop(spec, body["shift_at"], answers, audits)


def _row(finished: FinishedLoop) -> dict[str, Any]:
    spec = finished.spec
    row = row_of(finished.answers, finished.audits, finished.shift_at, spec.kl)
    ways = {}
    for way in loop.WAYS:
        # Of trials before the shift: what the certificate saw of a way while nothing of it was served.
        losses = [
            own.kl
            for own in finished.audits
            if own.ways == (way,) and own.answer < finished.shift_at and not finished.answers[own.answer].approximate
        ]
        ways[way] = [sum(loss > spec.kl for loss in losses), len(losses)]
    return {"loop": spec.name, **spec._asdict(), **row, "trials beyond": ways}


def _series(finished: FinishedLoop) -> dict[str, Any]:
    """Keeps what the figure shows: sums over the answers so far, and the bound."""
    hits = seen = 0
    shown: dict[str, Any] = {"loop": finished.spec.name, "shift at": finished.shift_at, "kl": finished.spec.kl}
    lines: dict[str, list[Any]] = {"hits": [], "seen": [], "cost": [], "bound": []}
    for answer in finished.answers:
        hits, seen = hits + answer.hit, seen + answer.seen
        lines["hits"].append(hits)
        lines["seen"].append(seen)
        lines["cost"].append(round(answer.audit_flops / answer.work, 5))
        lines["bound"].append(min((bound for bound in answer.bounds if bound), default=None))
    return shown | lines


def simulated_rows(finished: Sequence[FinishedLoop], seeds: int) -> list[dict[str, Any]]:
    """Simulates every seed on the losses that the loops over texts measured before their shifts, goal by goal."""
    rows = []
    goals = sorted({own.spec.kl for own in finished if own.spec.task == "texts"})
    for kl in goals:
        loops = [own for own in finished if own.spec.task == "texts"]
        parts = [simulation.losses_of(own.answers, own.audits, 0, own.shift_at) for own in loops]
        losses = simulation.Losses(
            tuple(loss for part in parts for loss in part.trials),
            tuple(loss for part, own in zip(parts, loops, strict=True) if own.spec.kl == kl for loss in part.served),
        )
        if not losses.trials:
            continue
        audited = _audited_share([own for own in loops if own.spec.kl == kl])
        for rate in RATES:
            if rate is not None and not any(loss > kl for _, loss in losses.trials):
                continue
            found = [simulation.simulate(losses, kl, audited, seed, rate) for seed in range(seeds)]
            rows.append(_simulated_row(kl, rate, losses, audited, found))
    return rows


def _simulated_row(
    kl: float,
    rate: float | None,
    losses: simulation.Losses,
    audited: float,
    found: Sequence[simulation.SimulatedLoop],
) -> dict[str, Any]:
    shares = [own.beyond / own.served for own in found if own.served]
    every = [own.beyond / simulation.ANSWERS for own in found]
    admitted = [own.admitted for own in found if own.admitted is not None]
    return {
        "goal": kl,
        "rate": rate,
        "losses": [len(losses.trials), len(losses.served)],
        "audited": audited,
        "seeds": len(found),
        "admitted": len(admitted),
        "audits until admitted": sorted(admitted)[len(admitted) // 2] if admitted else None,
        "withdrawals": sum(own.withdrawals for own in found),
        "largest share of served": max(shares, default=None),
        "largest share of all": max(every),
        "seeds beyond of served": sum(share > 0.1 for share in shares),
        "seeds beyond of all": sum(share > 0.1 for share in every),
    }


def _audited_share(loops: Sequence[FinishedLoop]) -> float:
    """Returns the share of approximate answers that were audited before the shift; the policy's where there is none."""
    approximate = audited = 0
    for own in loops:
        approximate += sum(answer.approximate > 0 for answer in own.answers[: own.shift_at])
        at = {audit.answer for audit in own.audits if audit.answer < own.shift_at}
        audited += sum(own.answers[index].approximate > 0 for index in at)
    return audited / approximate if approximate else 0.1


def published(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows."""
    return {name: results[name] for name in ("config", "loops", "simulated")}
