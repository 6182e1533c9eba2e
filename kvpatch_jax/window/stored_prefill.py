"""Stored prefills: the KV that a forward of a chunk left behind other pieces, kept to serve the chunk again.

A store keeps it as a chunk of its own, whose lead is everything that preceded it. Behind the very same pieces, served
in the same way, it is what a forward would compute, bit for bit. Behind the same *nearest* piece it is close to that,
because the nearest antecedent carries most of the deficit; then the chunk is approximate. Closer is the mean over
several histories that share the nearest piece, in which what they do not share averages out.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..cache import Chunk
from .entry import Likeness, PlacedPiece, short_digest

TIME_TO_LIVE = 7 * 24 * 3600.0
"""Seconds that a prefill is kept: histories that nobody repeats would fill a store without a budget."""
MOST_OF_A_MEAN = 8
"""Histories that a mean is taken over; more of them hardly change it."""


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

    farther = [piece.entry.key for piece in pieces[lead : index - 1]]
    return keys_behind(pieces[min(lead, index)].front, pieces[index - 1].entry.key, farther)


def keys_behind(pinned: str, nearest: str, farther: Sequence[str]) -> dict[Likeness, str]:
    """Returns the keys under which a prefill is found again behind other chunks, the most alike first.

    Args:
      pinned: digest of the pinned lead in front of it.
      nearest: key of what stands directly in front of it. farther: keys of what stands between that and the lead.
    """
    # Where the lead itself is nearest, there is nothing else to differ in.
    alike = f"{pinned} {nearest}"
    keys = dict[Likeness, str]()
    if len(farther) > 1:
        keys["moved"] = short_digest(f"moved {alike} {sorted(farther)}")
    return {
        **keys,
        "mean": short_digest(f"mean {alike}"),
        "near": short_digest(f"near {alike}"),
        "seen": short_digest(f"seen {pinned}"),
    }


def unreduced(store: Any) -> dict[str, Any]:
    """Returns the keyword by which a store that encodes by default keeps and reads KV as it was prefilled."""
    default = getattr(getattr(store, "encodings", None), "default", None)
    return {} if default is None else {"encoding": "unreduced"}


class StoredPrefills:
    """Stored prefills of one backbone's chunks in one store, never encoded: they are served bit for bit.

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
        return self.store.contains(id, self.backbone, lead=self.lead(front), **unreduced(self.store))

    def get(self, id: str, front: str) -> Chunk | None:
        """Reads a chunk's prefill behind exactly this front; None if it is not stored."""
        chunk = self.store.get(id, self.backbone, lead=self.lead(front), **unreduced(self.store))
        # An encoded one would be no prefill.
        return None if chunk is None or chunk.encoding is not None else chunk

    def front_alike(self, id: str, key: str, likeness: Likeness | None = None) -> str | None:
        """Returns what the stored prefill of a chunk with this key was computed behind; None without one.

        A mean has a digest of its own in place of that, another one for each history that is added to it.

        Args:
          likeness: of the key, where it is to be offered.
        """
        if likeness is not None and self._covers is not None and not self._covers(likeness, id):
            return None
        known = self._fronts.get((id, key))
        if known is not None and self.contains(id, known):
            return known

        found = self._read(id, key)
        if found is None or not self.contains(id, found[0]):
            return None
        front, count = found
        # A mean has another digest soon, until it is whole.
        if count in (1, MOST_OF_A_MEAN):
            self._fronts[id, key] = front
        return front

    def put(self, chunk: Chunk, front: str, keys: dict[Likeness, str], mean: bool = False) -> int:
        """Stores a prefill, `chunk.lead` being `lead(front)`, to be found by its front and by these keys.

        Args:
          mean: also adds it to the mean of those behind the same lead and nearest piece, once there are two, and has it
            found by "moved": more to write, for those who may serve it.

        Returns:
          How many times the size of a prefill was stored.
        """
        self.store.put(chunk, ttl=TIME_TO_LIVE, **unreduced(self.store))
        stored = 1 + (mean and "mean" in keys and self._add_to_mean(chunk, front, keys))
        # The first one stays: what follows was often served by it.
        for likeness, key in keys.items():
            if likeness == "mean" or (likeness == "moved" and not mean):
                continue
            if self.front_alike(chunk.id, key) is None:
                self._write(chunk.id, key, front)
        return stored

    def _add_to_mean(self, chunk: Chunk, front: str, keys: dict[Likeness, str]) -> bool:
        """Adds a prefill to a mean, whose version before that stays until its time is over: a window may name it.

        Returns:
          Whether a mean was stored.
        """
        key = keys["mean"]
        saved = self._read(chunk.id, key)
        first = self.front_alike(chunk.id, keys["near"]) if saved is None else None
        # Of one prefill there is no mean yet.
        if saved is None and first is None:
            return False
        old, count = saved or (first or "", 1)
        if count >= MOST_OF_A_MEAN:
            return False
        before = self.get(chunk.id, old)
        if before is None or before.length != chunk.length:
            return False

        kv, length = {}, chunk.length
        for name, value in chunk.kv.items():
            own, others = (np.asarray(each[:, :length], np.float32) for each in (value, before.kv[name]))
            kv[name] = (others + (own - others) / (count + 1)).astype(value.dtype)
        new = short_digest(f"mean {count + 1} {old} {front}")
        local = np.asarray(chunk.local)[:length]
        mean = dataclasses.replace(chunk, kv=kv, local=local, lead=self.lead(new))
        self.store.put(mean, ttl=TIME_TO_LIVE, **unreduced(self.store))
        self._write(chunk.id, key, new, count + 1)
        return True

    def _read(self, id: str, key: str) -> tuple[str, int] | None:
        """Reads which prefill has a key, and how many are in it."""
        saved = self.store.get_encoder(self.name(id, key), self.backbone)
        # What is stored may be of anybody's making: anything but a digest and a number is no prefill.
        if saved is None or saved.dtype != np.uint8 or saved.shape not in ((16,), (17,)):
            return None
        return saved[:16].tobytes().hex(), int(saved[16]) if len(saved) > 16 else 1

    def _write(self, id: str, key: str, front: str, count: int = 1) -> None:
        digest = bytes.fromhex(front) + (bytes([count]) if count > 1 else b"")
        name = self.name(id, key)
        self.store.put_encoder(name, self.backbone, np.frombuffer(digest, np.uint8), ttl=TIME_TO_LIVE)

    def name(self, id: str, key: str) -> str:
        """Returns the name under which a store says which prefill of a chunk has this key."""
        return f"prefill {short_digest(f'{self._dtype} {key} {id}')}"
