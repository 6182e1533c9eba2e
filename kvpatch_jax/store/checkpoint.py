"""The store and Orbax: a store beside model parameters in one checkpoint; chunks as Orbax arrays, for other meshes.

All of the library's calls of Orbax are here. It is its version 1 interface, which may still change, so that
`pyproject.toml` names the versions that it was held against. Orbax syncs array data and not its own small files and
directories; what this module acknowledges was synced afterwards, for which `make_durable` is there too.
"""

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ..chunk import AnyArray, Chunk
from ..errors import InputError, StoreCorruptError, StoreFullError, StoreIOError, StoreSnapshotError
from ..stamp import Patch
from .codec import encoder_blob, patch_blob, patch_of, patch_parts
from .files import sync_directory, sync_file_system, typed_errors
from .ids import Encoding, Name
from .objects import Blob, file_size
from .placement import Placement, target_of
from .portable import (
    Entry,
    blob_of_entry,
    check_entry,
    chunk_of_entry,
    empty_array,
    entry_of,
    entry_of_chunk,
    outline,
    specs_of,
)
from .restore import blob_of, is_there, load_objects, name_of, part_of, save_objects
from .snapshot import Progress, Summary, name_at, new_directory, read_list, write_list
from .store import ChunkStore

LIST = "EXPORT"
_PART_BYTES, _GROUP = 1 << 30, 64


# --------------------------------------------------------------------------------- a store beside model parameters


class StoreItem:
    """A store's tenant as an item of an Orbax checkpoint, for who wants other choices than those of the store itself.

    `ocp.save_checkpointables(path, {"chunk_store": store, "model": parameters})` takes the `ChunkStore` as it is, and
    so do `ocp.load_checkpointables` and `ocp.training.Checkpointer`. What is saved is a snapshot of the tenant's
    objects (`snapshot`), made while the caller goes on; loading adds it to the store, verified, all or nothing.

    Checkpoints are on a file system of this machine. Where several processes save together, the first of them saves
    and loads, for all of them share the root.

    Args:
      copy, skip_damaged: as of `save_snapshot` and `load_snapshot`.
    """

    def __init__(self, store: ChunkStore, *, copy: bool = False, skip_damaged: bool = False):
        self.store, self.copy, self.skip_damaged = store, copy, skip_damaged

    async def save(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax, which awaits the result in the background."""

        async def saved() -> None:
            path = _local(await directory.await_creation())
            if jax.process_index() == 0:
                await asyncio.to_thread(save_objects, self.store, path, copy=self.copy)

        return saved()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax. All is done before this returns, since Orbax puts an error of its own around later ones.

        Raises:
          As `load_snapshot`.
        """
        if jax.process_index() == 0:
            load = functools.partial(load_objects, copy=self.copy, skip_damaged=self.skip_damaged)
            await asyncio.to_thread(load, self.store, _local(directory))

        async def loaded() -> None:
            pass

        return loaded()


def _local(directory: Any) -> str:
    path = os.fspath(directory)
    if "://" in path:
        raise InputError(f"checkpoint {path}: expected a path of this machine's file system (exports may be elsewhere)")
    return path


def make_durable(directory: str | os.PathLike[str]) -> None:
    """Makes a finished checkpoint survive a loss of power: its files, its directories and its own name.

    Raises:
      StoreIOError: it cannot be synced, or is not there.
    """
    path = os.path.abspath(_local(directory))
    with typed_errors(f"checkpoint {path}: sync"):
        sync_file_system(path)
        sync_directory(os.path.dirname(path))


# ----------------------------------------------------------------------------------------------- chunks as arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """What an export holds.

    Attributes:
      chunks: canonicals as they were made.
      reduced: canonicals kept in a smaller encoding, in the dtype they had before, with the encoding.
      patches: with their stamps.
      encoders: towers' outputs, by backbone and id.
    """

    chunks: tuple[Chunk, ...] = ()
    reduced: tuple[tuple[Encoding, Chunk], ...] = ()
    patches: tuple[Patch, ...] = ()
    encoders: Mapping[tuple[str, str], AnyArray] = dataclasses.field(default_factory=dict)


def save_arrays(
    directory: str | os.PathLike[str],
    chunks: Sequence[Chunk] = (),
    patches: Sequence[Patch] = (),
    *,
    compress: bool = False,
) -> None:
    """Saves chunks and patches as one Orbax checkpoint of arrays (zarr3), a few for each, layers stacked.

    kv [L, T, K, H] and residuals may be sharded over a mesh, of several processes too, which then all call this. The
    checkpoint is there when it has returned everywhere. It is not encrypted.

    Raises:
      InputError: nothing to save. DtypeError: a dtype that objects do not hold. StoreFullError, StoreIOError.
    """
    entries = [entry_of_chunk(chunk) for chunk in chunks]
    encoders = [encoder_blob(c.id, c.backbone, np.asarray(c.encoder)) for c in chunks if c.encoder is not None]
    entries += [entry_of(blob, "enc") for blob in encoders]
    entries += [entry_of(patch_blob(patch), "p") for patch in patches]
    if not entries:
        raise InputError("save_arrays: 0 chunks and patches; expected some")
    path = os.fspath(directory)
    _save(path, entries, compress)
    if "://" not in path:
        make_durable(path)


def load_arrays(directory: str | os.PathLike[str], placement: Placement | None = None) -> Loaded:
    """Loads what `save_arrays` or `export_arrays` saved, each array verified where it came to lie.

    Args:
      placement: a sharding or device for kv [L, T, K, H], or one per channel: each device reads its own part. By
        default arrays of the host. Patches come on the default device, all else on the host.

    Raises:
      StoreSnapshotError: not an export, or damaged.
    """
    entries = [entry for part in _parts(os.fspath(directory)) for entry in _load(part, placement)]
    by_kind = lambda kind: [entry for entry in entries if entry.about["kind"] == kind]
    try:
        canonicals = [chunk_of_entry(entry) for entry in by_kind("kv")]
        patches = [patch_of(patch_parts(entry.about["body"], _host(entry))) for entry in by_kind("patch")]
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"export {directory}: {error}") from error
    return Loaded(
        tuple(chunk for encoding, chunk in canonicals if encoding is None),
        tuple((encoding, chunk) for encoding, chunk in canonicals if encoding is not None),
        tuple(patches),
        {(e.about["body"]["backbone"], e.about["body"]["id"]): e.arrays["encoder"] for e in by_kind("encoder")},
    )


def export_arrays(
    store: ChunkStore,
    directory: str | os.PathLike[str],
    *,
    compress: bool = False,
    part_bytes: int = _PART_BYTES,
    progress: Progress | None = None,
) -> Summary:
    """Exports all objects of a store's tenant, verified, as a new directory of Orbax checkpoints of arrays.

    Unlike a snapshot it depends on neither secret nor key of the store: ids are in it, and it is not encrypted.

    Args:
      part_bytes: of arrays in one checkpoint, which are in memory at a time.

    Raises:
      InputError: `directory` is there. StoreFullError, StoreReadOnlyError, StoreIOError; there is no directory then.
    """
    store.flush()
    listed = sorted(store.disk.scan(store.names.space), key=lambda entry: entry.path)
    total, done, objects, nbytes, parts = sum(each.size for each in listed), 0, 0, 0, 0
    waiting: list[Entry] = []
    with new_directory(os.fspath(directory)) as unfinished:
        for each in listed:
            name = name_at(each.path)
            found = store.disk.get(name)
            if found is not None:
                waiting.append(entry_of(blob_of(found.header, found.arrays), part_of(name.file)))
                objects, nbytes = objects + 1, nbytes + each.size
            if waiting and (_nbytes(waiting) >= part_bytes or each is listed[-1]):
                _save(f"{unfinished}/part-{parts:05d}", waiting, compress)
                waiting, parts = [], parts + 1
            done += each.size
            if progress is not None:
                progress(done, total)
        write_list(f"{unfinished}/{LIST}", {"version": 1, "parts": parts, "objects": objects})
        with typed_errors(f"export {unfinished}: sync"):
            sync_file_system(unfinished)  # what Orbax left unsynced
    return Summary(objects, nbytes, len(listed) - objects)


def import_arrays(directory: str | os.PathLike[str], store: ChunkStore, *, progress: Progress | None = None) -> Summary:
    """Puts what `export_arrays` or `save_arrays` saved into a store, under its tenant's names: all of it or nothing.

    Every array is verified before its object is put. What is there already stays; what is expired stays out.

    Raises:
      StoreSnapshotError: not an export, or damaged. As `ChunkStore.put`. Nothing was added then.
    """
    parts = _parts(os.fspath(directory))
    plans = [_planned(part, store) for part in parts]
    sizes = [sum(file_size(blob_of_entry(entry), name.file) for entry, name in plan.values()) for plan in plans]
    count = sum(len(_about(part)) for part in parts)

    def groups() -> Iterator[list[tuple[Name, Blob]]]:
        done = 0
        for part, plan, size in zip(parts, plans, sizes, strict=True):
            entries = _load(part, None) if plan else []
            for batch in itertools.batched(plan.items(), _GROUP):
                yield [(name, blob_of_entry(entries[index])) for index, (_, name) in batch]
            done += size
            if progress is not None:
                progress(done, sum(sizes))

    added = store.add(groups(), sum(sizes))
    return Summary(added, sum(sizes), count - added)


# ----------------------------------------------------------------------------------------------------- inside


def _nbytes(entries: Sequence[Entry]) -> int:
    return sum(value.nbytes for entry in entries for value in entry.arrays.values())


def _host(entry: Entry) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in entry.arrays.items()}


def _key(index: int) -> str:
    return f"{index:06d}"


def _save(path: str, entries: Sequence[Entry], compress: bool) -> None:
    """One checkpoint. Arrays without elements, which Orbax does not take, are made again from their shapes."""
    tree = {
        _key(index): {name: value for name, value in entry.arrays.items() if value.size}
        for index, entry in enumerate(entries)
    }
    text = json.dumps({"version": 1, "objects": [entry.about for entry in entries]}, separators=(",", ":")).encode()
    about = {"json": np.frombuffer(text, np.uint8), "digest": np.frombuffer(_digest(text), np.uint8)}
    context = ocp.Context()
    context.array_options.saving.use_compression = compress
    try:
        with context:
            ocp.save_checkpointables(path, {"objects": about, "arrays": {k: v for k, v in tree.items() if v}})
    except Exception as error:  # Orbax and TensorStore raise errors of many kinds
        kind = StoreFullError if "No space left" in str(error) else StoreIOError
        raise kind(f"export {path}: {str(error)[:300]}; expected Orbax to write it") from error


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32).digest()


def _parts(directory: str) -> list[str]:
    """The checkpoints of an export."""
    if not os.path.exists(f"{directory}/{LIST}"):
        return [directory]
    found = read_list(f"{directory}/{LIST}")
    if not isinstance(found, dict) or found.get("version") != 1 or not isinstance(found.get("parts"), int):
        raise StoreSnapshotError(f"export {directory}: {LIST} {str(found)[:80]}; expected version 1")
    return [f"{directory}/part-{number:05d}" for number in range(found["parts"])]


def _read(path: str, template: Mapping[str, Any]) -> dict[str, Any]:
    if "://" not in path and not os.path.exists(f"{path}/_CHECKPOINT_METADATA"):
        raise StoreSnapshotError(f"export {path}: no checkpoint there; expected one that was finished")
    try:
        return ocp.load_checkpointables(path, dict(template))
    except Exception as error:  # as above
        raise StoreSnapshotError(f"export {path}: {str(error)[:300]}; expected Orbax to read it") from error


def _about(path: str) -> list[dict[str, Any]]:
    """What a checkpoint says of its entries, verified."""
    found = _read(path, {"objects": None})["objects"]
    try:
        text = found["json"].tobytes()
        tree = json.loads(text) if found["digest"].tobytes() == _digest(text) else {}
    except (KeyError, TypeError, ValueError, AttributeError):
        tree = {}
    if tree.get("version") != 1:
        raise StoreSnapshotError(f"export {path}: its list does not agree with its digest; expected version 1")
    return tree["objects"]


def _load(path: str, placement: Placement | None) -> list[Entry]:
    """The entries of a checkpoint, verified."""
    abouts = _about(path)
    template = {_key(index): _template(about, placement) for index, about in enumerate(abouts)}
    tree = _read(path, {"arrays": {key: value for key, value in template.items() if value}})["arrays"]
    entries: list[Entry] = []
    for index, about in enumerate(abouts):
        missing = {name: empty_array(*spec) for name, spec in specs_of(about).items() if 0 in spec[1]}
        entry = Entry(about, tree.get(_key(index), {}) | missing)
        try:
            check_entry(entry)
        except StoreCorruptError as error:
            raise StoreSnapshotError(f"export {path}: object {index}: {error}", (str(error),)) from error
        entries.append(entry)
    return entries


def _template(about: Mapping[str, Any], placement: Placement | None) -> dict[str, Any]:
    """What Orbax is to load: arrays of the host, but kv where `placement` says."""
    template: dict[str, Any] = {}
    for name, (dtype, shape) in specs_of(about).items():
        if 0 in shape:
            continue
        channel = name.removeprefix("layers.").removesuffix(".scale")
        if placement is None or not name.startswith("layers.") or name.endswith(".scale"):
            template[name] = empty_array(dtype, shape)
        else:
            target = target_of(placement, channel)
            sharding = (
                target if isinstance(target, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(target)
            )
            template[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return template


def _planned(path: str, store: ChunkStore) -> dict[int, tuple[Entry, Name]]:
    """What of a checkpoint the store lacks: outline and name, by place in the checkpoint."""
    plan: dict[int, tuple[Entry, Name]] = {}
    for index, about in enumerate(_about(path)):
        if about["expires"] is not None and store.clock() >= about["expires"]:
            continue
        entry = outline(about)
        try:
            name = name_of(store.names, about["kind"], about["part"], about["body"], _host(entry))
        except StoreCorruptError as error:
            raise StoreSnapshotError(f"export {path}: object {index}: {error}", (str(error),)) from error
        if not is_there(store.disk, name):
            plan[index] = (entry, name)
    return plan
