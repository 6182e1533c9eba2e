"""Canonicals and patches of a batch: each found in a store, or formed by one forward for each distinct pair.

A chunk's patch is formed from a forward after the exact KV of its antecedent, which earlier forwards left. Prefixes are
therefore walked as a tree: one forward for each distinct chunk after each distinct antecedent.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from ..backbone import Backbone, Output, Tokens, ahead_of, check_tokens
from ..cache import Antecedent, Chunk, Member, Patch
from ..core import PARTS, EngineKV, bucket, end_position, jitted_fold, to_engine, token_rows
from ..errors import InputError, KVPatchError, NotFiniteError, StoreError
from ..patching import Rank, apply_patch, form_patch
from ..patching.form import choose_ranks, factor_dtype
from ..window import PatchStore, stored, stored_patches

Path = tuple[str, ...]
"""Ids of chunks from the front: the last one, after its antecedent."""
HostKV = Mapping[str, Float[np.ndarray, "L _ _ _"]]
Place = Callable[[Any, int], Any]
"""Places a host array on the devices, its rows (along an axis) split over those that share the work."""


class QuestionPrefix(NamedTuple):
    """What precedes a question.

    Attributes:
      kv: of each chunk, in the engine frame, {channel: [L,T,K,H]} on the host.
      tokens: of all chunks.
      span: where the question starts.
      exact: whether no patch is applied.
    """

    kv: tuple[HostKV, ...]
    tokens: int
    span: int
    exact: bool


class BatchPatchCache:
    """Chunks and patches of a batch, formed as they are needed.

    Attributes:
      rows: of a forward.
      place: places host arrays on the devices.
      counts: see `BatchReport`.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None,
        units: Mapping[str, Sequence[Any]],
        rank: Rank,
        dtype: Any,
        place: Place,
        rows: int,
    ):
        """Starts empty.

        Args:
          units: the items of each chunk, by id.
        """
        self.rows, self.place = rows, place
        self.counts: collections.Counter[str] = collections.Counter()
        self._backbone, self._store, self._units = backbone, store, units
        self._rank, self._dtype = rank, dtype
        self._tokens: dict[str, Tokens] = {}
        self._chunks: dict[str, Chunk] = {}
        self._patches: dict[Path, Patch] = {}
        # Exact KV of the last chunk of a path, in the engine frame, for forwards of the chunks that follow.
        self._exact: dict[Path, HostKV] = {}
        self._errors: dict[Path, KVPatchError] = {}

    def ensure(self, prefixes: Sequence[Path], following: Path | None) -> None:
        """Finds or forms the chunks and patches of some prefixes. `prefix` raises what failed.

        Args:
          prefixes: sorted.
          following: the prefix after them. What it shares with them is kept.
        """
        # Dictionaries in place of sets, so that the order of forwards does not depend on hashes.
        ids: dict[str, None] = {}
        for prefix in prefixes:
            ids |= dict.fromkeys(prefix)
        self._ensure_canonicals(list(ids))

        # A path needs a forward if its patch is missing, or if the exact KV of a longer one starts with it.
        paths: dict[Path, None] = {}
        for prefix in prefixes:
            if self._error(prefix) is None:
                paths |= dict.fromkeys(prefix[:depth] for depth in range(2, len(prefix) + 1))

        needed = {path for path in paths if path not in self._patches and not self._find_patch(path)}
        running: set[Path] = set()
        for path in needed:
            for depth in range(2, len(path) + 1):
                if path[:depth] in needed or path[:depth] not in self._exact:
                    running.add(path[:depth])

        # Shorter paths first, for longer ones read their KV. Forwards take chunks of one length and one start.
        formed: list[Patch] = []
        for depth in sorted({len(path) for path in running}):
            groups: dict[tuple[int, int], list[Path]] = {}
            for path in sorted(path for path in running if len(path) == depth):
                if self._error(path) is None:
                    sizes = self._chunks[path[-1]].length, sum(self._chunks[id].length for id in path[:-1])
                    groups.setdefault(sizes, []).append(path)
            for group in groups.values():
                formed += self._condition(group, needed)

        if formed and self._store is not None:
            self._put(self._store.put_patches, formed)

        def is_shared(path: Path) -> bool:
            return following is not None and following[: len(path)] == path

        self._exact = {path: kv for path, kv in self._exact.items() if is_shared(path)}
        # Without a store, a patch that is dropped here would have to be formed again.
        if self._store is not None:
            kept = [path for path in self._patches if path in paths or is_shared(path)]
            self._patches = {path: self._patches[path] for path in kept}

    def prefix(self, ids: Path) -> QuestionPrefix:
        """Returns what precedes a question: the first chunk as it is, each other one with its patch.

        Raises:
          KVPatchError: why one of them could not be formed.
        """
        error = self._error(ids)
        if error is not None:
            raise error

        # The first chunk is leading: its canonical is what a prefill would compute there.
        start, tokens, kv = 0, 0, []
        for depth, id in enumerate(ids, 1):
            chunk = self._padded_chunk(id)
            patch = self._patches.get(ids[:depth])
            placed = apply_patch(chunk, patch, start, antecedent=_antecedent(ids[: depth - 1]))
            kv.append(_first_tokens(placed, chunk.length))
            start, tokens = start + chunk.span, tokens + chunk.length

        return QuestionPrefix(tuple(kv), tokens, start, len(ids) < 2)

    def release(self, still_needed: set[str]) -> None:
        """Releases all tokens, and the chunks that no later item needs."""
        for id in [id for id in self._chunks if id not in still_needed]:
            del self._chunks[id]
        self._tokens.clear()

    # --------------------------------------------------------------------------------------------- canonicals

    def _ensure_canonicals(self, ids: Sequence[str]) -> None:
        """Reads canonicals from the store, or forms them: chunks of one length together."""
        missing: dict[int, list[str]] = {}
        for id in ids:
            if id in self._chunks or (id,) in self._errors:
                continue

            # Ids are of contents here; another program may have stored something else under one.
            # Encoded canonicals are left out: answers would depend on what a store has.
            found = stored(self._store, id, self._backbone.fingerprint)
            if found is not None and found.content == id:
                self._chunks[id] = found
                self.counts["found_canonicals"] += 1
                continue

            try:
                missing.setdefault(self._embed(id).embeddings.shape[1], []).append(id)
            except KVPatchError as error:
                self._errors[(id,)] = error

        # Chunks of one length need no padding, which would change their KV by rounding.
        for group in missing.values():
            for begin in range(0, len(group), self.rows):
                self._form_canonicals(group[begin : begin + self.rows])

    def _form_canonicals(self, ids: Sequence[str]) -> None:
        """Prefills chunks of one length alone, in one forward."""
        try:
            tokens = [self._embed(id) for id in ids]
            out = self._forward(tokens, None)
        except KVPatchError as error:
            self._errors |= {(id,): error for id in ids}
            return

        for row, id in enumerate(ids):
            self.counts["canonicals"] += 1
            local = np.asarray(tokens[row].positions)[0]
            try:
                chunk = Chunk(
                    kv=_row(out.kv, row),
                    local=local,
                    span=math.floor(end_position(local[None])[0]) + 1,
                    length=len(local),
                    id=id,
                    layout=self._backbone.layout,
                    backbone=self._backbone.fingerprint,
                    content=id,
                )
            except KVPatchError as error:
                self._errors[(id,)] = error
                continue

            self._chunks[id] = chunk
            if self._store is not None:
                self._put(self._store.put, chunk)

    def _embed(self, id: str) -> Tokens:
        """Returns the tokens of a chunk, whose files are read again.

        Raises:
          ImageError, InputError: as `prepare`.
        """
        if id not in self._tokens:
            tokens = self._backbone.embed(**self._backbone.prepare(list(self._units[id])))
            check_tokens(tokens, "answer_batch")
            self._tokens[id] = tokens
        return self._tokens[id]

    # ------------------------------------------------------------------------------------------------ patches

    def _condition(self, group: Sequence[Path], needed: set[Path]) -> list[Patch]:
        """Runs chunks of one length after antecedents of one length. Returns the patches that were needed."""
        formed = []
        for begin in range(0, len(group), self.rows):
            paths = group[begin : begin + self.rows]
            try:
                tokens = [self._embed(path[-1]).shift(self._start(path)) for path in paths]
                contexts = []
                for path in paths:
                    # The first chunk's exact KV is its canonical at 0; those of the others, forwards left.
                    if path[:1] not in self._exact:
                        first = self._chunks[path[0]]
                        kv = _first_tokens(first.kv, first.length)
                        self._exact[path[:1]] = _engine_kv(kv, first, 0)
                    contexts.append([self._exact[path[:depth]] for depth in range(1, len(path))])
                out = self._forward(tokens, contexts)
            except KVPatchError as error:
                self._errors |= dict.fromkeys(paths, error)
                continue

            for row, path in enumerate(paths):
                self.counts["conditioned" if path in needed else "again"] += 1
                kv = _row(out.kv, row)
                self._exact[path] = _engine_kv(kv, self._chunks[path[-1]], self._start(path))
                if path not in needed:
                    continue

                # KV that is not finite would be stored, and served to all items with this prefix.
                try:
                    if not np.isfinite(np.asarray(out.logits)[row]).all():
                        raise NotFiniteError(f"chunk {path[-1][:16]!r}: got logits with NaN or infinity; expected none")
                    chunk = self._padded_chunk(path[-1])
                    room = [(0, 0), (0, chunk.tokens - chunk.length), (0, 0), (0, 0)]
                    padded = {name: value if name in PARTS else np.pad(value, room) for name, value in kv.items()}
                    patch = form_patch(chunk, padded, self._rank, _antecedent(path[:-1]), dtype=self._dtype)
                except KVPatchError as error:
                    self._errors[path] = error
                    continue

                self._patches[path] = patch
                self.counts["patches"] += 1
                formed.append(patch)

        return formed

    def _find_patch(self, path: Path) -> bool:
        """Looks in the store for the patch that would be formed here, and keeps it. Returns whether there is one."""
        if self._store is None:
            return False

        backbone, chunk = self._backbone, self._padded_chunk(path[-1])
        antecedent = _antecedent(path[:-1])
        ranks = choose_ranks(chunk, self._rank)
        expected = antecedent.ids, tuple(range(backbone.layout.layers)), False

        # Only a patch that equals the one formed here: otherwise answers would depend on the store.
        for patch in stored_patches(self._store, chunk, antecedent, backbone.layout, backbone.fingerprint):
            of = patch.metadata
            found = of.antecedent.ids, of.layers, of.orbit
            if found != expected or dict(patch.ranks) != dict(ranks):
                continue
            if patch.tokens is not None and patch.tokens > chunk.tokens:
                continue
            if {leaf.dtype.name for leaf in jax.tree.leaves(dict(patch.factors))} == {factor_dtype(chunk, self._dtype)}:
                self._patches[path] = patch.pad(chunk.tokens)
                self.counts["found_patches"] += 1
                return True

        return False

    def _put(self, put: Callable[[Any], None], value: Any) -> None:
        """Stores chunks or patches. Answers do not depend on it, so that a full store is only counted."""
        try:
            put(value)
        except StoreError:
            self.counts["unstored"] += 1

    # ----------------------------------------------------------------------------------------------- forwards

    def _forward(self, tokens: Sequence[Tokens], contexts: Sequence[Sequence[HostKV]] | None) -> Output:
        """Runs one forward over rows of one length, after contexts of one length."""
        # The last row fills up the forward.
        padding = self.rows - len(tokens)
        batch = stacked([*tokens, *[tokens[-1]] * padding], self.place)
        context = None
        if contexts is not None:
            padded = [*contexts, *[contexts[-1]] * padding]
            size = sum(token_rows(kv).shape[1] for kv in padded[0])
            context = joined_context(padded, size, self.place)
        return self._backbone.prefill(batch, context=context)

    def _start(self, path: Path) -> int:
        """Returns the start of the last chunk of a path."""
        return sum(self._chunks[id].span for id in path[:-1])

    def _padded_chunk(self, id: str) -> Chunk:
        chunk = self._chunks[id]
        return chunk.pad(bucket(getattr(self._backbone, "buckets", None), chunk.length))

    def _error(self, path: Path) -> KVPatchError | None:
        """Returns why a chunk or patch along a path could not be formed, or None."""
        # A chunk that failed alone fails every path through it.
        steps = [*((id,) for id in path), *(path[:depth] for depth in range(2, len(path) + 1))]
        return next((self._errors[step] for step in steps if step in self._errors), None)


def _row(kv: Mapping[str, Any], row: int) -> HostKV:
    """Returns one row of a batch's KV, on the host."""
    return {name: np.asarray(value[:, row]) for name, value in kv.items()}


def _first_tokens(kv: Mapping[str, Any], count: int) -> HostKV:
    """Returns KV without padding, on the host."""
    arrays = {name: np.asarray(value) for name, value in kv.items()}
    return {name: value if name in PARTS else value[:, :count] for name, value in arrays.items()}


def _engine_kv(kv: HostKV, chunk: Chunk, start: int) -> HostKV:
    rotated = to_engine(chunk.layout, kv, np.asarray(chunk.local)[: chunk.length], start)
    return {name: np.asarray(value) for name, value in rotated.items()}


def _antecedent(path: Path) -> Antecedent:
    # The ids are those of contents.
    return Antecedent(tuple(Member(id, id) for id in path))


def stacked(rows: Sequence[Tokens], place: Place) -> Tokens:
    """Returns rows of one length as one batch.

    Raises:
      InputError: only some rows have deepstack features.
    """
    deep = [row.deepstack is not None for row in rows]
    if any(deep) and not all(deep):
        raise InputError("answer_batch: got deepstack features in some rows; expected them in all rows, or none")
    embeddings = np.concatenate([np.asarray(row.embeddings) for row in rows])
    positions = np.concatenate([np.asarray(row.positions) for row in rows])
    deepstack = np.concatenate([np.asarray(row.deepstack) for row in rows]) if all(deep) else None
    return Tokens(
        place(embeddings, 0), positions, None if deepstack is None else place(deepstack, 0), ahead_of(rows, 0)
    )


def joined_context(rows: Sequence[Sequence[HostKV]], size: int, place: Place) -> EngineKV:
    """Returns the chunks of each row one after the other, [L,B,size,K,H] for each channel, padded with zeros.

    Of a hybrid model also their transitions, composed in this order, [L,B,R,K,W] for each part.
    """
    joined = {}
    parts = [name for name in PARTS if name in rows[0][0]]
    if parts:
        composed = []
        for chunks in rows:
            # Lengths as arrays, so that no number of tokens compiles a program.
            counts = [np.asarray(token_rows(kv).shape[1], np.int32) for kv in chunks]
            composed.append(jitted_fold([{name: kv[name] for name in parts} for kv in chunks], counts))
        for name in parts:
            joined[name] = place(np.stack([np.asarray(own[name], np.float32) for own in composed], axis=1), 1)

    for name, sample in rows[0][0].items():
        if name in parts:
            continue
        values = np.zeros((sample.shape[0], len(rows), size, *sample.shape[2:]), sample.dtype)
        for row, chunks in enumerate(rows):
            begin = 0
            for kv in chunks:
                end = begin + kv[name].shape[1]
                values[:, row, begin:end] = kv[name]
                begin = end
        joined[name] = place(values, 1)

    return EngineKV(joined)
