"""Libraries of named resources that prompts refer to (MPIC, section 3.1): a tenant's files, an operator's references.

An entry is an object that is never evicted and counts for no budget. Its keyed name reveals nothing; its body holds the
name in prompts and all but the content. A listing is one query of the index and the bodies, each read once per process.
"""

import base64
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from ..cache import Chunk, Text, check_text, chunk_id, decoded, encoded, is_encoded, sort_of
from ..core import AnyArray
from ..errors import InputError, StoreError
from ..utils.kinds import expect_kind
from ..utils.sizes import Size, size_of
from .codec import decoding
from .files import Encoded, Stored, locked, read_header
from .index import file_errors, process_started
from .references import Kind, Reference, check_name
from .retriever import as_vector
from .store import ChunkStore

Content = str | bytes | np.ndarray | tuple[int, ...]
"""Content of a resource: text, an encoded file, pixels (or another array), or token ids."""
ENTRY_BYTES = 1024
"""Bytes that an entry counts for a quota besides its content, vector and chunk."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LibraryEntry:
    """A resource without its content, as in a listing.

    Attributes:
      reference: the reference in prompts, with its version in a dynamic library.
      nbytes: bytes that it counts for a quota: of its content, its vector and its chunk.
      expires: seconds since the epoch, or None.
      chunk: (backbone, id) of the chunk that was put with it, or None.
      vector: vector by which a retriever finds it, [D] float32, or None.
      withdrawn: whether this version withdraws the reference.
    """

    reference: Reference
    nbytes: int
    expires: float | None
    chunk: tuple[str, str] | None = dataclasses.field(repr=False)
    vector: np.ndarray | None = dataclasses.field(repr=False)
    withdrawn: bool


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Resource(LibraryEntry):
    """A verified resource of a library, with the content that was put; None if there is only a chunk."""

    content: Content | None = dataclasses.field(repr=False)

    def chunk_id(self, backbone: str) -> str:
        """Returns the id of its chunk for a backbone: of the chunk that was put with it, or else of its content.

        Raises:
          InputError: there is no content, and only a chunk of another backbone.
        """
        if self.chunk is not None and self.chunk[0] == backbone:
            return self.chunk[1]
        if self.content is None:
            raise InputError(f"{self.reference}: got a chunk of another backbone only; expected content too")
        return chunk_id(backbone, self.item)

    @property
    def item(self) -> Any:
        """Content as an item for `Backbone.prepare`: pixels of an image, a list of token ids, or a `Text`."""
        if self.reference.kind == "TOKENS" and self.content is not None:
            return [int(token) for token in self.content]
        if isinstance(self.content, bytes) and self.reference.kind == "IMAGE":
            return decoded(self.content, str(self.reference))
        return Text(self.content) if isinstance(self.content, str) else self.content


# ------------------------------------------------------------------------------------------------- entries as objects


def _as_content(content: Any, kind: Kind | None) -> Content:
    """Converts PIL images and JAX arrays to NumPy arrays, a path to its file's bytes, token ids to a tuple.

    Raises:
      InputError: the content is empty or of another type, a str that looks like a file name (unless `kind` is TEXT), or
        a file that cannot be read.
    """
    if hasattr(content, "getbands"):
        content = decoded(content)
    elif isinstance(content, jax.Array):
        content = np.asarray(content)
    elif isinstance(content, os.PathLike):
        try:
            content = Path(content).read_bytes()
        except OSError as error:
            raise InputError(f"library: got {os.fspath(content)!r} ({error}); expected a readable file") from error
    elif isinstance(content, str):
        if kind != "TEXT":
            check_text(content, "library")
        content = str(content)  # a `Text` too
    elif isinstance(content, list | tuple) and all(type(token) is int for token in content):
        content = tuple(content)

    if not isinstance(content, str | bytes | np.ndarray | tuple):
        kind_of = type(content).__name__
        raise InputError(f"library: got content of type {kind_of}; expected text, bytes, an array or token ids")
    if not (content.size if isinstance(content, np.ndarray) else len(content)):
        raise InputError("library: got empty content; expected some")
    return content


def _named(name: str, content: Any, chunk: Chunk | None, kind: Kind | None) -> tuple[Reference, Content | None]:
    """Returns the reference and the converted content of an entry; the kind is derived from the content by default.

    Raises:
      InputError: there is neither content nor chunk, or the content is of another kind. As `_as_content`, `check_name`.
    """
    if content is None:
        expect_kind(chunk, Chunk, f"library: {name!r:.80} without content: chunk", "a Chunk")
        return Reference(*check_name(kind or "IMAGE", name)), None
    expect_kind(chunk, Chunk | None, "library: chunk", "a Chunk, or None")
    content = _as_content(content, kind)
    if isinstance(content, bytes) and not is_encoded(content):
        derived = "FILE"
    else:
        derived = sort_of(Text(content) if isinstance(content, str) else content, "library").upper()
    reference = Reference(*check_name(kind or derived, name))

    # FILE has any content, and an image may be a file in an encoding that is not recognised.
    if reference.kind not in (derived, "FILE") and (reference.kind, derived) != ("IMAGE", "FILE"):
        raise InputError(f"{reference}: got content of kind {derived}; expected {reference.kind}")
    return reference, content


def _encode_entry(
    reference: Reference,
    content: Content | None,
    chunk: Chunk | None = None,
    vector: AnyArray | None = None,
) -> Encoded:
    """Encodes a resource as an object; with neither content nor chunk, a version that withdraws its reference."""
    array = np.zeros(0, np.uint8)
    if isinstance(content, str | bytes):
        array = np.frombuffer(encoded(content) if isinstance(content, str) else content, np.uint8)
    elif content is not None:
        array = content if isinstance(content, np.ndarray) else np.array(content, np.int64)
    components = b"" if vector is None else as_vector(vector, str(reference)).reshape(-1).tobytes()
    body = {
        "library": "static" if reference.version is None else "dynamic",
        "fields": [reference.kind, reference.name],
        "version": reference.version,
        "content": None if content is None else type(content).__name__,
        "chunk": None if chunk is None else [chunk.backbone, chunk.id],
        "vector": base64.b64encode(components).decode(),
        "nbytes": ENTRY_BYTES + array.nbytes + len(components) + (0 if chunk is None else chunk.nbytes),
    }
    return Encoded("entry", body, {"content": array})


def _decode_entry(stored: Stored) -> Resource:
    fields = _fields_of(stored.body, stored.expires)
    with decoding("entry"):
        content: Any = stored.arrays["content"]
        match stored.body["content"]:
            case "str":
                content = content.tobytes().decode()
            case "bytes":
                content = content.tobytes()
            case "tuple":
                content = tuple(content.tolist())
            case None:
                content = None
    return Resource(content=content, **fields)


def _fields_of(body: Mapping[str, Any], expires: float | None) -> dict[str, Any]:
    """Decodes the fields of a `LibraryEntry`. Raises StoreCorruptError for a body of no entry."""
    with decoding("entry"):
        chunk = None if body["chunk"] is None else (str(body["chunk"][0]), str(body["chunk"][1]))
        version = None if body["version"] is None else int(body["version"])
        components = np.frombuffer(base64.b64decode(body["vector"], validate=True), np.float32)
        return {
            "reference": Reference(*check_name(*body["fields"]), version),
            "nbytes": int(body["nbytes"]),
            "expires": expires,
            "chunk": chunk,
            "vector": components if components.size else None,
            "withdrawn": body["content"] is None and chunk is None,
        }


# ---------------------------------------------------------------------------------------------------------- libraries


class _Library:
    """A library of one tenant: its listing, and chunks that are deleted with their last entry."""

    _is_versioned = False

    def __init__(self, store: ChunkStore):
        expect_kind(store, ChunkStore, "library.store", "a ChunkStore")
        self.store, self.objects = store, store.objects
        self._listed: dict[tuple[str, int], LibraryEntry | None] = {}

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Locks the libraries of the root for changes, among threads and processes."""
        self.objects.expect_open()
        with contextlib.ExitStack() as stack:
            with file_errors("library: lock"):
                stack.enter_context(locked(f"{self.objects.root}/libraries.lock"))
            yield

    def _name(self, reference: Reference) -> str:
        library = "static" if reference.version is None else "dynamic"
        return self.objects.names.entry(library, reference.kind, reference.name, version=reference.version)

    def _get(self, reference: Reference) -> Resource | None:
        return self.objects.get(self._name(reference), _decode_entry)

    def entries(self) -> list[LibraryEntry]:
        """Lists this machine's current entries that were not withdrawn, by kind and name, without their contents."""
        newest: dict[tuple[str, str], LibraryEntry] = {}
        for entry in self._entries():
            version, key = entry.reference.version, (entry.reference.kind, entry.reference.name)
            is_newest = key not in newest or (version or 0) > (newest[key].reference.version or 0)
            if self._is_versioned == (version is not None) and is_newest:
                newest[key] = entry
        return [entry for _, entry in sorted(newest.items()) if not entry.withdrawn]

    def vectors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (reference without version, vector) of every current entry that has a vector, to fill a retriever."""
        for entry in self.entries():
            if entry.vector is not None:
                yield str(dataclasses.replace(entry.reference, version=None)), entry.vector

    def _entries(self) -> list[LibraryEntry]:
        """Lists the tenant's intact entries on this machine that have not expired: of both libraries, all versions."""
        self.objects.expect_open()
        query = """SELECT name, seq, expires FROM objects
          WHERE tenant = ? AND rank = 2 AND (expires IS NULL OR expires > ?)"""
        for _ in range(2):  # an entry may be replaced before its body is read
            listed: dict[tuple[str, int], LibraryEntry | None] = {}
            for name, seq, expires in self.objects.index.rows(query, self.objects.tenant, time.time()):
                listed[name, seq] = self._listed.get((name, seq)) or self._read_entry(name, expires)
            self._listed = listed
            if None not in listed.values():
                break
        return [entry for entry in self._listed.values() if entry is not None]

    def _read_entry(self, name: str, expires: float | None) -> LibraryEntry | None:
        """Reads an entry without its content; None if it is gone or damaged."""
        try:
            header, stored = read_header(f"{self.objects.root}/data/{self.objects.file_of(name)}")
            if stored.kind == "sealed":
                stored = self.objects.read(name)
            if stored is None or (header.tenant, header.name) != (self.objects.tenant, name):
                return None
            return LibraryEntry(**_fields_of(stored.body, expires))
        except (StoreError, OSError):
            return None

    def _put_chunk(self, chunk: Chunk | None, ttl: float | int | None) -> None:
        """Stores an entry's chunk, before the entry. It lives as long as the last of its entries."""
        if chunk is None:
            return
        for entry in self._entries():
            if entry.chunk == (chunk.backbone, chunk.id) and ttl is not None:
                ttl = None if entry.expires is None else max(ttl, entry.expires - time.time())
        self.store.put(chunk, ttl=ttl)

    def _delete_unused_chunks(self, deleted: Sequence[LibraryEntry]) -> None:
        """Deletes the chunks of entries that are gone, unless another entry has them."""
        chunks = {entry.chunk for entry in deleted if entry.chunk is not None}
        if chunks:
            chunks -= {entry.chunk for entry in self._entries()}
        for backbone, id in chunks:
            self.store.delete(id, backbone)


class StaticLibrary(_Library):
    """Library of files that one tenant uploads by name: images, text, token ids, or chunks. As durable as the store.

    Args:
      store: the tenant's store, which holds the chunks too.
      quota: bytes of all entries on this machine, including the chunks that were put with them, such as "10 GB".
      ttl: time to live of what is put, in seconds, also of the chunks put with it; None keeps entries.

    Raises:
      InputError: the quota is below 1, or the ttl is not a finite number above 0.
    """

    def __init__(self, store: ChunkStore, *, quota: Size, ttl: float | int | None = None):
        super().__init__(store)
        self.quota, self._ttl = size_of(quota, "static library: quota", 1), ttl
        self.objects.expiry(ttl)  # checks it

    def put(
        self,
        name: str,
        content: Any = None,
        *,
        chunk: Chunk | None = None,
        kind: Kind | None = None,
        vector: Float[AnyArray, " D"] | None = None,
    ) -> Reference:
        """Puts a file under a name durably, and replaces an entry with this kind and name.

        Args:
          content: text, an encoded image or other file (bytes, or its `pathlib.Path`), pixels (an array or PIL image),
            or token ids. A str that looks like a file name is refused unless `kind` is TEXT.
          chunk: its canonical, if it was computed already, for the store. Without content it cannot be computed again
            after eviction.
          kind: by default derived from the content; IMAGE if there is only a chunk.
          vector: vector by which a retriever finds it (`pooled`).

        Returns:
          The reference, as prompts name it.

        Raises:
          StoreError: it exceeds the quota; nothing was changed.
          InputError, ShapeError, NotFiniteError: content, name or vector cannot be stored.
          StoreError: as `ChunkStore.put`.
        """
        reference, content = _named(name, content, chunk, kind)
        expires = None if self._ttl is None else self.objects.expiry(self._ttl)
        written = _encode_entry(reference, content, chunk, vector)
        with self._changing():
            entries = self.entries()
            used = sum(entry.nbytes for entry in entries if entry.reference != reference)
            nbytes = written.body["nbytes"]
            if used + nbytes > self.quota:
                raise StoreError(
                    f"{reference}: got {nbytes} bytes; {used} of {self.quota} are taken; expected room within the quota"
                )
            self._put_chunk(chunk, self._ttl)
            self.objects.put([(self._name(reference), written)], expires=expires)
            self._delete_unused_chunks([entry for entry in entries if entry.reference == reference])
        return reference

    def get(self, kind: str, name: str) -> Resource | None:
        """Reads and verifies a file; None if there is none, or it is damaged. Raises InputError as `put`."""
        return self._get(Reference(*check_name(kind, name)))

    def delete(self, kind: str, name: str) -> bool:
        """Deletes a file, and its chunk unless another entry has it. Returns whether there was one.

        Chunks that were computed of its content later stay: `store.delete(resource.chunk_id(backbone), backbone)`.
        """
        reference = Reference(*check_name(kind, name))
        with self._changing():
            entries = [entry for entry in self.entries() if entry.reference == reference]
            deleted = self.objects.delete(self._name(reference).partition("/")[0])
            self._delete_unused_chunks(entries)
        return deleted


class HeldReference:
    """Hold on one version of a reference, until it is closed or its process ends. A context manager."""

    def __init__(self, resource: Resource, stack: contextlib.ExitStack):
        self.resource, self._stack = resource, stack

    def close(self) -> None:
        """Releases the version, and deletes it if it is old and nobody else holds it. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Resource:
        return self.resource

    def __exit__(self, *_: object) -> None:
        self.close()


class _TakenError(Exception):
    """Another machine has published this version."""


class DynamicLibrary(_Library):
    """Library of versioned references, published while readers in any process keep the versions that they hold.

    `publish` creates the next version, which every later `open` sees. An older version stays as long as a process of
    this machine holds it, with the chunk that was published with it. Versions count from 1. Machines that share a
    remote store share the library, and skip numbers where they publish at once; while the remote store does not
    answer, two of them may publish the same version.

    Args:
      store: a store of the operator's own tenant.
    """

    _is_versioned = True

    def publish(
        self,
        name: str,
        content: Any = None,
        *,
        chunk: Chunk | None = None,
        kind: Kind | None = None,
        vector: Float[AnyArray, " D"] | None = None,
    ) -> Reference:
        """Publishes the next version of a reference durably, and returns the reference with it.

        Arguments and errors are those of `StaticLibrary.put`, without a quota. After an error the previous version is
        the current one.
        """
        reference, content = _named(name, content, chunk, kind)
        with self._changing():
            return self._write_next(reference, content, chunk, vector)

    def withdraw(self, kind: str, name: str) -> bool:
        """Withdraws a reference by a new, empty version. Returns whether there was one. Readers keep held versions."""
        reference = Reference(*check_name(kind, name))
        with self._changing():
            version = max(self._versions(reference), default=None)
            current = None if version is None else self._get(dataclasses.replace(reference, version=version))
            if current is None or current.withdrawn:
                return False
            self._write_next(reference, None)
        return True

    def _write_next(
        self, reference: Reference, content: Any, chunk: Chunk | None = None, vector: AnyArray | None = None
    ) -> Reference:
        """Writes the next version, in one transaction and after its chunk, and deletes old ones."""
        while True:
            version = max(self._versions(reference), default=0) + 1
            reference = dataclasses.replace(reference, version=version)
            written = _encode_entry(reference, content, chunk, vector)
            self._put_chunk(chunk, None)
            with contextlib.suppress(_TakenError):
                self.objects.amend(self._name(reference), functools.partial(_unless_taken, written))
                # Where there are newer ones already, another machine may have published this number, too, and deleted
                # it as an old one. The next number is nobody's.
                newest = version
                with contextlib.suppress(StoreError):  # it is published, whether or not others can be listed now
                    newest = max(self._versions(reference))
                self._drop_old(self._prefix(reference), self._name(dataclasses.replace(reference, version=newest)))
                if newest == version:
                    return reference

    def open(self, kind: str, name: str, version: int | None = None) -> HeldReference | None:
        """Opens a version, by default the current one, and holds it until it is closed; None if it does not exist.

        Raises:
          InputError: no reference can have this kind or name. StoreError: the hold cannot be written.
        """
        reference = Reference(*check_name(kind, name))
        versions, pid = self._versions(reference), os.getpid()
        if not versions or version not in (None, *versions):
            return None
        with self.objects.index.write() as transaction:
            if version is None:
                version = max(versions + self._versions(reference, remote=False))
            reference = dataclasses.replace(reference, version=version)
            row = self.objects.tenant, self._name(reference), pid, process_started(pid)
            query = "INSERT INTO holds(tenant, name, pid, started) VALUES(?, ?, ?, ?)"
            hold = transaction.db.execute(query, row).lastrowid or 0
        with contextlib.ExitStack() as stack:
            stack.callback(self._release, reference, hold, pid)
            resource = self._get(reference)
            if resource is not None and not resource.withdrawn:
                return HeldReference(resource, stack.pop_all())
        return None

    def _release(self, reference: Reference, hold: int, pid: int) -> None:
        """Ends a hold of this process, and deletes the version if it is old; a closed store's ends with the process."""
        if pid == os.getpid() and not self.objects.closed:
            with self._changing():
                self._drop_old(self._prefix(reference), hold=hold)

    def _drop_old(self, prefix: str, newest: str = "", hold: int | None = None) -> int:
        """Deletes versions that are neither the newest nor held, in one transaction. Returns their number.

        Args:
          prefix: prefix of the names of one reference's versions, or "" for all.
          newest: name of its newest version, if another machine may have that.
          hold: one that ends in the same transaction.
        """
        tenant = self.objects.tenant
        query = """SELECT id, file, name FROM objects AS old
          WHERE tenant = ? AND rank = 2 AND name >= ? AND name < ? AND name LIKE '%/e.v%'
          AND name NOT IN (SELECT name FROM holds WHERE tenant = old.tenant)
          AND (name < ? OR EXISTS (SELECT 1 FROM objects AS new WHERE new.tenant = old.tenant AND new.name > old.name
            AND new.name < substr(old.name, 1, instr(old.name, '/')) || 'f'))"""
        with self.objects.index.write() as transaction:
            db = transaction.db
            db.execute("DELETE FROM holds WHERE rowid = ?", (hold,))
            transaction.end_dead_holds()
            rows = db.execute(query, (tenant, prefix, f"{prefix}g", newest)).fetchall()
            dropped = [self._read_entry(name, None) for _, _, name in rows]
            transaction.forget([row[:2] for row in rows])
            if rows and self.objects.remote is not None:
                seq = transaction.next_seq()
                for _, _, name in rows:
                    transaction.send(tenant, name, seq, "delete")
        if self.objects.sender is not None:
            self.objects.sender.wake()
        self._delete_unused_chunks([entry for entry in dropped if entry is not None])
        return len(rows)

    def _versions(self, reference: Reference, remote: bool = True) -> list[int]:
        names = self.objects.with_prefix(self._prefix(reference), remote)
        return sorted(int(name.rpartition("v")[2]) for name in names)

    def _prefix(self, reference: Reference) -> str:
        return self._name(dataclasses.replace(reference, version=1)).rpartition("v")[0] + "v"

    def collect(self) -> int:
        """Deletes old versions that only dead processes held. Returns their number."""
        with self._changing():
            return self._drop_old("")


def _unless_taken(written: Encoded, stored: list[Stored]) -> Encoded:
    if stored:
        raise _TakenError
    return written
