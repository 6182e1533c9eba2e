"""Array entries as pytrees of Orbax: writing, verified reading, and what is in them: chunks, or objects for a store.

This module has all of the library's calls of Orbax's version 1 interface. That may still change, so `pyproject.toml`
names the tested versions. Orbax neither verifies arrays nor supports empty ones: entries have checksums and shapes.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import stat
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from ...core import AnyArray, KVLayout
from ...errors import InputError, StoreCorruptError, StoreFullError, StoreIOError, StoreSnapshotError
from ...patching import Basis
from ..disk.tenant_disk import TenantDisk, TenantStore
from ..format.bases import basis_id, basis_of, completed
from ..format.buffers import expect_memory
from ..format.header import MALFORMED
from ..format.naming import name_at, part_of
from ..format.objects import blob_of, file_size
from ..format.patch_codec import patch_parts
from ..io.files import typed_errors
from ..tiers.device_placement import Placement, packed_target, target_of
from .array_entries import (
    ArrayContents,
    ArrayEntry,
    blob_of_entry,
    check_about,
    check_entry,
    chunk_of_entry,
    empty_array,
    entry_of,
    nbytes_of,
    specs_of,
)
from .import_rules import ImportCandidate, library_bytes, name_of
from .manifest import EXPORT, Summary, read_list, write_list
from .multihost import ProcessGroup
from .save import unchanged_libraries

PART_BYTES = 1 << 30
"""Bytes of a store's arrays in a part, which are in memory at once."""
_MOST_COMPRESSED = 1000
"""Limit of the ratio of array bytes to file bytes. KV compresses by a fifth: a higher ratio is an attack."""


# -------------------------------------------------------------------------------------------------------- saving


async def save_entries(directory: Any, entries: Sequence[ArrayEntry], handler: Any) -> Awaitable[Any]:
    """Starts to write entries, in all processes of a job. The result is to be awaited, in the background.

    Args:
      directory: Orbax's path of the item.
      handler: of `tree_handler`.

    Raises:
      StoreFullError, StoreIOError: they could not be written, also when the result is awaited.
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
    text = json.dumps({"version": 2, "objects": [entry.about for entry in entries]}, separators=(",", ":")).encode()
    about = {"json": np.frombuffer(text, np.uint8), "digest": np.frombuffer(text_digest(text), np.uint8)}

    with _written(directory.path):
        await directory.await_creation()
        pending: list[Awaitable[Any]] = []
        for name, value in {"objects": about, "arrays": tree}.items():
            (directory.path / name).mkdir(parents=True, exist_ok=True)  # the first process is not waited for
            pending.append(await handler.save(directory / name, value))

    async def finished() -> None:
        with _written(directory.path):
            await asyncio.gather(*pending)

    return finished()


@contextlib.contextmanager
def _written(path: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax and TensorStore raise errors of many types
        kind = StoreFullError if "No space left" in str(error) else StoreIOError
        raise kind(f"arrays {path}: got {str(error)[:300]}; expected Orbax to write them") from error


def tree_handler() -> Any:
    """Returns Orbax's handler of pytrees, with the options of the current `ocp.Context`."""
    return ocp.handlers.PyTreeHandler()


def save_store_arrays(store: TenantStore, directory: Any, handler: Any) -> Summary:
    """Writes and verifies all objects of a store's tenant as arrays, after its asynchronous puts. Not encrypted.

    Raises:
      StoreFullError, StoreReadOnlyError, StoreIOError: they could not be written.
    """
    store.flush()
    disk, names = store.tenant_disk.disk, store.tenant_disk.names
    waiting: list[ArrayEntry] = []
    objects, nbytes, skipped, parts, waiting_bytes = 0, 0, 0, 0, 0

    async def save() -> None:
        await (await save_entries(directory / f"part-{parts:05d}", waiting, handler))

    for below in (names.libraries, names.space):  # in this order, so that chunks of entries are saved too
        with unchanged_libraries(disk.root, below) if below == names.libraries else contextlib.nullcontext():
            for item in sorted(disk.scan(below), key=lambda item: item.path):
                found = disk.get(name_at(item.path))
                if found is None:
                    skipped += 1
                    continue
                waiting.append(entry_of(blob_of(found.header, found.arrays), part_of(item.path)))
                waiting_bytes += nbytes_of(waiting[-1].about)
                objects, nbytes = objects + 1, nbytes + item.size
                if waiting_bytes >= PART_BYTES:
                    asyncio.run(save())
                    waiting, waiting_bytes, parts = [], 0, parts + 1
    if waiting:
        asyncio.run(save())
        parts += 1
    with typed_errors(f"arrays {directory.path}: write"):
        write_list(f"{directory.path}/{EXPORT}", {"version": 1, "parts": parts, "objects": objects})
    return Summary(objects, nbytes, skipped)


# ------------------------------------------------------------------------------------------------------- loading


def load_contents(directory: str, placement: Placement | None = None) -> ArrayContents:
    """Loads the chunks and patches of a directory, and verifies each array on its device, in all processes together.

    Args:
      placement: a sharding or device for kv [L, T, K, H], or one per channel: each device reads its own part. By
        default kv are on the host. Patches are on the default device, everything else on the host.

    Raises:
      StoreSnapshotError: there are no arrays, or they are damaged.
      StoreIOError: another process failed.
    """
    kinds: dict[str, list[ArrayEntry]] = {"kv": [], "patch": [], "encoder": [], "entry": []}
    for part in _parts(directory):
        for entry in load_entries(part, placement):
            kinds[entry.about["kind"]].append(entry)
    try:
        canonicals = [chunk_of_entry(entry) for entry in kinds["kv"]]
        found = [patch_parts(entry.about["body"], entry.host) for entry in kinds["patch"]]
        encoders = {(e.about["body"]["backbone"], e.about["body"]["id"]): e.arrays["encoder"] for e in kinds["encoder"]}
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"arrays {directory}: {error}") from error
    except MALFORMED as error:
        kind = type(error).__name__  # the error's text may contain content
        raise StoreSnapshotError(f"arrays {directory}: got a body of no object ({kind}); expected one") from None

    def basis(digest: str, layout: KVLayout, backbone: str) -> Basis | None:
        rows = {name: encoders.get((backbone, basis_id(digest, name))) for name in layout.names}
        directions = {name: None if value is None else np.asarray(value) for name, value in rows.items()}
        return basis_of(digest, layout, backbone, directions)

    chunks = tuple(chunk for word, chunk in canonicals if word == chunk.encoding)
    reduced = tuple((word, chunk) for word, chunk in canonicals if word is not None and word != chunk.encoding)
    return ArrayContents(chunks, tuple(completed(found, basis)), reduced)


def array_candidates(directory: str, tenant_disk: TenantDisk) -> tuple[list[list[ImportCandidate]], int]:
    """Returns the objects of a directory of arrays under a store's names, a batch for each part, and their number.

    Expired ones are left out. Arrays are read and verified when an object is loaded, one part at a time.

    Raises:
      StoreSnapshotError: there are no arrays, or their descriptions are damaged.
      InputError: the job has several processes. Orbax's calls involve all of them, and a store's objects only one.
    """
    expect_one_process("a store from arrays")
    load = functools.lru_cache(maxsize=1)(load_entries)
    batches: list[list[ImportCandidate]] = []
    total = 0
    for part in reversed(_parts(directory)):  # entries were saved first, and are added last
        batches.append([])
        for index, about in enumerate(read_abouts(part)):
            total += 1
            if about["expires"] is not None and tenant_disk.clock() >= about["expires"]:
                continue
            # Names and sizes need no arrays, and the part may be larger than memory.
            entry = ArrayEntry(about, {name: empty_array(*spec) for name, spec in specs_of(about).items()})
            try:
                name = name_of(tenant_disk.names, about["kind"], about["part"], about["body"], entry.host)
                blob = blob_of_entry(entry)
                counted = library_bytes(tenant_disk, name, blob)
            except StoreCorruptError as error:
                raise StoreSnapshotError(f"arrays {part}: object {index}: {error}", (str(error),)) from error

            def loaded(part: str = part, index: int = index):
                return blob_of_entry(load(part)[index])

            batches[-1].append(ImportCandidate(name, file_size(blob, name.file), loaded, library_bytes=counted))
    return batches, total


def expect_one_process(what: str) -> None:
    """Raises InputError in a job of several processes."""
    if jax.process_count() > 1:
        raise InputError(
            f"StoreItem: got {what} in a job of {jax.process_count()} processes; expected one process, or "
            "StoreItem(contents=...) and StoreItem(placement=...) by all"
        )


def _parts(directory: str) -> list[str]:
    """Returns the parts of a directory of arrays, or itself."""
    if not os.path.lexists(f"{directory}/{EXPORT}"):
        return [directory]
    found = read_list(f"{directory}/{EXPORT}")
    parts = found.get("parts") if isinstance(found, dict) and found.get("version") == 1 else None
    there = sum(name.startswith("part-") for name in os.listdir(directory))
    if type(parts) is not int or not 0 <= parts <= there:
        raise StoreSnapshotError(
            f"arrays {directory}: got {EXPORT} {str(found)[:80]}; expected version 1, with at most {there} parts"
        )
    return [f"{directory}/part-{number:05d}" for number in range(parts)]


def read_abouts(path: str) -> list[dict[str, Any]]:
    """Reads and verifies the descriptions of entries (`ArrayEntry.about`), without their arrays.

    Raises:
      StoreSnapshotError: there are none, or they were changed.
    """
    size = _file_bytes(path)  # before anything is opened
    found = _read(path, "objects", None)
    try:
        text = found["json"].tobytes()
        tree = json.loads(text) if found["digest"].tobytes() == text_digest(text) else {}
    except MALFORMED:
        tree = {}

    if not isinstance(tree, dict) or tree.get("version") != 2 or not isinstance(tree.get("objects"), list):
        raise StoreSnapshotError(f"arrays {path}: got a list that differs from its digest; expected version 2")
    try:
        for about in tree["objects"]:
            check_about(about)
        nbytes = sum(map(nbytes_of, tree["objects"]))
        if size is not None and nbytes > _MOST_COMPRESSED * size:
            raise StoreCorruptError(f"got {nbytes} bytes of arrays in files of {size}")
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"arrays {path}: {error}; expected what was saved") from error
    return tree["objects"]


def load_entries(path: str, placement: Placement | None = None) -> list[ArrayEntry]:
    """Reads entries and verifies every array on its devices, in all processes or in none.

    Args:
      placement: placement of kv; everything else, and by default kv too, is on the host.

    Raises:
      StoreSnapshotError: as `read_abouts`, or an array was changed.
      StoreIOError: another process failed.
    """
    entries: list[ArrayEntry] = []
    bad: list[str] = []
    with ProcessGroup().agreeing(f"arrays {path}"):
        abouts = read_abouts(path)
        if placement is None:
            with typed_errors(f"arrays {path}: read"):
                expect_memory(sum(map(nbytes_of, abouts)))
        template = {_key(index): _template(about, placement) for index, about in enumerate(abouts)}
        template = {key: value for key, value in template.items() if value}
        tree = _read(path, "arrays", template) if template else {}
        for index, about in enumerate(abouts):
            missing = {name: empty_array(*spec) for name, spec in specs_of(about).items() if 0 in spec[1]}
            entries.append(ArrayEntry(about, tree.get(_key(index), {}) | missing))
            try:
                check_entry(entries[-1])
            except StoreCorruptError as error:
                bad.append(f"object {index}: {error}")
        if bad:
            raise StoreSnapshotError(f"arrays {path}: {bad[0]}", tuple(bad))
    return entries


def text_digest(text: bytes) -> bytes:
    """Returns the digest of the descriptions of entries."""
    return hashlib.blake2b(text, digest_size=32).digest()


def _key(index: int) -> str:
    return f"{index:06d}"


def _read(path: str, name: str, template: Mapping[str, Any] | None) -> Any:
    """Reads a pytree, in a thread of its own: the caller's may run an event loop."""

    async def read() -> Any:
        return await (await tree_handler().load(epath.Path(f"{path}/{name}"), template))

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, read()).result()
    except Exception as error:  # as in `_written`
        raise StoreSnapshotError(f"arrays {path}: got {str(error)[:300]}; expected Orbax to read them") from error


def _template(about: Mapping[str, Any], placement: Placement | None) -> dict[str, Any]:
    """Returns Orbax's template for loading: host arrays, except for kv with a placement."""
    template: dict[str, Any] = {}
    packed = about["body"].get("encoding") is not None
    for name, (dtype, shape) in specs_of(about).items():
        if 0 in shape:
            continue
        on_host = name.endswith(".scale") and not packed
        if placement is None or not name.startswith("layers.") or on_host:
            template[name] = empty_array(dtype, shape)
            continue
        target = target_of(placement, name.split(".")[1])
        # Of packed kv, what is stacked as [L, R, K, W] are the parts of a transition, which are arrays.
        target = packed_target(target, shape) if packed and len(shape) == 3 else target
        if not isinstance(target, jax.sharding.Sharding):
            target = jax.sharding.SingleDeviceSharding(target)
        template[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=target)
    return template


def _file_bytes(path: str) -> int | None:
    """Counts the bytes of a directory's files. None if it is on another machine.

    Raises:
      StoreSnapshotError: there are no arrays, or the directory contains a link, a FIFO or the like.
    """
    if "://" in path:
        return None
    if not os.path.isdir(f"{path}/objects"):
        raise StoreSnapshotError(f"arrays {path}: got no arrays there; expected those of a finished checkpoint")

    total = 0
    for _, folders, names, fd in os.fwalk(path):
        for name in folders + names:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise StoreSnapshotError(f"arrays {path}: got {name}, neither a file nor a directory; expected one")
            total += found.st_size
    return total
