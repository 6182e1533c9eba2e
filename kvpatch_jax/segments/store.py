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
from .index import SegmentIndex, StoredSpan
from .options import SegmentOptions
from .text import SegmentPrompt

GENERATIONS = 2
"""Reuses that may lie behind stored KV."""
SIZES = Buckets(16, 4)
"""Lengths that spans are packed at, so that they share programs."""


class SegmentStore:
    """Segments of one model. Methods can be called by several threads.

    Stores share nothing. Use one for each tenant: with a shared budget, the time of a prefill would tell a tenant what
    another does. Evicted KV is overwritten with zeros.

    Attributes:
      options: what it is built with. index: finds spans. bytes: of all KV and residuals.

    Raises:
      ConfigError: more reused layers than the model has below its last one. LayoutError: layers of unlike kinds.
    """

    def __init__(self, backbone: Backbone, options: SegmentOptions):
        check_uniform(backbone.layout, "SegmentStore")
        if not options.reuse_layers < backbone.layout.layers:
            raise ConfigError(
                f"reuse_layers: got {options.reuse_layers}; expected fewer than the model's {backbone.layout.layers} "
                "layers, for logits need one that is computed"
            )
        self.options, self.fingerprint = options, backbone.fingerprint
        self.index = SegmentIndex(options.context)
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

        Raises:
          InputError: arrays of another number of layers or tokens.
        """
        expected = {(self.options.reuse_layers, len(span.ids))}
        shapes = {value.shape[:2] for value in kv.values()} | {(self.options.reuse_layers, len(residual))}
        if shapes != expected:
            raise InputError(f"segments: got layers and tokens {sorted(shapes)}; expected {sorted(expected)}")

        with self.lock:
            if not self.lacks(span):
                return False
            rows = {name: self._packed(value) if self.options.int8 else value for name, value in kv.items()}
            dtype = jnp.bfloat16 if self.options.int8 else next(iter(kv.values())).dtype
            # Copies, which can be overwritten.
            arrays = jax.tree.map(np.array, (rows, residual.astype(dtype)))
            size = _bytes(arrays)
            if size > self.options.budget:
                return False
            self._drop(span.key)
            while self.bytes + size > self.options.budget:
                self._drop(next(iter(self._arrays)))
            self.index.add(prompt, span)
            self._arrays[span.key] = arrays
            self.bytes += size
            return True

    def read(self, key: str, start: int, stop: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Reads tokens start … stop-1 of a span: phase-free KV {channel: [R,n,K,H]} and residual [n,D], float32."""
        with self.lock:
            rows, residual = self._arrays[key]
            kv = {name: np.asarray(value)[:, start:stop].astype(np.float32) for name, value in rows.items()}
            return kv, residual[start:stop].astype(np.float32)

    def use(self, key: str) -> None:
        """Marks a span as the most recently used; ignores one that was evicted meanwhile."""
        with self.lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)

    def clear(self) -> None:
        """Removes and overwrites everything."""
        with self.lock:
            for key in list(self._arrays):
                self._drop(key)

    def _packed(self, value: np.ndarray) -> Any:
        count = value.shape[1]
        padded = zero_padded(value, 1, SIZES.round_up(count))
        return pack(padded, 8, None, -2, symmetric=True, heads=True, length=count)

    def _drop(self, key: str) -> None:
        """Removes and overwrites a span; ignores an unknown key."""
        self.index.remove(key)
        arrays = self._arrays.pop(key, None)
        self.bytes -= _bytes(arrays)
        for array in jax.tree.leaves(arrays):
            array.fill(0)


def _bytes(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))
