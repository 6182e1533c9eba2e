"""Exports of chunks as Orbax arrays, for other machines and meshes, and their import into a store.

An export is an Orbax checkpoint, or a directory of several with a list of them. It depends on neither secret nor key of
a store, and is not encrypted.
"""

import contextlib
import dataclasses
import functools
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from ...cache import Chunk, Patch
from ...core import AnyArray, KVLayout
from ...errors import InputError, StoreCorruptError, StoreSnapshotError, StoreVersionError
from ...patching import Basis
from ..disk.disk import Disk
from ..disk.partial_exports import new_directory
from ..disk.tenant_disk import TenantDisk, TenantStore
from ..format.bases import basis_id, basis_of, completed
from ..format.codec import encoder_blob
from ..format.header import MALFORMED
from ..format.naming import Encoding, name_at, part_of
from ..format.objects import blob_of, file_size
from ..format.patch_codec import patch_blob, patch_parts
from ..io.files import make_private, sync_file_system, typed_errors
from ..libraries.entries import Resource, check_resource, resource_of
from ..tiers.device_placement import Placement
from .array_entries import ArrayEntry, blob_of_entry, chunk_of_entry, entry_of, entry_of_chunk, outline
from .import_rules import ImportCandidate, import_objects, library_bytes, name_of
from .manifest import Progress, Summary, read_list, write_list
from .multihost import ProcessGroup
from .orbax_arrays import load_entries, read_abouts, save_entries
from .orbax_item import make_durable
from .save import unchanged_libraries

LIST = "EXPORT"
_PART_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class ExportContents:
    """Content of an export.

    Attributes:
      chunks: unreduced canonicals.
      reduced: canonicals that were stored in a smaller encoding, with its word: a dtype's in the original dtype; few
        bits packed (`Chunk.encoding`).
      patches: patches.
      encoders: encoder outputs by backbone and id.
      resources: entries of libraries, all versions.
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
    """Saves chunks and patches durably as one Orbax checkpoint of arrays (zarr3) with stacked layers, not encrypted.

    kv [L, T, K, H] and residuals may be sharded over a mesh, also of several processes. Then all processes call this
    with the same chunks and patches in the same order; arrays that are not sharded are taken from the first process.
    Once it has returned in any process, the checkpoint is complete.

    Raises:
      InputError: there is nothing to save.
      DtypeError: objects cannot hold a dtype.
      StoreFullError, StoreIOError: it could not be written; raised in all processes.
    """
    path = os.fspath(directory)
    with ProcessGroup().agreeing(f"export {path}"):
        entries = [entry_of_chunk(chunk) for chunk in chunks]
        encoders = [encoder_blob(c.id, c.backbone, np.asarray(c.encoder)) for c in chunks if c.encoder is not None]
        entries += [entry_of(blob, "enc") for blob in encoders]
        if any(patch.metadata.basis is not None for patch in patches):
            raise InputError(
                "save_arrays: got a patch in a shared basis; expected its own directions, or export_arrays of a store "
                "that has the basis"
            )
        entries += [entry_of(patch_blob(patch), "p") for patch in patches]
        if not entries:
            raise InputError("save_arrays: got no chunks and patches; expected some")

    if "://" in path:
        with ProcessGroup().agreeing(f"export {path}"):
            save_entries(path, entries, compress)
        return
    with _made_private(os.path.abspath(path)) as unfinished:
        save_entries(unfinished, entries, compress)


@contextlib.contextmanager
def _made_private(path: str) -> Iterator[str]:
    """Creates a private directory for Orbax, which creates files with the permissions of umask.

    Its content is renamed to `path` once it is private and durable, in all processes or in none.
    """
    together = ProcessGroup()
    unfinished = f"{path}.unfinished-{together.shared(secrets.token_bytes(16)).hex()}"
    first = together.index == 0

    try:
        with together.agreeing(f"export {path}"), typed_errors(f"export {path}: write"):
            if os.path.lexists(path):  # also a link that leads nowhere
                raise InputError(f"export {path}: got an existing path; expected a name that is free")
            if first:
                os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
                os.mkdir(unfinished, 0o700)
        with together.agreeing(f"export {path}"):
            yield f"{unfinished}/arrays"
        with together.agreeing(f"export {path}"), typed_errors(f"export {path}: write"):
            if first:
                make_private(unfinished)
                os.rename(f"{unfinished}/arrays", path)
                # Before the other processes continue, so that none of them sees the rest.
                shutil.rmtree(unfinished, ignore_errors=True)
                make_durable(path)
    finally:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)


def load_arrays(directory: str | os.PathLike[str], placement: Placement | None = None) -> ExportContents:
    """Loads an export of `save_arrays` or `export_arrays`, and verifies each array on its device.

    In a job of several processes all of them call this; the number of processes that saved does not matter.

    Args:
      placement: a sharding or device for kv [L, T, K, H], or one per channel: each device reads its own part. By
        default kv are on the host. Patches are on the default device, everything else on the host.

    Raises:
      StoreSnapshotError: it is no export, or damaged.
      StoreIOError: another process failed.
    """
    entries: list[ArrayEntry] = []
    for part in _parts(os.fspath(directory)):
        entries += load_entries(part, placement)

    def by_kind(kind):
        return [entry for entry in entries if entry.about["kind"] == kind]

    try:
        canonicals = [chunk_of_entry(entry) for entry in by_kind("kv")]
        found = [patch_parts(entry.about["body"], entry.host) for entry in by_kind("patch")]
        resources = [_resource(entry) for entry in by_kind("entry")]
        encoders = {
            (e.about["body"]["backbone"], e.about["body"]["id"]): e.arrays["encoder"] for e in by_kind("encoder")
        }
    except (StoreCorruptError, StoreVersionError) as error:
        raise StoreSnapshotError(f"export {directory}: {error}") from error
    except MALFORMED as error:
        kind = type(error).__name__  # the error's text may contain content
        raise StoreSnapshotError(f"export {directory}: got a body of no object ({kind}); expected one") from None

    def basis(digest: str, layout: KVLayout, backbone: str) -> Basis | None:
        rows = {name: encoders.get((backbone, basis_id(digest, name))) for name in layout.names}
        directions = {name: None if value is None else np.asarray(value) for name, value in rows.items()}
        return basis_of(digest, layout, backbone, directions)

    patches = completed(found, basis)
    return ExportContents(
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
    """Exports and verifies all objects of a store's tenant as a new directory of Orbax checkpoints of arrays.

    Unlike a snapshot it depends on neither secret nor key of the store: it contains ids, and is not encrypted.

    Args:
      part_bytes: bytes of arrays per checkpoint, which are in memory at once.

    Raises:
      InputError: `directory` exists.
      StoreFullError, StoreReadOnlyError, StoreIOError: it could not be written; there is no directory then.
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
            sync_file_system(unfinished)  # Orbax does not sync its own small files and directories
    return Summary(export.objects, export.nbytes, export.skipped)


class _Export:
    """Export in progress: entries for its next checkpoint, and counts."""

    def __init__(self, disk: Disk, directory: str, compress: bool, part_bytes: int):
        self._disk, self._directory, self._compress, self._part_bytes = disk, directory, compress, part_bytes
        self._waiting: list[ArrayEntry] = []
        self._waiting_bytes = 0
        self.objects, self.nbytes, self.skipped, self.parts = 0, 0, 0, 0

    def take(self, below: str, progress: Progress | None) -> None:
        """Adds every object below a folder of the store."""
        listed = sorted(self._disk.scan(below), key=lambda entry: entry.path)
        total, done = sum(item.size for item in listed), 0

        for item in listed:
            found = self._disk.get(name_at(item.path))
            if found is None:
                self.skipped += 1
            else:
                self._waiting.append(entry_of(blob_of(found.header, found.arrays), part_of(item.path)))
                self._waiting_bytes += sum(value.nbytes for value in self._waiting[-1].arrays.values())
                self.objects, self.nbytes = self.objects + 1, self.nbytes + item.size
            if self._waiting_bytes >= self._part_bytes:
                self.save()
            done += item.size
            if progress is not None:
                progress(done, total)

    def save(self) -> None:
        """Saves the waiting entries, if there are any, as one checkpoint."""
        if self._waiting:
            save_entries(f"{self._directory}/part-{self.parts:05d}", self._waiting, self._compress)
            self._waiting, self._waiting_bytes, self.parts = [], 0, self.parts + 1


def import_arrays(
    directory: str | os.PathLike[str], store: TenantStore, *, progress: Progress | None = None
) -> Summary:
    """Adds an export of `export_arrays` or `save_arrays` to a store, under its tenant's names, all or nothing.

    Every array is verified before its object is written. Existing objects stay; expired ones are skipped.

    Raises:
      StoreSnapshotError: it is no export, or damaged.
      StoreError: as `ChunkStore.put`. Nothing was added in any case.
    """
    _expect_one_process("import_arrays")
    load = functools.lru_cache(maxsize=1)(load_entries)  # only one checkpoint is in memory

    batches: list[list[ImportCandidate]] = []
    found = 0
    for part in reversed(_parts(os.fspath(directory))):  # entries were exported first, and are added last
        batch: list[ImportCandidate] = []
        for index, about in enumerate(read_abouts(part)):
            found += 1
            if about["expires"] is None or store.tenant_disk.clock() < about["expires"]:
                try:  # names and sizes need no arrays, and the checkpoint may be larger than memory
                    candidate = _incoming(store.tenant_disk, outline(about))
                except (StoreCorruptError, StoreVersionError) as error:
                    raise StoreSnapshotError(f"export {part}: object {index}: {error}", (str(error),)) from error

                def blob(part=part, index=index):
                    return blob_of_entry(load(part)[index])

                batch.append(dataclasses.replace(candidate, load=blob))
        batches.append(batch)

    added, nbytes = import_objects(store.tenant_disk, batches, progress=progress)
    return Summary(added, nbytes, found - added)


def _incoming(tenant_disk: TenantDisk, entry: ArrayEntry) -> ImportCandidate:
    """Returns an object of an export by its outline, with its name and size in the store."""
    about = entry.about
    name = name_of(tenant_disk.names, about["kind"], about["part"], about["body"], entry.host)
    blob = blob_of_entry(entry)
    counted = library_bytes(tenant_disk, name, blob)
    return ImportCandidate(name, file_size(blob, name.file), lambda: blob, library_bytes=counted)


def _expect_one_process(what: str) -> None:
    """Raises in jobs of several processes: Orbax's calls involve all of them, and a root's objects only one."""
    if jax.process_count() > 1:
        raise InputError(
            f"{what}: got a job of {jax.process_count()} processes; expected one (such as a separate program: "
            "python -m kvpatch_jax.store), or save_arrays and load_arrays by all"
        )


def _resource(entry: ArrayEntry) -> Resource:
    body, arrays, expires = entry.about["body"], entry.host, entry.about["expires"]
    check_resource(body, arrays, expires)
    return resource_of(body, arrays, expires)


def _parts(directory: str) -> list[str]:
    """Returns the checkpoints of an export."""
    if not os.path.lexists(f"{directory}/{LIST}"):
        return [directory]
    found = read_list(f"{directory}/{LIST}")
    parts = found.get("parts") if isinstance(found, dict) and found.get("version") == 1 else None
    there = sum(name.startswith("part-") for name in os.listdir(directory))
    if type(parts) is not int or not 0 <= parts <= there:
        raise StoreSnapshotError(
            f"export {directory}: got {LIST} {str(found)[:80]}; expected version 1, with at most {there} parts"
        )
    return [f"{directory}/part-{number:05d}" for number in range(found["parts"])]
