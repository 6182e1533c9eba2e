"""Writing of array entries as one Orbax checkpoint, and verified reading.

This module has all of the library's calls of Orbax's version 1 interface. That may still change, so `pyproject.toml`
names the tested versions.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ...core import AnyArray
from ...errors import StoreCorruptError, StoreFullError, StoreIOError, StoreSnapshotError
from ..format.buffers import expect_memory
from ..format.header import MALFORMED
from ..io.files import typed_errors
from ..tiers.device_placement import Placement, packed_target, target_of
from .array_entries import ArrayEntry, check_about, check_entry, empty_array, nbytes_of, specs_of
from .multihost import ProcessGroup

_MOST_COMPRESSED = 1000
"""Limit of the ratio of array bytes to file bytes. KV compresses by a fifth: a higher ratio is an attack."""


def save_entries(path: str, entries: Sequence[ArrayEntry], compress: bool) -> None:
    """Writes one checkpoint. Empty arrays, which Orbax does not support, are restored from their shapes.

    Raises:
      StoreFullError, StoreIOError: it could not be written.
    """
    tree: dict[str, dict[str, AnyArray]] = {}
    for index, entry in enumerate(entries):
        arrays: dict[str, AnyArray] = {}
        for name, value in entry.arrays.items():
            # In a job of several processes, Orbax requires that arrays of one process are on its host.
            alone = isinstance(value, jax.Array) and value.is_fully_addressable and jax.process_count() > 1
            if value.size:
                arrays[name] = np.asarray(value) if alone else value
        if arrays:
            tree[_key(index)] = arrays
    text = json.dumps({"version": 1, "objects": [entry.about for entry in entries]}, separators=(",", ":")).encode()
    about = {"json": np.frombuffer(text, np.uint8), "digest": np.frombuffer(text_digest(text), np.uint8)}
    context = ocp.Context()
    context.array_options.saving.use_compression = compress

    try:
        with context:
            ocp.save_checkpointables(path, {"objects": about, "arrays": tree})
    except Exception as error:  # Orbax and TensorStore raise errors of many types
        kind = StoreFullError if "No space left" in str(error) else StoreIOError
        raise kind(f"export {path}: got {str(error)[:300]}; expected Orbax to write it") from error


def read_abouts(path: str) -> list[dict[str, Any]]:
    """Reads and verifies the descriptions of a checkpoint's entries (`ArrayEntry.about`), without its arrays.

    Raises:
      StoreSnapshotError: it is no checkpoint, or was changed.
    """
    size = _file_bytes(path)  # before anything is opened
    found = _read(path, {"objects": None})["objects"]

    try:
        text = found["json"].tobytes()
        tree = json.loads(text) if found["digest"].tobytes() == text_digest(text) else {}
    except MALFORMED:
        tree = {}

    if not isinstance(tree, dict) or tree.get("version") != 1 or not isinstance(tree.get("objects"), list):
        raise StoreSnapshotError(f"export {path}: got a list that differs from its digest; expected version 1")
    try:
        for about in tree["objects"]:
            check_about(about)
        nbytes = sum(map(nbytes_of, tree["objects"]))
        if size is not None and nbytes > _MOST_COMPRESSED * size:
            raise StoreCorruptError(f"got {nbytes} bytes of arrays in files of {size}")
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"export {path}: {error}; expected what was exported") from error
    return tree["objects"]


def load_entries(path: str, placement: Placement | None = None) -> list[ArrayEntry]:
    """Reads the entries of a checkpoint and verifies every array on its devices, in all processes or in none.

    Args:
      placement: placement of kv; everything else, and by default kv too, is on the host.

    Raises:
      StoreSnapshotError: as `read_abouts`, or an array was changed.
      StoreIOError: another process failed.
    """
    entries: list[ArrayEntry] = []
    bad: list[str] = []
    with ProcessGroup().agreeing(f"export {path}"):
        abouts = read_abouts(path)
        if placement is None:
            with typed_errors(f"export {path}: read"):
                expect_memory(sum(map(nbytes_of, abouts)))
        template = {_key(index): _template(about, placement) for index, about in enumerate(abouts)}
        tree = _read(path, {"arrays": {key: value for key, value in template.items() if value}})["arrays"]
        for index, about in enumerate(abouts):
            missing = {name: empty_array(*spec) for name, spec in specs_of(about).items() if 0 in spec[1]}
            entries.append(ArrayEntry(about, tree.get(_key(index), {}) | missing))
            try:
                check_entry(entries[-1])
            except StoreCorruptError as error:
                bad.append(f"object {index}: {error}")
        if bad:
            raise StoreSnapshotError(f"export {path}: {bad[0]}", tuple(bad))
    return entries


def text_digest(text: bytes) -> bytes:
    """Returns the digest of a checkpoint's descriptions."""
    return hashlib.blake2b(text, digest_size=32).digest()


def _key(index: int) -> str:
    return f"{index:06d}"


def _read(path: str, template: Mapping[str, Any]) -> dict[str, Any]:
    if "://" not in path and not os.path.exists(f"{path}/_CHECKPOINT_METADATA"):
        raise StoreSnapshotError(f"export {path}: got no checkpoint there; expected one that was finished")
    try:
        return ocp.load_checkpointables(path, dict(template))
    except Exception as error:  # as in `save_entries`
        raise StoreSnapshotError(f"export {path}: got {str(error)[:300]}; expected Orbax to read it") from error


def _template(about: Mapping[str, Any], placement: Placement | None) -> dict[str, Any]:
    """Returns Orbax's template for loading: host arrays, except for kv with a placement."""
    template: dict[str, Any] = {}
    packed = about["body"].get("encoding") is not None
    for name, (dtype, shape) in specs_of(about).items():
        if 0 in shape:
            continue
        if placement is None or not name.startswith("layers.") or (name.endswith(".scale") and not packed):
            template[name] = empty_array(dtype, shape)
            continue
        target = target_of(placement, name.split(".")[1])
        target = packed_target(target, shape) if packed else target
        if not isinstance(target, jax.sharding.Sharding):
            target = jax.sharding.SingleDeviceSharding(target)
        template[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=target)
    return template


def _file_bytes(path: str) -> int | None:
    """Counts the bytes of a checkpoint's files. None if it is on another machine.

    Raises:
      StoreSnapshotError: there is no checkpoint, or it contains a link, a FIFO or the like.
    """
    if "://" in path:
        return None
    if not os.path.isdir(path):
        raise StoreSnapshotError(f"export {path}: got no checkpoint there; expected one that was finished")

    total = 0
    for _, folders, names, fd in os.fwalk(path):
        for name in folders + names:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise StoreSnapshotError(f"export {path}: got {name}, neither a file nor a directory; expected one")
            total += found.st_size
    return total
