"""What the executors of windows have in common: what they are given, and questions behind a window."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int, Num

from ..backbone import Backbone, Output, Tokens, check_tokens
from ..cache import Chunk, Patch, brief
from ..core import AnyArray, EngineKV, Paged
from ..errors import InputError, NotFiniteError, WindowError
from ..patching import lead_digest, lead_tokens
from .cost_meter import CostMeter
from .edits import Edit
from .entry import PlacedPiece
from .ledger import Ledger
from .sources import PatchStore, PieceSources, bucket, padded_tokens
from .window import Window

Noticed = Callable[[Window, str, Tokens, int, Mapping[str, Array]], None]
"""Told of each prefill: the window after it, the piece, its tokens at local positions, how many of them count, and its
phase-free KV behind those in front, {channel: [L,B,T',K,H]}, to keep."""


Lead = Sequence[Any] | Tokens | None
"""What canonicals are prefilled behind, as `make_chunk` takes it."""


@runtime_checkable
class ExecutorPiece(Protocol):
    """A piece as an executor holds it."""

    @property
    def id(self) -> str:
        """Its entry's."""
        ...

    @property
    def start(self) -> int:
        """Where its positions count from."""
        ...

    @property
    def length(self) -> int:
        """Tokens."""
        ...


class Executor:
    """What edits run on, and what is asked behind windows.

    Attributes:
      sources: what was given of pieces.
      store: where canonicals and patches are fetched from.
      lead: digest of what their canonicals were prefilled behind (`Chunk.lead`), or None.
      formers: called after each prefill.
    """

    def __init__(self, backbone: Backbone, store: PatchStore | None, padded: bool, lead: Lead = None):
        """Nothing given yet; `padded`: one row at a time, and all that is given and asked padded to buckets."""
        self.backbone, self.layout, self.store = backbone, backbone.layout, store
        self.buckets = getattr(backbone, "buckets", None) if padded else None
        self.lead = None if lead is None else lead_digest(backbone.fingerprint, lead_tokens(backbone, lead))
        self.sources = PieceSources(self.buckets, backbone.fingerprint, padded, self.lead)
        self.meter = CostMeter(backbone)
        self.formers: list[Noticed] = []
        self._current: dict[str, tuple[PlacedPiece, ...]] = {}

    @property
    def ledger(self) -> Ledger:
        """What was executed so far; `after - before` is what happened between two looks."""
        return self.meter.ledger

    # ------------------------------------------------------------------------------------- what is given

    def provide(
        self,
        id: str,
        *,
        tokens: Tokens | None = None,
        length: int | None = None,
        chunk: Chunk | None = None,
        patch: Patch | None = None,
        content: str | None = None,
        hidden: Mapping[int, Num[AnyArray, "*B T D"]] | None = None,
    ) -> str | None:
        """Gives what edits of a piece will need. What is given again takes the old one's place.

        Args:
          tokens: one row, at the piece's own positions (from 0): for `Prefill` and `Recompute`.
          length: how many of the tokens count, the first ones, of tokens padded to a bucket; None: all.
          chunk: its canonical. patch: of that canonical, or a removal patch.
          content: digest of what the tokens show; other content than before forgets all that was given.
          hidden: residuals entering some layers, {layer: [T,D] or [1,T,D]}, as `prefill(hidden_at=…)` gives them: for
            `Recompute` from such a layer.

        Returns:
          The digest of the patch that was given, None where none was.

        Raises:
          InputError, ShapeError: what is no tokens, chunk or patch, or of another number of tokens than what is known.
          PatchMismatchError: a chunk or patch of another id, or another backbone.
        """
        given = {"tokens": tokens, "length": length, "chunk": chunk, "patch": patch, "content": content}
        return self.sources.give(id, **given, hidden=hidden)

    def forget(self, id: str) -> None:
        """Lets go of what was given of a piece; what lies in the pool stays."""
        self.sources.forget(id)

    def tell(self, window: Window, id: str, tokens: Tokens, length: int, kv: Mapping[str, Array]) -> None:
        """Tells those who form patches of a prefill, whose KV may go on behind the tokens."""
        if self.formers:
            kv = {name: value[:, :, : tokens.embeddings.shape[1]] for name, value in kv.items()}
        for former in self.formers:
            former(window, id, tokens, length, kv)

    # ---------------------------------------------------------------------------------------- what is asked

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window."""
        raise NotImplementedError

    def context(self, window: Window) -> Paged | EngineKV | None:
        """The window's KV, as a backbone reads it; None of an empty window."""
        raise NotImplementedError

    def pieces(self, branch: str) -> Sequence[ExecutorPiece]:
        """The pieces of a branch, in order."""
        raise NotImplementedError

    def ask(
        self, window: Window, edits: Sequence[Edit], tokens: Tokens, length: int | None = None
    ) -> Float[Array, "B 1 V"]:
        """Executes the edits that led to a window and asks behind it; nothing of the question is kept.

        On a paged pool a piece that the edits prefill at the window's end and the question run in one forward. Where
        they end otherwise (a recall by a patch, a compaction) the question has a forward of its own.

        Args:
          window: after the edits. tokens: the question, at positions from 0. length: how many count, of tokens padded
            to a bucket.

        Returns:
          Logits behind the question's last token, as `prefill` gives them.

        Raises:
          As `run`; then window and pool are as they were, for a question that is refused too. NotFiniteError: also of
          the question's logits where it ran together with a piece.
        """
        self.question(window, tokens, length)
        self.run(window, edits)
        return self.prefill(window, tokens, length).logits

    def prefill(self, window: Window, tokens: Tokens, length: int | None = None, **options: Any) -> Output:
        """Asks behind a window: runs tokens whose positions begin at its `next_start`, and keeps nothing.

        Args:
          tokens: at positions from 0. length: how many count, of tokens padded to a bucket.
          options: of `backbone.prefill`; `logits` is "last", "all", or indices [1,n].

        Raises:
          WindowError: as `context`. What the backbone raises.
        """
        tokens, length = self.question(window, tokens, length)
        context = self.context(window)
        options = dict(options)
        wanted = options.get("logits", "last")
        if isinstance(wanted, str) and wanted == "last":
            options["logits"] = np.full((len(tokens.embeddings), 1), length - 1, np.int32)
        self._count(tokens, length, context, 1)
        return self.backbone.prefill(tokens, context, **options)

    def generate(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Int[np.ndarray, "B n"]:
        """Answers behind a window, as `backbone.generate` does; the window stays as it is.

        Args:
          tokens: the question, at positions from 0. length: how many count, of tokens padded to a bucket.
          options: of `backbone.generate`.

        Raises:
          WindowError: as `context`. What the backbone raises.
        """
        tokens, length = self.question(window, tokens, length)
        context = self.context(window)
        self._count(tokens, length, context, steps)
        lengths = np.full(len(tokens.embeddings), length, np.int32)
        backbone: Any = self.backbone
        return backbone.generate(tokens, steps, context, lengths=lengths, **options)

    def stream(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """Answers behind a window token by token, as `backbone.stream` does.

        The answer must be read to its end, or let go of, before the next `run`: that donates the pool.

        Raises:
          As `generate`.
        """
        tokens, length = self.question(window, tokens, length)
        context = self.context(window)
        self._count(tokens, length, context, steps)
        lengths = np.full(len(tokens.embeddings), length, np.int32)
        backbone: Any = self.backbone
        return backbone.stream(tokens, steps, context, lengths=lengths, **options)

    # -------------------------------------------------------------------------------------------- inside

    def bucket(self, size: int) -> int:
        """A number of tokens rounded up to its bucket."""
        return bucket(self.buckets, size)

    def check_holds(self, pieces: Sequence[ExecutorPiece], window: Window) -> None:
        """Refuses a window that is not made of these pieces.

        Raises:
          WindowError: another piece, start or number of tokens than expected.
        """
        found = [(held.id, held.start, held.length) for held in pieces]
        wanted = [(piece.entry.id, piece.start, piece.entry.tokens) for piece in window.pieces]
        for own, expected in zip([*found, None], [*wanted, None], strict=False):
            if own != expected:
                raise WindowError(
                    f"executor: branch {window.branch!r} holds {_shown(own)}; expected {_shown(expected)}, as the "
                    "window says (every operation's edits are run, once, in their order)"
                )

    def settle(self, window: Window) -> None:
        """Takes down that a window's edits were run."""
        for branch in window.joined:
            if not self.pieces(branch):
                self._current.pop(branch, None)
        self._current[window.branch] = window.pieces

    def current(self, branch: str) -> tuple[PlacedPiece, ...]:
        """The pieces of the window whose edits a branch ran last."""
        return self._current.get(branch, ())

    def check_current(self, window: Window) -> None:
        """Refuses a window that is not the one whose edits its branch ran last.

        Raises:
          WindowError: another one, or one of another backbone.
        """
        self.check_backbone(window)
        if window.pieces != self.current(window.branch):
            self.check_holds(self.pieces(window.branch), window)
            raise WindowError(
                f"executor: branch {window.branch!r} serves its pieces in other states; expected a window whose edits "
                "were run, and no other's since"
            )

    def check_backbone(self, window: Window) -> None:
        """Raises WindowError for a window of another backbone."""
        own = self.backbone.fingerprint
        if window.backbone != own:
            raise WindowError(f"executor: a window of backbone {window.backbone[:16]!r}; expected {own[:16]!r}")

    def check_finite(self, kind: str, id: str, logits: Float[Array, "B P V"]) -> None:
        """Raises NotFiniteError for a forward of a piece that gave NaN or infinity."""
        if not np.isfinite(np.asarray(logits)).all():
            raise NotFiniteError(f"{kind} of piece {brief(id)!r}: logits hold NaN or infinity; expected finite ones")

    def question(self, window: Window, tokens: Tokens, length: int | None) -> tuple[Tokens, int]:
        """A question behind a window, padded."""
        check_tokens(tokens, "question")
        count = tokens.embeddings.shape[1] if length is None else length
        if not 1 <= count <= tokens.embeddings.shape[1]:
            raise InputError(f"question: length {length} of {tokens.embeddings.shape[1]} tokens; expected 1 to all")
        size = max(tokens.embeddings.shape[1], self.bucket(count))
        return padded_tokens(tokens, size).shift(window.next_start), count

    def _count(self, tokens: Tokens, length: int, context: Paged | EngineKV | None, logits: int) -> None:
        """Counts a question."""
        vectors: Mapping[str, Any] = {}
        if context is not None:
            vectors = context.pool if isinstance(context, Paged) else context
        seen = int(np.asarray(context.seen).sum()) if isinstance(context, Paged) else key_count(context)
        keys = seen, key_count(context)
        self.meter.asked(vectors, (length, tokens.embeddings.shape[1]), keys, logits)


def key_count(context: Paged | EngineKV | None) -> int:
    """How many keys a backbone reads of a context, those that do not count included."""
    if context is None:
        return 0
    return context.key_count if isinstance(context, Paged) else next(iter(context.values())).shape[2]


def _shown(piece: tuple[str, int, int] | None) -> str:
    return "nothing more" if piece is None else f"{brief(piece[0])!r} at {piece[1]} of {piece[2]} tokens"
