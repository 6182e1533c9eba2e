"""Stored prefills: the KV that a forward of a chunk left behind other pieces, kept to serve the chunk again.

A store keeps it as a chunk of its own, whose lead is everything that preceded it. Behind the very same pieces, served
in the same way, it is what a forward would compute, bit for bit. Behind the same *nearest* piece it is close to that,
because the nearest antecedent carries most of the deficit; then the chunk is approximate.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ..cache import Chunk
from .entry import PlacedPiece, short_digest

TIME_TO_LIVE = 7 * 24 * 3600.0
"""Seconds that a prefill is kept: histories that nobody repeats would fill a store without a budget."""
Likeness = Literal["near", "seen"]
"""What a stored prefill has in common with a place: the pinned lead and the nearest piece, or the lead alone."""


def likeness_keys(pieces: Sequence[PlacedPiece], index: int, lead: int) -> dict[Likeness, str]:
    """Returns the keys under which a prefill at an index is found again behind other pieces, the most alike first.

    Args:
      pieces: of a window.
      lead: how many are pinned at the front.

    Returns:
      Nothing at the front of a window, nor where positions are free in front of the piece or in front of what precedes
      it: there a chunk is read at another distance.
    """
    front = pieces[: index + 1]
    if not index or any(after.start != before.end for before, after in itertools.pairwise(front)):
        return {}

    # Where the lead itself is nearest, there is nothing else to differ in.
    pinned = pieces[min(lead, index)].front
    return {
        "near": short_digest(f"near {pinned} {pieces[index - 1].entry.key}"),
        "seen": short_digest(f"seen {pinned}"),
    }


class StoredPrefills:
    """Stored prefills of one backbone's chunks in one store.

    Attributes:
      store: a `ChunkStore`, or anything that keeps chunks and arrays under names as one does.
      backbone: fingerprint of the weights.
    """

    def __init__(
        self,
        store: Any,
        backbone: str,
        dtype: jax.typing.DTypeLike,
        covers: Callable[[Likeness, str], bool] | None = None,
    ):
        """Names prefills of this backbone that read KV of a pool of this dtype: another rounding is another KV.

        Args:
          covers: whether a chunk, by its id, may be offered by a likeness; None: every chunk may.
        """
        self.store, self.backbone = store, backbone
        self._dtype = np.dtype(dtype).name
        self._fronts: dict[tuple[str, str], str] = {}
        self._covers = covers

    @staticmethod
    def supports(store: Any) -> bool:
        """Returns whether a store can keep prefills: it says what it contains, and keeps arrays by name."""
        return all(hasattr(store, name) for name in ("contains", "get_encoder", "put_encoder"))

    def lead(self, front: str) -> str:
        """Returns what a prefill is stored under as its lead, from the chain digest of what preceded it."""
        return short_digest(f"prefill {self._dtype} {front}")

    def contains(self, id: str, front: str) -> bool:
        """Returns whether a chunk's prefill behind exactly this front is stored, without reading it."""
        return self.store.contains(id, self.backbone, lead=self.lead(front))

    def get(self, id: str, front: str) -> Chunk | None:
        """Reads a chunk's prefill behind exactly this front; None if it is not stored."""
        return self.store.get(id, self.backbone, lead=self.lead(front))

    def front_alike(self, id: str, key: str, likeness: Likeness | None = None) -> str | None:
        """Returns what the first stored prefill of a chunk with this key was computed behind; None without one.

        Args:
          likeness: of the key, where it is to be offered.
        """
        if likeness is not None and self._covers is not None and not self._covers(likeness, id):
            return None
        name = self._name(id, key)
        front = self._fronts.get((id, key))
        if front is None:
            saved = self.store.get_encoder(name, self.backbone)
            # What is stored may be of anybody's making: anything but a digest is no prefill.
            if saved is None or saved.dtype != np.uint8 or saved.shape != (16,):
                return None
            front = self._fronts[id, key] = saved.tobytes().hex()
        return front if self.contains(id, front) else None

    def put(self, chunk: Chunk, front: str, keys: dict[Likeness, str]) -> None:
        """Stores a prefill, `chunk.lead` being `lead(front)`, to be found by its front and by these keys."""
        self.store.put(chunk, ttl=TIME_TO_LIVE)
        # The first one stays: what follows was often served by it.
        for key in keys.values():
            if self.front_alike(chunk.id, key) is None:
                digest = np.frombuffer(bytes.fromhex(front), np.uint8)
                self.store.put_encoder(self._name(chunk.id, key), self.backbone, digest, ttl=TIME_TO_LIVE)
                self._fronts[chunk.id, key] = front

    def _name(self, id: str, key: str) -> str:
        return f"prefill {short_digest(f'{self._dtype} {key} {id}')}"
