"""`Session`: an agent's window, and what it takes to add, recall, slide, fork and ask it."""

import os
import secrets
import weakref
from collections.abc import Iterable
from typing import Any

from ..backbone import Backbone
from ..cache import brief, part_name
from ..errors import InputError, SessionError
from ..plan import Plan
from ..sampling import Sampling
from ..utils.kinds import all_of
from ..window import Fidelity, Kind, PatchStore, Promise, Window, is_count
from . import saved
from .answers import Answer
from .config import Keep, SessionConfig, check_arguments, check_keep, with_chat_template
from .inputs import embedded
from .needs import UNCHANGED, DisposabilityProbe, DisposabilityReport
from .pieces import PieceBook, retry_after_pool_loss, window_step
from .placing import Placer
from .questions import QuestionRunner, Stop, options_of
from .runtime import Runtime
from .stats import Stats

RANK = 16
"""Default rank of patches that are formed in the background."""


class Session:
    """What an agent sees: images, frames and texts, of which the last ones stay, and questions after them.

        from pathlib import Path

        import kvpatch_jax as kvp
        from models import load

        backbone = load("evals/trained/documents/qwen2_5_vl")  # of a checkout, as the images are
        screenshots = sorted(Path("docs/pictures/screenshots").glob("*.png"))

        with kvp.Session(backbone, store=kvp.ChunkStore("out/chunks"), keep=2) as session:
            for shot in screenshots:
                session.add(shot)
                print(shot.name, session.ask("unit of seed?"))
            session.recall(screenshots[1])
            print("recalled", session.ask("unit of seed?"))

    A session is a window with the images that it shows and the runtime that holds its KV. Pieces that stay are rotated,
    not computed again, and what can be reused later is stored in the background, at the latest by `close`. Several
    threads may use a session, one call at a time. A call that raises leaves the session as it was.

    Attributes:
      backbone, store, runtime: what the session runs on.
      name: in events.
      config: the options.
      watchers: called with each event and the items that it brought, after it has happened. A fork has a copy.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        keep: Keep = None,
        *,
        lead: Any = None,
        promise: Promise = "remember",
        runtime: Runtime | None = None,
        branch: str = "",
        name: str | None = None,
        config: SessionConfig | None = None,
        **options: Any,
    ):
        """Opens a session that shows only its lead.

        Args:
          backbone: of `models.load`.
          store: a `ChunkStore`. Exact data (prefills, tower outputs) is always read from it. Patches are formed where
            they may be served, or with a `rank`.
          keep: the number of chunks that stay after the lead; the oldest leave. A pair: the number down to which they
            leave together, and the one that makes them leave. None: all.
          lead: pinned at the front, and nothing else is: a text or image, a list of them, or 0 for nothing. None: the
            first chunk, or of a first text the 4 tokens that attention sinks on; the rest of it can be replaced.
          promise: the reference of the window: "remember" (the model in which a token does not attend to what had left
            before it) or "forget" (a prefill of the current window).
          runtime: shared with other sessions. None: one of its own.
          branch: of the pool of a shared runtime.
          name: in events. None: the branch, or a random name.
          config, options: a `SessionConfig`, and fields that override it, as in `Session(backbone, memory="1 GiB")`.

        Raises:
          SessionError, CertificateError: an invalid argument, or one of other weights. What adding the lead raises.
        """
        config = SessionConfig.with_options(config, options)
        check_arguments(backbone, store, keep, runtime, name)
        config.check(backbone, runtime)
        if config.chat is not False:
            lead, config = with_chat_template(backbone, lead, config)

        # A list is several inputs, unless it is token ids.
        several = isinstance(lead, list | tuple) and not all(isinstance(item, int) for item in lead)
        first = [] if lead is None or is_count(lead, 0) else list(lead) if several else [lead]
        pinned: int = lead if is_count(lead, 0) else len(first) or 1  # pyright: ignore[reportAssignmentType]
        # The pool is allocated last, when nothing can be invalid any more.
        window = Window.empty(backbone, lead=pinned, promise=promise, branch=branch)
        runtime = config.runtime(backbone, store) if runtime is None else runtime
        self._compose(PieceBook(name or branch or secrets.token_hex(8), runtime, window, config), keep)
        try:
            for item in first:
                self._add(item, None, False, None, lead=True)
        except BaseException:
            # The caller has no session to close, and a runtime has a pool and a thread.
            self.close()
            raise

    def _compose(self, book: PieceBook, keep: Keep) -> None:
        """Sets all attributes. New, forked and restored sessions are composed alike."""
        self._book, self._placer, self._questions = book, Placer(book, keep), QuestionRunner(book)
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self.name, self.watchers, self.runtime, self.config = book.name, book.watchers, book.runtime, book.config
        self.backbone, self.store = self.runtime.backbone, self.runtime.store
        # By default nothing is formed that this session may not serve.
        if self.config.approximates and self.runtime.former is not None:
            self.runtime.former.form_means()
            self.runtime.former.form_patches(RANK)

    @property
    def keep(self) -> Keep:
        """The number of chunks that stay after the lead, as it was passed."""
        return self._placer.keep

    @property
    def window(self) -> Window:
        """What the model reads now, an immutable value."""
        return self._book.window

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the pieces, from the front."""
        return self._book.names(self.window.ids)

    @property
    def gone(self) -> tuple[str, ...]:
        """Names of the evicted chunks, which can be recalled, the latest last; at most 512."""
        return self._book.names(self.window.gone)

    @property
    def closed(self) -> bool:
        """Whether the session was closed."""
        return self._book.closed

    def fidelity(self, id: str) -> Fidelity:
        """Returns how a piece is served: "exact", "survivor" or "approximate" (`Window.fidelity`)."""
        return self.window.fidelity(self._book.find(id).entry.id)

    def __len__(self) -> int:
        return len(self.window)

    def __bool__(self) -> bool:
        # An empty session is a session: without this its length would make it false.
        return True

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._book.ids.get(id, id) in self.window

    def __repr__(self) -> str:
        return f"Session({'closed, ' if self.closed else ''}keep={self.keep}, {self.window!r})"

    # --------------------------------------------------------------------------------------------------------- pieces

    @window_step
    def add(self, item: Any, *, id: str | None = None, order_free: bool = False, kind: Kind | None = None) -> str:
        """Places an image, frames or a text after all others. If `keep` chunks are there, the oldest leaves.

        A chunk that left comes back, as by `recall`. Content that is still in the window becomes a second piece.

        Args:
          item: an image (the `pathlib.Path` of its file, the bytes of that file, a PIL image or uint8 pixels); several
            of them as one chunk (a clip); a text, as a `Text` if it looks like a file's name; token ids; a part of an
            OpenAI or Hugging Face message, or a whole message.
          id: the session's name for it. None: the digest of its content.
          order_free: whether `reorder` may move the chunk.
          kind: "chunk", or "text", which cannot be recalled and leaves with the chunk before it. None: "text" of texts.

        Returns:
          Its name.

        Raises:
          SessionClosedError. SessionError: the name of another piece. ImageError, InputError: an unreadable input.
          PoolError: no room. What the backbone raises.
        """
        return self._add(item, id, order_free, kind)

    def _add(self, item: Any, id: str | None, order_free: bool, kind: Kind | None, lead: bool = False) -> str:
        book = self._book
        with book.open():
            pass
        # Decoding an image takes long and needs no lock; another thread may close the session meanwhile.
        read = book.read(item)
        with book.open():
            # vLLM's name of a medium in a message, which may come again although it was forgotten here.
            if id is None and not book.was_used(uuid := part_name(item)):
                id = uuid
            evicted = book.find_evicted(read.content, id)
            if evicted is not None:
                return self._recall(evicted, read)
            with book.admit(read, id, order_free, kind, whole=lead) as records:
                *sinks, record = records
                room = self._placer.enter("add", record, sinks=sinks)
            self._notify_placed("add", record, read.items, room)
            return record.name

    @window_step
    def insert(
        self, item: Any, before: str, *, id: str | None = None, order_free: bool = False, kind: Kind | None = None
    ) -> str:
        """Places an input in front of a piece; otherwise as `add`. Pieces after it have not attended to it.

        With reuse "exact" or "certified" they are prefilled again, otherwise rotated.
        """
        book = self._book
        read = book.read(item)
        with book.open():
            follower = book.find(before).entry.id
            with book.admit(read, id, order_free, kind, whole=True) as records:
                room = self._placer.enter("insert", records[0], before=follower)
            self._notify_placed("insert", records[0], read.items, room, before=before)
            return records[0].name

    @window_step
    def recall(self, item: Any) -> str:
        """Brings back an evicted chunk, by its name or its content. If `keep` chunks are there, the oldest leaves.

        A chunk in the window stays as it is.

        Returns:
          Its name.

        Raises:
          SessionError: a name or content that was never added, or a chunk whose content was discarded: give the image
          again. Otherwise as `add`.
        """
        book = self._book
        with book.open():
            read = None
            if not book.knows(item):
                read = book.read(item)
            # A content may be in the window and evicted. The evicted piece is meant, for the other needs no recall.
            record = book.find(item) if read is None else book.find_evicted(read.content)
            if record is None and read is not None:
                shown = [piece.id for piece in book.window.pieces if piece.entry.content == read.content]
                record = book.records[shown[-1]] if shown else None
            if record is None:
                found = brief(item) if isinstance(item, str) else f"a {type(item).__name__}"
                expected = ", ".join(repr(brief(name)) for name in self.gone[-8:]) or "nothing, for nothing has left"
                raise SessionError(f"recall: got {found!r:.80}, which was never added; expected {expected}")
            return record.name if record.entry.id in book.window else self._recall(record, read)

    def _recall(self, record: Any, read: Any) -> str:
        """Places an evicted chunk again, with its input if the caller gave it. Returns its name."""
        book = self._book
        if record.input is None:
            record.input = read
        room = self._placer.enter("recall", record)
        book.counters["recalled"] += 1
        book.trim()
        self._notify_placed("recall", record, (), room)
        return record.name

    @window_step
    def slide(self, keep: int) -> tuple[str, ...]:
        """Evicts all but the last `keep` chunks after the lead. Returns the names of the evicted chunks.

        Raises:
          SessionClosedError. WindowError: an invalid number.
        """
        with self._book.open():
            return self._book.evict("slide", self.window.slide(keep), keep=keep)

    @window_step
    def evict(self, id: str) -> tuple[str, ...]:
        """Evicts a piece. Returns its name if it is a chunk, which can be recalled.

        Raises:
          SessionClosedError. SessionError: an unknown name. WindowError: a piece of the lead, or one that has left.
        """
        with self._book.open():
            record = self._book.find(id)
            return self._book.evict("evict", self.window.evict(record.entry.id), chunk=record.name)

    @window_step
    def replace(self, id: str, item: Any, *, name: str | None = None, order_free: bool = False) -> str:
        """Replaces a piece by another, which pieces after it have not attended to.

        With reuse "exact" or "certified" these are prefilled again; otherwise they are rotated, and "approximate".

        Returns:
          The name of the new piece.

        Raises:
          As `add`; and SessionError: an unknown name. WindowError: a piece of the lead.
        """
        book = self._book
        read = book.read(item)
        with book.open():
            old = book.find(id)
            with book.admit(read, name, order_free, whole=True) as records:
                window = book.window.replace(old.entry.id, records[0].entry)
                book.records.setdefault(records[0].entry.id, records[0])
                book.run("replace", self._placer.mended(window) if book.config.mends else window)
            book.notify("replace", records[0], read.items, replaced=old.name)
            return records[0].name

    @window_step
    def reorder(self, ids: Iterable[str]) -> None:
        """Reorders order-free chunks: the places of the named chunks are filled in this order.

        Chunks that move are rotated, and approximate if they then follow others than they were formed for.

        Raises:
          SessionClosedError. SessionError: an unknown name. WindowError: a piece that is not order-free, or pinned.
        """
        book = self._book
        with book.open():
            records = [book.find(id) for id in all_of(str, ids, "reorder")]
            book.run("reorder", book.window.reorder([record.entry.id for record in records]))
            book.notify("reorder", order=tuple(record.name for record in records))

    @window_step
    def fork(self, *, keep: Keep = None) -> "Session":
        """Opens a session on a branch, which shares all KV with this one until either changes a piece.

        Args:
          keep: of the branch. None: as this session.

        Raises:
          SessionClosedError. SessionError: an invalid `keep`.
        """
        check_keep(keep)
        with self._book.open():
            branch, pieces = self._fork(self.keep if keep is None else keep)
            pieces.watchers.extend(self._book.watchers)
            self._book.notify("fork", branch=branch.name)
            return branch

    def close(self) -> None:
        """Closes the session: releases its KV and ends unfinished answers. Idempotent."""
        book = self._book
        with book.lock:
            if book.closed:
                return
            # Answers may be read by other threads. They end with an error instead of reading released KV.
            book.closed = True
            book.notify("close")
            for answer in list(self._answers):
                answer.close()
            book.release()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------ questions

    @retry_after_pool_loss
    def ask(
        self,
        question: Any,
        *,
        steps: int | None = None,
        stop: Stop = None,
        temperature: float | int = 0.0,
        top_p: float | int = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        audit: bool = False,
        look: int = 16,
    ) -> Answer:
        """Asks a question after the window. The window stays as it is, and the question is not kept.

        Returns once the first token is there. The answer belongs to this window, whatever the session does while the
        rest is read.

        Args:
          question: a text, token ids, an image, or several of them. A str is a text, as for `add`.
          steps: the largest number of tokens. None: the checkpoint's (`max_new_tokens` of its generation_config.json),
            or 256.
          stop: what ends the answer: token ids, or texts of one token each. None: the backbone's stop tokens. (): none.
          temperature, top_p, top_k: of sampling; temperature 0 takes the likeliest token.
          seed: of sampling. None: drawn, and kept in the answer.
          look: tokens between two calls of the session's retriever, which is also called before the first token.
          audit: reads the answer to its end, then runs window, question and answer through the model without any reuse,
            and compares: `answer.kl`, `answer.audit`.

        `IMAGE#NAME` in a text refers to a chunk of the session's linker. Such chunks are placed after the window for
        this question alone, with the text between them. So are chunks that the retriever finds (`RetrievalQuery`),
        before the answer continues. `answer.recalled` names both.

        Returns:
          The answer: an iterable of text as it is decoded; `str(answer)` is all of it.

        Raises:
          SessionClosedError. InputError, ConfigError: an invalid question or option. UnknownReferenceError: a reference
          that the linker does not know. What the backbone raises.
        """
        book = self._book
        with book.open():
            sampling = Sampling(temperature, top_p, top_k)
            options = options_of(self.backbone, steps, stop, sampling, seed, look)
            answer = self._questions.ask(question, options, audit, look, self._fork)
            # Held weakly: an answer that nobody reads any more ends by itself.
            self._answers.add(answer)
            book.counters["asked"] += 1
            # Only texts can be written to a trace and asked again from it.
            if isinstance(question, str):
                book.notify("ask", text=str(question), steps=options.steps)
            return answer

    def needs(
        self, chunk: str, question: Any, *, steps: int = 8, bound: float = UNCHANGED, erased: bool = False
    ) -> DisposabilityReport:
        """Probes whether a question needs a chunk, or what the chunk absorbed. The window stays as it is.

        It is answered as the window is, without the chunk's conditioning, and without the chunk, on forks. No piece is
        prefilled again. A canonical that is not in the store takes a forward of the chunk alone.

        Args:
          chunk: its name.
          question: as of `ask`.
          steps: of the answers, which are greedy.
          bound: mean nats per token that count as no change.
          erased: also ask without any trace of the chunk: what follows it is served bare.

        Raises:
          SessionClosedError. SessionError: an unknown name, or a text. WindowError: a chunk of the lead, or one that is
          not in the window. What `ask` raises.
        """
        if not isinstance(bound, int | float) or not bound >= 0:
            raise InputError(f"needs.bound: got {bound!r:.80}; expected nats, 0 or more")
        with self._book.open():
            items = self._questions.items(question)
            asked = embedded(self.backbone, items)
            return DisposabilityProbe(self._book, items, asked, steps).run(chunk, bound, erased)

    def plan(self, *items: Any) -> Plan:
        """Plans how inputs would enter now, in this order, after all others. Runs nothing.

        Args:
          items: names of evicted chunks, or inputs of `add`. Without any: how the window itself is served best.

        Raises:
          As `plan.plan`, and as `add` for an unreadable input.
        """
        with self._book.open():
            return self._placer.plan(items)

    def stats(self) -> Stats:
        """Returns counts of what was done so far: `print(session.stats())`."""
        with self._book.lock:
            return self._book.stats()

    # ------------------------------------------------------------------------------------------------ save and restore

    def save(self, path: str | os.PathLike[str], *, kv: bool = True) -> None:
        """Writes the session to a file. An existing file is replaced as a whole or not at all.

        The file has the window, names, the inputs of the pieces (of evicted chunks while they are kept), and the KV of
        the window as it is in the pool, because a survivor's KV cannot be computed again. It does not have the store.

        Args:
          kv: False leaves out the KV. The restored session then prefills its window, and forgets what had left.

        Raises:
          SessionClosedError. SessionError: a file that cannot be written.
        """
        with self._book.open():
            saved.save(path, self._book, self.keep, kv)

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        backbone: Backbone,
        store: PatchStore | None = None,
        *,
        runtime: Runtime | None = None,
        branch: str = "",
        **options: Any,
    ) -> "Session":
        """Restores a session that was saved, in this process or another. Its answers are bit-equal.

        A fork is restored as a session of its own. Inputs of pieces are embedded when they are needed again.

        Args:
          backbone: the one that the session was saved with.
          store: of canonicals and patches. Another store, or none, costs forwards and changes no answer.
          runtime, branch: as of a new session.
          options: `certificate`, `linker`, `retriever`, `rank`, `pages` of `SessionConfig`. The other options are as
            they were saved.

        Raises:
          SessionError: no session, damage, another version, or a runtime whose pool has another dtype. WindowError: a
          session of another backbone. PoolError: no room. Nothing is held then.
        """
        session = cls.__new__(cls)
        session._compose(*saved.restore(path, backbone, store, runtime, branch, options))
        return session

    # --------------------------------------------------------------------------------------------------------- inside

    def _fork(self, keep: Keep = None) -> "tuple[Session, PieceBook]":
        """Returns a session on a branch and its book, without watchers: questions are answered there, too."""
        pieces = self._book.fork()
        branch = Session.__new__(Session)
        branch._compose(pieces, keep)
        return branch, pieces

    def _notify_placed(self, op: Any, record: Any, items: Any, room: Any, **fields: Any) -> None:
        """Notifies the watchers of a piece that was placed, and first of the placeholders that made room for it."""
        # In this order a trace replays: each event changes the window that the one before it left.
        for replaced, placeholder in room.placeholders.items():
            shown = () if placeholder.input is None else placeholder.input.items
            self._book.notify("replace", placeholder, shown, replaced=replaced)
        self._book.notify(op, record, items, keep=room.stayed, **fields)
