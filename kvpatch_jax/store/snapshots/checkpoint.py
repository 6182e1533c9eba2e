"""The store and Orbax: a store beside model parameters in one checkpoint; chunks as Orbax arrays, for other meshes.

All of the library's calls of Orbax's version 1 interface are here. It may still change, so that `pyproject.toml` names
the versions that it was held against. Orbax syncs array data and not its own small files and directories; what this
module acknowledges was synced afterwards, for which `make_durable` is there too.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ...chunk import AnyArray, Chunk
from ...errors import InputError, StoreCorruptError, StoreFullError, StoreIOError, StoreSnapshotError
from ...patch_metadata import Patch
from ..disk.disk import Disk
from ..disk.tenant_disk import TenantDisk, TenantStore
from ..disk.unfinished import new_directory
from ..format.buffers import expect_memory
from ..format.codec import encoder_blob, patch_blob, patch_of, patch_parts
from ..format.header import MALFORMED
from ..format.naming import Encoding, Name, name_at
from ..format.objects import Blob, file_size
from ..io.files import make_private, sync_directory, sync_file_system, typed_errors
from ..libraries.entries import Resource, check_resource, chunk_bytes, resource_of
from ..tiers.placement import Placement, target_of
from .array_entries import (
    ArrayEntry,
    blob_of_entry,
    check_about,
    check_entry,
    chunk_of_entry,
    empty_array,
    entry_of,
    entry_of_chunk,
    nbytes_of,
    outline,
    specs_of,
)
from .import_rules import changing_libraries, check_library, entries_last, is_entry, is_there
from .manifest import Progress, Summary, read_list, unchanged_libraries, write_list
from .multihost import ProcessGroup
from .orbax_item import local_path
from .restore import blob_of, name_of, part_of

LIST = "EXPORT"
_PART_BYTES, _GROUP = 1 << 30, 64
_MOST_COMPRESSED = 1000
"""Times as many bytes of arrays as files have: KV compresses by a fifth, a file that says more is made to mislead."""


def make_durable(directory: str | os.PathLike[str]) -> None:
    """Makes a finished checkpoint survive a loss of power: its files, its directories and its own name.

    Raises:
      StoreIOError: it cannot be synced, or is not there.
    """
    path = os.path.abspath(local_path(directory))
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
      patches: with their metadata.
      encoders: towers' outputs, by backbone and id.
      resources: entries of libraries, the current version and older ones of each.
    """

    chunks: tuple[Chunk, ...] = ()
    reduced: tuple[tuple[Encoding, Chunk], ...] = ()
    patches: tuple[Patch, ...] = ()
    encoders: Mapping[tuple[str, str], AnyArray] = dataclasses.field(default_factory=dict)
    resources: tuple[Resource, ...] = ()


def save_arrays(
    directory: str | os.PathLike[str],
    chunks: Sequence[Chunk] = (),
    patches: Sequence[Patch] = (),
    *,
    compress: bool = False,
) -> None:
    """Saves chunks and patches as one Orbax checkpoint of arrays (zarr3), a few for each, layers stacked.

    kv [L, T, K, H] and residuals may be sharded over a mesh, of several processes too. Then all processes call this,
    with the same chunks and patches in the same order; arrays that are not spread over them are taken from the first.
    When it has returned, in whichever process, the checkpoint is there, and durable. It is not encrypted.

    Raises:
      InputError: nothing to save. DtypeError: a dtype that objects do not hold. StoreFullError, StoreIOError; with
        several processes, in all of them.
    """
    path = os.fspath(directory)
    with ProcessGroup().agreeing(f"export {path}"):
        entries = [entry_of_chunk(chunk) for chunk in chunks]
        encoders = [encoder_blob(c.id, c.backbone, np.asarray(c.encoder)) for c in chunks if c.encoder is not None]
        entries += [entry_of(blob, "enc") for blob in encoders]
        entries += [entry_of(patch_blob(patch), "p") for patch in patches]
        if not entries:
            raise InputError("save_arrays: 0 chunks and patches; expected some")
    if "://" in path:
        with ProcessGroup().agreeing(f"export {path}"):
            _save(path, entries, compress)
        return
    with _made_private(os.path.abspath(path)) as unfinished:
        _save(unfinished, entries, compress)


@contextlib.contextmanager
def _made_private(path: str) -> Iterator[str]:
    """A name for Orbax to write to, in a directory that others cannot enter, for it makes files as umask says.

    What is made there gets its own name when it is its owner's alone, and durable; in all processes or in none.
    """
    together = ProcessGroup()
    unfinished = f"{path}.unfinished-{together.shared(secrets.token_bytes(16)).hex()}"
    first = together.index == 0
    try:
        with together.agreeing(f"export {path}"), typed_errors(f"export {path}: write"):
            if os.path.lexists(path):
                raise InputError(f"export {path}: it is there; expected a name that is free")
            if first:
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
                os.mkdir(unfinished, 0o700)
        with together.agreeing(f"export {path}"):
            yield f"{unfinished}/arrays"
        with together.agreeing(f"export {path}"), typed_errors(f"export {path}: write"):
            if first:
                make_private(unfinished)
                os.rename(f"{unfinished}/arrays", path)
                make_durable(path)
    finally:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)


def load_arrays(directory: str | os.PathLike[str], placement: Placement | None = None) -> Loaded:
    """Loads what `save_arrays` or `export_arrays` saved, each array verified where it came to lie.

    In a job of several processes all of them call this; how many saved does not matter.

    Args:
      placement: a sharding or device for kv [L, T, K, H], or one per channel: each device reads its own part. By
        default arrays of the host. Patches come on the default device, all else on the host.

    Raises:
      StoreSnapshotError: not an export, or damaged. StoreIOError: so in another process.
    """
    entries = [entry for part in _parts(os.fspath(directory)) for entry in _load(part, placement)]
    by_kind = lambda kind: [entry for entry in entries if entry.about["kind"] == kind]
    try:
        canonicals = [chunk_of_entry(entry) for entry in by_kind("kv")]
        patches = [patch_of(patch_parts(entry.about["body"], _host(entry))) for entry in by_kind("patch")]
        resources = [_resource(entry) for entry in by_kind("entry")]
        encoders = {
            (e.about["body"]["backbone"], e.about["body"]["id"]): e.arrays["encoder"] for e in by_kind("encoder")
        }
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"export {directory}: {error}") from error
    except MALFORMED as error:
        kind = type(error).__name__  # the error itself may hold content
        raise StoreSnapshotError(f"export {directory}: a body that makes no object ({kind}); expected one") from None
    return Loaded(
        tuple(chunk for encoding, chunk in canonicals if encoding is None),
        tuple((encoding, chunk) for encoding, chunk in canonicals if encoding is not None),
        tuple(patches),
        encoders,
        tuple(resources),
    )


def export_arrays(
    store: TenantStore,
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
    _expect_one_process("export_arrays")
    store.flush()
    disk, names = store.tenant_disk.disk, store.tenant_disk.names
    with new_directory(os.fspath(directory), disk.root, names.tenant_name) as unfinished:
        export = _Export(disk, unfinished, compress, part_bytes)
        with unchanged_libraries(disk.root, names.libraries):
            export.take(names.libraries, None)
        export.take(names.space, progress)
        export.save()
        write_list(f"{unfinished}/{LIST}", {"version": 1, "parts": export.parts, "objects": export.objects})
        with typed_errors(f"export {unfinished}: sync"):
            sync_file_system(unfinished)  # what Orbax left unsynced
    return Summary(export.objects, export.nbytes, export.skipped)


class _Export:
    """An export on its way: what waits for the next checkpoint of it, and what was taken so far."""

    def __init__(self, disk: Disk, directory: str, compress: bool, part_bytes: int):
        self._disk, self._directory, self._compress, self._part_bytes = disk, directory, compress, part_bytes
        self._waiting: list[ArrayEntry] = []
        self.objects, self.nbytes, self.skipped, self.parts = 0, 0, 0, 0

    def take(self, below: str, progress: Progress | None) -> None:
        """Takes every object below a folder of the store."""
        listed = sorted(self._disk.scan(below), key=lambda entry: entry.path)
        total, done = sum(each.size for each in listed), 0
        for each in listed:
            name = name_at(each.path)
            found = self._disk.get(name)
            if found is None:
                self.skipped += 1
            else:
                self._waiting.append(entry_of(blob_of(found.header, found.arrays), part_of(name.file)))
                self.objects, self.nbytes = self.objects + 1, self.nbytes + each.size
            if _nbytes(self._waiting) >= self._part_bytes:
                self.save()
            done += each.size
            if progress is not None:
                progress(done, total)

    def save(self) -> None:
        """Saves what waits, if anything does."""
        if self._waiting:
            _save(f"{self._directory}/part-{self.parts:05d}", self._waiting, self._compress)
            self._waiting, self.parts = [], self.parts + 1


def import_arrays(
    directory: str | os.PathLike[str], store: TenantStore, *, progress: Progress | None = None
) -> Summary:
    """Puts what `export_arrays` or `save_arrays` saved into a store, under its tenant's names: all of it or nothing.

    Every array is verified before its object is put. What is there already stays; what is expired stays out.

    Raises:
      StoreSnapshotError: not an export, or damaged. As `ChunkStore.put`. Nothing was added then.
    """
    _expect_one_process("import_arrays")
    tenant_disk = store.tenant_disk
    parts = list(reversed(_parts(os.fspath(directory))))  # entries were exported first, and come in last
    plans = [_planned(part, tenant_disk) for part in parts]
    every = [name for plan in plans for _, name in plan.values()]
    with changing_libraries(tenant_disk.disk, every) as has:
        lacks = lambda name: not (has(name) if is_entry(name) else is_there(tenant_disk.disk, name))
        plans = [{index: each for index, each in plan.items() if lacks(each[1])} for plan in plans]
        sizes = [sum(file_size(blob_of_entry(entry), name.file) for entry, name in plan.values()) for plan in plans]
        coming = [each for plan in plans for each in plan.values()]
        check_library(tenant_disk, sum(_counted(tenant_disk, *each) for each in coming))
        need = sum(file_size(blob_of_entry(entry), name.file) for entry, name in coming if not is_entry(name))
        added = tenant_disk.add(_groups(parts, plans, sizes, progress), need)
    return Summary(added, sum(sizes), sum(len(_about(part)) for part in parts) - added)


# ----------------------------------------------------------------------------------------------------- inside


def _expect_one_process(what: str) -> None:
    """These read and write the objects of one root, and Orbax's calls are for all processes or for none."""
    if jax.process_count() > 1:
        raise InputError(
            f"{what}: in a job of {jax.process_count()} processes; expected one (a program of its own will do: "
            "python -m kvpatch_jax.store), or save_arrays and load_arrays by all"
        )


def _groups(
    parts: Sequence[str],
    plans: Sequence[Mapping[int, tuple[ArrayEntry, Name]]],
    sizes: Sequence[int],
    progress: Progress | None,
) -> Iterator[list[tuple[Name, Blob]]]:
    """What goes in together, checkpoint by checkpoint, verified."""
    done = 0
    for part, plan, size in zip(parts, plans, sizes, strict=True):
        entries = _load(part, None) if plan else []
        order = entries_last([(index, name) for index, (_, name) in plan.items()], lambda each: each[1])
        for batch in itertools.batched(order, _GROUP):
            yield [(name, blob_of_entry(entries[index])) for index, name in batch]
        done += size
        if progress is not None:
            progress(done, sum(sizes))


def _counted(tenant_disk: TenantDisk, entry: ArrayEntry, name: Name) -> int:
    """Bytes that an entry will count for in a static library; 0 for all else."""
    if tenant_disk.budget.library is None or entry.about["part"] != "entry":
        return 0
    sealed = tenant_disk.sealed(name, blob_of_entry(entry))
    return file_size(sealed, name.file) + chunk_bytes(entry.about["body"])


def _resource(entry: ArrayEntry) -> Resource:
    body, arrays, expires = entry.about["body"], _host(entry), entry.about["expires"]
    check_resource(body, arrays, expires)
    return resource_of(body, arrays, expires)


def _nbytes(entries: Sequence[ArrayEntry]) -> int:
    return sum(value.nbytes for entry in entries for value in entry.arrays.values())


def _host(entry: ArrayEntry) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in entry.arrays.items()}


def _key(index: int) -> str:
    return f"{index:06d}"


def _save(path: str, entries: Sequence[ArrayEntry], compress: bool) -> None:
    """One checkpoint. Arrays without elements, which Orbax does not take, are made again from their shapes."""
    tree = {
        _key(index): {name: _savable(value) for name, value in entry.arrays.items() if value.size}
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


def _savable(value: AnyArray) -> AnyArray:
    """Of an array that this process alone has, Orbax takes in a job of several processes only what is on the host."""
    alone = isinstance(value, jax.Array) and value.is_fully_addressable and jax.process_count() > 1
    return np.asarray(value) if alone else value


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32).digest()


def _parts(directory: str) -> list[str]:
    """The checkpoints of an export."""
    if not os.path.lexists(f"{directory}/{LIST}"):
        return [directory]
    found = read_list(f"{directory}/{LIST}")
    parts = found.get("parts") if isinstance(found, dict) and found.get("version") == 1 else None
    there = sum(name.startswith("part-") for name in os.listdir(directory))
    if type(parts) is not int or not 0 <= parts <= there:
        raise StoreSnapshotError(
            f"export {directory}: {LIST} {str(found)[:80]}; expected version 1, of at most {there} parts"
        )
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
    size = _file_bytes(path)  # before anything is opened
    found = _read(path, {"objects": None})["objects"]
    try:
        text = found["json"].tobytes()
        tree = json.loads(text) if found["digest"].tobytes() == _digest(text) else {}
    except MALFORMED:
        tree = {}
    if not isinstance(tree, dict) or tree.get("version") != 1 or not isinstance(tree.get("objects"), list):
        raise StoreSnapshotError(f"export {path}: its list does not agree with its digest; expected version 1")
    try:
        for about in tree["objects"]:
            check_about(about)
        nbytes = sum(map(nbytes_of, tree["objects"]))
        if size is not None and nbytes > _MOST_COMPRESSED * size:
            raise StoreCorruptError(f"{nbytes} bytes of arrays in files of {size}")
    except StoreCorruptError as error:
        raise StoreSnapshotError(f"export {path}: {error}; expected what was exported") from error
    return tree["objects"]


def _file_bytes(path: str) -> int | None:
    """Bytes of all files of a checkpoint; none leads elsewhere or hangs who opens it. None: not on this machine.

    Raises:
      StoreSnapshotError.
    """
    if "://" in path:
        return None
    total = 0
    for _, folders, names, fd in os.fwalk(path):
        for name in folders + names:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                raise StoreSnapshotError(f"export {path}: {name} is neither a file nor a directory; expected one")
            total += found.st_size
    return total


def _load(path: str, placement: Placement | None) -> list[ArrayEntry]:
    """The entries of a checkpoint, verified, in all processes or in none."""
    entries: list[ArrayEntry] = []
    bad: list[str] = []
    with ProcessGroup().agreeing(f"export {path}"):
        abouts = _about(path)
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


def _planned(path: str, tenant_disk: TenantDisk) -> dict[int, tuple[ArrayEntry, Name]]:
    """What of a checkpoint has not expired: outline and name, by place in the checkpoint."""
    plan: dict[int, tuple[ArrayEntry, Name]] = {}
    for index, about in enumerate(_about(path)):
        if about["expires"] is not None and tenant_disk.clock() >= about["expires"]:
            continue
        entry = outline(about)
        try:
            name = name_of(tenant_disk.names, about["kind"], about["part"], about["body"], _host(entry))
        except StoreCorruptError as error:
            raise StoreSnapshotError(f"export {path}: object {index}: {error}", (str(error),)) from error
        plan[index] = (entry, name)
    return plan
