"""`Executor`: brings the KV of windows into one paged pool, and runs questions behind them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import Backbone, Output, Tokens, check_tokens
from ..cache import Chunk, Patch, brief, identity
from ..core import PARTS, Paged, PhaseFreeKV, as_start, bucket, check_positions, zero_padded
from ..errors import InputError, NotFiniteError, PoolError, PoolLostError, WindowError
from ..pool import (
    Pools,
    SlotAllocator,
    enlarged,
    make_pool,
    put_rows,
    read_rows,
    rotate_pieces,
    trimmed,
    with_source,
    write_piece,
)
from .costs import Action, Costs, Step
from .fused import packed_tokens
from .sources import Encodings, PatchStore, Sources
from .states import Composed, Compositions, State, make_state
from .window import Piece, Window

PrefillObserver = Callable[[Window, Piece, Tokens, int, Mapping[str, Array]], None]
"""Called after each prefill: the window, the piece, its tokens at local positions, how many of them count, and its
phase-free KV, {channel: [L,B,T',K,H]}."""

UNPLACED = -1
"""Start of a piece whose keys a rotation that failed may have moved."""


@dataclasses.dataclass(frozen=True, eq=False)
class Resident:
    """A piece of one branch in the pool.

    Attributes:
      made: identity of its KV.
      slots: [T], one per token that counts, in order.
      local: positions relative to its start, float32 [T] or [T, A].
      start: where its keys lie now, or `UNPLACED`; the window says where they should.
      state: its transition in a hybrid model; None in others.
    """

    made: str
    slots: Int[np.ndarray, " T"]
    local: Float[np.ndarray, "*positions"]
    start: int
    state: State | None = None


@dataclasses.dataclass(eq=False)
class FusedQuestion:
    """A question asked behind a window: tokens at positions from 0, padded, how many count, and its logits [1,1,V]."""

    tokens: Tokens
    length: int
    logits: Float[Array, "1 1 V"] | None = None


class Executor:
    """Executor of windows on one paged pool, which the windows of one loop and their forks share.

    `run` compares what a branch holds with a window by identities, and does what is missing. New KV goes to slots that
    nobody owns and is adopted at the end, so a run that fails needs no undo; where keys lie is a cache that the next
    call mends, because keys are always rotated from their phase-free source. The pool is donated from launch to launch:
    the `Paged` that `context` returns is valid until the next `run`.

        window = window.append(entry)
        executor.provide(entry.id, tokens=tokens)
        executor.run(window)
        answer = executor.generate(window, question, 32)

    Attributes:
      costs: of the backbone, in the dtype of the pool.
      sources: inputs of pieces. provide, forget: its methods.
      observers: called after each prefill.
      slots: who owns which slot of the pool.
      pools: the vectors, and the phase-free source of those that rotate.
      branches: by branch and id, what is in the pool. Replaced, never changed: other threads may read it.
    """

    def __init__(
        self,
        backbone: Backbone,
        pages: int,
        page_size: int = 16,
        dtype: jax.typing.DTypeLike | None = None,
        *,
        store: PatchStore | None = None,
        encoding: str | None = None,
        padded: bool = False,
    ):
        """Allocates the pool.

        Args:
          dtype: of the pool; None: bfloat16.
          store: where canonicals, patches and stored prefills are fetched from.
          encoding: word of the few bits in which canonicals, and patches of them, are kept; None: as they were
            prefilled. They stay packed, and are decoded where they are placed.
          padded: rows of whole lanes, as TPUs require.

        Raises:
          PoolError: no pages, or an empty page.
        """
        self.backbone, self.layout = backbone, backbone.layout
        self.buckets = getattr(backbone, "buckets", None)
        self.dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
        self.costs = Costs.of(backbone, self.dtype)
        self.sources = Sources(backbone, store, dtype=self.dtype, encoding=encoding)
        self.provide, self.forget = self.sources.provide, self.sources.forget
        self.observers: list[PrefillObserver] = []
        self._padded = padded
        self._compositions = Compositions(self.layout)
        self.slots = SlotAllocator(pages, page_size)
        self.branches: dict[str, dict[str, Resident]] = {}
        self.renew()

    @property
    def store(self) -> PatchStore | None:
        """Where canonicals, patches and stored prefills are fetched from."""
        return self.sources.store

    # -------------------------------------------------------------------------------------------------------- pieces

    def run(self, window: Window) -> Step:
        """Brings the KV of a window into the pool. Returns what that took.

        A run that fails changes neither the windows nor their KV. If a launch fails after the pool was donated to it
        (out of memory, say), the pool is lost, and every call raises until `renew`.

        Raises:
          PoolError: no room. InputError: tokens, a canonical, patch or prefill that was not provided and that no store
          has. PatchMismatchError: a chunk or patch of another content. WindowError: a window of another backbone, or
          pieces whose front has changed since they were placed: run every window. NotFiniteError: a forward whose
          logits are NaN. PoolLostError: the pool is lost. What the backbone raises.
        """
        return self._bring(window, None)

    def ask(self, window: Window, tokens: Tokens, length: int | None = None) -> tuple[Float[Array, "1 1 V"], Step]:
        """Brings the KV of a window and asks behind it. Nothing of the question is kept.

        The window's last piece, where it is prefilled, and the question run in one forward.

        Args:
          tokens: the question, at positions from 0.
          length: how many count, of tokens padded to a bucket.

        Returns:
          The logits behind the question's last token, and what was done.

        Raises:
          As `run`, of a question too; then everything is as it was.
        """
        question = FusedQuestion(*self.question(window, tokens, length))
        step = self._bring(window, question)
        assert question.logits is not None
        return question.logits, step

    def release(self, branch: str) -> None:
        """Releases everything that a branch holds. Idempotent."""
        for resident in self.branches.get(branch, {}).values():
            self.slots.release(resident.slots)
        self.branches = {name: held for name, held in self.branches.items() if name != branch}

    def share(self, window: Window, branch: str) -> None:
        """Makes another branch an owner of a window's KV, in the same slots."""
        residents = {piece.id: resident for piece, resident in zip(window.pieces, self._residents(window), strict=True)}
        for resident in residents.values():
            self.slots.share(resident.slots)
        self.branches = {**self.branches, branch: residents}

    def reserve(self, branch: str, tokens: int) -> Int[np.ndarray, " T"]:
        """Allocates slots to a branch for tokens that follow its window; `release` frees them.

        From then on the branch is no window's.

        Raises:
          PoolError: no room.
        """
        slots = self.slots.allocate(tokens, aligned=True)
        # Ids of pieces are not empty.
        reserved = Resident("", slots, np.zeros(0, np.float32), 0)
        self.branches = {**self.branches, branch: {**self.branches.get(branch, {}), "": reserved}}
        return slots

    def missing_pages(self, window: Window, *, shared: bool = True) -> int:
        """Returns the free pages that a run of a window takes.

        Args:
          shared: counts KV that moves while other branches own it too, and is therefore copied.
        """
        held, size, pages = self._held(window.branch), self.slots.page_size, 0
        for piece in window.pieces:
            resident = held.get(piece.id)
            if resident is None or resident.made != piece.made:
                missing = True
            else:
                missing = shared and resident.start != piece.start and self.slots.owners(resident.slots).max() > 1
            pages += -(-piece.entry.tokens // size) if missing else 0
        return pages

    # ----------------------------------------------------------------------------------------------------- questions

    def context(self, window: Window) -> Paged | None:
        """Returns the window's KV in place: what `backbone.prefill` and `generate` read. None of an empty window.

        Raises:
          WindowError: the pool does not hold the window: it was not run, or another one since.
        """
        return self._context(window.pieces, self._residents(window))

    def prefill(self, window: Window, tokens: Tokens, length: int | None = None, **options: Any) -> Output:
        """Runs tokens behind a window and keeps nothing; their positions begin at its `next_start`.

        Args:
          tokens: at positions from 0.
          length: how many count, of tokens padded to a bucket.
          options: of `backbone.prefill`; `logits` is "last", "all", or indices [1,n].

        Raises:
          WindowError: as `context`. What the backbone raises.
        """
        tokens, length = self.question(window, tokens, length)
        # "last" is the last token that counts, which padding may follow.
        logits = options.get("logits", "last")
        if isinstance(logits, str) and logits == "last":
            options["logits"] = np.full((len(tokens.embeddings), 1), length - 1, np.int32)
        if self.layout.parts:
            options["lengths"] = np.full(len(tokens.embeddings), length, np.int32)
        return self.backbone.prefill(tokens, self.context(window), **options)

    def generate(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Int[np.ndarray, "B n"]:
        """Answers behind a window, as `backbone.generate` does; the window stays as it is.

        Args:
          tokens: the question, at positions from 0.
          length: how many count, of tokens padded to a bucket.
          options: of `backbone.generate`.

        Raises:
          WindowError: as `context`. What the backbone raises.
        """
        backbone: Any = self.backbone
        tokens, length = self.question(window, tokens, length)
        lengths = np.full(len(tokens.embeddings), length, np.int32)
        return backbone.generate(tokens, steps, self.context(window), lengths=lengths, **options)

    def stream(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """Answers behind a window token by token, as `backbone.stream` does.

        With the first token the answer has a cache of its own, and the pool may change.

        Raises:
          As `generate`.
        """
        backbone: Any = self.backbone
        tokens, length = self.question(window, tokens, length)
        lengths = np.full(len(tokens.embeddings), length, np.int32)
        return backbone.stream(tokens, steps, self.context(window), lengths=lengths, **options)

    def question(self, window: Window, tokens: Tokens, length: int | None) -> tuple[Tokens, int]:
        """Pads a question and moves it behind a window. Returns it, and how many of its tokens count.

        Raises:
          InputError: more than there are, or none.
        """
        check_tokens(tokens, "question")
        size = tokens.embeddings.shape[1]
        count = size if length is None else length
        if not 1 <= count <= size:
            raise InputError(f"question.length: got {length} of {size} tokens; expected 1 to {size}")
        # Positions of padding do not matter: nothing that counts sees it.
        return tokens.pad(max(size, bucket(self.buckets, count))).shift(window.next_start), count

    # ------------------------------------------------------------------------------------------------------- the pool

    def read(self, window: Window, id: str) -> PhaseFreeKV:
        """Copies a piece's phase-free KV out of the pool, {channel: [L,T,K,H]}, with its transition in a hybrid model.

        Raises:
          WindowError: the pool does not hold the window.
        """
        resident = self._residents(window)[window.index(id)]
        kv = self._phase_free(resident, bucket(self.buckets, len(resident.slots)))
        rows = {channel.name: kv[channel.name][:, : len(resident.slots)] for channel in self.layout.token_channels}
        return PhaseFreeKV({**kv, **rows})

    def snapshot(self, window: Window) -> list[dict[str, np.ndarray]]:
        """Copies a window's pieces to the host: for each its "local", "engine.k", "source.k", "state.map" …

        Raises:
          WindowError: the pool does not hold the window.
        """
        snapshots = []
        for resident in self._residents(window):
            arrays, length = {"local": resident.local}, len(resident.slots)
            rows = read_rows(self.pools, self._padded_slots(resident.slots))
            for side, vectors in zip(Pools._fields, rows, strict=True):
                # Padding of buckets is cut off; that of lanes stays, for a pool of the same widths.
                arrays |= {f"{side}.{name}": np.asarray(value)[:, :length] for name, value in vectors.items()}
            arrays |= {f"state.{name}": np.asarray(value) for name, value in (resident.state or {}).items()}
            snapshots.append(arrays)
        return snapshots

    def restore(self, window: Window, snapshots: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Writes the pieces of a window into the pool, where its branch holds nothing, bit for bit.

        Raises:
          WindowError: pieces that are not the window's, or of another pool's channels, widths or dtype. PoolError: no
          room. PoolLostError: the pool is lost. Then nothing has changed.
        """
        self._check(window)
        if self.branches.get(window.branch) or len(snapshots) != len(window.pieces):
            raise WindowError(
                f"restore: got {len(snapshots)} pieces for branch {window.branch!r}; expected "
                f"{len(window.pieces)}, and a branch that holds nothing"
            )
        for piece, arrays in zip(window.pieces, snapshots, strict=True):
            self._check_snapshot(piece, arrays)
        self.check_pool()
        fresh = self._allocate(window.pieces)
        residents = {}
        try:
            for piece, slots, arrays in zip(window.pieces, fresh, snapshots, strict=True):
                size = bucket(self.buckets, len(slots))
                sides = []
                for side in Pools._fields:
                    rows = _named(arrays, side)
                    sides.append({name: jnp.asarray(zero_padded(value, 1, size)) for name, value in rows})
                self.pools = put_rows(self.pools, self._padded_slots(slots), Pools(*sides), np.int32(len(slots)))
                state = {name: jnp.asarray(value) for name, value in _named(arrays, "state")} or None
                residents[piece.id] = Resident(piece.made, slots, arrays["local"], piece.start, state)
        except BaseException as error:
            for slots in fresh:
                self.slots.release(slots)
            self.check_pool(error)
            raise
        self.branches = {**self.branches, window.branch: residents}

    def renew(self) -> None:
        """Allocates the pool again and releases every branch; what was provided stays.

        Run `window.anew()` afterwards.
        """
        pages, page_size = self.slots.pages, self.slots.page_size
        shardings = getattr(self.backbone, "kv_shardings", None)
        engine = make_pool(self.layout, pages, page_size, self.dtype, padded=self._padded, shardings=shardings)
        self.pools = with_source(self.layout, engine)
        self.slots, self.branches = SlotAllocator(pages, page_size), {}
        self._compositions.clear()

    def enlarge(self, pages: int) -> None:
        """Appends pages to the pool, up to this number; what it holds stays. Programs compile for the new size.

        Raises:
          PoolError: fewer pages than there are. PoolLostError: the pool is lost.
        """
        self.check_pool()
        slots = self.slots.enlarged(pages)
        self.pools = enlarged(self.pools, pages - self.slots.pages)
        self.slots = slots

    @property
    def lost(self) -> bool:
        """Whether a launch failed after the pool was donated to it."""
        return any(value.is_deleted() for value in jax.tree.leaves(self.pools))

    def check_pool(self, cause: BaseException | None = None) -> None:
        """Raises PoolLostError if the vectors are lost."""
        if self.lost:
            raise PoolLostError(
                "executor: got a pool whose vectors were lost in a failed launch; expected `renew()`, then a run of "
                "`window.anew()`"
            ) from cause

    @property
    def composed(self) -> frozenset[tuple[str, ...]]:
        """Identities of the fronts whose transitions are composed, in a hybrid model."""
        return self._compositions.recent

    @property
    def state_bytes(self) -> int:
        """Bytes beside the pool in a hybrid model: of transitions of pieces, and of compositions that are kept."""
        residents = [resident for held in self.branches.values() for resident in held.values()]
        arrays = {id(value): value.nbytes for own in residents for value in (own.state or {}).values()}
        return sum(arrays.values()) + self._compositions.nbytes

    # --------------------------------------------------------------------------------------------------------- inside

    def _bring(self, window: Window, question: FusedQuestion | None) -> Step:
        self._check(window)
        self.check_pool()
        held = self._held(window.branch)
        stays = [piece.id in held and held[piece.id].made == piece.made for piece in window.pieces]
        # All that can be refused is refused before anything is written.
        makings = [self._making(window, index) for index, there in enumerate(stays) if not there]
        fresh = self._allocate([making.piece for making in makings])
        step, taken = list[Action](), list(fresh)
        try:
            survivors = {piece.id: held[piece.id] for piece, there in zip(window.pieces, stays, strict=True) if there}
            residents = self._at_places(window, survivors, step)
            taken += [residents[id].slots for id in survivors if residents[id].slots is not survivors[id].slots]
            for making, slots in zip(makings, fresh, strict=True):
                last = making.piece is window.pieces[-1]
                residents[making.piece.id] = self._make(
                    window, making, slots, residents, held, step, question if last else None
                )
            ordered = {piece.id: residents[piece.id] for piece in window.pieces}
            if question is not None and question.logits is None:
                self._answer(question, window.pieces, list(ordered.values()), step)
        except BaseException as error:
            for slots in taken:
                self.slots.release(slots)
            self.check_pool(error)
            raise

        self._adopt(window.branch, ordered)
        for making in makings:
            if making.kv is not None:
                for observer in self.observers:
                    observer(window, making.piece, making.tokens, making.piece.entry.tokens, making.kv)
        return tuple(step)

    def _adopt(self, branch: str, residents: dict[str, Resident]) -> None:
        """Makes a branch hold these pieces; slots that it had for others, or for copies of them, are released."""
        before = self.branches.get(branch, {})
        self.branches = {**self.branches, branch: residents}
        for id, resident in before.items():
            if id not in residents or residents[id].slots is not resident.slots:
                self.slots.release(resident.slots)

    def _held(self, branch: str) -> dict[str, Resident]:
        """Returns what a branch holds; a new fork first becomes an owner of what its parent does."""
        if branch not in self.branches and "/" in branch:
            parent = self.branches.get(branch.rpartition("/")[0], {})
            for resident in parent.values():
                self.slots.share(resident.slots)
            self.branches = {**self.branches, branch: dict(parent)}
        return self.branches.get(branch, {})

    def _residents(self, window: Window) -> list[Resident]:
        """Returns a window's pieces in the pool, their keys in place.

        Raises:
          WindowError: the pool does not hold the window.
        """
        self._check(window)
        self.check_pool()
        held = self._held(window.branch)
        made = {id: resident.made for id, resident in held.items()}
        if made != {piece.id: piece.made for piece in window.pieces}:
            wrong = next((piece.id for piece in window.pieces if made.get(piece.id) != piece.made), None)
            found = "more pieces" if wrong is None else f"other KV of {brief(wrong)!r}"
            raise WindowError(
                f"executor: got {found} in branch {window.branch!r}; expected this window to be run first"
            )
        residents = self._at_places(window, held, [])
        self._adopt(window.branch, residents)
        return [residents[piece.id] for piece in window.pieces]

    def _check(self, window: Window) -> None:
        """Refuses a window of another backbone."""
        fingerprint = self.backbone.fingerprint
        if window.backbone != fingerprint:
            raise WindowError(
                f"executor: got a window of backbone {window.backbone[:16]!r}; expected {fingerprint[:16]!r}"
            )

    def _allocate(self, pieces: Sequence[Piece]) -> list[Int[np.ndarray, " _"]]:
        """Takes free slots for pieces, all or none, each from a page of its own.

        Raises:
          PoolError: too few are free.
        """
        taken: list[Int[np.ndarray, " _"]] = []
        for piece in pieces:
            try:
                taken.append(self.slots.allocate(piece.entry.tokens, aligned=True))
            except PoolError as error:
                for slots in taken:
                    self.slots.release(slots)
                raise PoolError(f"piece {brief(piece.id)!r}: {error}") from None
        return taken

    # ---------------------------------------------------------------------------------------------------- making KV

    def _making(self, window: Window, index: int) -> "_Making":
        """Gathers what a piece is made of: tokens, or a canonical, its patch, a stored prefill.

        Raises:
          InputError, PatchMismatchError: as `run`. WindowError: its front has changed since it was placed.
        """
        piece, sources = window.pieces[index], self.sources
        id, content = piece.id, piece.entry.content
        if piece.method == "prefill":
            front = tuple(other.made for other in window.pieces[:index])
            if piece.made != identity(piece.entry.key, "prefill", front):
                raise WindowError(f"executor: got {brief(id)!r} behind another front; expected every window to be run")
            tokens, length = sources.tokens(id, content)
            if length != piece.entry.tokens:
                raise InputError(f"prefill: got {length} tokens of {brief(id)!r}; expected {piece.entry.tokens}")
            making = _Making(piece, tokens, np.asarray(tokens.positions[0], np.float32)[:length])
        elif piece.method == "restored":
            chunk = sources.prefill(id, content, piece.source or piece.made, piece.entry.tokens)
            making = _Making(piece, chunk=chunk, fetched=[self.costs.fetch(id, chunk.length)])
        else:
            making = self._placing(window, piece)
        if making.chunk is not None:
            making.local = np.asarray(making.chunk.local, np.float32)[: making.chunk.length]
            if making.chunk.length != piece.entry.tokens:
                raise WindowError(
                    f"{piece.method}: got {making.chunk.length} tokens of {brief(id)!r}; expected {piece.entry.tokens}"
                )
        check_positions(self.layout.rope, making.local, np.asarray(piece.start, np.int32))
        return making

    def _placing(self, window: Window, piece: Piece) -> "_Making":
        """Gathers a canonical and the patch that serves it."""
        id, content, sources, patch, fetched = piece.id, piece.entry.content, self.sources, None, list[Action]()
        encodings: Encodings | None = None
        if piece.method == "patch":
            patch, read = sources.patch(id, content, piece.source or "", window.target(id))
            note = sources[id].notes[piece.source or ""]
            fetched += [Action("fetch", id, 0, note.nbytes, 0)] if read else []
            encodings = (patch.metadata.encoding,)
        elif piece.method == "leading":
            # At the front of a window the canonical stands for the prefill itself.
            encodings = (None,)
        chunk, read = sources.canonical(id, content, encodings)
        fetched += [self.costs.fetch(id, chunk.length)] if read and piece.base is None else []
        return _Making(piece, chunk=chunk, patch=patch, fetched=fetched)

    def _make(
        self,
        window: Window,
        making: "_Making",
        slots: Int[np.ndarray, " T"],
        residents: Mapping[str, Resident],
        held: Mapping[str, Resident],
        step: list[Action],
        question: FusedQuestion | None,
    ) -> Resident:
        """Computes a piece's KV, or takes it from where it is, and writes it to slots of its own."""
        piece, costs, id = making.piece, self.costs, making.piece.id
        step += making.fetched
        factors: Any = {}
        options: dict[str, Any] = {}
        if making.chunk is None:
            index = window.index(id)
            front = [residents[other.id] for other in window.pieces[:index]]
            kv = self._forward(making, window.pieces[:index], front, step, question)
        else:
            kv, patch = making.chunk.kv, making.patch
            if patch is None:
                step.append(costs.copy(id, piece.entry.tokens))
            else:
                step.append(costs.patch(id, piece.entry.tokens, self.sources[id].notes[piece.source or ""]))
                factors = patch.operands
                layers = patch.metadata.layers
                options = {} if len(layers) == self.layout.layers else {"layers": layers}
            if piece.base is not None:
                # A removal patch is added to what the piece has in the pool; the canonical tells the shapes.
                if id not in held or held[id].made != piece.base:
                    raise WindowError(f"patch: got a removal patch of {brief(id)!r}; expected its base in the pool")
                kv = self._phase_free(held[id], making.chunk.tokens)
        return self._written(making, slots, kv, factors, options)

    def _written(
        self, making: "_Making", slots: Int[np.ndarray, " T"], kv: Any, factors: Any, options: dict[str, Any]
    ) -> Resident:
        """Writes R(start + local) · (KV + u v) to slots, KV + u v to their source and the piece's state."""
        layout, piece = self.layout, making.piece
        names = [channel.name for channel in layout.parts]
        state = None
        if names:
            parts, own = {name: kv[name] for name in names}, {name: factors[name] for name in names if name in factors}
            state = make_state(layout, parts, own, **options)
        rows = {name: value for name, value in kv.items() if name not in names}
        factors = {name: value for name, value in factors.items() if name not in names}
        # Slots of padding are 0, and never written: the launch knows how many tokens count.
        size = next(iter(rows.values())).shape[-3]
        padded, local = zero_padded(slots, 0, size), zero_padded(making.local, 0, size)
        start, length = np.asarray(as_start(layout.rope, piece.start)), np.int32(len(slots))
        self.pools = write_piece(layout, self.pools, padded, local, start, length, rows, factors, **options)
        return Resident(piece.made, slots, making.local, piece.start, state)

    def _forward(
        self,
        making: "_Making",
        pieces: Sequence[Piece],
        front: Sequence[Resident],
        step: list[Action],
        question: FusedQuestion | None,
    ) -> Mapping[str, Float[Array, "L 1 T _ _"]]:
        """Runs a piece behind those in front, with the question behind it if there is one.

        In a hybrid model the question has a forward of its own: that of both returns the transition of both.

        Raises:
          NotFiniteError: NaN or infinity. What the backbone raises.
        """
        piece, costs = making.piece, self.costs
        count, behind = piece.entry.tokens, sum(len(resident.slots) for resident in front)
        tokens, context = making.tokens.shift(piece.start), self._context(pieces, front, step)
        size = tokens.embeddings.shape[1]
        prefill, options = self.backbone.prefill, dict[str, Any]()
        if self.layout.parts:
            # Attention does not see padding behind the tokens; a state would go through it.
            options["lengths"], question = np.array([count], np.int32), None
        if question is not None:
            # Padding of both follows the question, so no position that counts sees it.
            tokens = packed_tokens(tokens, count, question.tokens, question.length)
            prefill = getattr(self.backbone, "prefill_padded", prefill)
        last = count - 1 if question is None else count + question.length - 1
        out = prefill(tokens, context, logits=np.array([[last]], np.int32), **options)
        _check_finite(out.logits, f"prefill of piece {brief(piece.id)!r}")

        step.append(costs.prefill(piece.id, count, behind))
        if question is not None:
            question.logits = out.logits
            # One row of logits is computed, which the prefill counts.
            step.append(costs.question(question.length, behind + count, logits=0))
        # KV of a question behind is no one's, and is not what observers see.
        parts = {name: value for name, value in out.kv.items() if name in PARTS}
        making.kv = {**{name: value[:, :, :size] for name, value in out.kv.items()}, **parts}
        return out.kv

    def _answer(
        self, question: FusedQuestion, pieces: Sequence[Piece], residents: Sequence[Resident], step: list[Action]
    ) -> None:
        """Runs a question behind pieces in a forward of its own.

        Raises:
          NotFiniteError: NaN or infinity. What the backbone raises.
        """
        context, last = self._context(pieces, residents, step), np.array([[question.length - 1]], np.int32)
        options: Any = {"lengths": np.array([question.length], np.int32)} if self.layout.parts else {}
        out = self.backbone.prefill(question.tokens, context, logits=last, **options)
        _check_finite(out.logits, "question")
        question.logits = out.logits
        step.append(self.costs.question(question.length, sum(piece.entry.tokens for piece in pieces)))

    # ------------------------------------------------------------------------------------------------ reading, rotating

    def _context(
        self, pieces: Sequence[Piece], residents: Sequence[Resident], step: list[Action] | None = None
    ) -> Paged | None:
        """Returns the KV of pieces as a backbone reads it; None without pieces."""
        if not pieces:
            return None
        composed: Composed | None = None
        if self.layout.parts:
            mades, lengths = [piece.made for piece in pieces], [piece.entry.tokens for piece in pieces]
            states = [resident.state or {} for resident in residents]
            composed, count = self._compositions.of(mades, states, lengths)
            if step is not None and count:
                step.append(self.costs.compose(pieces[-1].id, count))
        slots = np.concatenate([resident.slots for resident in residents])
        return Paged.of(self.pools.engine, slots, self.buckets, composed)

    def _at_places(self, window: Window, held: Mapping[str, Resident], step: list[Action]) -> dict[str, Resident]:
        """Rotates pieces whose keys lie elsewhere than their window says.

        What other branches own is rotated into new slots, which nobody owns before `_adopt`.
        """
        moves, copies = list[tuple[Piece, Resident]](), list[tuple[Piece, Resident]]()
        for piece in window.pieces:
            resident = held.get(piece.id)
            if resident is not None and resident.start != piece.start:
                check_positions(self.layout.rope, resident.local, np.asarray(piece.start, np.int32))
                shared = bool((self.slots.owners(resident.slots) > 1).any())
                (copies if shared else moves).append((piece, resident))
        fresh = self._allocate([piece for piece, _ in copies])
        placed = dict(held)
        try:
            if moves:
                # A rotation that is interrupted leaves keys nobody knows where, and the next one mends them.
                ids = [piece.id for piece, _ in moves]
                self._record(window.branch, {id: dataclasses.replace(held[id], start=UNPLACED) for id in ids})
                self._rotate(moves, [resident.slots for _, resident in moves], whole=False)
                moved = {piece.id: dataclasses.replace(resident, start=piece.start) for piece, resident in moves}
                self._record(window.branch, moved)
                placed |= moved
            if copies:
                self._rotate(copies, fresh, whole=True)
                for (piece, resident), slots in zip(copies, fresh, strict=True):
                    placed[piece.id] = dataclasses.replace(resident, start=piece.start, slots=slots)
        except BaseException:
            for slots in fresh:
                self.slots.release(slots)
            raise
        step += [self.costs.rotate(piece.id, len(resident.slots)) for piece, resident in (*moves, *copies)]
        return placed

    def _record(self, branch: str, residents: Mapping[str, Resident]) -> None:
        """Notes where pieces of a branch lie, in the slots that they have."""
        self.branches = {**self.branches, branch: {**self.branches[branch], **residents}}

    def _rotate(
        self, group: Sequence[tuple[Piece, Resident]], targets: Sequence[Int[np.ndarray, " _"]], whole: bool
    ) -> None:
        """Rotates pieces from their phase-free source to slots in one launch; `whole`: with all other channels."""
        read = np.concatenate([resident.slots for _, resident in group])
        write = np.concatenate(targets)
        local = np.concatenate([resident.local for _, resident in group])
        # One start per token, and per axis where positions have axes.
        lengths = [len(slots) for slots in targets]
        starts = np.repeat(np.array([piece.start for piece, _ in group], np.int32), lengths)
        if local.ndim > 1:
            starts = np.broadcast_to(starts[:, None], local.shape)
        # Few programs matter more here than padding: powers of two.
        size = len(read) if self.buckets is None else 1 << (len(read) - 1).bit_length()
        arrays = [np.asarray(zero_padded(array, 0, size)) for array in (read, write, local, starts)]
        self.pools = rotate_pieces(self.layout, self.pools, *arrays, np.int32(len(read)), whole=whole)

    def _phase_free(self, resident: Resident, size: int) -> PhaseFreeKV:
        """Returns the phase-free KV of a piece, padded to `size` tokens, with its transition in a hybrid model."""
        rows = read_rows(self.pools, np.asarray(zero_padded(resident.slots, 0, size)))
        # Channels that do not rotate are phase-free in the pool; the source replaces the others.
        return PhaseFreeKV({**trimmed(self.layout, {**rows.engine, **rows.source}), **(resident.state or {})})

    def _padded_slots(self, slots: Int[np.ndarray, " T"]) -> Int[np.ndarray, " N"]:
        return np.asarray(zero_padded(slots, 0, bucket(self.buckets, len(slots))))

    def _check_snapshot(self, piece: Piece, arrays: Mapping[str, np.ndarray]) -> None:
        """Refuses rows of another pool, or of another number of tokens."""
        axes, length = self.layout.rope.axes, piece.entry.tokens
        expected: dict[str, Any] = {"local": ((length,) if axes is None else (length, axes), "float32")}
        for side, vectors in zip(Pools._fields, self.pools, strict=True):
            for name, value in vectors.items():
                expected[f"{side}.{name}"] = ((value.shape[0], length, *value.shape[3:]), str(value.dtype))
        for channel in self.layout.parts:
            shape = (self.layout.depth(channel.name), channel.rows, channel.heads, channel.width)
            expected[f"state.{channel.name}"] = (shape, "float32")
        found = {name: (value.shape, str(value.dtype)) for name, value in arrays.items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                got, wanted = found.get(name), expected.get(name)
                raise WindowError(f"restore: got {name} {got} of piece {brief(piece.id)!r}; expected {wanted}")


@dataclasses.dataclass(eq=False)
class _Making:
    """What a piece is made of, and once a forward has run, its KV."""

    piece: Piece
    tokens: Any = None
    local: Any = None
    chunk: Chunk | None = None
    patch: Patch | None = None
    fetched: list[Action] = dataclasses.field(default_factory=list)
    kv: Mapping[str, Array] | None = None


def _check_finite(logits: Float[Array, "..."], what: str) -> None:
    if not np.isfinite(np.asarray(logits)).all():
        raise NotFiniteError(f"{what}: got NaN or infinity; expected finite logits")


def _named(arrays: Mapping[str, np.ndarray], side: str) -> list[tuple[str, np.ndarray]]:
    """Returns the arrays of one side of a snapshot, by channel."""
    prefix = f"{side}."
    return [(name.removeprefix(prefix), value) for name, value in arrays.items() if name.startswith(prefix)]
