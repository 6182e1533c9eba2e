"""`Session`: an agent's window, and what it takes to add, recall, slide, fork and ask it."""

import os
import secrets
import weakref
from collections.abc import Iterable
from typing import Any

from ..backbone import Backbone
from ..cache import brief
from ..errors import SessionError
from ..plan import Plan
from ..sampling import Sampling
from ..utils.kinds import all_of
from ..window import Costs, Fidelity, Kind, PatchStore, Promise, Window
from . import session_file
from .answers import Answer
from .disposability import UNCHANGED, DisposabilityProbe, DisposabilityReport
from .piece_registry import PieceRegistry, RuntimeRefCount, retry_after_pool_loss
from .question_runner import AnswerOptions, QuestionRunner, Stop
from .reuse_planner import ReusePlanner
from .runtime import Runtime, dtype_of
from .session_config import Keep, SessionConfig, check_arguments, check_keep, with_chat_template
from .session_input import embedded
from .stats import Stats


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
            they may be served: with a certificate, `uncertified`, or a `rank`.
          keep: the number of chunks that stay after the lead; the oldest leave. A pair: the number down to which they
            leave together, and the one that makes them leave. None: all.
          lead: pinned at the front: a text or image, a list of them, or 0 for nothing. None: the texts that are added
            before the first chunk, or without such texts, that chunk.
          promise: the reference of the window: "remember" (the model in which a token does not attend to what had left
            before it) or "forget" (a prefill of the current window).
          runtime: shared with other sessions. None: a `PrivateRuntime`.
          branch: of the pool of a shared runtime.
          name: in events. None: the branch, or a random name.
          config, options: a `SessionConfig`, and fields that override it, as in `Session(backbone, memory="1 GiB")`.

        Raises:
          SessionError, CertificateError: an invalid argument, or one of other weights. What adding the lead raises.
        """
        config = SessionConfig.with_options(config, options)
        check_arguments(backbone, store, keep, runtime, name)
        config.check_backbone(backbone)
        if config.chat is not False:
            lead, config = with_chat_template(backbone, lead, config)

        # A list is several inputs, unless it is token ids.
        several = isinstance(lead, list | tuple) and not all(isinstance(item, int) for item in lead)
        first = [] if lead is None or isinstance(lead, int) else list(lead) if several else [lead]
        # 0 pins nothing, not even the first chunk; None lets the window settle its lead with that chunk.
        pinned = lead if isinstance(lead, int) else len(first) or None

        # The pool is allocated last, when nothing can be invalid any more.
        dtype = dtype_of(backbone) if config.dtype is None else config.dtype
        # Costs count bytes of the pool that the KV is in, whatever this session would have chosen.
        if runtime is not None:
            config.check_runtime(runtime)
            dtype = runtime.executor.dtype
        window = Window.empty(Costs.of(backbone, dtype), lead=pinned, promise=promise, branch=branch)
        opened = config.private_runtime(backbone, store) if runtime is None else runtime
        users = RuntimeRefCount(opened, private=runtime is None)
        self._compose(PieceRegistry(name or branch or secrets.token_hex(8), users, window, config), keep)
        try:
            for item in first:
                self.add(item)
        except BaseException:
            # The caller has no session to close, and a runtime has a pool and a thread.
            self.close()
            raise

    def _compose(self, registry: PieceRegistry, keep: Keep) -> None:
        """Sets all attributes. New, forked and restored sessions are composed alike."""
        self._registry, self._planner = registry, ReusePlanner(registry, keep)
        self._questions = QuestionRunner(registry)
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self.name, self.watchers, self.runtime = registry.name, registry.watchers, registry.runtime
        self.config, self.backbone, self.store = registry.config, self.runtime.backbone, self.runtime.store

        self.config.form_for(self.runtime.former)

    @property
    def keep(self) -> Keep:
        """The number of chunks that stay after the lead, as it was passed."""
        return self._planner.keeper.keep

    @property
    def window(self) -> Window:
        """What the model reads now, an immutable value."""
        return self._registry.window

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the pieces, from the front."""
        return self._registry.names(self._registry.window.ids)

    @property
    def gone(self) -> tuple[str, ...]:
        """Names of the evicted chunks, which can be recalled, the latest last; at most 512."""
        return self._registry.names(self._registry.window.gone)

    @property
    def closed(self) -> bool:
        """Whether the session was closed."""
        return self._registry.closed

    def fidelity(self, id: str) -> Fidelity:
        """Returns how a piece is served: "exact", "survivor" or "approximate" (`Window.fidelity`)."""
        return self._registry.window.fidelity(self._registry.find(id).entry.id)

    def __len__(self) -> int:
        return len(self.window)

    def __bool__(self) -> bool:
        # An empty session is a session: without this its length would make it false.
        return True

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._registry.ids.get(id, id) in self._registry.window

    def __repr__(self) -> str:
        return f"Session({'closed, ' if self.closed else ''}keep={self.keep}, {self.window!r})"

    @retry_after_pool_loss
    def add(self, item: Any, *, id: str | None = None, order_free: bool = False, kind: Kind | None = None) -> str:
        """Places an image, frames or a text after all others. If `keep` chunks are there, the oldest leaves.

        A chunk that left comes back, as by `recall`. Content that is still in the window becomes a second piece.

        Args:
          item: an image (the `pathlib.Path` of its file, the bytes of that file, a PIL image or uint8 pixels); several
            of them as one chunk (a clip); a text, as a `Text` if it looks like a file's name; or token ids.
          id: the session's name for it. None: the digest of its content.
          order_free: whether `reorder` may move the chunk.
          kind: "chunk", or "text", which cannot be recalled and leaves with the chunk after it. None: "text" for texts.

        Returns:
          Its name.

        Raises:
          SessionClosedError. SessionError: the name of another piece. ImageError, InputError: an unreadable input.
          PoolError: no room. What the backbone raises.
        """
        registry = self._registry
        registry.check_open()
        # Decoding an image takes long and needs no lock; another thread may close the session meanwhile.
        read = registry.read(item)

        with registry.lock:
            registry.check_open()
            evicted = registry.find_evicted(read.content, id)
            if evicted is not None:
                return self._planner.recall(evicted, read)

            with registry.admit(read, id, order_free, kind) as record:
                self._planner.place(record)
            self._planner.notify("add", record, read.items)
            return record.name

    @retry_after_pool_loss
    def recall(self, item: Any) -> str:
        """Brings back an evicted chunk, by its name or its content. If `keep` chunks are there, the oldest leaves.

        A chunk in the window stays as it is.

        Returns:
          Its name.

        Raises:
          SessionError: a name or content that was never added, or a chunk whose content was discarded: give the image
          again. Otherwise as `add`.
        """
        registry = self._registry
        registry.check_open()
        read = None if registry.knows(item) else registry.read(item)

        with registry.lock:
            registry.check_open()
            # A content may be in the window and evicted. The evicted piece is meant, for the other needs no recall.
            record = registry.find(item) if read is None else registry.find_evicted(read.content)
            if record is None and read is not None:
                shown = [piece.id for piece in registry.window.pieces if piece.entry.content == read.content]
                record = registry.records[shown[-1]] if shown else None
            if record is None:
                found = brief(item) if isinstance(item, str) else f"a {type(item).__name__}"
                expected = f"one that left: {registry.list_names(self.gone)}"
                raise SessionError(f"recall: got {found!r:.80}, which was never added; expected {expected}")
            return record.name if record.entry.id in registry.window else self._planner.recall(record, read)

    @retry_after_pool_loss
    def slide(self, keep: int) -> tuple[str, ...]:
        """Evicts all but the last `keep` chunks after the lead. Returns the names of the evicted chunks.

        Raises:
          SessionClosedError. WindowError: an invalid number.
        """
        registry = self._registry
        with registry.lock:
            registry.check_open()
            return registry.evict("slide", *registry.window.slide(keep), keep=keep)

    @retry_after_pool_loss
    def evict(self, id: str) -> tuple[str, ...]:
        """Evicts a piece. Returns its name if it is a chunk, which can be recalled.

        Raises:
          SessionClosedError. SessionError: an unknown name. WindowError: a piece of the lead, or one that has left.
        """
        registry = self._registry
        with registry.lock:
            registry.check_open()
            record = registry.find(id)
            return registry.evict("evict", *registry.window.evict(record.entry.id), chunk=record.name)

    @retry_after_pool_loss
    def replace(self, id: str, item: Any, *, name: str | None = None, order_free: bool = False) -> str:
        """Replaces a piece by another, which pieces after it have not attended to.

        Returns:
          The name of the new piece.

        Raises:
          As `add`; and SessionError: an unknown name. WindowError: a piece of the lead.
        """
        registry = self._registry
        registry.check_open()
        read = registry.read(item)

        with registry.lock:
            registry.check_open()
            old = registry.find(id)
            with registry.admit(read, name, order_free) as record:
                registry.run(*registry.window.replace(old.entry.id, record.entry))
            registry.notify("replace", record, read.items, replaced=old.name)
            return record.name

    @retry_after_pool_loss
    def reorder(self, ids: Iterable[str]) -> None:
        """Reorders order-free chunks: the places of the named chunks are filled in this order.

        Chunks that move are rotated, and approximate if they then follow others than they were formed for.

        Raises:
          SessionClosedError. SessionError: an unknown name. WindowError: a piece that is not order-free, or pinned.
        """
        registry = self._registry
        with registry.lock:
            registry.check_open()
            records = [registry.find(id) for id in all_of(str, ids, "reorder")]
            registry.run(*registry.window.reorder([record.entry.id for record in records]))
            registry.notify("reorder", order=tuple(record.name for record in records))

    @retry_after_pool_loss
    def fork(self, *, keep: Keep = None) -> "Session":
        """Opens a session on a branch, which shares all KV with this one until either changes a piece.

        Args:
          keep: of the branch. None: as this session.

        Raises:
          SessionClosedError. SessionError: an invalid `keep`.
        """
        check_keep(keep)
        with self._registry.lock:
            self._registry.check_open()
            branch, pieces = self._fork(self.keep if keep is None else keep)
            pieces.watchers.extend(self._registry.watchers)
            self._registry.notify("fork", branch=branch.name)
            return branch

    def close(self) -> None:
        """Closes the session: releases its KV and ends unfinished answers. Idempotent."""
        registry = self._registry
        with registry.lock:
            if registry.closed:
                return

            # Answers may be read by other threads. They end with an error instead of reading released KV.
            registry.closed = True
            registry.notify("close")
            for answer in list(self._answers):
                answer.close()

            registry.release()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        registry = self._registry
        registry.check_open()
        sampling = Sampling(temperature, top_p, top_k)
        options = AnswerOptions.of(registry.runtime.backbone, steps, stop, sampling, seed, audit, look)
        with registry.lock:
            registry.check_open()
            answer = self._questions.ask(question, options, self._fork)
            # Held weakly: an answer that nobody reads any more ends by itself.
            self._answers.add(answer)
            registry.counters["asked"] += 1
            # Only texts can be written to a trace and asked again from it.
            if isinstance(question, str):
                registry.notify("ask", text=str(question), steps=options.steps)
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
        registry = self._registry
        registry.check_open()
        items = self._questions.items(question)
        asked = embedded(registry.runtime.backbone, items)
        with registry.lock:
            registry.check_open()
            return DisposabilityProbe(registry, items, asked, steps).run(chunk, bound, erased)

    def plan(self, *items: Any) -> Plan:
        """Plans how inputs would enter now, in this order, after all others. Runs nothing.

        Args:
          items: names of evicted chunks, or inputs of `add`. Without any: how the window itself is served best.

        Raises:
          As `plan.plan`, and as `add` for an unreadable input.
        """
        self._registry.check_open()
        with self._registry.lock:
            return self._planner.plan(items)

    def stats(self) -> Stats:
        """Returns counts of what was done so far: `print(session.stats())`."""
        with self._registry.lock:
            return self._registry.stats()

    def save(self, path: str | os.PathLike[str], *, kv: bool = True) -> None:
        """Writes the session to a file. An existing file is replaced as a whole or not at all.

        The file has the window, names, the inputs of the pieces (of evicted chunks while they are kept), and the KV of
        the window as it is in the pool, because a survivor's KV cannot be computed again. It does not have the store.

        Args:
          kv: False leaves out the KV. The restored session then prefills its window, and forgets what had left.

        Raises:
          SessionClosedError. SessionError: a file that cannot be written.
        """
        with self._registry.lock:
            self._registry.check_open()
            session_file.save(path, self._registry, self.keep, kv)

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
          options: `certificate`, `goal`, `costs`, `linker`, `retriever`, `rank`, `pages` of `SessionConfig`. The other
            options are as they were saved.

        Raises:
          SessionError: no session, damage, another version, or a runtime whose pool has another dtype. WindowError: a
          session of another backbone. PoolError: no room. Nothing is held then.
        """
        session = cls.__new__(cls)
        session._compose(*session_file.restore(path, backbone, store, runtime, branch, options))
        return session

    def _fork(self, keep: Keep = None) -> "tuple[Session, PieceRegistry]":
        """Returns a session on a branch and its registry, without watchers: questions are answered there, too."""
        pieces = self._registry.fork()
        branch = Session.__new__(Session)
        branch._compose(pieces, keep)
        # Its pieces are those of this session, so what plans know of them holds there too.
        return branch, pieces
