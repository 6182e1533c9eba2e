"""Store of segments: an index, and the KV of its spans on the host within a budget of bytes.

Segment reuse (proposal, §3.2, §6), changed in two places. The proposal stores keys after RoPE and turns them by the
difference of positions; these are phase-free and rotated once. It stores no residual, without which the upper layers of
a reused token cannot run; here it lies beside the KV. No text is stored, only token ids.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..backbone import Backbone
from ..core import Buckets, check_uniform, pack, zero_padded
from ..errors import ConfigError, InputError
from ..utils.kinds import is_whole
from .index import SegmentIndex, StoredSpan
from .text import SegmentPrompt

GENERATIONS = 2
"""Reuses that may lie behind stored KV."""
SIZES = Buckets(16, 4)
"""Lengths that spans are packed at, so that they share programs."""


class SegmentStore:
    """Segments of one model, which several threads may use.

    Stores share nothing. Use one for each tenant: with a shared budget, the time of a prefill would tell a tenant what
    another does. Evicted KV is overwritten with zeros.

    Attributes:
      index: finds spans.
      bytes: of all KV and residuals.
    """

    def __init__(
        self, backbone: Backbone, reuse_layers: int, *, context: int = 64, int8: bool = False, budget: int = 1 << 30
    ):
        """Creates an empty store.

        Args:
          reuse_layers: L_reuse, layers from the bottom whose KV is stored and reused; those above are always computed.
          context: W, tokens of the left context that is compared (32 … 128 in the proposal).
          int8: whether KV is stored in 8 bits, with a scale per layer, head and feature, and not in the model's dtype.
            The residual is in bfloat16 then: a 255th of its largest value would drown most tokens.
          budget: bytes. The segments least recently used are evicted.

        Raises:
          ConfigError: an option out of range. LayoutError: layers of unlike kinds.
        """
        check_uniform(backbone.layout, "SegmentStore")
        # Logits need a layer that is computed.
        last = backbone.layout.layers - 1
        for name, value, valid, expected in (
            ("reuse_layers", reuse_layers, is_whole(reuse_layers, 1) and reuse_layers <= last, f"1 to {last}"),
            ("context", context, is_whole(context, 0), "a number of tokens"),
            ("budget", budget, is_whole(budget, 1), "a number of bytes, 1 or more"),
        ):
            if not valid:
                raise ConfigError(f"SegmentStore: got {name} {value!r:.80}; expected {expected}")
        self.fingerprint, self.reuse_layers, self.int8, self.budget = backbone.fingerprint, reuse_layers, int8, budget
        self.index = SegmentIndex(context)
        self.lock = threading.RLock()
        self.bytes = 0
        # {key: (KV, residual)}, least recently used first.
        self._arrays: OrderedDict[str, tuple[dict[str, Any], np.ndarray]] = OrderedDict()

    def expect(self, backbone: Backbone) -> None:
        """Raises InputError for another model than that of the segments."""
        if backbone.fingerprint != self.fingerprint:
            raise InputError(
                f"segments: got those of model {self.fingerprint[:16]}…; expected {backbone.fingerprint[:16]}…, the "
                "fingerprint of the backbone"
            )

    def lacks(self, span: StoredSpan) -> bool:
        """Returns whether a span is new, or stored behind more reuses than this one."""
        known = self.index.spans.get(span.key)
        return span.generation <= GENERATIONS and (known is None or span.generation < known.generation)

    def add(
        self,
        prompt: SegmentPrompt,
        span: StoredSpan,
        kv: Mapping[str, np.ndarray],
        residual: Float[np.ndarray, "n D"],
    ) -> bool:
        """Stores a span of a prompt, described by `index.describe`; returns whether it did.

        A span larger than the budget, and one that the store does not lack, are not stored.

        Args:
          kv: phase-free, {channel: [R,n,K,H]}, the lowest `reuse_layers` layers of the span's tokens.
          residual: [n,D], entering layer `reuse_layers`.
        """
        rows: dict[str, Any] = dict(kv)
        dtype = next(iter(kv.values())).dtype
        if self.int8:
            size, dtype = SIZES.round_up(len(residual)), jnp.bfloat16
            for name, value in kv.items():
                padded = zero_padded(value, 1, size)
                rows[name] = pack(padded, 8, None, -2, symmetric=True, heads=True, length=len(residual))
        # Copies, which can be overwritten.
        arrays = jax.tree.map(np.array, (rows, residual.astype(dtype)))
        with self.lock:
            if not self.lacks(span) or _bytes(arrays) > self.budget:
                return False
            if span.key in self._arrays:
                self._drop(span.key)
            while self.bytes + _bytes(arrays) > self.budget:
                self._drop(next(iter(self._arrays)))
            self.index.add(prompt, span)
            self._arrays[span.key] = arrays
            self.bytes += _bytes(arrays)
            return True

    def read(self, key: str, start: int, stop: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Reads tokens start … stop-1 of a span, which becomes the most recently used.

        Returns:
          Phase-free KV {channel: [R,n,K,H]} and residual [n,D], float32.
        """
        with self.lock:
            rows, residual = self._arrays[key]
            self._arrays.move_to_end(key)
            kv = {name: np.asarray(value)[:, start:stop].astype(np.float32) for name, value in rows.items()}
            return kv, residual[start:stop].astype(np.float32)

    def _drop(self, key: str) -> None:
        """Removes and overwrites a span."""
        self.index.remove(key)
        arrays = self._arrays.pop(key)
        self.bytes -= _bytes(arrays)
        for array in jax.tree.leaves(arrays):
            array.fill(0)


def _bytes(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))
