"""Drift (Kamera App. D): how far may the legends change before the page's stored patch must go, and what mends it?"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.patching import divergence, reuse_curve

from ... import small_task
from ...arms.reused_page import cut
from ...results import intervals
from ...small_task import KINDS, LEGENDS, Contexts
from ...small_task.scenes import Answers
from ..results_table import ResultsTable
from .common import RANK, Step, add, patch_of, setting
from .image_sequence import KV, AgentLoop, Image, ImageSequence, read
from .probe_images import ProbeImages, foreign_legends, with_foreign

CORRECTION_RANK = 16
COVERAGES = (0.25, 0.5, 0.75)
SAFE_SHARE = 0.5
"""The share of blind's KL that a safe reuse may lose."""
QUESTIONS = {"chain": 6, "aggregate": 4, "override": 4, "page": 2}


class Change(NamedTuple):
    """One way in which the legends in front of the page drift.

    name: of rows. images: what stands in front of the page now. contexts: what that means.
    shown: bool [legends], by storage: which of the contexts' legends stand there.
    """

    name: str
    images: list[Image]
    contexts: Contexts
    shown: np.ndarray


@dataclasses.dataclass
class Safety:
    """What a reuse-or-rebuild gate would see, one entry per context and change.

    divergence: of the antecedents. kl: of the stored patch; blind: of blind reuse, both mean nats per question.
    flipped: share of decisions that the stored patch changes. cluster: the context. name: of the change.
    """

    divergence: list[float] = dataclasses.field(default_factory=list)
    kl: list[float] = dataclasses.field(default_factory=list)
    blind: list[float] = dataclasses.field(default_factory=list)
    flipped: list[float] = dataclasses.field(default_factory=list)
    cluster: list[int] = dataclasses.field(default_factory=list)
    name: list[str] = dataclasses.field(default_factory=list)

    def take(self, other: "Safety") -> None:
        """Adds what another one saw."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).extend(getattr(other, field.name))


def changes(stock: ProbeImages) -> list[Change]:
    """Lists the ways: another order, one dropped and one doubled, 1 to 3 replaced, 1 to 3 distractors in front."""
    own, foreign, contexts = list(stock.legends), foreign_legends(stock, 1), stock.contexts
    every = np.ones(LEGENDS, bool)
    turned, doubled = np.array([1, 2, 0]), np.array([0, 1, 1])
    listed = [
        Change("reorder", [own[i] for i in turned], contexts.reordered(turned), every),
        Change("drop_duplicate", [own[i] for i in doubled], contexts.reordered(doubled), np.array([True, True, False])),
    ]

    for count in range(1, LEGENDS + 1):
        # From the middle outwards, so that one replaced legend is neither the first nor the last.
        which = np.isin(np.arange(LEGENDS), np.array([1, 2, 0])[:count])
        images = [foreign[i] if which[i] else own[i] for i in range(LEGENDS)]
        listed.append(Change(f"replaced={count}", images, with_foreign(contexts, which, 1), every))

    for count in range(1, LEGENDS + 1):
        listed.append(Change(f"distractors={count}", [*stock.distractors[:count], *own], contexts, every))
    return listed


def measure_drift(
    table: ResultsTable,
    stock: ProbeImages,
    lead: bool,
    rng: np.random.Generator,
    step: Step,
    safety: Safety | None = None,
) -> None:
    """Serves the page behind legends that changed since its patch was formed; the legends as re-prefill has them.

    Arms: "blind"; "stored", the stored patch; "rebuilt" and "update", a new patch and the stored one corrected,
    formed as a window would: of a prefill of the page behind kept legends, those that are new prefilled in their places
    and the others left as they were (where every kept legend stands behind the same as before, that is the re-prefill,
    and they are left out); "oracle" and "oracle_update", the same of the re-prefill they are scored against;
    "deep" and "deepest", layers recomputed from a quarter and from the first up, out of the residual that the page had
    alone; "shallow", the lowest quarter recomputed and the stored patch above. Adds items "window.drift".
    """
    front, backbone = stock.front(lead), stock.backbone
    before = ImageSequence(backbone, [*front, *stock.legends, stock.page])
    conditioned = before.prefill()
    stored = patch_of(stock.page, conditioned[-1], before.antecedent(len(before) - 1))
    listed = changes(stock)
    # Room for the lead in both settings: what is prefilled behind a window runs one program in both.
    lines = [ImageSequence(backbone, [*stock.front(True), *change.images]) for change in listed]
    room = max(line.size for line in lines)
    known = {id(image): kv for image, kv in zip(before.images[:-1], conditioned[:-1], strict=True)}

    for change in listed:
        line = ImageSequence(backbone, [*front, *change.images, stock.page])
        parts, place = line.prefill(), len(line) - 1
        ids, whole = line.antecedent(place), line.engine(parts)
        patches = {
            "blind": None,
            "stored": stored,
            "oracle": patch_of(stock.page, parts[-1], ids),
            "oracle_update": _updated(stock, stored, parts[-1], ids),
        }

        if not kept_is_exact(before, line):
            served = as_kept(stock, line, known, room)
            patches["rebuilt"] = patch_of(stock.page, served, ids)
            patches["update"] = _updated(stock, stored, served, ids)

        pages = {name: line.serve(place, patch) for name, patch in patches.items()}
        true = cut(whole, line.slices[place])
        quarter = max(1, round(backbone.layout.layers / 4))
        pages["shallow"] = {
            name: np.concatenate([true[name][:quarter], value[quarter:]]) for name, value in pages["stored"].items()
        }
        for name, layer in {"deep": quarter, "deepest": 1}.items():
            pages[name] = deep_refresh(line, whole, pages["blind"], layer)
        caches = {name: line.with_served(whole, {place: page}) for name, page in pages.items()}
        caches["re-prefill"] = whole

        shown = np.broadcast_to(change.shown, (len(change.contexts), LEGENDS))
        questions = small_task.ask(change.contexts, rng, QUESTIONS, shown)
        said = read(line, caches, questions)
        part = f"{change.name}.{setting(lead=lead)}"
        add(table, "window.drift", part, questions, stock.clusters, said)
        if safety is not None:
            _note(safety, stock, before, line, change.name, said, questions)
        step(f"drift {part}")


def kept_is_exact(before: ImageSequence, now: ImageSequence) -> bool:
    """Returns whether every image in front of the page that was there before stands behind the same images as it
    did.
    """
    stood = {image.chunk.id: before.antecedent(place) for place, image in enumerate(before.images)}
    ahead = [(image.chunk.id, now.antecedent(place)) for place, image in enumerate(now.images[:-1])]
    return all(stood.get(name, front) == front for name, front in ahead)


def as_kept(stock: ProbeImages, line: ImageSequence, known: dict[int, KV], room: int) -> KV:
    """Prefills the page behind the line as a window keeps it: known legends as they were, new ones in their places."""
    loop = AgentLoop(stock.backbone, room)
    for image in line.images[:-1]:
        if id(image) in known:
            loop.held.append((image, known[id(image)]))
        else:
            loop.append(image)
    return loop.prefill(stock.page)


def deep_refresh(line: ImageSequence, whole: KV, alone: KV, layer: int) -> KV:
    """Recomputes the page's layers from `layer` up, behind the legends, from the residual it had there alone."""
    backbone, place = line.backbone, len(line) - 1
    image, where = line.images[place], line.slices[place]
    hidden = backbone.prefill(image.tokens, hidden_at=(layer,)).hidden[layer]
    # The residual at the boundary already holds what was added below it; above, features are added again.
    tokens = image.tokens._replace(embeddings=hidden).shift(line.starts[place])
    context = {name: jnp.asarray(value[:, :, : where.start]) for name, value in whole.items()}
    upper = backbone.prefill(tokens, context, start_layer=layer).kv
    full = {name: np.concatenate([np.zeros_like(alone[name][:layer]), value]) for name, value in upper.items()}
    turned = kvp.to_engine(backbone.layout, full, image.tokens.positions, line.starts[place])
    return {name: np.concatenate([alone[name][:layer], value[layer:]]) for name, value in turned.items()}


def _updated(stock: ProbeImages, stored: kvp.Patch, conditioned: KV, ids: tuple[str, ...]) -> kvp.Patch:
    correction = kvp.correction_patch(stock.page.chunk, stored, conditioned, CORRECTION_RANK, ids, method="exact")
    return kvp.update_patch(stored, correction, rank=RANK)


def _note(
    safety: Safety,
    stock: ProbeImages,
    before: ImageSequence,
    line: ImageSequence,
    name: str,
    said: dict[str, Answers],
    questions,
) -> None:
    """Writes down per context how far the legends moved and what the stored patch cost."""
    asked = questions.valid & np.isin(
        questions.kind, [KINDS.index(kind) for kind in ("chain", "aggregate", "override")]
    )
    count = np.maximum(asked.sum(axis=1), 1)

    def mean(values):
        return (values * asked).sum(axis=1) / count

    reference = said["re-prefill"]
    apart = antecedent_divergence(before, line)

    for values, into in (
        (apart, safety.divergence),
        (mean(said["stored"].divergence_from(reference)), safety.kl),
        (mean(said["blind"].divergence_from(reference)), safety.blind),
        (mean(said["stored"].predicted != reference.predicted), safety.flipped),
        (stock.clusters, safety.cluster),
    ):
        into.extend(np.asarray(values).tolist())

    safety.name.extend([name] * len(apart))


def antecedent_divergence(before: ImageSequence, now: ImageSequence) -> np.ndarray:
    """Computes how far the images in front moved, [B], as a gate would see it: `kvpatch_jax.patching.gate.divergence`.

    Each image is one vector, its canonical's channels without phase averaged over tokens.
    """
    ahead = (*before.images[:-1], *now.images[:-1])
    pooled = {image.chunk.id: pooled_rows(image) for image in ahead}
    ids = [line.antecedent(len(line) - 1) for line in (before, now)]
    rows = len(before.tokens.embeddings)
    apart = []
    for row in range(rows):
        apart.append(divergence(*ids, pooled={name: vectors[row] for name, vectors in pooled.items()}))
    return np.array(apart)


def pooled_rows(image: Image) -> np.ndarray:
    """Averages a batch of canonicals over tokens, [B, D], as `kvpatch_jax.patching.gate.pooled_canonical` does one."""
    still = [channel.name for channel in image.chunk.layout.channels if not channel.rotates]
    means = [np.asarray(image.chunk.kv[name], np.float32).mean(axis=2) for name in still]
    return np.concatenate([np.moveaxis(mean, 1, 0).reshape(mean.shape[1], -1) for mean in means], axis=1)


# ------------------------------------------------------------------------------------------------------------- gate


def gate_rows(table: ResultsTable, safety: Safety) -> None:
    """Adds rows "window.gate": false reuse at each coverage, medians of divergence, and their rank correlation.

    A reuse is safe where the stored patch removes at least half of what blind reuse loses in that context (η ≥ 0.5);
    the gate reuses the share of lowest divergence (those as near as the last one too). Contexts in which blind reuse
    loses nothing are left out.
    """
    divergence, kl, blind = (np.array(values) for values in (safety.divergence, safety.kl, safety.blind))
    cluster, name = np.array(safety.cluster), np.array(safety.name)
    kept = blind > 1e-3
    divergence, kl, blind, cluster, name = (values[kept] for values in (divergence, kl, blind, cluster, name))
    if not kept.any():
        return

    curve = reuse_curve(divergence.tolist(), (kl / blind).tolist(), SAFE_SHARE)
    safe = kl / blind <= SAFE_SHARE
    for coverage in COVERAGES:
        reused = divergence <= curve.threshold[np.argmax(curve.coverage >= coverage)]
        wrong = intervals.mean((~safe[reused]).astype(float), cluster[reused])
        table.row("window.gate", f"coverage={coverage:g}", "false_reuse", wrong)

    for word, which in (("safe", safe), ("unsafe", ~safe)):
        if which.any():
            median = resampled(np.median, cluster[which], divergence[which])
            table.row("window.gate", word, "divergence_median", median)

    table.row("window.gate", "all", "unsafe_share", intervals.mean((~safe).astype(float), cluster))
    table.row("window.gate", "all", "rank_correlation", resampled(rank_correlation, cluster, divergence, kl))
    for each in dict.fromkeys(name.tolist()):
        here = name == each
        table.row("window.gate", each, "divergence", intervals.mean(divergence[here], cluster[here]))
        table.row("window.gate", each, "stored_kl", intervals.mean(kl[here], cluster[here]))
        table.row("window.gate", each, "unsafe_share", intervals.mean((~safe[here]).astype(float), cluster[here]))


def resampled(
    statistic: Callable[..., float], cluster: np.ndarray, *columns: np.ndarray, draws: int = 500
) -> intervals.Interval:
    """Estimates any statistic of columns [items], with a 95 % interval over resampled contexts."""
    value, names = float(statistic(*columns)), np.unique(cluster)
    if len(names) < 2:
        return intervals.Interval(value, np.nan, np.nan, len(cluster))

    members, rng = {name: np.flatnonzero(cluster == name) for name in names}, np.random.default_rng(0)
    drawn = []
    for _ in range(draws):
        items = np.concatenate([members[name] for name in rng.choice(names, len(names))])
        drawn.append(float(statistic(*(column[items] for column in columns))))

    low, high = np.percentile(drawn, [intervals.LOW, intervals.HIGH])
    return intervals.Interval(value, float(low), float(high), len(cluster))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Computes Spearman's rank correlation, equal values sharing their mean rank; 0 where one does not vary."""
    ranks = []
    for values in (a, b):
        _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count + 1) / 2)[inverse])
    if min(np.ptp(rank) for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])
