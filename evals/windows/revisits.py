"""Revisits: sessions over a store that go back to what they have seen, restart, come in another order, and fork.

Sessions over a store remember: their reference is a session that reuses nothing and is shown the same pieces. A prefix
cache is a session that forgets. All other ways are counted, not run.
"""

import contextlib
import functools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.models import Buckets, ModelBackbone
from kvpatch_jax.session import compared, embedded, served_logits
from kvpatch_jax.window import Costs

from ..harness.datasets import Run
from ..harness.frame import Row, measured_row
from ..harness.intervals import Interval
from ..harness.lines import Question
from ..harness.methods import REFERENCE
from ..harness.parts import Part, Record
from ..harness.runner import loaded
from ..loops.costs import PrefixCache
from ..task.contexts import SIZES, Contexts, sample
from ..task.drawing import images_of
from ..task.questions import ask
from ..task.vocabulary import vocabulary
from .measured import rows_of
from .tolerance import LEAD_TOKENS
from .visits import BATCHED, FIRST, ONE_BY_ONE, OTHER_ORDERS, PIECES, SAME, Visit, counted_work, draw_visits

MOST_REVISITS = 16
"""Steps of a visit after every piece was shown once, at most."""
OTHER = "other"
"""The visits in other orders together."""
METRICS = ("accuracy", "kl", "within")


class Way(NamedTuple):
    """Options of a session; whether all visits share a store; whether chunks leave in batches of a window."""

    options: Mapping[str, Any] = {}
    stored: bool = True
    batched: bool = False


WAYS = {
    REFERENCE: Way(stored=False),
    "default": Way(),
    # A patch of the very history would serve what its stored prefill serves, so none is formed.
    "uncertified": Way({"reuse": "patched", "rank": 0}),
    f"{ONE_BY_ONE}, run": Way({"promise": "forget"}, stored=False),
    f"{BATCHED}, run": Way({"promise": "forget"}, stored=False, batched=True),
}


class TraceContents(NamedTuple):
    """What a trace shows and asks: contexts of the task, three sheets and a page each.

    Attributes:
      contexts: one each. pieces: images of all contexts in order.
      lead: token ids, pinned in front.
    """

    contexts: list[Contexts]
    pieces: list[np.ndarray]
    lead: list[int]

    @classmethod
    def draw(cls, count: int, seed: int) -> "TraceContents":
        """Draws contexts."""
        rng = np.random.default_rng(seed)
        contexts = [sample(rng, 1, SIZES[str(PIECES)]) for _ in range(count)]
        pieces = [image for context in contexts for image in images_of(context)]
        return cls(contexts, pieces, (vocabulary().first["value"] + np.arange(LEAD_TOKENS)).tolist())

    def ask(self, rng: np.random.Generator, context: int, together: Sequence[int]) -> tuple[Question, int]:
        """Draws a question and its answer, -1 without one.

        Args:
          context: its number. together: its pieces that stand together at the end of the window.
        """
        is_page = together[-1] == PIECES - 1
        kind = "sheet" if not is_page else "chain" if len(together) > 1 else "page"
        sheets = [piece for piece in together if piece != PIECES - 1]
        shown = np.zeros((1, PIECES - 1), bool)
        # A page is asked about through all sheets in front of it, a sheet by itself.
        shown[0, sheets if is_page else sheets[-1:]] = True
        questions = ask(self.contexts[context], rng, {kind: 1}, shown)
        ids = tuple(questions.ids[0].tolist())
        return Question(ids, (len(ids) - 1,)), int(questions.answer[0, -1])


def questions_of(contents: TraceContents, visit: Visit, window: int, seed: int) -> list[tuple[Question, int]]:
    """Asks after every step of a visit, about what is in a window of so many pieces; questions with their answers."""
    # The same trace is asked the same questions.
    rng, questions = np.random.default_rng([seed, *visit.pieces]), []
    for step in range(len(visit.pieces)):
        shown = visit.pieces[max(step + 1 - window, 0) : step + 1]
        context, together = shown[-1] // PIECES, list[int]()
        # Pieces of other contexts in between would say otherwise about the same names.
        for piece in reversed(shown):
            if piece // PIECES != context or piece % PIECES in together:
                break
            together.insert(0, piece % PIECES)
        questions.append(contents.ask(rng, context, together))
    return questions


# --------------------------------------------------------------------------------------------------------- sessions


class ServedVisit(NamedTuple):
    """Logits after every question of the steps that count, their counts, and the tokens of each piece shown."""

    logits: list[np.ndarray]
    counts: dict[str, int]
    tokens: dict[int, int]


def serve(
    backbone: ModelBackbone,
    store: kvp.ChunkStore | None,
    contents: TraceContents,
    visit: Visit,
    questions: Sequence[tuple[Question, int]],
    options: Mapping[str, Any],
    shown: set[int],
) -> ServedVisit:
    """Replays a visit in a session; after every piece it waits until all is stored.

    Args:
      options: of the session.
      shown: pieces that were shown before, in any visit; those of this one are added.
    """
    logits, tokens, revisited = [], {}, 0
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(kvp.Session(backbone, store, lead=contents.lead, **options))
        before = _counts(session)
        for step, (piece, (question, _)) in enumerate(zip(visit.pieces, questions, strict=True)):
            if visit.forked and step == visit.forked:
                session = stack.enter_context(session.fork())
                before = _counts(session)
            session.add(contents.pieces[piece], kind="chunk")
            if session.runtime.former is not None:
                session.runtime.former.flush()
            tokens[piece] = session.window.pieces[-1].entry.tokens
            if step >= visit.forked:
                revisited += piece in shown
                tail = embedded(backbone, [list(question.ids)])
                logits.append(served_logits(session.runtime, session.window, tail, len(question.ids), 1))
            shown.add(piece)
        counts = {name: value - before[name] for name, value in _counts(session).items()}
    counts |= {"steps": len(visit.pieces) - visit.forked, "revisits": revisited}
    return ServedVisit(logits, counts, tokens)


def _counts(session: kvp.Session) -> dict[str, int]:
    stats, store = session.stats(), session.store
    written = 0 if not isinstance(store, kvp.ChunkStore) else store.statistics().counts.get("put_bytes", 0)
    return {"hits": stats.hits, "tokens": stats.tokens, "flops": stats.flops, "written": written}


def serve_visits(
    backbone: ModelBackbone,
    contents: TraceContents,
    visits: Sequence[Visit],
    questions: Mapping[str, Sequence[tuple[Question, int]]],
    way: Way,
    window: int,
) -> Iterator[tuple[Visit, ServedVisit]]:
    """Serves all visits of a trace in one way, over one store if the way has one."""
    shown, first = set[int](), None
    options = {**way.options, "keep": (window, 2 * window) if way.batched else window}
    with contextlib.ExitStack() as stack:
        store = None
        if way.stored:
            store = stack.enter_context(kvp.ChunkStore(stack.enter_context(tempfile.TemporaryDirectory())))
        for visit in visits:
            # Without a store a restart is the first visit again.
            if visit.name == SAME and first is not None and not way.stored:
                served = first._replace(counts={**first.counts, "revisits": first.counts["steps"]})
            else:
                served = serve(backbone, store, contents, visit, questions[visit.name], options, shown)
            first = served if visit.name == FIRST else first
            yield visit, served


def records_of_trace(model: str, path: str, window: int, trace: int, seed: int) -> Iterator[Record]:
    """Measures one trace: a record for each way and visit, those of the reference first, then what is counted."""
    # Sessions of a model that pads to few lengths compile few programs.
    backbone, contexts = loaded(path, buckets=Buckets()), max(2 * window // PIECES, 1)
    contents = TraceContents.draw(contexts, seed + 1000 * window + trace)
    revisits = min(MOST_REVISITS, contexts * PIECES)
    visits = draw_visits(contexts, window, revisits, seed + trace)
    questions = {visit.name: questions_of(contents, visit, window, seed) for visit in visits}
    truth: dict[str, ServedVisit] = {}
    labels, place = {"model": model, "kinds": ["answer"]}, f"documents.window={window}"

    for name, way in WAYS.items():
        for visit, served in serve_visits(backbone, contents, visits, questions, way, window):
            expected = truth.setdefault(visit.name, served)
            record = _answers(served, expected, visit, questions[visit.name], trace)
            yield {**labels, **record, "arm": name, "probe": f"{place}.{visit.name}", "counts": served.counts}

    caches: dict[str, PrefixCache] = {}
    tokens = [truth[FIRST].tokens[piece] for piece in range(contexts * PIECES)]
    flops = Costs.of(backbone, np.float32).forward.flops
    for visit in visits:
        counts = {"steps": len(visit.pieces) - visit.forked}
        for name, work in counted_work(visit, tokens, len(contents.lead), window, flops, caches).items():
            counted = {**counts, "tokens": work[0], "flops": work[1]}
            yield {**labels, "arm": name, "probe": f"{place}.{visit.name}", "counts": counted}


def _answers(
    served: ServedVisit, truth: ServedVisit, visit: Visit, questions: Sequence[tuple[Question, int]], trace: int
) -> Record:
    """Compares the answers of a visit with the reference's; questions without a right answer are left out."""
    columns: dict[str, list[Any]] = {"predicted": [], "kl": [], "answer": [], "kind": [], "cluster": []}
    steps = range(visit.forked, len(visit.pieces))
    for step, logits, expected in zip(steps, served.logits, truth.logits, strict=True):
        (kl,), _ = compared(expected, logits)
        _, answer = questions[step]
        if answer >= 0:
            columns["predicted"].append(int(logits[0].argmax()))
            columns["kl"].append(float(f"{kl:.6g}"))
            columns["answer"].append(answer)
            columns["kind"].append(0)
            columns["cluster"].append(1000 * trace + visit.pieces[step] // PIECES)
    return columns


# ------------------------------------------------------------------------------------------------------ the data set


class Revisits:
    """Sessions over a store as a data set; a probe is the window's chunks, a part a trace."""

    name = "revisits"
    probes = ("documents.window=4", "documents.window=2")

    def parts(self, run: Run) -> list[Part]:
        """Lists all parts; n is the number of traces.

        Raises:
          InputError: an unknown probe.
        """
        probes = run.probes_of(self)
        parts = []
        for probe in probes:
            window = int(probe.rpartition("=")[2])
            for model, path in run.models.items():
                for trace in range(run.n):
                    measure = functools.partial(records_of_trace, model, path, window, trace, run.seed)
                    parts.append(Part(f"revisits.{probe}, {model}, trace {trace}", measure, float(window)))
        return parts

    def rows(self, records: Mapping[str, Iterable[Record]]) -> list[Row]:
        """Makes rows; probes are "revisits.documents.window=8.same" and so on, "other" the visits in other orders."""
        by_part = {key: list(_with_other_orders(part)) for key, part in records.items()}
        answers = {key: [record for record in part if "kl" in record] for key, part in by_part.items()}
        rows = rows_of(self.name, answers, METRICS)
        groups: dict[tuple[str, str, str], list[Mapping[str, int]]] = {}
        for part in by_part.values():
            for record in part:
                groups.setdefault((record["probe"], record["model"], record["arm"]), []).append(record["counts"])
        for (probe, model, arm), counts in groups.items():
            for metric, interval in _totals(counts).items():
                rows.append(measured_row(f"{self.name}.{probe}", model, arm, metric, interval))
        return rows


def _with_other_orders(records: Iterable[Record]) -> Iterator[Record]:
    for record in records:
        yield record
        place, _, visit = record["probe"].rpartition(".")
        if visit in OTHER_ORDERS:
            yield {**record, "probe": f"{place}.{OTHER}"}


def _totals(counts: Sequence[Mapping[str, int]]) -> dict[str, Interval]:
    """Computes the share of revisits without a forward, and the tokens, GFLOP and KiB written of a step."""
    names = dict.fromkeys(name for count in counts for name in count)
    total = {name: sum(count.get(name, 0) for count in counts) for name in names}
    steps, revisits = total["steps"], total.get("revisits", 0)
    values = {"tokens": total["tokens"] / steps, "gflop": total["flops"] / steps / 1e9}
    if "written" in total:
        values["written_kib"] = total["written"] / steps / 1024
    sizes = dict.fromkeys(values, steps)
    if revisits:
        values["hits"], sizes["hits"] = total["hits"] / revisits, revisits
    return {name: Interval(value, value, value, sizes[name]) for name, value in values.items()}


REVISITS = Revisits()
