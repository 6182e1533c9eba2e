"""Compilation ahead of time of what an executor will need. Nothing is written to the pool, nothing is stored."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone, Tokens
from ..core import PART_DTYPE, Buckets, KVEncoding, Paged, as_start, encode_kv
from . import programs
from .edit_run import packed
from .padding import bucket, padded_tokens
from .paged_pool import PagedPool

MOST_PIECES = 64
"""Pieces of windows up to which compositions of transitions are compiled."""
NO_TOKENS = np.int32(0)
"""Length of what is written: programs run on zeros of which none count."""


def samples(backbone: Any, buckets: Buckets | None, inputs: Sequence[int | Tokens]) -> list[Tokens]:
    """Returns one set of tokens for each bucket and kind among lengths and sample tokens."""
    found: dict[Any, Tokens] = {}
    for tokens in inputs:
        if not isinstance(tokens, Tokens):
            tokens = padded_tokens(backbone.embed(np.zeros((1, 1), np.int32)), bucket(buckets, int(tokens)))
        tokens = padded_tokens(tokens, bucket(buckets, tokens.embeddings.shape[1]))

        # Programs depend on the length, on features for deeper layers and on whether positions are whole numbers.
        kind = tokens.embeddings.shape[1], tokens.deepstack is None, str(np.asarray(tokens.positions).dtype)
        found[kind] = tokens
    return list(found.values())


class Precompiler:
    """Runs every program that a pool will need once, on inputs of which no token counts.

    Windows have up to `keys` tokens, on at most `pages` pages of `page_size`.
    """

    def __init__(
        self,
        backbone: Backbone,
        pool: PagedPool,
        keys: int,
        pages: int,
        page_size: int,
        encodings: Sequence[str | None] = (None,),
    ):
        self._pool, self._keys, self._encodings = pool, keys, encodings
        self._backbone: Any = backbone

        # No context, and one of each bucket of page tables.
        self._contexts: dict[int, Paged | None] = {0: None}
        unit = programs.compose_transitions((pool.unit,), np.zeros(1, np.int32)) if pool.layout.parts else None
        for count in range(1, min(-(-keys // page_size) + 1, pages) + 1):
            table = np.arange(count * page_size, dtype=np.int32)
            context = Paged.of(pool.vectors.engine, table, pool.buckets, unit)
            self._contexts.setdefault(context.table.shape[1], context)

    def compile(
        self, pieces: Sequence[Tokens], asked: Sequence[Tokens], *, ranks: Sequence[int], steps: int, ask: bool
    ) -> None:
        """Compiles what pieces and questions, as `samples` returns them, need. See `PagedExecutor.warm_up`."""
        backbone = self._backbone
        for sample in pieces:
            self._prefill(backbone.prefill, sample)
            self._write(sample, ranks, spliced=True)

            # A piece and a question in one forward, and the launch that writes the piece.
            for question in asked if ask and not self._pool.layout.parts else ():
                together = packed(sample, sample.embeddings.shape[1], question, question.embeddings.shape[1])
                self._prefill(getattr(backbone, "prefill_padded", backbone.prefill), together)
                self._write(together, (), spliced=False)

        for sample in asked:
            self._prefill(backbone.prefill, sample, steps)

        if self._pool.layout.parts and pieces:
            self._make_transitions(pieces[0].embeddings.dtype, ranks)

        # Runs of rotations and copies have any number of tokens up to that of the window.
        for count in sorted({bucket(self._pool.buckets, number) for number in range(1, self._keys + 1)}):
            self._rotate_and_copy(count)

    def _prefill(self, prefill: Any, sample: Tokens, steps: int = 0) -> None:
        """Runs a forward behind every context, and generates `steps` tokens behind it."""
        length = sample.embeddings.shape[1]
        for context in self._contexts.values():
            # Launches have replaced the vectors since; by how much the tokens move changes no program.
            own = None if context is None else context._replace(pool=self._pool.vectors.engine)
            moved = sample.shift(0 if context is None else 1)
            lengths = np.array([length], np.int32)
            options: Any = {"lengths": lengths} if self._pool.layout.parts else {}
            prefill(moved, own, logits=np.array([[length - 1]], np.int32), **options)
            if steps:
                self._backbone.generate(moved, steps, own, lengths=lengths)

    def _write(self, sample: Tokens, ranks: Sequence[int], spliced: bool) -> None:
        """Runs the launches that write a piece: prefilled, and if `spliced` bare, and patched at each rank."""
        pool, layout, size = self._pool, self._pool.layout, sample.embeddings.shape[1]
        dtype, kv = sample.embeddings.dtype, {}
        for channel in layout.token_channels:
            kv[channel.name] = jnp.zeros((layout.depth(channel.name), size, channel.heads, channel.width), dtype)

        # As a prefill returns it, [L,1,T,K,H]; as a chunk has it; and with factors.
        inputs: list[tuple[Any, Any]] = [({name: value[:, None] for name, value in kv.items()}, {})]
        bases: list[Any] = [kv]
        unit = pool.unit if layout.parts else {}
        for word in self._encodings:
            if word is not None:
                encoded = encode_kv(layout, {**kv, **unit}, KVEncoding.of(word))
                bases.append({name: encoded[name] for name in kv})
        if spliced:
            inputs += [(base, {}) for base in bases]
        for rank in ranks:
            factors = {}
            for channel in layout.token_channels:
                layers = layout.depth(channel.name)
                u = jnp.zeros((layers, size, rank), dtype)
                factors[channel.name] = u, jnp.zeros((layers, rank, channel.features), dtype)
            inputs += [(base, factors) for base in bases]

        local, start = np.asarray(sample.positions[0], np.float32), np.asarray(as_start(layout.rope, 0))
        destination = programs.Destination(np.zeros(size, np.int32), local, start, NO_TOKENS)
        for vectors, factors in inputs:
            pool.vectors = programs.write_piece(layout, pool.vectors, destination, vectors, factors)

    def _make_transitions(self, dtype: Any, ranks: Sequence[int]) -> None:
        """Runs the launches that make the transition of a piece, prefilled, bare and patched at each rank, and compose
        those of windows.
        """
        pool, layout = self._pool, self._pool.layout
        unit, patches = pool.unit, [dict[str, Any]() for _ in ranks]
        for rank, patch in zip(ranks, patches, strict=True):
            for part in layout.parts:
                layers, rows, features = layout.depth(part.name), part.rows or 0, part.features
                own = min(rank, rows, features)
                u, v = jnp.zeros((layers, rows, own), dtype), jnp.zeros((layers, own, features), dtype)
                # As patches are formed: dense where factors would take as many numbers.
                smaller = own * (rows + features) < rows * features
                patch[part.name] = (u, v) if smaller else jnp.zeros((layers, rows, part.heads, part.width), dtype)

        # As a prefill returns it, [L,1,R,K,W]; as a chunk has it, and as encoded ones.
        forward = {name: value.astype(dtype) if name == "tail" else value for name, value in unit.items()}
        bases = [forward]
        if any(word is not None for word in self._encodings):
            bases.append({name: value.astype(PART_DTYPE) for name, value in unit.items()})
        inputs: list[tuple[Any, Any]] = [(base, patch) for base in bases for patch in ({}, *patches)]
        programs.make_transition(layout, {name: value[:, None] for name, value in forward.items()}, {})
        for parts, patch in inputs:
            programs.make_transition(layout, parts, patch)

        # Windows of any number of pieces: of 1, 2, 4, …, each of a token or more.
        count = 1
        while count < 2 * min(self._keys, MOST_PIECES):
            programs.compose_transitions((unit,) * count, np.zeros(count, np.int32))
            count *= 2

    def _rotate_and_copy(self, size: int) -> None:
        """Runs the launches that rotate, copy and read so many slots."""
        pool, layout = self._pool, self._pool.layout
        axes = () if layout.rope.axes is None else (layout.rope.axes,)
        slots, starts = np.zeros(size, np.int32), np.zeros((size, *axes), np.int32)
        local = np.zeros((size, *axes), np.float32)
        rotation = programs.SlotRotation(slots, slots, local, starts, NO_TOKENS)

        # In place, and into slots of the branch's own.
        for whole in (False, True):
            pool.vectors = programs.rotate_slots(layout, pool.vectors, rotation, whole=whole)
        pool.vectors = programs.copy_slots(pool.vectors, slots, slots, NO_TOKENS)
        rows = programs.read_rows(pool.vectors, slots)
        pool.vectors = programs.put_rows(pool.vectors, slots, rows, NO_TOKENS)
