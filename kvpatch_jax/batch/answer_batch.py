"""`answer_batch`: many questions over shared images and texts, each prefix brought once, with answers as JSONL."""

import collections
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..backbone import Backbone
from ..cache import digest_of, encoded
from ..errors import InputError, KVPatchError, PoolError
from ..session import Answer, AuditStats, Session, SessionConfig, Sessions
from ..utils.kinds import is_whole
from ..window import PatchStore
from .answer_file import append, open_answers, shard_path
from .items import BatchItem, BatchJob, read_items, shard_of

FIRST_PAGES = 256
"""Pages of the pool at first; it is doubled where a prefix finds no room."""
STEPS = 32
"""Tokens of an answer at most, if neither the item nor the checkpoint says."""


@dataclasses.dataclass
class BatchReport:
    """Counts of what `answer_batch` did.

    Attributes:
      path: of the answers.
      items: of this shard.
      answered, failed: by this call.
      before: items that an earlier call had answered.
      forwards: prefills of chunks, without those of questions.
      hits: chunks that the store had, placed without a forward.
      tokens, reprefill: tokens of these forwards; those that prefills of all the windows would have computed.
      prefix_cache: of these, without what a prefix cache of every earlier window has.
      audits: of approximate answers, beside blind reuse.
      unformed: pieces that were not stored, or got no patch.
    """

    path: Path
    items: int
    answered: int = 0
    failed: int = 0
    before: int = 0
    forwards: int = 0
    hits: int = 0
    tokens: int = 0
    reprefill: int = 0
    prefix_cache: int = 0
    audits: AuditStats = dataclasses.field(default_factory=AuditStats)
    unformed: int = 0

    def __str__(self) -> str:
        text = f"{self.answered} of {self.items} items answered"
        text += f", {self.before} before" * bool(self.before) + f", {self.failed} failed" * bool(self.failed)
        text += f"; {self.forwards} forwards of chunks and {self.hits} hits: {self.tokens} tokens computed (a prefix "
        text += f"cache {self.prefix_cache}, re-prefills {self.reprefill})"
        text += f"; {self.audits}" * bool(self.audits.answers or self.audits.skipped)
        return text + f"; {self.unformed} pieces not stored or patched" * bool(self.unformed)


def answer_batch(
    backbone: Backbone,
    store: PatchStore | None,
    items: Iterable[BatchItem | Mapping[str, Any]],
    *,
    out: str | os.PathLike[str],
    shard: tuple[int, int] = (0, 1),
    batch: int = 8,
    **options: Any,
) -> BatchReport:
    """Answers questions greedily over chunks that items share, and writes a line of JSON for each.

        items = [BatchItem([page, Text("a note")], "How many rows?", steps=16), …]
        report = kvp.answer_batch(backbone, store, items, out="answers.jsonl")
        lines = kvp.batch.read_answers("answers.jsonl")

    Items are served by a session: those with the same prefix share its KV. Each line says its "fidelity". With reuse
    "exact" an answer depends on its item alone, and the store only saves forwards; with another reuse it also depends
    on what the store has.

    Of approximate answers the first three and then 2 % (`audit=`) are compared with a re-prefill; a kind of chunk whose
    reuse loses more than `kl`, or more than blind reuse, is then prefilled, with one warning (`SessionConfig`).

    An item that cannot be read, or whose chunks cannot be prefilled, gets a line with its error, and the others
    continue; standard error says how many, and on a terminal how many are done. An error of the batch itself (a full
    disk, a device out of memory) ends the run. The same call then continues after the lines that were written, and asks
    again what had failed.

    Args:
      backbone: of `models.load`.
      store: of prefills, canonicals and patches, such as `ChunkStore`, or None.
      items: `BatchItem`s, or mappings of its fields. All of them, whatever the shard.
      out: file of the answers. Each of several shards has its own: `answers.00002-of-00008.jsonl`.
      shard: (index, count): the part of the items that is answered here.
      batch: the number of answers that are decoded together.
      options: of `SessionConfig`: `reuse` and `certificate` say how chunks that the store has are served.

    Returns:
      Counts of what was done, with what audits measured. The answers are in the file.

    Raises:
      InputError: no items or none that can be read, an invalid backbone, store or option, a certificate of other
      weights, or a file with answers of other items, backbone or options, or that another run writes to.
      SessionError: an invalid option of sessions. PoolError: no room.
    """
    pair = isinstance(shard, tuple | list) and len(shard) == 2 and all(is_whole(number, 0) for number in shard)
    if not pair or not shard[0] < shard[1]:
        raise InputError(f"answer_batch: got shard {shard!r:.80}; expected (index, count), the index below the count")
    path = shard_path(out, *shard)
    # Everything is refused before the file of answers is created.
    with Sessions(backbone, store, pages=FIRST_PAGES, batch=batch, timeout=0) as sessions:
        config = SessionConfig.with_options(None, options, "answer_batch", ("out", "shard", "batch"))
        session = sessions.open(lead=0, config=config)
        steps = getattr(backbone, "answer_tokens", None) or STEPS
        jobs, contents = read_items(items, backbone.fingerprint, steps)

        # The header has everything that answers depend on.
        digest = digest_of([b"items", *(encoded(job.digest) for job in jobs)], size=16)
        header = {"items": len(jobs), "digest": digest, "backbone": backbone.fingerprint, "shard": list(shard)}
        header |= {"reuse": config.policy, "options": digest_of([encoded(repr(config))], size=16)}
        jobs = shard_of(jobs, *shard)
        file, lines = open_answers(path, header, {job.index for job in jobs})
        with file:
            left = [job for job in jobs if "error" in lines.get(job.index, {"error": "not asked"})]
            report = BatchReport(path, len(jobs), before=len(jobs) - len(left))
            _BatchRun(session, batch, file, report, contents).answer(left)
        former = sessions.runtime.former
    # Closing has waited for what is formed in the background, and warned of what failed.
    report.unformed = 0 if former is None else former.done.failed
    if report.failed:
        print(f"answer_batch: {report.failed} of {report.items} items failed; their lines say why", file=sys.stderr)
    return report


class _BatchRun:
    """Run over jobs in one session, whose window goes from prefix to prefix, with a queue of unfinished answers."""

    def __init__(
        self, session: Session, batch: int, file: BinaryIO, report: BatchReport, contents: Mapping[str, list[Any]]
    ):
        self._session, self._batch, self._file, self._report = session, batch, file, report
        self._contents, self._prefix = contents, list[str]()
        self._queue = collections.deque[tuple[BatchJob, str, Answer]]()
        self._shows_progress = sys.stderr.isatty()

    def answer(self, jobs: Iterable[BatchJob]) -> None:
        """Answers jobs that are sorted by prefix, and writes their lines."""
        for job in jobs:
            try:
                if job.error is not None:
                    raise job.error
                self._show(job.front)
                answer = self._with_room(self._session.ask, self._contents[job.question], steps=job.steps)
                # Only now: what a loss guard has ruled out was prefilled for the question.
                exact = all(self._session.fidelity(id) == "exact" for id in self._session.ids)
                self._queue.append((job, "exact" if exact else "approximate", answer))
            except KVPatchError as error:
                self._fail(job, error)
            while len(self._queue) >= self._batch:
                self._finish()
        while self._queue:
            self._finish()
        if self._shows_progress and self._report.items:
            print(file=sys.stderr)
        stats = self._session.stats()
        for name in ("forwards", "hits", "tokens", "reprefill", "prefix_cache", "audits"):
            setattr(self._report, name, getattr(stats, name))

    def _show(self, front: Sequence[str]) -> None:
        """Brings a prefix: evicts from the back what the last one does not share with it, and adds the rest."""
        while self._prefix != list(front[: len(self._prefix)]):
            self._session.evict(self._session.ids[-1])
            self._prefix.pop()
        for chunk in front[len(self._prefix) :]:
            self._with_room(self._session.add, self._contents[chunk], kind="chunk")
            self._prefix.append(chunk)
        # An audit needs room for the window again, and is skipped without it.
        window, slots = self._session.window, self._session.runtime.executor.slots
        pages = sum(-(-piece.entry.tokens // slots.page_size) for piece in window.pieces)
        if self._session.config.audit and not window.as_promised and slots.free_pages < pages:
            self._enlarge()

    def _enlarge(self) -> None:
        """Doubles the pool, once all answers are finished."""
        while self._queue:
            self._finish()
        executor = self._session.runtime.executor
        self._session.runtime.do(lambda: executor.enlarge(2 * executor.slots.pages))

    def _with_room(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs a call of the session. Where it finds no room, finishes all answers; then doubles the pool."""
        while True:
            try:
                return call(*args, **options)
            except PoolError as error:
                if error.lost:
                    raise
                if not self._queue:
                    self._enlarge()
                while self._queue:
                    self._finish()

    def _finish(self) -> None:
        """Writes the oldest answer of the queue."""
        job, fidelity, answer = self._queue.popleft()
        try:
            ids = list(answer.ids)
        except KVPatchError as error:
            self._fail(job, error)
            return
        # The answer ends before its stop token, which can only be the last.
        backbone: Any = self._session.backbone
        if ended := ids[-1] in backbone.stop_tokens:
            ids.pop()
        text = backbone.text(ids) if getattr(backbone, "tokenizer", None) is not None else None
        fields = {"answer": text, "ids": ids, "ended": ended, "fidelity": fidelity}
        append(self._file, {"item": job.index, "id": job.id, **fields})
        self._report.answered += 1
        self._show_progress()

    def _fail(self, job: BatchJob, error: KVPatchError) -> None:
        """Writes the line of an item with its error. Raises that of a pool, which is the batch's."""
        if isinstance(error, PoolError):
            raise error
        message = str(error).encode("utf-8", "backslashreplace").decode()[:2000]
        append(self._file, {"item": job.index, "id": job.id, "error": type(error).__name__, "message": message})
        self._report.failed += 1
        self._show_progress()

    def _show_progress(self) -> None:
        """Counts on a terminal what is done, on one line."""
        report = self._report
        if self._shows_progress:
            done = report.before + report.answered + report.failed
            failed = f", {report.failed} failed" * bool(report.failed)
            print(f"\ranswer_batch: {done} of {report.items} items{failed}", end="", file=sys.stderr, flush=True)
