"""What is kept of a chunk's versions, as arrays and with all its bytes: bases, directions of deficits, KV in few bits.

A base and a patch in few bits are `kvpatch_jax`'s own (`encode_kv_rows`, `choose_directions`, `stored`); here they are
of a whole batch at once, and one decomposition serves every budget. A test holds them against `form_patch`.
Axis letters: B chunks, T tokens, R directions, F features, L layers.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import kvpatch_jax as kvp
from kvpatch_jax.core import flatten_heads, ops
from kvpatch_jax.patching.byte_budget import ByteBudget, choose_directions, direction_bytes
from kvpatch_jax.repair import RepairBytes
from kvpatch_jax.repair.encoded_corrections import patch_bytes
from kvpatch_jax.repair.stored_kv import KVPrecision, decode_kv_rows, encode_kv_rows, mean_kv

from ..arms.reused_page import KV
from .versions import MetChunks

KEPT_BASES = 4
"""Encoded bases that are kept at once."""
Weights = Mapping[str, Float[np.ndarray, "L F"]]


class StoredForm(NamedTuple):
    """What is served of a chunk, and its cost.

    Attributes:
      kv: phase-free, {channel: [L,B,T,K,H]}; None: `cache` has it.
      bytes: of one row, kept and moved.
      serving: FLOPs of one reuse beside the rotation. forming: FLOPs before the first reuse, of one antecedent.
      cache: engine-frame KV of antecedent and chunk, where a repair made it.
    """

    kv: KV | None
    bytes: RepairBytes
    serving: float
    forming: float
    cache: KV | None = None


class Directions(NamedTuple):
    """Directions of a deficit by channel: coefficients u [L,B,R,T], v [L,B,R,F], singular values [L,B,R]."""

    u: dict[str, Array]
    v: dict[str, Array]
    values: dict[str, np.ndarray]


class FormFactory:
    """Makes forms of chunks; keeps encoded bases, and the last deficit's directions.

    Args:
      chunks: with their versions.
      weights: of features, by name: how much an error in each counts when directions are chosen.
    """

    def __init__(self, chunks: MetChunks, weights: Mapping[str, Weights] | None = None):
        self.chunks, self.weights = chunks, dict(weights or {})
        self.layout, self.costs = chunks.backbone.layout, chunks.first.costs
        self._bases: dict[tuple, tuple[KV, int]] = {}
        self._last: tuple[tuple, Directions] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        return self.costs.tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of a chunk's KV in 16 bits, which all shares are of."""
        return 2 * self.costs.numbers

    # ------------------------------------------------------------------------------------------------------- bases

    def members(self, base: str, version: int, antecedents: int) -> tuple[int, ...]:
        """Lists the versions that a base is made of: antecedents are taken in groups of so many, as they were met."""
        if base == "canonical":
            return ()
        group = version // antecedents * antecedents
        found = [number for number in range(group, group + antecedents) if number < len(self.chunks)]
        return tuple(number for number in found if base == "mean" or number != version)

    def base(self, base: str, version: int, antecedents: int) -> KV:
        """Returns a base before it is encoded."""
        if base == "canonical":
            return self.chunks.canonical
        versions = [self.chunks.conditioned[number] for number in self.members(base, version, antecedents)]
        return mean_kv(versions)

    def encoded_base(
        self, base: str, precision: KVPrecision | int, version: int, antecedents: int
    ) -> tuple[KV, RepairBytes]:
        """Returns a base as it is read again from its encoding, and its bytes, which are kept once."""
        own = KVPrecision.of(precision)
        key = base, own, self.members(base, version, antecedents)
        if key not in self._bases:
            # Arms of one base lie together; more of them would fill the memory.
            while len(self._bases) >= KEPT_BASES:
                self._bases.pop(next(iter(self._bases)))
            stored = encode_kv_rows(self.layout, self.base(base, version, antecedents), own)
            self._bases[key] = decode_kv_rows(stored), own.nbytes(self.layout, self.tokens)
        kv, size = self._bases[key]
        return kv, RepairBytes(shared=size, moved=size) if base != "canonical" else RepairBytes(size, moved=size)

    def base_forming(self, base: str) -> float:
        """Counts the FLOPs of a base itself, shared by its antecedents: a prefill alone, or nothing beside theirs."""
        return float(self.costs.alone) if base == "canonical" else 0.0

    # ----------------------------------------------------------------------------------------------------- patches

    def directions(
        self,
        base: str,
        precision: KVPrecision | int,
        version: int,
        antecedents: int,
        weights: str | None,
    ) -> Directions:
        """Decomposes a version's deficit against a decoded base."""
        key = base, KVPrecision.of(precision), version, antecedents, weights
        if self._last is None or self._last[0] != key:
            self._last = None
            kv, _ = self.encoded_base(base, precision, version, antecedents)
            own = None if weights is None else {name: jnp.asarray(w) for name, w in self.weights[weights].items()}
            found = _jitted_directions(self.chunks.conditioned[version], kv, own)
            values = {name: np.asarray(channel[2]) for name, channel in found.items()}
            self._last = (
                key,
                Directions(
                    {name: channel[0] for name, channel in found.items()},
                    {name: channel[1] for name, channel in found.items()},
                    values,
                ),
            )
        return self._last[1]

    def patched(
        self,
        base: str,
        precision: KVPrecision | int,
        version: int,
        antecedents: int,
        *,
        factors: str,
        share: float | None = None,
        rank: int | None = None,
        weights: str | None = None,
        relative: float | None = None,
    ) -> StoredForm:
        """Adds a patch in few bits to a base in few bits.

        Args:
          factors: dtype of the patch's factors, as `form_patch` takes it.
          share: bytes of the patch as a share of the KV's, ranks chosen by layer and channel; or `rank`: one for all.
          weights: name of the weights by which directions are found and chosen; None: none.
          relative: as of `ByteBudget`; None: its default.
        """
        kv, bytes = self.encoded_base(base, precision, version, antecedents)
        found = self.directions(base, precision, version, antecedents, weights)
        if share is None:
            assert rank is not None
            masks, counts = {}, {}
            for name, values in found.values.items():
                masks[name] = np.broadcast_to(np.arange(values.shape[-1]) < rank, values.shape)
                counts[name] = int(masks[name][:, 0].sum())
            size = float(patch_bytes(self.layout, self.tokens, rank, factors))
        else:
            options: dict[str, Any] = {} if relative is None else {"relative": relative}
            budget = ByteBudget(int(share * self.kv_bytes), **options)
            masks, size = self._within(found, budget, factors)

        added = sum(2.0 * mask.sum() / mask.shape[1] * self._direction_size(name) for name, mask in masks.items())
        most = max(int(mask.sum(-1).max()) for mask in masks.values())
        # Few shapes: each is a program.
        width = min(-(-most // 32) * 32, *(mask.shape[-1] for mask in masks.values()))
        width = max(width, most)
        cut = {name: jnp.asarray(mask[..., :width]) for name, mask in masks.items()}
        u = {name: value[:, :, :width] for name, value in found.u.items()}
        v = {name: value[:, :, :width] for name, value in found.v.items()}
        own = None if weights is None else {name: jnp.asarray(w) for name, w in self.weights[weights].items()}
        served = _jitted_patched(kv, u, v, cut, own, factors)
        kept = bytes._replace(stored=round(size), moved=bytes.moved + round(size))
        forming = self.costs.prefill + self.costs.factorising() + self.base_forming(base) / antecedents
        return StoredForm(served, kept, float(added), float(forming))

    def _direction_size(self, name: str) -> int:
        return self.tokens * self.layout.channel(name).features

    def _within(
        self, found: Directions, budget: ByteBudget, factors: str
    ) -> tuple[dict[str, Bool[np.ndarray, "L B R"]], float]:
        """Marks the directions that each row's budget holds; also returns the bytes kept, the rows' mean."""
        costs = {}
        for name in found.values:
            costs[name] = direction_bytes(self.tokens, self.layout.channel(name).features, factors)
        columns = dict.fromkeys(found.values, 2 * self.layout.layers)
        masks = {name: np.zeros(values.shape, bool) for name, values in found.values.items()}
        total, rows = 0, self.chunks.rows
        for row in range(rows):
            values = {}
            for name, own in found.values.items():
                values[name] = np.minimum.accumulate(own[:, row], axis=1)
                # As `form_patch` compares directions of different layers.
                norms = np.linalg.norm(values[name], axis=1, keepdims=True)
                values[name] = values[name] / np.maximum(norms, 1e-3 * norms.max() + 1e-30) ** budget.power()
            ranks = choose_directions(values, costs, budget.nbytes, column_bytes=columns)
            for name, own in ranks.items():
                masks[name][:, row] = np.arange(masks[name].shape[-1]) < own[:, None]
                total += int(own.sum()) * costs[name] + int(own.max(initial=0)) * columns[name]
        return masks, total / rows

    # -------------------------------------------------------------------------------------------------- other forms

    def few_bits(self, precision: KVPrecision | int, version: int) -> StoredForm:
        """Keeps a version itself, in few bits."""
        own = KVPrecision.of(precision)
        kv = decode_kv_rows(encode_kv_rows(self.layout, self.chunks.conditioned[version], own))
        size = own.nbytes(self.layout, self.tokens)
        return StoredForm(kv, RepairBytes(stored=size, moved=size), 0.0, float(self.costs.prefill))

    def base_alone(self, base: str, precision: KVPrecision | int, version: int, antecedents: int) -> StoredForm:
        """Serves a base without a patch."""
        kv, bytes = self.encoded_base(base, precision, version, antecedents)
        forming = self.costs.prefill if self.members(base, version, antecedents) else self.costs.alone
        return StoredForm(kv, bytes, 0.0, float(forming))

    def keys_rounded(self, version: int, bits: int, where: str, group: int | None) -> StoredForm:
        """Rounds a version's keys alone: by feature "before" or "after" rotation, or by "token" after it.

        Values stay whole, so that what differs is the place where keys are rounded.
        """
        page, kv = self.chunks.readers[version].page, dict(self.chunks.conditioned[version])
        positions = np.asarray(page.tokens.positions)[:, page.slots]
        before = where == "before"
        placed = kv if before else dict(kvp.to_engine(self.layout, kv, positions, 0))
        axis, size = -1 if where == "token" else -2, 0
        for channel in self.layout.channels:
            if channel.rotates or channel.name == "k":
                packed = kvp.core.pack(placed[channel.name], bits, group, axis, heads=True)
                placed[channel.name] = kvp.core.unpack(packed)
                size += self.layout.layers * kvp.core.packed_bytes(self.tokens, channel.features, bits, group, axis)
            else:
                size += 2 * self.layout.layers * self.tokens * channel.features
        served = placed if before else dict(kvp.to_phase_free(self.layout, placed, positions))
        return StoredForm(served, RepairBytes(stored=size, moved=size), 0.0, float(self.costs.prefill))

    def error(self, kv: KV, version: int, names: Sequence[str] | None = None) -> float:
        """Computes ‖served − KV(B|A)‖ / ‖KV(B|A)‖ over channels, whose norms count alike."""
        total, wanted = [], self.layout.names if names is None else names
        for name in wanted:
            expected = self.chunks.conditioned[version][name]
            total.append(float(jnp.linalg.norm(kv[name] - expected) / jnp.linalg.norm(expected)))
        return float(np.sqrt(np.mean(np.square(total))))


@jax.jit
def _jitted_directions(
    version: KV, base: KV, weights: dict[str, Array] | None
) -> dict[str, tuple[Array, Array, Array]]:
    """Returns by channel u [L,B,R,T] with singular values, v [L,B,R,F] and the values [L,B,R], weighted where asked.

    By the eigenvectors of Δᵀ Δ, which take a quarter of the time of a singular value decomposition: whatever v is,
    u = Δ v is the best there is, so rounding costs energy and no correctness.
    """
    found = {}
    for name, own in base.items():
        delta = flatten_heads(version[name] - own)
        if weights is not None:
            delta = delta * weights[name][:, None, None]
        gram = jnp.swapaxes(delta, -1, -2) @ delta
        energy, vectors = jnp.linalg.eigh(gram)
        limit = min(own.shape[2], gram.shape[-1])
        v = jnp.swapaxes(vectors, -1, -2)[..., ::-1, :][..., :limit, :]
        u = jnp.einsum("lbtf,lbrf->lbrt", delta, v)
        found[name] = u, v, jnp.sqrt(jnp.maximum(energy[..., ::-1][..., :limit], 0.0))
    return found


@functools.partial(jax.jit, static_argnames=("dtype",))
def _jitted_patched(
    base: KV,
    u: dict[str, Array],
    v: dict[str, Array],
    masks: dict[str, Array],
    weights: dict[str, Array] | None,
    dtype: str,
) -> dict[str, Array]:
    """Adds the marked directions, in a dtype of factors, to a base."""
    served = {}
    for name, value in base.items():
        own = v[name] if weights is None else v[name] / weights[name][:, None, None]
        left, right = (ops.value_of(ops.stored(factor, dtype, -1)) for factor in (u[name], own))
        left = jnp.where(masks[name][..., None], left, 0.0)
        delta = jnp.einsum("lbrt,lbrf->lbtf", left.astype(jnp.float32), right.astype(jnp.float32))
        served[name] = value + delta.reshape(value.shape)
    return served
