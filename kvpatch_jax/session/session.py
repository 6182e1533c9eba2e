"""`Session`: an agent's window, and what it takes to add, recall, slide, fork and ask it."""

import contextlib
import os
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..answers import Sampling
from ..backbone import Backbone
from ..cache import brief
from ..errors import InputError, SessionError
from ..patching import DEFAULT_SIZE
from ..plan import Plan
from ..utils.interrupts import interrupts_deferred
from ..utils.kinds import all_of, is_whole
from ..window import Fidelity, Kind, PatchStore, Promise, Window, is_count
from . import saved
from .answers import Answer
from .config import Keep, SessionConfig, check_keep, with_chat_template
from .inputs import embedded
from .needs import UNCHANGED, DisposabilityReport, probe
from .pieces import PieceBook, session_call
from .placing import Placer
from .questions import QuestionRunner, Stop, options_of
from .runtime import Runtime
from .stats import Stats

OWN_OPTIONS = ("store", "keep", "lead", "promise", "runtime", "name", "config")
"""Options of a session that are none of its config."""
RANK = 16
"""Default rank of patches that are formed in the background and served within a certificate, which bounds ranks."""


class Session:
    """What an agent sees: images, frames and texts, of which the last ones stay, and questions after them.

        from pathlib import Path

        import kvpatch_jax as kvp
        from kvpatch_jax.models import load

        backbone = load("evals/trained/documents/qwen2_5_vl")  # of a checkout, as the images are
        screenshots = sorted(Path("docs/pictures/screenshots").glob("*.png"))

        with kvp.Session(backbone, store=kvp.ChunkStore("out/chunks"), keep=2) as session:
            for shot in screenshots:
                session.add(shot)
                print(shot.name, session.ask("unit of seed?"))
            session.recall(screenshots[1])
            print("recalled", session.ask("unit of seed?"))

    A session is a window with its images and the runtime that holds its KV. Pieces that stay are rotated, not computed
    again, and what can be reused later is stored in the background, at the latest by `close`. Several threads may use
    it, one call at a time. A call that raises changes nothing.

    Attributes:
      backbone, store, runtime: what the session runs on.
      name: in events.
      config: the options.
      watchers: called with each event and the items that it brought, after it has happened: what a watcher raises
        undoes nothing. A fork has a copy.
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
          lead: pinned at the front, and nothing else is: a text or image, a list of them, or how many of the
            first pieces that are added; 0 for none. None: the first chunk, or of a first text the 4 tokens that
            attention sinks on; the rest of it can be replaced.
          promise: the reference of the window: "remember" (the model in which a token does not attend to what had left
            before it) or "forget" (a prefill of the current window).
          runtime: shared with other sessions. None: one of its own.
          name: in events. None: a random one.
          config, options: a `SessionConfig`, and fields that override it, as in `Session(backbone, memory="1 GiB")`.

        Raises:
          SessionError, InputError: an invalid argument, or one of other weights. What adding the lead raises.
        """
        config = SessionConfig.with_options(config, options, "session", OWN_OPTIONS)
        config.check(backbone, store, runtime, keep, name)
        if config.chat is not False:
            lead, config = with_chat_template(backbone, lead, config)

        # A list is several inputs, unless it is token ids.
        several = isinstance(lead, list | tuple) and not all(isinstance(item, int) for item in lead)
        first = [] if lead is None or is_count(lead, 0) else list(lead) if several else [lead]
        pinned: int = lead if is_count(lead, 0) else len(first) or 1  # pyright: ignore[reportAssignmentType]
        # The pool is allocated last, when nothing can be invalid any more.
        # Sessions on one runtime never share a branch: each would release what the other holds.
        window = Window.empty(backbone, lead=pinned, promise=promise, branch=secrets.token_hex(8))
        runtime = config.runtime(backbone, store) if runtime is None else runtime
        self._compose(PieceBook(name or window.branch, runtime, window, config), keep)
        try:
            for item in first:
                self._placer.add(self._book.read(item), lead=True)
        except BaseException:
            # The caller has no session to close, and a runtime has a pool and a thread.
            self.close()
            raise

    def _compose(self, book: PieceBook, keep: Keep) -> None:
        """Sets all attributes. New, forked and restored sessions are composed alike."""
        self._book, self._placer, self._questions = book, Placer(book, keep), QuestionRunner(book)
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self.name, self.watchers, self.runtime, self.config = book.name, book.watchers, book.runtime, book.config
        self.backbone, self.store, former = self.runtime.backbone, self.runtime.store, self.runtime.former
        # By default nothing is formed that this session may not serve.
        if former is not None and self.config.policy in ("certified", "patched"):
            former.form_means()
            former.form_patches(RANK if self.config.policy == "certified" else DEFAULT_SIZE)

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
        return id in self._book

    def __repr__(self) -> str:
        return f"Session({'closed, ' if self.closed else ''}keep={self.keep}, {self.window!r})"

    # --------------------------------------------------------------------------------------------------------- pieces

    @session_call(interrupts_deferred)
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
          SessionError: it is closed; the name of another piece. InputError: an unreadable input.
          PoolError: no room. What the backbone raises.
        """
        # Decoding an image takes long and needs no lock; another thread may close the session meanwhile.
        read = self._book.read(item)
        with self._book.open():
            return self._placer.add(read, id, order_free, kind)

    @session_call(interrupts_deferred)
    def insert(
        self, item: Any, before: str, *, id: str | None = None, order_free: bool = False, kind: Kind | None = None
    ) -> str:
        """Places an input in front of a piece; otherwise as `add`. Pieces after it have not attended to it.

        With reuse "exact" or "certified" they are prefilled again, otherwise rotated.
        """
        read = self._book.read(item)
        with self._book.open():
            return self._placer.add(read, id, order_free, kind, before=self._book.find(before).entry.id)

    @session_call(interrupts_deferred)
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
            read = None if book.knows(item) else book.read(item)
            if read is None:
                record = book.find(item)
            else:
                # A content may be in the window and evicted. The evicted piece is meant: the other needs no recall.
                shown = [book.records[piece.id] for piece in book.window.pieces if piece.entry.content == read.content]
                record = book.find_evicted(read.content) or (shown[-1] if shown else None)
            if record is None:
                found = brief(item) if isinstance(item, str) else f"a {type(item).__name__}"
                expected = ", ".join(repr(brief(name)) for name in self.gone[-8:]) or "nothing, for nothing has left"
                used = [name for name in (item, read and read.content) if isinstance(name, str) and book.was_used(name)]
                past = "is text, or forgotten since: add it again" if used else "was never added"
                raise SessionError(f"recall: got {found!r:.80}, which {past}; expected {expected}")
            return record.name if record.entry.id in book.window else self._placer.recall(record, read)

    @session_call(interrupts_deferred)
    def slide(self, keep: int) -> tuple[str, ...]:
        """Evicts all but the last `keep` chunks after the lead. Returns their names. Raises SessionError: no number."""
        with self._book.open():
            return self._book.evict("slide", self.window.slide(keep), keep=keep)

    @session_call(interrupts_deferred)
    def evict(self, id: str) -> tuple[str, ...]:
        """Evicts a piece. Returns its name if it is a chunk, which can be recalled.

        Raises:
          SessionError: it is closed; an unknown name; a piece of the lead, or one that has left.
        """
        with self._book.open():
            record = self._book.find(id)
            return self._book.evict("evict", self.window.evict(record.entry.id), chunk=record.name)

    @session_call(interrupts_deferred)
    def replace(self, id: str, item: Any, *, name: str | None = None, order_free: bool = False) -> str:
        """Replaces a piece by another, which pieces after it have not attended to.

        With reuse "exact" or "certified" these are prefilled again; otherwise they are rotated, and "approximate".
        Nothing leaves, even if an image takes the place of a text: `keep` counts again at the next `add`.

        Returns:
          The name of the new piece.

        Raises:
          As `add`; and SessionError: an unknown name; a piece of the lead.
        """
        book = self._book
        read = book.read(item)
        with book.open():
            return self._placer.replace(book.find(id), read, name, order_free)

    @session_call(interrupts_deferred)
    def reorder(self, ids: Iterable[str]) -> None:
        """Reorders order-free chunks: the places of the named chunks are filled in this order.

        Chunks that move are rotated, and approximate if they then follow others than they were formed for.

        Raises:
          SessionError: it is closed; an unknown name; a piece that is not order-free, or pinned.
        """
        book = self._book
        with book.open():
            records = [book.find(id) for id in all_of(str, ids, "reorder")]
            book.run("reorder", book.window.reorder([record.entry.id for record in records]))
            book.notify("reorder", order=tuple(record.name for record in records))

    @session_call(interrupts_deferred)
    def fork(self, *, keep: Keep = None) -> "Session":
        """Opens a session on a branch, which shares all KV with this one until either changes a piece.

        It has another `keep` if one is given. Raises SessionError if that is invalid.
        """
        check_keep(keep)
        with self._book.open():
            branch = Session.__new__(Session)
            branch._compose(self._book.fork(), self.keep if keep is None else keep)
            branch.watchers.extend(self._book.watchers)
            try:
                self._book.notify("fork", branch=branch.name)
            except BaseException:
                branch.close()
                raise
            return branch

    def close(self) -> None:
        """Closes the session: releases its KV and ends unfinished answers. Idempotent."""
        book = self._book
        with book.lock:
            if book.closed:
                return
            book.closed = True
        # Also where a watcher raises: nobody could close it again.
        try:
            book.notify("close")
        finally:
            # Answers may be read by other threads. They end with an error instead of reading released KV. Without the
            # lock, because a retriever that runs for one may wait for it.
            for answer in list(self._answers):
                answer.close()
            with book.lock:
                book.release()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------ questions

    @session_call(contextlib.nullcontext)
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
          SessionError: it is closed. InputError, ConfigError: an invalid question or option. InputError: a reference
          that the linker does not know. What the backbone raises.
        """
        book = self._book
        with book.open():
            sampling = Sampling(temperature, top_p, top_k)
            options = options_of(self.backbone, steps, stop, sampling, seed, look)
            with interrupts_deferred():
                self._placer.mend()
            answer = self._questions.ask(question, options, audit, look)
            # Held weakly: an answer that nobody reads any more ends by itself.
            self._answers.add(answer)
            book.counters["asked"] += 1
            # Only texts can be written to a trace and asked again from it.
            if isinstance(question, str):
                book.notify("ask", text=str(question), steps=options.steps)
            return answer

    @session_call(contextlib.nullcontext)
    def log_probs(self, question: Any, ids: Sequence[int] | np.ndarray) -> Float[np.ndarray, " n"]:
        """Returns the log-probability of each token of an answer after the window, before temperature and cuts.

        Args:
          question: as of `ask`.
          ids: tokens of the answer, such as `Answer.ids`.

        Returns:
          float32 [n], in nats, by one forward over question and answer; NaN for tokens behind one that stands for an
          image.

        Raises:
          InputError: ids that are not tokens. As `ask`.
        """
        if not all(is_whole(id, 0) for id in ids):
            raise InputError(f"log_probs.ids: got {ids!r:.80}; expected token ids")
        with self._book.open():
            return self._questions.log_probs(question, [int(id) for id in ids])

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
          SessionError: it is closed; an unknown name, or a text; a chunk of the lead, or one that is
          not in the window. What `ask` raises.
        """
        if not isinstance(bound, int | float) or not bound >= 0:
            raise InputError(f"needs.bound: got {bound!r:.80}; expected nats, 0 or more")
        if not is_count(steps):
            raise InputError(f"needs.steps: got {steps!r:.80}; expected a number of tokens, 1 or more")
        with self._book.open():
            items = self._questions.items(question)
            asked = embedded(self.backbone, items)
            return probe(self._book, chunk, items, asked, steps, bound, erased)

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
          SessionError: it is closed; a file that cannot be written.
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
        **options: Any,
    ) -> "Session":
        """Restores a session that was saved, in this process or another. Its answers are bit-equal.

        Args:
          backbone: the one that the session was saved with.
          store: of canonicals and patches. Another store, or none, costs forwards and changes no answer.
          runtime: as of a new session.
          options: `certificate`, `linker`, `retriever`, `rank`, `pages` of `SessionConfig`. The other options are as
            they were saved.

        Raises:
          SessionError: no session, damage, another version, or a runtime whose pool has another dtype; a
          session of another backbone. PoolError: no room.
        """
        session = cls.__new__(cls)
        session._compose(*saved.restore(path, backbone, store, runtime, options))
        return session
