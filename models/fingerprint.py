"""A backbone's identity: a digest of everything that its numbers depend on."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from kvpatch_jax.core import host_view

from .checkpoints import flatten_params

_PIECE = 16 << 20
"""Bytes of a piece. Another size gives another digest."""
_SMALL = 1 << 20
"""Bytes below which a thread costs more than it saves."""


def fingerprint_of(settings: Iterable[bytes], parameters: Mapping[str, Any]) -> str:
    """Digests settings, and every parameter's name, type, shape and bytes: 32 hexadecimal digits.

    A parameter is cut along its first axis into pieces of about 16 MiB, whatever devices hold it; threads take their
    SHA-256, and blake2b goes over these in order. So the value does not depend on threads, shards or devices. Of a
    device's memory the host holds one piece per thread. SHA-256 and not blake2b: processors have instructions for it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for setting in settings:
        digest.update(len(setting).to_bytes(8, "little") + setting)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for path, leaf in sorted(flatten_params(parameters).items()):
            digest.update(f"{'.'.join(path)}\0{leaf.dtype}\0{leaf.shape}\0".encode())

            leaf = host_view(leaf)
            pieces: list[tuple[slice, ...]] = [()]
            if leaf.shape and leaf.size:
                step = max(1, _PIECE * leaf.shape[0] // leaf.nbytes)
                pieces = [(slice(start, min(start + step, len(leaf))),) for start in range(0, len(leaf), step)]

            # On a host all of the array is looked at in place; of a device's, each piece is fetched by itself.
            in_place = leaf.nbytes < _SMALL or not isinstance(leaf, jax.Array)

            def hashed(piece: tuple[slice, ...], leaf: Any = leaf, in_place: bool = in_place) -> bytes:
                values = np.asarray(leaf)[piece] if in_place else np.asarray(leaf[piece])
                return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8)).digest()

            for piece in (map if leaf.nbytes < _SMALL else pool.map)(hashed, pieces):
                digest.update(piece)

    return digest.hexdigest()
