"""Store of segments: per tenant an index, packed KV and an SLRU budget, all apart from every other tenant's.

Segment reuse (proposal, §3.2, §6). Budgets are per tenant as well: where tenants evicted each other's segments, the
time of a prefill would tell one what another does. What is evicted is overwritten. No text is kept, only token ids.
"""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ..backbone import Backbone
from ..core import check_uniform
from ..errors import ConfigError, InputError
from .segment_index import SegmentIndex, StoredSpan
from .segment_options import SegmentIndexOptions
from .segmentation import SegmentPrompt, TokenRange
from .segmented_lru import SegmentedLRU
from .stored_kv import StoredKV, pack, unpack


class SegmentCounters(NamedTuple):
    """Counts of one tenant: spans stored, refused because they are too large, evicted, and used by prefills."""

    stored: int = 0
    refused: int = 0
    evicted: int = 0
    used: int = 0


class TenantSegments:
    """Segments of one tenant and one model. Methods can be called by several threads.

    Attributes:
      tenant: its name. fingerprint: the model's. options: what it is built with.
      index: finds spans. counters: what happened so far.
    """

    def __init__(self, tenant: str, fingerprint: str, options: SegmentIndexOptions):
        self.tenant, self.fingerprint, self.options = tenant, fingerprint, options
        self.index = SegmentIndex(options)
        self.counters = SegmentCounters()
        self.lock = threading.RLock()
        self._kv: dict[str, StoredKV] = {}
        self._order = SegmentedLRU(options.budget, options.protected_share)

    @property
    def bytes(self) -> int:
        """Bytes of what is stored."""
        return self._order.bytes

    def expect(self, backbone: Backbone, tenant: str) -> None:
        """Checks that these are segments of a model and a tenant.

        Raises:
          InputError: they are another's.
        """
        if tenant != self.tenant:
            # The message does not name whose they are.
            raise InputError(f"segments: got another tenant's; expected those of {tenant!r:.80}")
        if backbone.fingerprint != self.fingerprint:
            raise InputError(
                f"segments: got those of model {self.fingerprint[:16]}…; expected {backbone.fingerprint[:16]}…, the "
                "fingerprint of the backbone"
            )

    def lacks(self, span: StoredSpan) -> bool:
        """Returns whether a span is not stored, or only behind more reuses than this one."""
        known = self.index.spans.get(span.key)
        return known is None or span.generation < known.generation

    def add(
        self,
        prompt: SegmentPrompt,
        span: StoredSpan,
        kv: Mapping[str, np.ndarray],
        residual: Float[np.ndarray, "n D"],
    ) -> bool:
        """Stores a span of a prompt, described by `index.described`; returns whether it is stored now.

        Args:
          kv: phase-free, {channel: [R,n,K,H]}, the lowest `reuse_layers` layers of the span's tokens.
          residual: [n,D], entering layer `reuse_layers`.

        Raises:
          InputError: arrays of another number of layers or tokens.
        """
        shapes = {value.shape[:2] for value in kv.values()} | {(self.options.reuse_layers, len(residual))}
        if shapes != {(self.options.reuse_layers, len(span.ids))}:
            raise InputError(
                f"segments: got layers and tokens {sorted(shapes)}; expected {self.options.reuse_layers} layers of "
                f"{len(span.ids)} tokens"
            )

        with self.lock:
            if span.generation > self.options.generations or not self.lacks(span):
                return False
            if span.key in self.index.spans:
                self._order.remove(span.key)
                self._drop(span.key)
            packed = pack(kv, residual, self.options.storage)
            evicted = self._order.admit(span.key, packed.bytes)
            if evicted is None:
                self.counters = self.counters._replace(refused=self.counters.refused + 1)
                return False

            for key in evicted:
                self._drop(str(key))
            self.index.add(prompt, span)
            self._kv[span.key] = packed
            count = self.counters
            self.counters = count._replace(stored=count.stored + 1, evicted=count.evicted + len(evicted))
            return True

    def read(self, key: str, tokens: TokenRange) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Reads tokens of a span: phase-free KV {channel: [R,n,K,H]} and residual [n,D], float32. Counts as no use."""
        with self.lock:
            return unpack(self._kv[key], *tokens)

    def use(self, key: str) -> None:
        """Notes that a prefill reused a span, which protects it. One that was evicted meanwhile is ignored."""
        with self.lock:
            self._order.hit(key)
            self.counters = self.counters._replace(used=self.counters.used + 1)

    def clear(self) -> None:
        """Removes and overwrites everything."""
        with self.lock:
            for key in list(self._kv):
                self._order.remove(key)
                self._drop(key)

    def _drop(self, key: str) -> None:
        self.index.remove(key)
        self._kv.pop(key).erase()


class SegmentStore:
    """Segments of one model, apart by tenant.

    Raises:
      ConfigError: more reused layers than the model has below its last one. LayoutError: layers of unlike kinds.
    """

    def __init__(self, backbone: Backbone, options: SegmentIndexOptions):
        check_uniform(backbone.layout, "SegmentStore")
        if not options.reuse_layers < backbone.layout.layers:
            raise ConfigError(
                f"reuse_layers: got {options.reuse_layers}; expected fewer than the model's {backbone.layout.layers} "
                "layers, for logits need one that is computed"
            )
        self.options, self.fingerprint = options, backbone.fingerprint
        self._tenants: dict[str, TenantSegments] = {}
        self._lock = threading.Lock()

    def tenant(self, name: str) -> TenantSegments:
        """Returns a tenant's segments, none at first.

        Raises:
          InputError: the name is empty.
        """
        if not isinstance(name, str) or not name:
            raise InputError(f"tenant: got {name!r:.80}; expected a name")
        with self._lock:
            if name not in self._tenants:
                self._tenants[name] = TenantSegments(name, self.fingerprint, self.options)
            return self._tenants[name]

    def delete_tenant(self, name: str) -> bool:
        """Removes a tenant and overwrites its segments; returns whether there was one."""
        with self._lock:
            found = self._tenants.pop(name, None)
        if found is not None:
            found.clear()
        return found is not None
