"""Sums of a chunk's deficits over the orders of one set of chunks in front of it, as traffic brings them.

Of each sum one orbit patch is formed, which serves orders that were not met yet.
"""

import collections

import jax

from ...cache import Chunk
from ...core import PhaseFreeKV
from ...patching import Accumulated, accumulate

MAX_BYTES = 256 << 20
"""Host memory of the sums; the least recently met ones go first, and begin anew."""


class OrbitSums:
    """Running sums by tenant, canonical and set. For one thread.

    Attributes:
      nbytes: that are held.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self.nbytes, self._max_bytes = 0, max_bytes
        self._sums: collections.OrderedDict[tuple[str, str, str, tuple[str, ...]], Accumulated] = (
            collections.OrderedDict()
        )

    def add(self, tenant: str, canonical: Chunk, free: PhaseFreeKV, antecedent: tuple[str, ...]) -> Accumulated:
        """Adds a chunk's phase-free KV behind one order of a set, and returns the sum.

        Raises:
          PatchMismatchError, ShapeError, NotFiniteError: as `accumulate`.
        """
        key = tenant, canonical.backbone, canonical.id, tuple(sorted(antecedent))
        before = self._sums.pop(key, None)
        self.nbytes -= _bytes_of(before)
        made = accumulate(before, free, canonical, antecedent)
        made = Accumulated(jax.device_get(dict(made.total)), made.count, made.chunk, made.antecedent)
        self._sums[key] = made
        self.nbytes += _bytes_of(made)
        while self.nbytes > self._max_bytes:
            _, oldest = self._sums.popitem(last=False)
            self.nbytes -= _bytes_of(oldest)
        return made


def _bytes_of(own: Accumulated | None) -> int:
    """Counts the bytes of a sum, and of the canonical that it is held with."""
    return 0 if own is None else own.chunk.nbytes + sum(value.nbytes for value in own.total.values())
