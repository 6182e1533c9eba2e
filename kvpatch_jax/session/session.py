"""`Session`: what an agent sees, added, asked, slid, recalled, reordered and forked in a few calls."""

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from ..backbone import Backbone
from ..cache import brief, names_of
from ..errors import SessionError
from ..patching import Rank
from ..plan import Certificate, DeviceCosts, Goal
from ..traces import Op
from ..utils.sizes import Size, size_of
from ..window import Costs, Edits, Fidelity, Kind, PatchStore, Promise, Window
from .answers import Answer
from .chat_frame import framed
from .disposability import DisposabilityProbe
from .piece_registry import PieceRecord, RuntimeRefCount, outliving_the_pool
from .reuse_planner import check_certificate
from .runtime import PAGE_SIZE, RANK, PrivateRuntime, Runtime
from .session_checkpoint import Restoring
from .session_input import LARGEST_IMAGE, SessionInput, thing_of
from .stats import Stats

SETTINGS = (
    *("certificate", "goal", "costs", "uncertified", "linker", "retriever"),
    *("around", "chat", "largest_image", "memory"),
)
"""What a session is set to, its forks too."""
MEMORY = 512 << 20
"""Bytes that a session keeps of what has left, to bring it back without being given it again."""


class Session(DisposabilityProbe, Restoring):
    """What an agent sees: images, frames and texts, of which the last ones stay, and questions behind them.

        from pathlib import Path

        import kvpatch_jax as kvp
        from models import load

        backbone = load("evals/trained/qwen2_5_vl")  # of a checkout, as the images are
        screenshots = sorted(Path("docs/pictures/screenshots").glob("*.png"))

        with kvp.Session(backbone, store=kvp.ChunkStore("out/chunks"), keep=2) as session:
            for shot in screenshots:
                session.add(shot)
                print(shot.name, session.ask("fill? b3"))
            session.recall(screenshots[1])
            print("recalled", session.ask("fill? b3"))

    A session is a window with what it takes to run it. What stays is turned and not computed again; what was formed
    behind the back goes into the store. Several threads may use it, one call at a time. Where a call raises, the
    session is as it was. Closing it stores what is still to be formed; where nobody does, the process takes a few
    seconds for that at its end and drops the rest.

    Attributes:
      runtime: what it runs on.
      keep: how many chunks stay behind the pinned lead; None: all.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None = None,
        keep: int | None = None,
        *,
        certificate: Certificate | None = None,
        goal: Goal | None = None,
        costs: DeviceCosts | None = None,
        uncertified: bool = False,
        lead: Any = None,
        promise: Promise = "remember",
        rank: Rank | None = None,
        runtime: Runtime | None = None,
        branch: str = "",
        name: str | None = None,
        linker: Any = None,
        retriever: Any = None,
        around: tuple[str, str] = ("", ""),
        chat: bool = False,
        pages: int | None = None,
        page_size: int = PAGE_SIZE,
        dtype: jax.typing.DTypeLike | None = None,
        largest_image: Size = LARGEST_IMAGE,
        memory: Size = MEMORY,
    ):
        """Starts with nothing but the lead.

        Args:
          backbone: what `models.load` gives.
          store: a `ChunkStore`. What is exact is read from it always: the canonical of what leads, and what the vision
            tower made of an image. Patches are formed behind the back and kept there where they may be served: with a
            certificate, with `uncertified`, or where a rank is said.
          keep: how many chunks stay behind the lead; the oldest leaves when one more comes in. None: all stay.
          certificate: what reuse was measured to lose on this backbone. With one, what comes back is served by stored
            patches where that keeps to the goal; without, it is prefilled.
          goal: bounds on what an answer loses, or on bytes or seconds; None: 0.05 nats with a certificate, else exactly
            what the window promises.
          costs: of this device, for plans; None: assumed.
          uncertified: takes stored patches that were formed behind the very antecedent without a certificate. What is
            served so is "approximate", and nothing says how far it is off.
          lead: what is pinned in front: a text or image, a list of them, or 0 for nothing. None: the texts that are
            added before the first chunk, or where there are none that chunk.
          promise: what the window is held against: "remember" (the model where no token sees what had left by then), or
            "forget" (a prefill of what is there).
          rank: of patches that are formed behind the back; 0 forms none. None: 16 where this session may serve them,
            else none.
          runtime: shared with other sessions; None makes one of this session's own.
          branch: of the runtime's pool, where it is shared.
          name: of the session, for those who watch it; None: its branch, or drawn at random.
          linker: a `Linker`: `IMAGE#NAME` in questions stands for what a library has.
          retriever: what looks for chunks while an answer is made; see `ask`.
          around: what stands in front of and behind every question.
          chat: lays everything out as one message of a user by the checkpoint's chat template: what that puts in front
            is the lead, with a `lead` that is a text as the system prompt, and the rest stands around every question.
          pages, page_size, dtype: of the pool; see `PrivateRuntime`.
          largest_image: bytes that an image may have, as a file and as pixels: a number, or such as "64 MiB".
          memory: bytes that are kept of what has left (tokens and pixels, the oldest goes first), so that `recall`
            need not be given it again.

        Raises:
          SessionError: a backbone, store, keep or runtime that is none or does not belong. What adding the lead raises.
        """
        _check(backbone, store, keep, runtime, linker)
        _check_settings(name, around, costs, retriever)
        largest_image = size_of(largest_image, "session: largest_image", refused=SessionError)
        memory = size_of(memory, "session: memory", refused=SessionError)
        if not isinstance(chat, bool):
            raise SessionError(f"session: chat {chat!r:.80}; expected True or False")
        check_certificate(certificate, goal, backbone.fingerprint)
        if chat:
            lead, around = framed(backbone, lead, around)
        if runtime is None:
            options: dict[str, Any] = {"pages": pages, "page_size": page_size, "dtype": dtype, "rank": rank}
            owners = RuntimeRefCount(PrivateRuntime(backbone, store, **options), True)
        else:
            owners = RuntimeRefCount(runtime, False)
        first = [] if lead is None or isinstance(lead, int) else list(lead) if _is_several(lead) else [lead]
        pinned = lead if isinstance(lead, int) else len(first) or None
        numbers = Costs.of(backbone, owners.runtime.executor.dtype)
        window = Window.empty(numbers, lead=pinned, promise=promise, branch=branch)
        how: dict[str, Any] = {"linker": linker, "retriever": retriever, "around": around, "goal": goal, "chat": chat}
        how |= {"largest_image": largest_image, "memory": memory, "certificate": certificate, "costs": costs}
        how |= {"uncertified": uncertified}
        self._set_up(name or branch or secrets.token_hex(8), owners, window, keep, **how)
        try:
            for thing in first:
                self.add(thing)
        except BaseException:
            self.close()
            raise

    def _set_up(self, name: str, owners: RuntimeRefCount, window: Window, keep: int | None, **how: Any) -> None:
        self.keep = keep
        for word in SETTINGS:
            setattr(self, word, how[word])
        if owners.runtime.former is not None and (self.certificate is not None or self.uncertified):
            owners.runtime.former.form_patches(RANK)
        self._ways = {}
        self._answers: weakref.WeakSet[Answer] = weakref.WeakSet()
        self._hold_nothing(name, owners, window)

    # ------------------------------------------------------------------------------------------- what is seen

    def fidelity(self, id: str) -> Fidelity:
        """How truly a piece is served: "exact", "survivor" or "approximate" (`Window.fidelity`)."""
        return self._window.fidelity(self._piece(id))

    def __len__(self) -> int:
        return len(self._window)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._names.get(id, id) in self._window

    def __repr__(self) -> str:
        return f"Session({'closed, ' if self._closed else ''}keep={self.keep}, {self._window!r})"

    # ------------------------------------------------------------------------------------- what comes and goes

    @outliving_the_pool
    def add(self, thing: Any, *, id: str | None = None, order_free: bool = False, kind: Kind | None = None) -> str:
        """Places an image, frames or a text behind all others; where `keep` are there the oldest chunk leaves.

        What left and is given again comes back, as `recall` brings it. The same content again while it is there is a
        second piece.

        Args:
          thing: an image (the `pathlib.Path` of its file, that file's bytes, a PIL image or uint8 pixels); several of
            them as one chunk (a clip); a text, which is a `Text` where it looks like a file's name; or token ids.
          id: the session's name for it; None: the digest of its content.
          order_free: a chunk that `reorder` may move.
          kind: "chunk" or "text" (it cannot be recalled, and leaves with the chunk behind it); None: "text" of texts.

        Returns:
          Its name.

        Raises:
          SessionClosedError. SessionError: a name that stands for something else. ImageError, InputError: what cannot
          be read. PoolError: no room. What the backbone raises.
        """
        self._expect_open()
        read = thing_of(self.backbone, thing, self.largest_image)
        with self._lock:
            self._expect_open()
            back = self._left(read, id)
            if back is not None:
                return self._bring_back(back, read)
            with self._coming_in(read, id, order_free, kind) as known:
                self._bring(known)
            self._tell("add", known, read.items, keep=self.keep, **_text_of(read))
            return known.name

    @outliving_the_pool
    def recall(self, thing: Any) -> str:
        """Brings a chunk back that left: by its name, or by what it shows; where `keep` are there the oldest leaves.

        What is in the window stays as it is.

        Returns:
          Its name.

        Raises:
          SessionError: nothing by this name or content was ever added, or what is left of it does not suffice: give the
          image again. Else as `add`.
        """
        self._expect_open()
        named = isinstance(thing, str) and (thing in self._names or thing in self._known)
        read = None if named else thing_of(self.backbone, thing, self.largest_image)
        with self._lock:
            self._expect_open()
            known = self._known[self._piece(thing)] if read is None else self._left(read, None) or self._shows(read)
            if known is None:
                shown = brief(thing) if isinstance(thing, str) else f"a {type(thing).__name__}"
                left = self._listed(self.gone)
                raise SessionError(f"recall: {shown!r:.80} was never added; expected one that left: {left}")
            return known.name if known.entry.id in self._window else self._bring_back(known, read)

    @outliving_the_pool
    def slide(self, keep: int) -> tuple[str, ...]:
        """Takes out all but the last `keep` chunks behind the lead. Returns the names of the chunks that left.

        Raises:
          SessionClosedError. WindowError: a negative number, or none.
        """
        return self._leave("slide", lambda: self._window.slide(keep), keep=keep)

    @outliving_the_pool
    def evict(self, id: str) -> tuple[str, ...]:
        """Takes a piece out. Returns its name where it is a chunk, which can be recalled.

        Raises:
          SessionClosedError. SessionError: an unknown name. WindowError: a piece of the lead, or one that has left.
        """
        with self._lock:
            self._expect_open()
            known = self._known[self._piece(id)]
            return self._leave("evict", lambda: self._window.evict(known.entry.id), chunk=known.name)

    @outliving_the_pool
    def replace(self, id: str, thing: Any, *, name: str | None = None, order_free: bool = False) -> str:
        """Puts something in the place of a piece, which leaves. What stands behind has not seen it.

        Returns:
          The name of what came.

        Raises:
          As `add`; and SessionError: an unknown name. WindowError: a piece of the lead.
        """
        self._expect_open()
        read = thing_of(self.backbone, thing, self.largest_image)
        with self._lock:
            self._expect_open()
            old = self._known[self._piece(id)]
            with self._coming_in(read, name, order_free) as known:
                self._run(*self._window.replace(old.entry.id, known.entry))
            self._tell("replace", known, read.items, replaced=old.name, **_text_of(read))
            return known.name

    @outliving_the_pool
    def reorder(self, ids: Iterable[str]) -> None:
        """Puts order-free chunks into another order: the places of those that are named are filled in this order.

        What moves is turned, and approximate where it stands behind what it was not made behind.

        Raises:
          SessionClosedError. SessionError: an unknown name. WindowError: a piece that is not order-free, or pinned.
        """
        with self._lock:
            self._expect_open()
            pieces = [self._piece(id) for id in names_of(ids, "reorder")]
            self._run(*self._window.reorder(pieces))
            self._tell("reorder", order=tuple(self._name(piece) for piece in pieces))

    @outliving_the_pool
    def fork(self, *, keep: int | None = None) -> "Session":
        """Starts a side branch: a session that shares all KV with this one until one of the two changes a piece.

        Args:
          keep: of the branch; None: as this one.

        Raises:
          SessionClosedError. SessionError: a keep that is none.
        """
        _check_keep(keep)
        with self._lock:
            self._expect_open()
            branch = self._fork()
            branch.keep = self.keep if keep is None else keep
            branch.watchers = list(self.watchers)
            self._tell("fork", branch=branch.name)
            return branch

    def _fork(self) -> "Session":
        window, edits = self._window.fork(secrets.token_hex(8))
        self.runtime.run(window, edits)
        branch = object.__new__(Session)
        how = {word: getattr(self, word) for word in SETTINGS}
        name = f"{self.name}/{window.branch.rpartition('/')[2]}"
        branch._set_up(name, self._owners, window, self.keep, **how)
        branch._names, branch._used, branch._ways = dict(self._names), self._used.copy(), dict(self._ways)
        for id, known in self._known.items():
            branch._known[id] = PieceRecord(known.entry, known.name, known.thing)
            if known.held is not None:
                branch._hold(branch._known[id], known.held)
        return branch

    def close(self) -> None:
        """Lets go of everything; answers that are not read to their end are ended. Closing twice is allowed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tell("close")
            for answer in list(self._answers):
                answer.close()
            self.runtime.release(self._window.branch)
            for known in self._known.values():
                self._let_go(known)
            self._owners.leave()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> Stats:
        """Counts what was done so far: `print(session.stats())`."""
        with self._lock:
            window, former = self._window, self.runtime.former
            with self.runtime.locked():
                books = self.runtime.executor.books.allocator
                pages, free = books.pages, books.free_pages
            fidelity: dict[str, int] = {}
            for piece in window.pieces:
                fidelity[piece.fidelity] = fidelity.get(piece.fidelity, 0) + 1
            return Stats(
                **self._counts.words,
                fidelity=fidelity,
                tokens_held=window.tokens,
                pages=pages,
                free_pages=free,
                formed=None if former is None else former.done,
            )

    # -------------------------------------------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _coming_in(
        self, read: SessionInput, id: str | None, order_free: bool, kind: Kind | None = None
    ) -> Iterator[PieceRecord]:
        """Names what comes in and holds it meanwhile: it is entered once it did, and let go of where that fails."""
        if kind is None:
            kind = "text" if read.textual and not order_free else "chunk"
        name, piece_id = self._names_for(read, id)
        tokens = self._embedded(read)
        known = PieceRecord(tokens.entry(piece_id, read, kind, order_free), name, read)
        self._hold(known, tokens)
        try:
            yield known
        except BaseException:
            self._let_go(known)
            raise
        self._enter(known)
        self._counts.add("added")
        self._settled()

    def _shows(self, read: SessionInput) -> PieceRecord | None:
        """The last piece of the window that shows this; None where none does."""
        shown = [piece.entry.id for piece in self._window.pieces if piece.entry.content == read.content]
        return self._known[shown[-1]] if shown else None

    def _bring_back(self, known: PieceRecord, read: SessionInput | None) -> str:
        if known.thing is None:
            known.thing = read
        self._bring(known)
        self._counts.add("recalled")
        self._settled()
        self._tell("recall", known, keep=self.keep)
        return known.name

    def _leave(self, op: Op, change: Callable[[], tuple[Window, Edits]], **fields: Any) -> tuple[str, ...]:
        with self._lock:
            self._expect_open()
            before = set(self.gone)
            window, edits = change()
            if edits:
                self._run(window, edits)
            left = tuple(name for name in self.gone if name not in before)
            self._settled()
            self._tell(op, **fields)
            return left


def _text_of(read: SessionInput) -> dict[str, str]:
    """The text of a thing that is one, for those who watch."""
    return {"text": "".join(read.items)} if read.items and all(isinstance(item, str) for item in read.items) else {}


def _is_several(lead: Any) -> bool:
    return isinstance(lead, list | tuple) and not all(isinstance(each, int) for each in lead)


def _check_keep(keep: Any) -> None:
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise SessionError(f"session: keep {keep!r:.80}; expected how many chunks stay, 1 or more, or None")


def _check_settings(name: Any, around: Any, costs: Any, retriever: Any) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise SessionError(f"session: name {name!r:.80}; expected a text, or None")
    marks = isinstance(around, tuple | list) and len(around) == 2 and all(isinstance(each, str) for each in around)
    if not marks:
        raise SessionError(f"session: around {around!r:.80}; expected two texts, in front of and behind a question")
    if costs is not None and not isinstance(costs, DeviceCosts):
        raise SessionError(f"session: costs {costs!r:.80}; expected DeviceCosts.read(…), or None")
    if retriever is not None and not callable(retriever) and not hasattr(retriever, "search"):
        raise SessionError(f"session: retriever {retriever!r:.80}; expected a function, or one with `search`, or None")


def _check(backbone: Any, store: Any, keep: Any, runtime: Any, linker: Any) -> None:
    """Refuses what no session can be made of."""
    if not all(hasattr(backbone, word) for word in ("fingerprint", "prepare", "embed", "prefill")):
        raise SessionError(f"session: backbone of type {type(backbone).__name__}; expected what models.load gives")
    if store is not None and not isinstance(store, PatchStore):
        raise SessionError(f"session: store {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")
    _check_keep(keep)
    if runtime is not None and not isinstance(runtime, Runtime):
        raise SessionError(f"session: runtime {runtime!r:.80}; expected one of another session, or None")
    for what, other in (
        ("runtime", None if runtime is None else runtime.backbone.fingerprint),
        ("linker", None if linker is None else getattr(linker, "backbone", f"{linker!r:.16}")),
    ):
        if other is not None and other != backbone.fingerprint:
            raise SessionError(
                f"session: {what} of backbone {other[:16]!r}; expected {backbone.fingerprint[:16]!r}, this one's"
            )
    if runtime is not None and store is not None and runtime.store is not store:
        raise SessionError("session: a store beside a runtime that has another one; expected the runtime's, or None")
