"""Plans and mixtures under a bound, on held-out windows: does it hold where chunks are served in different modes?

What is available of each chunk is drawn for every batch: its canonical alone, or also a patch of some rank, formed
behind the pieces in front. Only forwards cost anything, so plans use all that the bound allows. Mixtures are drawn.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.plan import Certificate, CertifiedPlan, DeviceCosts, Goal, PatchInventory, Rates, plan
from kvpatch_jax.window import Costs, Entry, Window

from ..oracles import HostExecutor
from ..probes.window.image_sequence import KV, ImageSequence, on_host, read_behind
from .certification_run import CertificationRun
from .mixtures import Mixer, mixture_goals
from .scores import plan_row, rounded
from .serving_modes import padded_to_chunk
from .window_sources import WindowBatch

FORWARDS = DeviceCosts("any", None, {"Prefill": Rates(flop=1.0), "Recompute": Rates(flop=1.0)}, "forwards alone count")
LEAD = "lead"
PLANNED, MIXED = "planned", "mixed at random"
"""How the methods of a window's pieces are chosen."""


def measure_plans(run: CertificationRun, certificate: Certificate, seed: int) -> tuple[CertifiedPlan, ...]:
    """Plans held-out windows under bounds of patches, mixes methods under bounds of stored prefills, and tests both.

    Args:
      seed: of what is available or mixed, drawn for each batch by a generator of its own.
    """
    # A journal's plans were made by certain numbers, whatever the day.
    numbers = dataclasses.replace(certificate, made="any day").digest
    tests = {size: _tests(certificate, run, size) for size in run.source.sizes.chunks}
    results: dict[tuple[int, str, float], list[tuple[np.ndarray, np.ndarray, float]]] = {}
    for size, own in tests.items():
        results |= {(size, name, goal): [] for name, goal in own}

    for number, spec in enumerate(spec for spec in run.source.specs if spec.held_out):
        part_name = f"plans {number}, by {numbers}"
        part = run.journal.part(part_name)
        if part is None:
            windows, measured = run.source.load(run.backbone, spec, run.folder), []
            draws = {name: np.random.default_rng([seed, own, number]) for name, own in ((PLANNED, 3), (MIXED, 4))}
            mixer = Mixer(windows) if any(name == MIXED for name, _ in tests[spec.chunks]) else None
            for name, goal in tests[spec.chunks]:
                if name == MIXED and mixer is not None:
                    kl, cluster, share = mixer.answers(run, goal, certificate, draws[name])
                else:
                    kl, cluster, share = _executed(windows, run, goal, certificate, draws[name])
                measured.append((kl.tolist(), cluster.tolist(), share))
            part = run.journal.add(part_name, found=measured)
            run.step("plans")

        for test, (kl, cluster, share) in zip(tests[spec.chunks], part["found"], strict=True):
            results[spec.chunks, *test].append((np.asarray(kl, float), np.asarray(cluster, int), share))

    rows = []
    for (size, name, goal), parts in results.items():
        kls, clusters, shares = zip(*parts, strict=True)
        name = f"{name} for at most {goal:.3g} nats"
        name += f", {size} chunks" if len(tests) > 1 else ""
        rows.append(plan_row(name, goal, np.concatenate(kls), np.concatenate(clusters), float(np.mean(shares))))

    return tuple(rows)


def _tests(certificate: Certificate, run: CertificationRun, size: int) -> list[tuple[str, float]]:
    """Returns the bounds that windows of a size are served under, each with how their methods are chosen."""
    planned = [(PLANNED, goal) for goal in goals_of(certificate, run.ranks, size)]
    return planned + [(MIXED, goal) for goal in mixture_goals(certificate, size)]


def goals_of(certificate: Certificate, ranks: Sequence[int], size: int) -> list[float]:
    """Returns bounds to plan for: of windows patched throughout, at ranks between the extremes; descending.

    Args:
      size: chunks of the windows.
    """
    bounds = [certificate.bound("stored", rank, behind=size - 1) for rank in ranks[1:-1] or ranks]
    return sorted({rounded(bound) for bound in bounds if bound}, reverse=True)


def _executed(
    windows: WindowBatch, run: CertificationRun, goal: float, certificate: Certificate, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, float]:
    """Plans, serves and asks a batch: KL of each answer, its window, and the share of approximate chunks."""
    line = ImageSequence(windows.backbone, [windows.lead, *windows.pieces])
    target = line.prefill()
    executor = HostExecutor(windows.backbone)

    # The lead alone is in the window and runs; what chunks come in by is planned.
    lead = windows.lead
    window = Window.empty(Costs.of(windows.backbone, "float32"), promise="forget")
    window, edits = window.append(Entry.of_tokens(LEAD, lead.tokens, lead.chunk.content))
    executor.provide(LEAD, tokens=lead.tokens, content=lead.chunk.content)
    executor.run(window, edits)

    inventory = _drawn_inventory(windows, target, run.ranks, rng, executor)
    wanted = [Entry.of(piece.chunk, modality=run.source.modalities[0]) for piece in windows.pieces]
    planned = plan(window, wanted, Goal(kl=goal), stored=inventory, certificate=certificate, costs=FORWARDS)
    planned.provide(executor)
    executor.run(planned.window, planned.edits)

    questions = windows.questions
    tail = questions.behind(line.end)
    promised = read_behind(line, line.engine(target), tail)
    served = read_behind(line, on_host(dict(executor.context(planned.window) or {})), tail)
    kl = questions.scored(served.divergence_from(promised))[questions.valid]
    approximate = np.mean([chunk.fidelity == "approximate" for chunk in planned.chunks[1:]])
    return kl, questions.of_valid(windows.clusters), float(approximate)


def _drawn_inventory(
    windows: WindowBatch, target: Sequence[KV], ranks: Sequence[int], rng: np.random.Generator, executor: HostExecutor
) -> PatchInventory:
    """Draws which chunks have a patch, and of which rank; gives the executor the tokens of all."""
    inventory = PatchInventory(windows.backbone.fingerprint)
    front = [Member(LEAD, windows.lead.chunk.content)]
    for place, piece in enumerate(windows.pieces, 1):
        chunk = piece.chunk
        inventory.add(chunk)
        executor.provide(chunk.id, tokens=piece.tokens, content=chunk.content)
        rank = int(rng.choice([0, *ranks]))
        if rank:
            kv = padded_to_chunk(chunk, target[place])
            inventory.add(kvp.form_patch(chunk, kv, rank, Antecedent(tuple(front)), dense=False))
        front.append(Member(chunk.id, chunk.content))

    return inventory
