"""`Executor`: brings the KV of windows into one paged pool, and runs questions behind them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import Backbone, Output, Tokens, check_tokens
from ..cache import Chunk, Patch, brief, identity
from ..core import PARTS, Paged, PhaseFreeKV, as_start, bucket, check_positions, zero_padded
from ..errors import InputError, NotFiniteError, PoolError, SessionError
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
from .entry import PatchNote
from .fused import packed_tokens
from .sources import PatchStore, Sources
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

    # -------------------------------------------------------------------------------------------------------- pieces

    def run(self, window: Window, *, observed: bool = True) -> Step:
        """Brings the KV of a window into the pool. Returns what that took.

        A run that fails changes neither the windows nor their KV. If a launch fails after the pool was donated to it
        (out of memory, say), the pool is lost, and every call raises until `renew`.

        Args:
          observed: whether observers are called; not for a trial, of which nothing is to be stored.

        Raises:
          PoolError: no room. InputError: tokens, a canonical, patch or prefill that was not provided and that no store
          has. PatchMismatchError: a chunk or patch of another content. SessionError: a window of another backbone, or
          pieces whose front has changed since they were placed: run every window. NotFiniteError: a forward whose
          logits are NaN. PoolError: the pool is lost. What the backbone raises.
        """
        return self._bring(_Run(window, observed=observed))

    def ask(self, window: Window, tokens: Tokens, length: int | None = None) -> tuple[Float[Array, "1 1 V"], Step]:
        """Brings the KV of a window and asks behind it. Nothing of the question is kept.

        The window's last piece, where it is prefilled, and the question (as `prefill` takes it) run in one forward.

        Returns:
          The logits behind the question's last token, and what was done.

        Raises:
          As `run` and `prefill`; then everything is as it was.
        """
        run = _Run(window, self.question(window, tokens, length))
        step = self._bring(run)
        assert run.logits is not None
        return run.logits, step

    def release(self, branch: str) -> None:
        """Releases everything that a branch holds. Idempotent."""
        for resident in self.branches.get(branch, {}).values():
            self.slots.release(resident.slots)
        self.branches = {name: held for name, held in self.branches.items() if name != branch}

    def share(self, window: Window, branch: str) -> None:
        """Makes another branch an owner of a window's KV, in the same slots."""
        residents = self._residents(window)
        for resident in residents.values():
            self.slots.share(resident.slots)
        self._hold(branch, residents)

    def reserve(self, branch: str, tokens: int) -> Int[np.ndarray, " T"]:
        """Allocates slots to a branch for tokens that follow its window; `release` frees them.

        From then on the branch is no window's.

        Raises:
          PoolError: no room.
        """
        slots = self._pages_for(tokens, "question and answer")
        # Ids of pieces are not empty.
        reserved = Resident("", slots, np.zeros(0, np.float32), 0)
        self._hold(branch, {**self.branches.get(branch, {}), "": reserved})
        return slots

    def missing_pages(self, window: Window, *, shared: bool = True) -> int:
        """Returns the free pages that a run of a window takes.

        Args:
          shared: counts KV that moves while other branches own it too, and is therefore copied.
        """
        held, size, pages = self._held(window.branch), self.slots.page_size, 0
        for piece in window.pieces:
            resident = held.get(piece.id)
            missing = resident is None or resident.made != piece.made
            if resident is not None and not missing and shared and resident.start != piece.start:
                missing = bool((self.slots.owners(resident.slots) > 1).any())
            pages += -(-piece.entry.tokens // size) if missing else 0
        return pages

    # ----------------------------------------------------------------------------------------------------- questions

    def context(self, window: Window) -> Paged | None:
        """Returns the window's KV in place: what `backbone.prefill` and `generate` read. None of an empty window.

        Raises:
          SessionError: the pool does not hold the window: it was not run, or another one since.
        """
        return self._context(window.pieces, self._residents(window))

    def prefill(self, window: Window, tokens: Tokens, length: int | None = None, **options: Any) -> Output:
        """Runs tokens behind a window and keeps nothing; their positions begin at its `next_start`.

        Args:
          tokens: at positions from 0.
          length: how many count, of tokens padded to a bucket.
          options: of `backbone.prefill`; `logits` is "last", "all", or indices [1,n].

        Raises:
          InputError: as `question`. SessionError: as `context`. What the backbone raises.
        """
        return self._ask_behind(self.question(window, tokens, length), self.context(window), **options)

    def generate(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Int[np.ndarray, "B n"]:
        """Answers behind a window, as `backbone.generate` does with these options; else as `prefill`."""
        (tokens, length), backbone = self.question(window, tokens, length), cast("Any", self.backbone)
        lengths = [length] * len(tokens.embeddings)
        return backbone.generate(tokens, steps, self.context(window), lengths=lengths, **options)

    def stream(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """Answers behind a window token by token, as `backbone.stream` does with these options; else as `prefill`.

        With the first token the answer has a cache of its own, and the pool may change.
        """
        (tokens, length), backbone = self.question(window, tokens, length), cast("Any", self.backbone)
        lengths = [length] * len(tokens.embeddings)
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
          SessionError: the pool does not hold the window.
        """
        resident = self._residents(window)[window.piece(id).id]
        kv = self._phase_free(resident, bucket(self.buckets, len(resident.slots)))
        rows = {channel.name: kv[channel.name][:, : len(resident.slots)] for channel in self.layout.token_channels}
        return PhaseFreeKV({**kv, **rows})

    def snapshot(self, window: Window) -> list[dict[str, np.ndarray]]:
        """Copies a window's pieces to the host: for each its "local", "engine.k", "source.k", "state.map" …

        Raises:
          SessionError: the pool does not hold the window.
        """
        snapshots = []
        for resident in self._residents(window).values():
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
          SessionError: pieces that are not the window's, or of another pool's channels, widths or dtype. PoolError: no
          room; the pool is lost. Then nothing has changed.
        """
        self._check(window)
        if self.branches.get(window.branch) or len(snapshots) != len(window.pieces):
            raise SessionError(
                f"restore: got {len(snapshots)} pieces for branch {window.branch!r}; expected "
                f"{len(window.pieces)}, and a branch that holds nothing"
            )
        for piece, arrays in zip(window.pieces, snapshots, strict=True):
            shapes = {name: (value.shape, str(value.dtype)) for name, value in arrays.items()}
            expected = self._snapshot_shapes(piece.entry.tokens)
            wrong = [name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)]
            if wrong:
                got = f"{min(wrong)} {shapes.get(min(wrong))} of piece {brief(piece.id)!r}"
                raise SessionError(f"restore: got {got}; expected {expected.get(min(wrong))}")
        residents = {}
        with self._taking() as taken:
            self._allocate(window.pieces, taken)
            for piece, slots, arrays in zip(window.pieces, taken, snapshots, strict=True):
                size, sides = bucket(self.buckets, len(slots)), []
                for side, vectors in zip(Pools._fields, self.pools, strict=True):
                    rows = {name: zero_padded(arrays[f"{side}.{name}"], 1, size) for name in vectors}
                    sides.append(jax.tree.map(jnp.asarray, rows))
                self.pools = put_rows(self.pools, self._padded_slots(slots), Pools(*sides), np.int32(len(slots)))
                state = {channel.name: jnp.asarray(arrays[f"state.{channel.name}"]) for channel in self.layout.parts}
                residents[piece.id] = Resident(piece.made, slots, arrays["local"], piece.start, state or None)
        self._hold(window.branch, residents)

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
          PoolError: fewer pages than there are; the pool is lost.
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
        """Raises PoolError if the vectors are lost."""
        if self.lost:
            raise PoolError(
                "executor: got a pool whose vectors were lost in a failed launch; expected `renew()`, then a run of "
                "`window.anew()`",
                lost=True,
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

    # ------------------------------------------------------------------------------------------- what branches hold

    def _hold(self, branch: str, residents: Mapping[str, Resident]) -> None:
        """Makes a branch hold these pieces; slots that it had for others, or for copies of them, are released."""
        before = self.branches.get(branch, {})
        self.branches = {**self.branches, branch: dict(residents)}
        for id, resident in before.items():
            if id not in residents or residents[id].slots is not resident.slots:
                self.slots.release(resident.slots)

    def _held(self, branch: str) -> dict[str, Resident]:
        """Returns what a branch holds; a new fork first becomes an owner of what its parent does."""
        if branch not in self.branches and "/" in branch:
            parent = self.branches.get(branch.rpartition("/")[0], {})
            for resident in parent.values():
                self.slots.share(resident.slots)
            self._hold(branch, parent)
        return self.branches.get(branch, {})

    def _residents(self, window: Window) -> dict[str, Resident]:
        """Returns a window's pieces in the pool, from the front, their keys in place."""
        self._check(window)
        held = self._held(window.branch)
        made = {id: resident.made for id, resident in held.items()}
        if made != {piece.id: piece.made for piece in window.pieces}:
            wrong = next((piece.id for piece in window.pieces if made.get(piece.id) != piece.made), None)
            found = "more pieces" if wrong is None else f"other KV of {brief(wrong)!r}"
            raise SessionError(
                f"executor: got {found} in branch {window.branch!r}; expected this window to be run first"
            )
        with self._taking() as taken:
            residents = self._at_places(window, held, [], taken)
        self._hold(window.branch, residents)
        return {piece.id: residents[piece.id] for piece in window.pieces}

    def _check(self, window: Window) -> None:
        """Refuses a window of another backbone, and any while the pool is lost."""
        self.check_pool()
        fingerprint = self.backbone.fingerprint
        if window.backbone != fingerprint:
            raise SessionError(
                f"executor: got a window of backbone {window.backbone[:16]!r}; expected {fingerprint[:16]!r}"
            )

    @contextlib.contextmanager
    def _taking(self) -> Iterator[list[Int[np.ndarray, " _"]]]:
        """Collects slots that are taken, and releases them if what follows fails."""
        taken: list[Int[np.ndarray, " _"]] = []
        try:
            yield taken
        except BaseException as error:
            for slots in taken:
                self.slots.release(slots)
            self.check_pool(error)
            raise

    def _pages_for(self, tokens: int, what: str) -> Int[np.ndarray, " T"]:
        """Takes free pages for tokens. Raises PoolError, which says what gives room."""
        try:
            return self.slots.allocate(tokens, aligned=True)
        except PoolError as error:
            raise PoolError(
                f"{what}, {tokens} tokens: {error} (more pages=, a window that keeps fewer chunks by keep=, or evict)"
            ) from None

    def _allocate(self, pieces: Sequence[Piece], taken: list[Int[np.ndarray, " _"]]) -> list[Int[np.ndarray, " _"]]:
        """Takes free slots for pieces, each from a page of its own."""
        for piece in pieces:
            taken.append(self._pages_for(piece.entry.tokens, f"piece {brief(piece.id)!r}"))
        return taken[len(taken) - len(pieces) :]

    # ---------------------------------------------------------------------------------------------------- making KV

    def _bring(self, run: "_Run") -> Step:
        """Brings a window's KV into the pool and asks the question behind it, if there is one."""
        window = run.window
        self._check(window)
        held = self._held(window.branch)
        survivors, makings = dict[str, Resident](), list[_Making]()
        # All that can be refused is refused before anything is written.
        for index, piece in enumerate(window.pieces):
            if piece.id in held and held[piece.id].made == piece.made:
                survivors[piece.id] = held[piece.id]
            else:
                makings.append(self._making(window, index))
        with self._taking() as taken:
            fresh = self._allocate([making.piece for making in makings], taken)
            run.residents = self._at_places(window, survivors, run.step, taken)
            for making, slots in zip(makings, fresh, strict=True):
                self._make(run, making, slots, held)
            if run.question is not None and run.logits is None:
                # In a forward of its own.
                count = run.question[1]
                out = self._ask_behind(run.question, self._context(window.pieces, run.residents, run.step))
                _check_finite(out.logits, "question")
                run.logits = out.logits
                run.step.append(self.costs.question(count, window.tokens))

        self._hold(window.branch, {piece.id: run.residents[piece.id] for piece in window.pieces})
        for making in makings:
            if making.kv is not None and run.observed:
                for observer in self.observers:
                    observer(window, making.piece, making.tokens, making.piece.entry.tokens, making.kv)
        return tuple(run.step)

    def _making(self, window: Window, index: int) -> "_Making":
        """Gathers what a piece is made of: tokens, or a canonical and its patch, or a stored prefill."""
        piece, sources = window.pieces[index], self.sources
        entry, making, is_read = piece.entry, _Making(piece), False
        if piece.method == "prefill":
            front = tuple(other.made for other in window.pieces[:index])
            if piece.made != identity(entry.key, "prefill", front):
                raise SessionError(
                    f"executor: got {brief(piece.id)!r} behind another front; expected every window to be run"
                )
            making.tokens = sources.tokens(entry)
            local = making.tokens.positions[0]
        else:
            encodings = None
            if piece.method == "restored":
                making.chunk, is_read = sources.prefill(entry, piece.source or piece.made), True
            else:
                if piece.method == "leading":
                    # At the front of a window the canonical stands for the prefill itself.
                    encodings = (None,)
                elif piece.method == "patch":
                    target = window.target(piece.id)
                    making.patch, making.note, is_fetched = sources.patch(entry, piece.source or "", target)
                    encodings = (making.patch.metadata.chunk.encoding,)
                    making.fetched += [Action("fetch", piece.id, 0, making.note.nbytes, 0)] if is_fetched else []
                making.chunk, is_read = sources.canonical(entry, encodings)
            local = making.chunk.local
        if is_read and piece.base is None:
            making.fetched.append(self.costs.fetch(piece.id, entry.tokens))
        making.local = np.asarray(local, np.float32)[: entry.tokens]
        check_positions(self.layout.rope, making.local, np.asarray(piece.start, np.int32))
        return making

    def _make(self, run: "_Run", making: "_Making", slots: Int[np.ndarray, " T"], held: Mapping[str, Resident]) -> None:
        """Computes a piece's KV, or takes it from where it is, and writes it to slots of its own.

        Written are R(start + local) · (KV + u v) to its slots, KV + u v to their source, and the piece's state.
        """
        piece, layout, id, factors, options = making.piece, self.layout, making.piece.id, {}, {}
        run.step += making.fetched
        if making.chunk is None:
            kv = self._forward(run, making)
        else:
            kv = making.chunk.kv
            if making.patch is None or making.note is None:
                run.step.append(self.costs.copy(id, piece.entry.tokens))
            else:
                run.step.append(self.costs.patch(id, piece.entry.tokens, making.note))
                factors, layers = making.patch.operands, making.patch.metadata.layers
                options = {} if len(layers) == layout.layers else {"layers": layers}
            if piece.base is not None:
                # A removal patch is added to what the piece has in the pool; the canonical tells the shapes.
                if id not in held or held[id].made != piece.base:
                    raise SessionError(f"patch: got a removal patch of {brief(id)!r}; expected its base in the pool")
                kv = self._phase_free(held[id], making.chunk.tokens)

        names, state = [channel.name for channel in layout.parts], None
        if names:
            part_factors = {name: factors[name] for name in names if name in factors}
            state = make_state(layout, {name: kv[name] for name in names}, part_factors, **options)
        rows = {name: value for name, value in kv.items() if name not in names}
        factors = {name: value for name, value in factors.items() if name not in names}
        # Slots of padding are 0, and never written: the launch knows how many tokens count.
        size = next(iter(rows.values())).shape[-3]
        padded, local = zero_padded(slots, 0, size), zero_padded(making.local, 0, size)
        start, length = np.asarray(as_start(layout.rope, piece.start)), np.int32(len(slots))
        self.pools = write_piece(layout, self.pools, padded, local, start, length, rows, factors, **options)
        run.residents[id] = Resident(piece.made, slots, making.local, piece.start, state)

    def _forward(self, run: "_Run", making: "_Making") -> Mapping[str, Float[Array, "L 1 T _ _"]]:
        """Runs a piece behind those in front, with the question behind it if it is the last one.

        In a hybrid model the question has a forward of its own: that of both returns the transition of both.
        """
        piece, costs = making.piece, self.costs
        front = run.window.pieces[: run.window.index(piece.id)]
        count, behind = piece.entry.tokens, sum(other.entry.tokens for other in front)
        tokens, context = making.tokens.shift(piece.start), self._context(front, run.residents, run.step)
        size, last = tokens.embeddings.shape[1], count - 1
        prefill, options = self.backbone.prefill, dict[str, Any]()
        question = run.question if piece is run.window.pieces[-1] else None
        if self.layout.parts:
            # Attention does not see padding behind the tokens; a state would go through it.
            options["lengths"], question = np.array([count], np.int32), None
        if question is not None:
            # Padding of both follows the question, so no position that counts sees it.
            tokens, last = packed_tokens(tokens, count, *question), last + question[1]
            prefill = getattr(self.backbone, "prefill_padded", prefill)
        out = prefill(tokens, context, logits=np.array([[last]], np.int32), **options)
        _check_finite(out.logits, f"prefill of piece {brief(piece.id)!r}")

        run.step.append(costs.prefill(piece.id, count, behind))
        if question is not None:
            run.logits = out.logits
            # One row of logits is computed, which the prefill counts.
            run.step.append(costs.question(question[1], behind + count, logits=0))
        # KV of a question behind is no one's, and is not what observers see.
        making.kv = {name: value if name in PARTS else value[:, :, :size] for name, value in out.kv.items()}
        return out.kv

    def _ask_behind(self, question: "_Question", context: Paged | None, **options: Any) -> Output:
        """Runs a question in a forward of its own."""
        tokens, length = question
        lengths = np.full(len(tokens.embeddings), length, np.int32)
        # "last" is the last token that counts, which padding may follow.
        logits = options.get("logits", "last")
        options["logits"] = lengths[:, None] - 1 if isinstance(logits, str) and logits == "last" else logits
        if self.layout.parts:
            options["lengths"] = lengths
        return self.backbone.prefill(tokens, context, **options)

    # ------------------------------------------------------------------------------------------------ reading, rotating

    def _context(
        self, pieces: Sequence[Piece], residents: Mapping[str, Resident], step: list[Action] | None = None
    ) -> Paged | None:
        """Returns the KV of pieces as a backbone reads it; None without pieces."""
        if not pieces:
            return None
        composed: Composed | None = None
        if self.layout.parts:
            mades, lengths = [piece.made for piece in pieces], [piece.entry.tokens for piece in pieces]
            states = [residents[piece.id].state or {} for piece in pieces]
            composed, count = self._compositions.of(mades, states, lengths)
            if step is not None and count:
                step.append(self.costs.compose(pieces[-1].id, count))
        slots = np.concatenate([residents[piece.id].slots for piece in pieces])
        return Paged.of(self.pools.engine, slots, self.buckets and self.buckets.of_keys, composed)

    def _at_places(
        self, window: Window, held: Mapping[str, Resident], step: list[Action], taken: list[Int[np.ndarray, " _"]]
    ) -> dict[str, Resident]:
        """Rotates pieces whose keys lie elsewhere than their window says.

        What other branches own is rotated into new slots, which nobody owns before the branch holds them.
        """
        moves, copies, placed = list[Piece](), list[Piece](), dict(held)
        for piece in window.pieces:
            resident = held.get(piece.id)
            if resident is not None and resident.start != piece.start:
                check_positions(self.layout.rope, resident.local, np.asarray(piece.start, np.int32))
                (copies if (self.slots.owners(resident.slots) > 1).any() else moves).append(piece)
                placed[piece.id] = dataclasses.replace(resident, start=piece.start)
        for piece, slots in zip(copies, self._allocate(copies, taken), strict=True):
            placed[piece.id] = dataclasses.replace(placed[piece.id], slots=slots)
        if moves:
            # A rotation that is interrupted leaves keys nobody knows where, and the next one mends them.
            lost = {piece.id: dataclasses.replace(held[piece.id], start=UNPLACED) for piece in moves}
            branch = self.branches[window.branch]
            self._hold(window.branch, branch | lost)
            self._rotate(moves, held, placed, whole=False)
            self._hold(window.branch, branch | {piece.id: placed[piece.id] for piece in moves})
        if copies:
            self._rotate(copies, held, placed, whole=True)
        step += [self.costs.rotate(piece.id, piece.entry.tokens) for piece in (*moves, *copies)]
        return placed

    def _rotate(
        self, pieces: Sequence[Piece], before: Mapping[str, Resident], after: Mapping[str, Resident], whole: bool
    ) -> None:
        """Rotates pieces from their phase-free source to slots in one launch; `whole`: with all other channels."""
        read = np.concatenate([before[piece.id].slots for piece in pieces])
        write = np.concatenate([after[piece.id].slots for piece in pieces])
        local = np.concatenate([before[piece.id].local for piece in pieces])
        # One start per token, and per axis where positions have axes.
        starts = np.repeat([piece.start for piece in pieces], [piece.entry.tokens for piece in pieces]).astype(np.int32)
        if local.ndim > 1:
            starts = np.broadcast_to(starts[:, None], local.shape)
        size = bucket(self.buckets and self.buckets.of_keys, len(read))
        arrays = [np.asarray(zero_padded(array, 0, size)) for array in (read, write, local, starts)]
        self.pools = rotate_pieces(self.layout, self.pools, *arrays, np.int32(len(read)), whole=whole)

    def _phase_free(self, resident: Resident, size: int) -> PhaseFreeKV:
        """Returns the phase-free KV of a piece, padded to `size` tokens, with its transition in a hybrid model."""
        rows = read_rows(self.pools, np.asarray(zero_padded(resident.slots, 0, size)))
        # Channels that do not rotate are phase-free in the pool; the source replaces the others.
        return PhaseFreeKV({**trimmed(self.layout, {**rows.engine, **rows.source}), **(resident.state or {})})

    def _padded_slots(self, slots: Int[np.ndarray, " T"]) -> Int[np.ndarray, " N"]:
        return np.asarray(zero_padded(slots, 0, bucket(self.buckets, len(slots))))

    def _snapshot_shapes(self, length: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the shape and dtype of every array in the snapshot of a piece of so many tokens."""
        axes = self.layout.rope.axes
        shapes = dict[str, tuple[tuple[int, ...], str]]()
        shapes["local"] = ((length,) if axes is None else (length, axes), "float32")
        for side, vectors in zip(Pools._fields, self.pools, strict=True):
            for name, value in vectors.items():
                shapes[f"{side}.{name}"] = ((value.shape[0], length, *value.shape[3:]), str(value.dtype))
        for channel in self.layout.parts:
            shape = (self.layout.depth(channel.name), channel.rows or 0, channel.heads, channel.width)
            shapes[f"state.{channel.name}"] = (shape, "float32")
        return shapes


_Question = tuple[Tokens, int]
"""A question moved behind a window, padded, and how many of its tokens count."""


@dataclasses.dataclass(eq=False)
class _Run:
    """A window that is brought, with a question behind it if one is asked: what is placed and done so far."""

    window: Window
    question: _Question | None = None
    observed: bool = True
    logits: Float[Array, "1 1 V"] | None = None
    residents: dict[str, Resident] = dataclasses.field(default_factory=dict)
    step: list[Action] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Making:
    """What a piece is made of, and once a forward has run, its KV."""

    piece: Piece
    tokens: Any = None
    local: Any = None
    chunk: Chunk | None = None
    patch: Patch | None = None
    note: PatchNote | None = None
    fetched: list[Action] = dataclasses.field(default_factory=list)
    kv: Mapping[str, Array] | None = None


def _check_finite(logits: Float[Array, "..."], what: str) -> None:
    if not np.isfinite(np.asarray(logits)).all():
        raise NotFiniteError(f"{what}: got NaN or infinity; expected finite logits")
