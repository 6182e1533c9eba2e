"""Pieces of a window one behind the other: prefilled, served from what is cached, and asked about.

Everything is a batch of windows that share all but their contents. KV of a piece is phase-free, and what is read is in
the engine frame; of a hybrid model each piece's KV has its own transition. Between forwards everything lies on the
host, padded to the backbone's buckets: a line of another order or length compiles nothing. Axis letters: B windows, T
tokens of a piece, n tokens of all questions, P scored ones, A answers, V vocabulary.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

import kvpatch_jax as kvp
from kvpatch_jax import Text, ops
from kvpatch_jax.backbone import Tokens, joined_tokens
from kvpatch_jax.core import PARTS, bucket, zero_padded
from kvpatch_jax.models import ModelBackbone

KV = dict[str, Float[np.ndarray, "L B _ _ _"]]
"""{channel: [L, B, T, K, H]} on the host."""
AnyKV = Mapping[str, Any]
"""The same, on the host or not."""
RUN = 512
"""Tokens of a window that are run at a time."""


def cut(kv: Mapping[str, Any], where: slice) -> KV:
    """Cuts tokens out of KV and brings them to the host; a hybrid's transition stays that of all tokens."""
    host = {name: np.asarray(value) for name, value in kv.items()}
    return {name: value if name in PARTS else value[:, :, where] for name, value in host.items()}


def padded(kv: Mapping[str, Any], size: int) -> KV:
    """Pads the tokens of KV with zeros."""
    return {name: np.asarray(zero_padded(value, 2, size)) for name, value in kv.items()}


def joined(parts: Sequence[KV]) -> KV:
    """Joins KV of pieces behind one another."""
    return {name: np.concatenate([part[name] for part in parts], axis=2) for name in parts[0]}


def prefilled(backbone: ModelBackbone, tokens: Tokens, context: Any = None, mask: np.ndarray | None = None) -> KV:
    """Prefills tokens, padded to their bucket; phase-free KV of theirs."""
    size = tokens.embeddings.shape[1]
    room = bucket(backbone.buckets, size)
    # An image whose tokens see each other is not divided.
    many = RUN if context is None and tokens.ahead is None else None
    return cut(backbone.prefill(tokens.pad(room), context, mask, chunk=many).kv, slice(size))


class BatchedPiece(NamedTuple):
    """A chunk of every window, or the lead that is pinned in front.

    Attributes:
      tokens: [B, T, …], positions from its own start.
      chunk: its canonical, a batch of chunks, padded to its bucket.
    """

    tokens: Tokens
    chunk: kvp.Chunk

    @property
    def size(self) -> int:
        """Number of its tokens."""
        return self.chunk.length

    def padded(self, kv: KV) -> KV:
        """Pads KV of its tokens as its chunk is padded."""
        return padded(kv, self.chunk.tokens)

    def patched(self, patch: kvp.Patch) -> KV:
        """Computes the phase-free KV that a patch serves: canonical plus correction, rounded to the chunk's type."""
        chunk = self.chunk
        added = ops.correction(chunk.layout, dict(patch.factors), layers=patch.metadata.layers)
        kv = {name: jnp.asarray(value) + added.get(name, 0.0) for name, value in chunk.kv.items()}
        return cut({name: value.astype(chunk.kv[name].dtype) for name, value in kv.items()}, slice(chunk.length))

    def of_others(self) -> "BatchedPiece":
        """Gives each window the piece that the next window has in this place."""
        rolled = jax.tree.map(lambda array: jnp.asarray(np.roll(array, -1, axis=0)), self.tokens)
        kv = {name: np.roll(np.asarray(value), -1, axis=1) for name, value in self.chunk.kv.items()}
        name = f"{self.chunk.id}+1"
        chunk = dataclasses.replace(self.chunk, kv=kv, id=name, content=name)
        return BatchedPiece(rolled._replace(positions=self.tokens.positions), chunk)


def make_piece(backbone: ModelBackbone, tokens: Tokens, id: str, content: str | None = None) -> BatchedPiece:
    """Prefills tokens alone, whose rows share their positions. content: names what is shown; None: the id does."""
    local = np.asarray(tokens.positions)[0]
    chunk = kvp.Chunk(
        kv=prefilled(backbone, tokens),
        local=local,
        span=int(local.max()) + 1,
        length=len(local),
        id=id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=content or id,
    )
    return BatchedPiece(tokens, chunk.pad(bucket(backbone.buckets, len(local))))


def text_piece(backbone: ModelBackbone, ids: Int[np.ndarray, "B T"], id: str) -> BatchedPiece:
    """Makes a piece of token ids."""
    return make_piece(backbone, backbone.embed(ids.astype(np.int32), positions_of(backbone, ids.shape)), id)


def positions_of(backbone: ModelBackbone, shape: tuple[int, ...], steps: Any = None, start: int = 0) -> np.ndarray:
    """Makes positions of rows of text tokens [B,T], with an axis for each of the rope's.

    Args:
      steps: place of each token behind `start`; None: one after the other.
    """
    steps = np.arange(shape[1]) if steps is None else steps
    positions = np.broadcast_to(start + steps, shape).astype(np.int32)
    axes = backbone.layout.rope.axes
    return positions if axes is None else np.repeat(positions[..., None], axes, axis=2)


class Contents:
    """What windows show, by name, each embedded once: images (files or arrays), `Text`, or token ids.

    Args:
      media: keeps files of a data set on disk as long as it lives.
    """

    def __init__(self, backbone: ModelBackbone, values: Mapping[str, Any], media: Any = None):
        self.backbone, self.values, self.media = backbone, values, media
        self._tokens: dict[str, Tokens] = {}

    def tokens(self, name: str) -> Tokens:
        """Embeds what has this name. InputError: an unknown word; an image that cannot be read."""
        if name not in self._tokens:
            value = self.values[name]
            # Of a text the ids alone: the tokenizer's start and end tokens stand around prompts, not pieces.
            items = [self.backbone.ids(str(value)) if isinstance(value, Text) else value]
            self._tokens[name] = self.backbone.embed(**self.backbone.prepare(items))
        return self._tokens[name]

    def shape(self, *names: str) -> tuple[Any, ...]:
        """Returns a sort key that puts contents of one shape next to one another, in order of their tokens."""
        tokens = [self.tokens(name) for name in names]
        return tuple((part.embeddings.shape, np.asarray(part.positions).tobytes()) for part in tokens)

    def batch(self, names: Sequence[str], id: str, content: str) -> BatchedPiece:
        """Prefills a piece of a batch of windows, alone."""
        tokens = joined_tokens([self.tokens(name).on_host() for name in names], axis=0).on_device()
        return make_piece(self.backbone, tokens, id, content)


class Line:
    """Pieces in the order in which they stand, the first one's positions from 0.

    Attributes:
      backbone: reads them.
      pieces: the lead first.
      starts: the position at which each begins. end: the position behind the last.
      slices: where each stands among the tokens.
    """

    def __init__(self, backbone: ModelBackbone, pieces: Sequence[BatchedPiece]):
        self.backbone, self.pieces = backbone, tuple(pieces)
        edges = np.cumsum([0, *(piece.chunk.span for piece in self.pieces)])
        self.starts, self.end = edges[:-1].astype(np.int32), int(edges[-1])
        sizes = np.cumsum([0, *(piece.size for piece in self.pieces)]).tolist()
        self.slices = [slice(first, last) for first, last in itertools.pairwise(sizes)]

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def size(self) -> int:
        """Tokens of all pieces."""
        return self.slices[-1].stop

    @functools.cached_property
    def tokens(self) -> Tokens:
        """All pieces as one prompt."""
        pairs = zip(self.pieces, self.starts, strict=True)
        return joined_tokens([piece.tokens.shift(start).on_host() for piece, start in pairs]).on_device()

    def antecedent(self, place: int) -> tuple[str, ...]:
        """Lists the ids of the pieces in front of a place."""
        return tuple(piece.chunk.id for piece in self.pieces[:place])

    def prefill(self) -> list[KV]:
        """Prefills everything in one forward; phase-free KV of each piece, of a model without transitions."""
        return self.parts(prefilled(self.backbone, self.tokens))

    def conditioned(self) -> list[AnyKV]:
        """Prefills every piece behind those in front of it, a forward each; phase-free KV of each."""
        return [dict(kv) for kv in kvp.conditioned(self.backbone, [piece.tokens for piece in self.pieces])]

    def behind(self, parts: Sequence[AnyKV], piece: BatchedPiece) -> AnyKV:
        """Prefills a piece behind the line, whose engine-frame KV is `parts`; phase-free KV of the piece."""
        return dict(self.backbone.prefill(piece.tokens.shift(np.int32(self.end)), kvp.joined(*parts)).kv)

    def parts(self, kv: KV) -> list[KV]:
        """Cuts KV of the line into its pieces."""
        return [cut(kv, where) for where in self.slices]

    def engine(self, parts: Sequence[KV], room: int | None = None) -> KV:
        """Turns phase-free KV of every piece to its place and joins it.

        Args:
          room: tokens that the cache is padded to, and stays padded to; None: none are added.
        """
        size = bucket(self.backbone.buckets, self.size) if room is None else room
        positions = zero_padded(np.asarray(self.tokens.positions), 1, size)
        turned = kvp.to_engine(self.backbone.layout, padded(joined(parts), size), positions, 0)
        return cut(turned, slice(self.size if room is None else room))

    def placed(self, parts: Sequence[AnyKV]) -> list[AnyKV]:
        """Turns phase-free KV of every piece to its place, and leaves the pieces apart."""
        moved = []
        for piece, kv, start in zip(self.pieces, parts, self.starts.tolist(), strict=True):
            moved.append(kvp.to_engine(piece.chunk.layout, kv, piece.tokens.positions, start))
        return moved

    def served(self, place: int, patch: kvp.Patch | None = None, **base: Any) -> AnyKV:
        """Serves a piece at its place in the engine frame, patched or bare.

        A patch that was formed behind others is served all the same: what that costs is what is measured.

        Args:
          base: `base` and `base_antecedent` of `kvp.Placed`, in place of the canonical.
        """
        chunk, start = self.pieces[place].chunk, self.starts[place]
        return kvp.apply_patch(chunk, patch, start, self.antecedent(place), allow_stale=True, **base)

    def serve(self, place: int, patch: kvp.Patch | None = None) -> KV:
        """Serves a piece's canonical at its place, patched or bare, and brings it to the host without padding."""
        return cut(self.served(place, patch), slice(self.pieces[place].size))

    def with_served(self, cache: KV, pieces: Mapping[int, KV]) -> KV:
        """Replaces some pieces of an engine-frame cache of the line."""
        return joined([pieces.get(place, part) for place, part in enumerate(self.parts(cache))])


class GrowingWindow:
    """An agent's window as an engine keeps it: what comes in is prefilled behind it, once, and keeps that KV.

    Attributes:
      room: tokens that the window is padded to, so that every prefill behind it runs the same program.
      pieces: in the window, the lead first. parts: phase-free KV of each.
    """

    def __init__(
        self, backbone: ModelBackbone, room: int, pieces: Sequence[BatchedPiece] = (), parts: Sequence[KV] = ()
    ) -> None:
        self.backbone, self.room = backbone, bucket(backbone.buckets, room)
        self.pieces, self.parts = [*pieces], [*parts]

    def prefill(self, piece: BatchedPiece) -> KV:
        """Prefills a piece behind the window, which stays as it is; phase-free KV."""
        if not self.pieces:
            return prefilled(self.backbone, piece.tokens)
        line, size = Line(self.backbone, self.pieces), bucket(self.backbone.buckets, piece.size)
        seen = np.concatenate([np.arange(self.room) < line.size, np.zeros(size, bool)])
        mask = seen[None] | np.pad(np.tri(size, dtype=bool), [(0, 0), (self.room, 0)])
        mask = np.broadcast_to(mask, (len(piece.tokens.embeddings), 1, *mask.shape))
        context = {name: jnp.asarray(kv) for name, kv in line.engine(self.parts, self.room).items()}
        return prefilled(self.backbone, piece.tokens.shift(np.int32(line.end)), context, mask)

    def append(self, piece: BatchedPiece, kv: KV | None = None) -> None:
        """Adds a piece with its KV, or (None) with that of a prefill behind the window."""
        kv = self.prefill(piece) if kv is None else kv
        self.pieces.append(piece)
        self.parts.append(kv)

    def slide(self, pieces: Sequence[BatchedPiece], most: int) -> "GrowingWindow":
        """Adds pieces one by one; the oldest behind the lead leaves for each where there are `most` already."""
        for piece in pieces:
            if len(self.pieces) > most:
                del self.pieces[1], self.parts[1]
            self.append(piece)
        return self


# ------------------------------------------------------------------------------------------------------- questions


class Question(NamedTuple):
    """Tokens behind a window, and the places among them whose next token is scored; their mean is one answer."""

    ids: tuple[int, ...]
    scored: tuple[int, ...]


class PackedQuestions(NamedTuple):
    """Questions behind a batch of windows, packed into one forward in which none sees another.

    Attributes:
      ids: [B, n]. steps: [n], their places behind the window. among: [n, n], which token sees which.
      scored: [B, P], places whose logits are read. owner: [P], the answer that each belongs to.
      valid: [B, A], the answers that count.
    """

    ids: Int[np.ndarray, "B n"]
    steps: Int[np.ndarray, " n"]
    among: Bool[np.ndarray, "n n"]
    scored: Int[np.ndarray, "B P"]
    owner: Int[np.ndarray, " P"]
    valid: Bool[np.ndarray, "B A"]

    def ask(self, line: Line, cache: KV) -> Float[np.ndarray, "B P V"]:
        """Asks everything behind a line over one of its engine-frame caches; log-probabilities of the next tokens."""
        backbone, rows = line.backbone, len(self.ids)
        room = bucket(backbone.buckets, line.size)
        positions = positions_of(backbone, self.ids.shape, self.steps, line.end)
        seen = np.broadcast_to(np.arange(room) < line.size, (rows, 1, len(self.steps), room))
        mask = np.concatenate([seen, np.broadcast_to(self.among, (rows, 1, *self.among.shape))], axis=3)
        context = {name: jnp.asarray(value) for name, value in padded(cache, room).items()}
        tokens = backbone.embed(self.ids, positions)
        logits = backbone.prefill(tokens, context, mask, logits=self.scored).logits
        return np.asarray(jax.nn.log_softmax(logits, axis=-1))

    def answers(self, values: Shaped[np.ndarray, "B P"]) -> Float[np.ndarray, " answers"]:
        """Averages what was scored over the tokens of each answer, and returns the answers that count."""
        count = self.valid.shape[1]
        sums = np.stack([np.bincount(self.owner, row, count) for row in np.asarray(values, np.float64)])
        return (sums / np.bincount(self.owner, minlength=count))[self.valid]

    def of_answers(self, rows: np.ndarray) -> np.ndarray:
        """Repeats a number of each window, [B], for each of its answers that count."""
        return np.repeat(rows[:, None], self.valid.shape[1], axis=1)[self.valid]


def divergence(promised: Float[np.ndarray, "B P V"], served: Float[np.ndarray, "B P V"]) -> Float[np.ndarray, "B P"]:
    """Computes KL(promised ‖ served) of log-probabilities, in nats."""
    # In float64: differences of log-probabilities near 0 would vanish in float32.
    wide = promised.astype(np.float64)
    return np.sum(np.exp(wide) * (wide - served), axis=-1)


def packed(rows: Sequence[Sequence[Question]], lengths: Sequence[int]) -> PackedQuestions:
    """Packs questions behind the windows of a batch, each at the positions right behind the window.

    Args:
      rows: of each window, one or more; those at one place have equally many scored tokens.
      lengths: tokens of the longest question at each place, in all batches, so that one program reads them all. What
        fills up windows with fewer questions does not count.
    """
    ids, scored, columns = [], [], list[list[Question]]()
    for place in range(len(lengths)):
        answers = next((len(row[place].scored) for row in rows if place < len(row)), 1)
        filler = Question((0,), (0,) * answers)
        columns.append([row[place] if place < len(row) else filler for row in rows])
    for column, length, start in zip(columns, lengths, np.cumsum([0, *lengths[:-1]]), strict=True):
        # Tokens that fill a question up stand behind the scored ones, which do not see them.
        ids.append([(*question.ids, *[0] * (length - len(question.ids))) for question in column])
        scored.append([[start + place for place in question.scored] for question in column])
    number = np.repeat(np.arange(len(lengths)), lengths)
    return PackedQuestions(
        ids=np.concatenate(ids, axis=1).astype(np.int32),
        steps=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        among=(number[:, None] == number) & np.tri(len(number), dtype=bool),
        scored=np.concatenate(scored, axis=1).astype(np.int32),
        owner=np.repeat(np.arange(len(lengths)), [len(column[0].scored) for column in columns]),
        valid=np.arange(len(lengths))[None] < np.array([[len(row)] for row in rows]),
    )
