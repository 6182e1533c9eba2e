"""Revisits: sessions over a store that go back to what they have seen, restart, come in another order, and fork.

Sessions over a store remember: their reference is a session that reuses nothing and is shown the same pieces. A prefix
cache is a session that forgets. All other ways are counted, not run.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.core import Buckets
from kvpatch_jax.session import embedded
from kvpatch_jax.session.logit_comparison import compared, served_logits
from kvpatch_jax.window import Costs
from models import ModelBackbone, load

from ..harness.datasets import Run
from ..harness.frame import Row, measured_row
from ..harness.intervals import Interval
from ..harness.methods import REFERENCE
from ..harness.parts import Part, Record
from ..task.contexts import SIZES, sample
from ..task.drawing import images_of
from ..task.questions import ask
from ..task.vocabulary import vocabulary
from ..texts.corpus import documents
from .records import rows_of
from .tolerance import CHUNK, LEAD, LEAD_TOKENS
from .visits import BATCHED, FIRST, ONE_BY_ONE, OTHER_ORDERS, PIECES, SAME, Prompt, Visit, counted_work, draw_visits

SCORED = 16
"""Tokens of a text that are scored behind a chunk."""
REVISITS_OF = {"documents": 16, "plain": 16, "prose": 8, "code": 8}
"""Steps of a visit after every piece was shown once, at most."""
OTHER = "other"
"""The visits in other orders together."""
RUN_UP_TO = 8
"""The largest window behind which sessions that forget are run; behind larger ones they prefill for minutes."""
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
    "uncertified": Way({"uncertified": True, "rank": 0}),
    f"{ONE_BY_ONE}, run": Way({"promise": "forget"}, stored=False),
    f"{BATCHED}, run": Way({"promise": "forget"}, stored=False, batched=True),
}


class Question(NamedTuple):
    """Tokens that are read behind a window, how many of them come before the first scored one, and the right tokens."""

    ids: tuple[int, ...]
    tokens: int
    answers: tuple[int, ...]


class Contents(NamedTuple):
    """What a trace shows and asks.

    Attributes:
      lead: token ids, pinned in front. pieces: of all contexts in order, images or token ids.
      ask: asks about a context by its number, of which these pieces stand together at the end of the window.
    """

    lead: list[int]
    pieces: list[Any]
    ask: Callable[[np.random.Generator, int, Sequence[int]], Question]


def task_contents(drawing: str, contexts: int, seed: int) -> Contents:
    """Draws contexts of the task: three sheets and a page each."""
    rng = np.random.default_rng(seed)
    drawn = [sample(rng, 1, SIZES[str(PIECES)], drawing=drawing) for _ in range(contexts)]
    pieces = [image for context in drawn for image in images_of(context)]

    def asked(rng: np.random.Generator, context: int, together: Sequence[int]) -> Question:
        is_page = together[-1] == PIECES - 1
        kind = "sheet" if not is_page else "chain" if len(together) > 1 else "page"
        sheets = [piece for piece in together if piece != PIECES - 1]
        shown = np.zeros((1, PIECES - 1), bool)
        # A page is asked about through all sheets in front of it, a sheet by itself.
        shown[0, sheets if is_page else sheets[-1:]] = True
        questions = ask(drawn[context], rng, {kind: 1}, shown)
        return Question(tuple(questions.ids[0].tolist()), questions.ids.shape[1], (int(questions.answer[0, -1]),))

    return Contents((vocabulary(drawing).first["value"] + np.arange(LEAD_TOKENS)).tolist(), pieces, asked)


def text_contents(backbone: ModelBackbone, domain: str, contexts: int, trace: int) -> Contents:
    """Reads documents of a domain, four chunks each, no two traces the same; scored is what follows a chunk."""
    stride, first = CHUNK + SCORED, trace * contexts
    tokens = PIECES * stride + 1
    pieces, tails = [], []
    for document in documents(backbone, domain, first + contexts, tokens, tokens)[first:]:
        for start in range(0, PIECES * stride, stride):
            ids = document.ids[start : start + stride + 1].tolist()
            pieces.append(ids[:CHUNK])
            tails.append(ids[CHUNK:])

    def asked(rng: np.random.Generator, context: int, together: Sequence[int]) -> Question:
        ids = tails[context * PIECES + together[-1]]
        return Question(tuple(ids[:-1]), 1, tuple(ids[1:]))

    return Contents(np.asarray(backbone.prepare([kvp.Text(LEAD)])["input_ids"])[0].tolist(), pieces, asked)


def questions_of(contents: Contents, visit: Visit, window: int, seed: int) -> list[Question]:
    """Asks after every step of a visit, about what is in a window of so many pieces."""
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
    contents: Contents,
    visit: Visit,
    questions: Sequence[Question],
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
        for step, (piece, question) in enumerate(zip(visit.pieces, questions, strict=True)):
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
                places = len(question.answers)
                logits.append(served_logits(session.runtime, session.window, tail, question.tokens, places))
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
    contents: Contents,
    visits: Sequence[Visit],
    questions: Mapping[str, Sequence[Question]],
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


@functools.lru_cache(maxsize=2)
def padded_backbone(path: str) -> ModelBackbone:
    """Loads a model that pads to few lengths, so that sessions compile few programs."""
    return load(path, dtype="float32", buckets=Buckets())


def records_of_trace(model: str, path: str, content: str, window: int, trace: int, seed: int) -> Iterator[Record]:
    """Measures one trace: a record for each way and visit, those of the reference first, then what is counted."""
    backbone, contexts = padded_backbone(path), max(2 * window // PIECES, 1)
    if content in ("prose", "code"):
        contents = text_contents(backbone, content, contexts, trace)
    else:
        contents = task_contents(content, contexts, seed + 1000 * window + trace)
    revisits = min(REVISITS_OF[content], contexts * PIECES)
    visits = draw_visits(contexts, window, revisits, seed + trace)
    questions = {visit.name: questions_of(contents, visit, window, seed) for visit in visits}
    truth: dict[str, ServedVisit] = {}
    labels = {"model": model, "kinds": ["answer"]}

    for name, way in WAYS.items():
        if not way.stored and name != REFERENCE and window > RUN_UP_TO:
            continue
        for visit, served in serve_visits(backbone, contents, visits, questions, way, window):
            expected = truth.setdefault(visit.name, served)
            record = _answers(served, expected, visit, questions[visit.name], trace)
            yield {**labels, **record, "arm": name, "probe": _probe(content, window, visit), "counts": served.counts}

    caches: dict[str, set[Prompt]] = {}
    tokens = [truth[FIRST].tokens[piece] for piece in range(contexts * PIECES)]
    flops = Costs.of(backbone, np.float32).run
    for visit in visits:
        counts = {"steps": len(visit.pieces) - visit.forked}
        for name, work in counted_work(visit, tokens, len(contents.lead), window, flops, caches).items():
            counted = {**counts, "tokens": work[0], "flops": work[1]}
            yield {**labels, "arm": name, "probe": _probe(content, window, visit), "counts": counted}


def _probe(content: str, window: int, visit: Visit) -> str:
    return f"{content}.window={window}.{visit.name}"


def _answers(
    served: ServedVisit, truth: ServedVisit, visit: Visit, questions: Sequence[Question], trace: int
) -> Record:
    """Compares the answers of a visit with the reference's; questions without a right answer are left out."""
    columns: dict[str, list[Any]] = {"predicted": [], "kl": [], "answer": [], "kind": [], "cluster": []}
    steps = range(visit.forked, len(visit.pieces))
    for step, logits, expected in zip(steps, served.logits, truth.logits, strict=True):
        kl, _ = compared(expected, logits)
        for place, answer in enumerate(questions[step].answers):
            if answer >= 0:
                columns["predicted"].append(int(logits[place].argmax()))
                columns["kl"].append(float(f"{kl[place]:.6g}"))
                columns["answer"].append(answer)
                columns["kind"].append(0)
                columns["cluster"].append(1000 * trace + visit.pieces[step] // PIECES)
    return columns


# ------------------------------------------------------------------------------------------------------ the data set


class Revisits:
    """Sessions over a store as a data set; a probe is what is shown and the window's chunks, a part a trace."""

    name = "revisits"
    probes = tuple(f"{content}.window={window}" for content in REVISITS_OF for window in (2, 4, 8, 16))

    def parts(self, run: Run) -> list[Part]:
        """Lists all parts; n is the number of traces.

        Raises:
          InputError: an unknown probe.
        """
        probes = run.probes_of(self)
        parts = []
        for probe in probes:
            content, _, window = probe.partition(".window=")
            for model, path in run.models.items():
                for trace in range(run.n):
                    measure = functools.partial(records_of_trace, model, path, content, int(window), trace, run.seed)
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
