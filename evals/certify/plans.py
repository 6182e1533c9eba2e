"""Plans under a bound, carried out on held-out windows: is it kept where chunks are served in different ways?

What lies ready of each chunk is drawn anew for every batch: its canonical alone, or also a patch of some rank, formed
behind what stands in front. Forwards cost and nothing else does, so that plans take all that the bound allows.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.plan import Certificate, CertifiedPlan, DeviceCosts, Goal, PatchInventory, Plan, Rates, plan
from kvpatch_jax.window import Costs, Entry, Window
from models import ModelBackbone

from ..oracles import HostExecutor
from ..probes.window.image_sequence import KV, ImageSequence, on_host, read_behind
from .asking import scored
from .certifying import Step, divergence
from .journal import Journal
from .scores import plan_row, rounded
from .ways import of_chunk
from .windows import Source, Windows

FORWARDS = DeviceCosts("any", None, {"Prefill": Rates(flop=1.0), "Recompute": Rates(flop=1.0)}, "forwards alone count")
LEAD = "lead"


def measure_plans(
    backbone: ModelBackbone,
    source: Source,
    folder: Path,
    certificate: Certificate,
    ranks: Sequence[int],
    seed: int,
    journal: Journal | None = None,
    step: Step = lambda _: None,
) -> tuple[CertifiedPlan, ...]:
    """Plans held-out windows under the bounds of patches of some ranks, and holds answers against them.

    Args:
      seed: of what lies ready, drawn for each batch by a generator of its own.
      journal, step: as `certifying.measure` takes them; a step is a batch.
    """
    goals = goals_of(certificate, ranks)
    found: dict[float, list[tuple[np.ndarray, np.ndarray, float]]] = {goal: [] for goal in goals}
    journal = Journal() if journal is None else journal
    numbers = dataclasses.replace(certificate, made="any day").digest  # which the plans are made by
    for number, planned in enumerate(each for each in source.planned if each.held_out):
        name = f"plans {number}, by {numbers}"
        part = journal.part(name)
        if part is None:
            windows, rng = source.load(backbone, planned, folder), np.random.default_rng([seed, 3, number])
            done = [carried_out(windows, source.modality, Goal(kl=goal), certificate, ranks, rng) for goal in goals]
            part = journal.add(name, found=[(kl.tolist(), cluster.tolist(), share) for kl, cluster, share in done])
            step("plans")
        for goal, (kl, cluster, share) in zip(goals, part["found"], strict=True):
            found[goal].append((np.asarray(kl, float), np.asarray(cluster, int), share))
    rows = []
    for goal, parts in found.items():
        kl, cluster = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        share = float(np.mean([part[2] for part in parts]))
        rows.append(plan_row(f"planned for at most {goal:.3g} nats", goal, kl, cluster, share))
    return tuple(rows)


def goals_of(certificate: Certificate, ranks: Sequence[int]) -> list[float]:
    """Bounds to plan for: those of windows that are patched throughout, at ranks between the ends; descending."""
    others = certificate.chunks - 1
    bounds = [certificate.bound("stored", rank, behind=others) for rank in ranks[1:-1] or ranks]
    return sorted({rounded(bound) for bound in bounds if bound}, reverse=True)


def carried_out(
    windows: Windows,
    modality: str,
    goal: Goal,
    certificate: Certificate,
    ranks: Sequence[int],
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Plans a batch, runs it and asks: KL of each answer, whose window, and the share of approximate chunks."""
    line = ImageSequence(windows.backbone, [windows.lead, *windows.pieces])
    target = line.prefill()
    executor = HostExecutor(windows.backbone)
    planned = planned_for(windows, modality, line, target, goal, certificate, ranks, rng, executor)
    planned.provide(executor)
    executor.run(planned.window, planned.edits)

    tail = windows.asked.behind(line.end)
    promised = read_behind(line, line.engine(target), tail)
    served = read_behind(line, on_host(dict(executor.context(planned.window) or {})), tail)
    valid = windows.asked.valid
    cluster = np.repeat(windows.clusters[:, None], valid.shape[1], axis=1)[valid]
    approximate = np.mean([chunk.fidelity == "approximate" for chunk in planned.chunks[1:]])
    return scored(divergence(promised, served), windows.asked)[valid], cluster, float(approximate)


def _patch(chunk: kvp.Chunk, kv: KV, rank: int, front: Sequence[Member]) -> kvp.Patch:
    return kvp.form_patch(chunk, of_chunk(chunk, kv), rank, Antecedent(tuple(front)), dense=False)


def planned_for(
    windows: Windows,
    modality: str,
    line: ImageSequence,
    target: Sequence[KV],
    goal: Goal,
    certificate: Certificate,
    ranks: Sequence[int],
    rng: np.random.Generator,
    executor: HostExecutor,
) -> Plan:
    """Plans a window of the pieces behind the lead, of a stock that is drawn."""
    backbone, lead = windows.backbone, windows.lead
    window = Window.empty(Costs.of(backbone, "float32"), promise="forget")
    window, edits = window.append(Entry.of_tokens(LEAD, lead.tokens, lead.chunk.content))
    executor.provide(LEAD, tokens=lead.tokens, content=lead.chunk.content)
    executor.run(window, edits)

    stock, front = PatchInventory(backbone.fingerprint), [Member(LEAD, lead.chunk.content)]
    for place, piece in enumerate(windows.pieces, 1):
        stock.add(piece.chunk)
        executor.provide(piece.chunk.id, tokens=piece.tokens, content=piece.chunk.content)
        rank = int(rng.choice([0, *ranks]))
        if rank:
            stock.add(_patch(piece.chunk, target[place], rank, front))
        front.append(Member(piece.chunk.id, piece.chunk.content))
    wanted = [Entry.of(piece.chunk, modality=modality) for piece in windows.pieces]
    return plan(window, wanted, goal, stored=stock, certificate=certificate, costs=FORWARDS)
