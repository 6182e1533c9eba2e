"""Canonicals and patches of a batch: each found in a store or made once, by one forward for each distinct pair.

A chunk's patch is formed of a forward behind the exact KV of all in front of it, which the forward before it left. So
prefixes are walked as a tree: one forward for each distinct chunk behind each distinct antecedent.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from ..backbone import Backbone, Output, Tokens, check_tokens
from ..cache import Antecedent, Chunk, Member, Patch
from ..core import EngineKV, to_engine
from ..errors import InputError, KVPatchError, NotFiniteError, StoreError
from ..patching import Placed, Rank, apply_patch, choose_ranks, factor_dtype, form_patch
from ..window import PatchStore, asked_behind, bucket, padded_chunk, padded_patch

Path = tuple[str, ...]
"""Ids of chunks from the front on: the last one, behind those in front of it."""
HostKV = Mapping[str, Float[np.ndarray, "L _ _ _"]]
Place = Callable[[Any, int], Any]
"""Puts a host array on the devices, its rows (along an axis) over those that share the work."""


class QuestionPrefix(NamedTuple):
    """What stands in front of a question.

    Attributes:
      kv: of each chunk, in the engine frame, {channel: [L,T,K,H]} on the host. tokens: of all of them.
      span: where the question starts. exact: whether no patch is in it.
    """

    kv: tuple[HostKV, ...]
    tokens: int
    span: int
    exact: bool


class BatchPatchCache:
    """Chunks and patches of a batch, as they are needed.

    Attributes:
      counts: canonicals, conditioned, again: forwards of a chunk alone, behind others, and behind others whose patch
        was stored, for the sake of those behind it; found_canonicals, found_patches: in the store; patches: formed;
        unstored: what the store did not take.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore | None,
        units: Mapping[str, Sequence[Any]],
        rank: Rank,
        dtype: Any,
        rows: int,
        place: Place,
    ):
        """Nothing is there yet.

        Args:
          units: what each chunk shows, by id. rows: of a forward, each on a device of its own.
        """
        self.backbone, self.store, self.units = backbone, store, units
        self.rank, self.dtype, self.rows, self.place = rank, dtype, rows, place
        self.buckets = getattr(backbone, "buckets", None)
        self.counts: collections.Counter[str] = collections.Counter()
        self._tokens: dict[str, Tokens] = {}
        self._chunks: dict[str, Chunk] = {}
        self._patches: dict[Path, Patch] = {}
        self._exact: dict[Path, HostKV] = {}
        self._bad: dict[Path, KVPatchError] = {}

    # --------------------------------------------------------------------------------------------- what is needed

    def ensure(self, fronts: Sequence[Path], following: Path | None) -> None:
        """Finds or makes what these fronts are served by; what fails is told when it is asked for.

        Args:
          fronts: in their order. following: the front behind them, with which what is shared is kept.
        """
        self._canonicals(list(dict.fromkeys(id for front in fronts for id in front)))
        known = [front for front in fronts if self._error(front) is None]
        paths = dict.fromkeys(front[:depth] for front in known for depth in range(2, len(front) + 1))
        needed = {path for path in paths if path not in self._patches and not self._find_patch(path)}
        running = {path[:depth] for path in needed for depth in range(2, len(path) + 1)}
        running = {path for path in running if path in needed or path not in self._exact}

        formed: list[Patch] = []
        for depth in sorted({len(path) for path in running}):
            groups: dict[tuple[int, int], list[Path]] = {}
            for path in sorted(path for path in running if len(path) == depth):
                if self._error(path) is None:
                    sizes = self._chunks[path[-1]].length, sum(self._chunks[id].length for id in path[:-1])
                    groups.setdefault(sizes, []).append(path)
            for group in groups.values():
                formed += self._conditioned(group, needed)
        self._keep(formed)

        shared = lambda path: following is not None and following[: len(path)] == path
        self._exact = {path: kv for path, kv in self._exact.items() if shared(path)}
        self._patches = {
            path: patch for path, patch in self._patches.items() if shared(path) or path in paths or self.store is None
        }

    def front(self, ids: Path) -> QuestionPrefix:
        """What stands in front of a question: the first chunk as it is, each other one with its patch.

        Raises:
          KVPatchError: why one of them could not be made.
        """
        error = self._error(ids)
        if error is not None:
            raise error
        start, tokens, found = 0, 0, []
        for depth in range(1, len(ids) + 1):
            chunk = self._padded(ids[depth - 1])
            patch = self._patches.get(ids[:depth])
            behind = self._behind(ids[: depth - 1])
            served = apply_patch(Placed(chunk, patch, start, antecedent=behind))
            found.append({name: np.asarray(value)[:, : chunk.length] for name, value in served.items()})
            start, tokens = start + chunk.span, tokens + chunk.length
        return QuestionPrefix(tuple(found), tokens, start, len(ids) < 2)

    def let_go(self, still: set[str]) -> None:
        """Lets go of chunks that no item will need, and of others too where a store has them."""
        for id in [id for id in self._chunks if id not in still]:
            del self._chunks[id]
        self._tokens.clear()

    # --------------------------------------------------------------------------------------------- canonicals

    def _canonicals(self, ids: Sequence[str]) -> None:
        missing: dict[int, list[str]] = {}
        for id in ids:
            if id in self._chunks or (id,) in self._bad:
                continue
            found = None if self.store is None else self.store.get(id, self.backbone.fingerprint)
            if found is not None and found.content == id:
                self._chunks[id] = found
                self.counts["found_canonicals"] += 1
                continue
            try:
                missing.setdefault(self._embedded(id).embeddings.shape[1], []).append(id)
            except KVPatchError as error:
                self._bad[(id,)] = error
        for group in missing.values():
            for begin in range(0, len(group), self.rows):
                self._alone(group[begin : begin + self.rows])

    def _embedded(self, id: str) -> Tokens:
        """The tokens of a chunk, read again.

        Raises:
          ImageError, InputError: as `prepare`.
        """
        if id not in self._tokens:
            tokens = self.backbone.embed(**self.backbone.prepare(list(self.units[id])))
            check_tokens(tokens, "answer_batch")
            self._tokens[id] = tokens
        return self._tokens[id]

    def _alone(self, ids: Sequence[str]) -> None:
        """Prefills chunks of one length alone, all at once."""
        try:
            tokens = [self._embedded(id) for id in ids]
            out = self._forward(tokens, None)
        except KVPatchError as error:
            self._bad |= {(id,): error for id in ids}
            return
        for row, id in enumerate(ids):
            self.counts["canonicals"] += 1
            local = np.asarray(tokens[row].positions)[0]
            try:
                chunk = Chunk(
                    kv={name: np.asarray(value[:, row]) for name, value in out.kv.items()},
                    local=local,
                    span=math.floor(local.max()) + 1,
                    length=len(local),
                    id=id,
                    layout=self.backbone.layout,
                    backbone=self.backbone.fingerprint,
                    content=id,
                )
            except KVPatchError as error:
                self._bad[(id,)] = error
                continue
            self._chunks[id] = chunk
            if self.store is not None:
                self._stored(self.store.put, chunk)

    # ------------------------------------------------------------------------------------------------ patches

    def _conditioned(self, group: Sequence[Path], needed: set[Path]) -> list[Patch]:
        """Runs chunks of one length behind as many tokens, and forms the patches that are needed."""
        formed = []
        for begin in range(0, len(group), self.rows):
            paths = group[begin : begin + self.rows]
            try:
                tokens = [self._embedded(path[-1]).shift(self._start(path)) for path in paths]
                out = self._forward(tokens, [self._exact_front(path[:-1]) for path in paths])
            except KVPatchError as error:
                self._bad |= dict.fromkeys(paths, error)
                continue
            for row, path in enumerate(paths):
                self.counts["conditioned" if path in needed else "again"] += 1
                kv = {name: np.asarray(value[:, row]) for name, value in out.kv.items()}
                chunk = self._chunks[path[-1]]
                self._exact[path] = self._engine(kv, chunk, self._start(path))
                if path not in needed:
                    continue
                try:
                    if not np.isfinite(np.asarray(out.logits)[row]).all():
                        raise NotFiniteError(f"chunk {path[-1][:16]!r}: logits hold NaN or infinity; expected none")
                    formed.append(self._formed(path, kv))
                except KVPatchError as error:
                    self._bad[path] = error
        return formed

    def _formed(self, path: Path, kv: HostKV) -> Patch:
        chunk = self._padded(path[-1])
        room = [(0, 0), (0, chunk.tokens - chunk.length), (0, 0), (0, 0)]
        padded = {name: np.pad(value, room) for name, value in kv.items()}
        patch = form_patch(chunk, padded, self.rank, self._behind(path[:-1]), dtype=self.dtype)
        self._patches[path] = patch
        self.counts["patches"] += 1
        return patch

    def _find_patch(self, path: Path) -> bool:
        """Looks for a patch as it would be formed here in the store, and keeps it."""
        if self.store is None:
            return False
        chunk, behind = self._padded(path[-1]), self._behind(path[:-1])
        wanted = asked_behind(behind, chunk.id, chunk.content, self.backbone.layout, self.backbone.fingerprint)
        ranks, asked = choose_ranks(chunk, self.rank)
        for patch in self.store.get_patches(wanted):
            own = patch.metadata
            same = (own.antecedent, own.layers, own.heads, own.frame, own.orbit, own.asked)
            if same != (wanted.antecedent, wanted.layers, "joint", "phase_free", False, asked):
                continue
            dtype = {leaf.dtype.name for leaf in jax.tree.leaves(dict(patch.factors))}
            if patch.tokens not in (None, chunk.tokens) and (patch.tokens or 0) > chunk.tokens:
                continue
            if dict(patch.ranks) == dict(ranks) and dtype == {factor_dtype(chunk, self.dtype)}:
                self._patches[path] = padded_patch(patch, chunk.tokens)
                self.counts["found_patches"] += 1
                return True
        return False

    def _keep(self, formed: Sequence[Patch]) -> None:
        if formed and self.store is not None:
            self._stored(self.store.put_patches, list(formed))

    def _stored(self, put: Callable[[Any], None], thing: Any) -> None:
        """Stores something. An answer does not depend on it: what does not find room is counted."""
        try:
            put(thing)
        except StoreError:
            self.counts["unstored"] += 1

    # ------------------------------------------------------------------------------------------------ steps

    def _forward(self, tokens: Sequence[Tokens], contexts: Sequence[Sequence[HostKV]] | None) -> Output:
        """One forward over rows of one length each, behind contexts of one length."""
        rows = [*tokens, *[tokens[-1]] * (self.rows - len(tokens))]
        whole = stacked(rows, self.place)
        context = None
        if contexts is not None:
            fronts = [*contexts, *[contexts[-1]] * (self.rows - len(contexts))]
            size = sum(next(iter(kv.values())).shape[1] for kv in fronts[0])
            context = context_of(fronts, size, self.place)
        return self.backbone.prefill(whole, context=context)

    def _exact_front(self, path: Path) -> list[HostKV]:
        """Exact KV of all along a path, in the engine frame."""
        first = self._chunks[path[0]]
        if path[:1] not in self._exact:
            kv = {name: np.asarray(value)[:, : first.length] for name, value in first.kv.items()}
            self._exact[path[:1]] = self._engine(kv, first, 0)
        return [self._exact[path[:depth]] for depth in range(1, len(path) + 1)]

    def _engine(self, kv: HostKV, chunk: Chunk, start: int) -> HostKV:
        turned = to_engine(chunk.layout, kv, np.asarray(chunk.local)[: chunk.length], start)
        return {name: np.asarray(value) for name, value in turned.items()}

    def _start(self, path: Path) -> int:
        return sum(self._chunks[id].span for id in path[:-1])

    def _behind(self, path: Path) -> Antecedent:
        return Antecedent(tuple(Member(id, id) for id in path))

    def _padded(self, id: str) -> Chunk:
        chunk = self._chunks[id]
        return padded_chunk(chunk, bucket(self.buckets, chunk.length))

    def _error(self, path: Path) -> KVPatchError | None:
        """Why something along a path could not be made."""
        for id in path:
            if (id,) in self._bad:
                return self._bad[(id,)]
        return next((self._bad[path[:depth]] for depth in range(2, len(path) + 1) if path[:depth] in self._bad), None)


def stacked(rows: Sequence[Tokens], place: Place) -> Tokens:
    """Rows of equally many tokens as one batch.

    Raises:
      InputError: rows with features for deeper layers beside rows without.
    """
    deep = [row.deepstack is not None for row in rows]
    if any(deep) and not all(deep):
        raise InputError("answer_batch: rows with deepstack features beside rows without; expected one kind")
    embeddings = np.concatenate([np.asarray(row.embeddings) for row in rows])
    positions = np.concatenate([np.asarray(row.positions) for row in rows])
    deepstack = np.concatenate([np.asarray(row.deepstack) for row in rows]) if all(deep) else None
    return Tokens(place(embeddings, 0), positions, None if deepstack is None else place(deepstack, 0))


def context_of(fronts: Sequence[Sequence[HostKV]], size: int, place: Place) -> EngineKV:
    """Rows of engine-frame KV, [L,B,size,K,H] for each channel, with zeros behind what is shorter."""
    found = {}
    for name, sample in fronts[0][0].items():
        whole = np.zeros((sample.shape[0], len(fronts), size, *sample.shape[2:]), sample.dtype)
        for row, front in enumerate(fronts):
            begin = 0
            for kv in front:
                end = begin + kv[name].shape[1]
                whole[:, row, begin:end] = kv[name]
                begin = end
        found[name] = place(whole, 1)
    return EngineKV(found)
