"""What both libraries stand on: named resources as objects of the store's directory, beside its chunks.

An entry is a verified, durable object like any other, under `lib/<tenant>/<library>/`. Its name is inside it, so that a
library can be listed; the path tells nothing. Entries are outside the chunks' budget and eviction. Whoever changes a
library holds its lock, among threads and processes; readers hold none.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Float

from ...chunk import AnyArray, Chunk
from ...chunk_ids import chunk_id, content_digest, encoded
from ...content import Text, check_text, sort_of
from ...errors import InputError, LibraryFullError, NotFiniteError, StoreCorruptError, StoreError
from ...images import decoded, is_encoded
from ..disk.directory import DirectoryEntry
from ..disk.quarantine import purge
from ..disk.tenant_disk import TenantDisk, TenantStore
from ..disk.version_floor import Floor, Floors, number_of
from ..format.header import MALFORMED, Header
from ..format.naming import Name, Names, name_at
from ..format.objects import Blob
from ..io.files import locked, make_directories, typed_errors
from .folder_index import Contents, Seen
from .references import Kind, Reference, check_name

Content = str | bytes | np.ndarray | list[int] | tuple[int, ...]
"""What a resource shows: text, an encoded file, pixels (or another array), or token ids."""

_MOST_VERSIONS = 10**9  # what a reference can be written for
_NOTHING = np.zeros(1, np.uint8)  # an object has at least one byte


@dataclasses.dataclass(frozen=True)
class LibraryEntry:
    """A resource as its header tells it.

    Attributes:
      reference: how a prompt names it, with its version in a dynamic library.
      nbytes: what it counts for: its file, and the chunk that was put with it.
      expires: seconds since the epoch, or None.
      chunk: (backbone, id) of the chunk that was put with it, or None.
      withdrawn: whether this version says that there is none any more.
      path: from the store's root.
      number: of an encrypted entry: older ones of its name have lower numbers.
    """

    reference: Reference
    nbytes: int
    expires: float | None
    chunk: tuple[str, str] | None = dataclasses.field(repr=False)
    withdrawn: bool
    path: str
    number: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Resource:
    """A resource read from a library, verified.

    Attributes:
      reference: how a prompt names it, with its version in a dynamic library.
      content: as it was put; None where only a chunk was.
      digest: of the content, 64 hexadecimal digits; equal contents have equal ones. Empty without content.
      metadata: the operator's.
      vector: what a retriever finds it by, [D] float32, or None.
      expires, chunk: as in `LibraryEntry`.
    """

    reference: Reference
    content: str | bytes | np.ndarray | tuple[int, ...] | None = dataclasses.field(repr=False)
    digest: str = dataclasses.field(repr=False)
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)
    vector: np.ndarray | None = dataclasses.field(repr=False)
    expires: float | None
    chunk: tuple[str, str] | None = dataclasses.field(repr=False)

    def chunk_id(self, backbone: str) -> str:
        """The id of its chunk for a backbone: of the one that was put with it, else `chunk_id` of its content.

        Raises:
          InputError: only a chunk was put, and another backbone's.
        """
        if self.chunk is not None and self.chunk[0] == backbone:
            return self.chunk[1]
        if self.content is None:
            raise InputError(f"{self.reference}: a chunk of another backbone alone; expected content too")
        return self.content_id(backbone)

    def content_id(self, backbone: str) -> str:
        """`chunk_id` of its content. Raises InputError where there is none."""
        if self.content is None:
            raise InputError(f"{self.reference}: put without content; expected some")
        return chunk_id(backbone, self.item)

    @property
    def item(self) -> Any:
        """The content as `Backbone.prepare` takes it: an encoded image as its pixels, token ids as a list, a `Text`."""
        if self.reference.kind == "TOKENS" and self.content is not None:
            return [int(token) for token in self.content]
        if isinstance(self.content, bytes) and self.reference.kind == "IMAGE":
            return decoded(self.content, str(self.reference))
        return Text(self.content) if isinstance(self.content, str) else self.content


def as_content(content: Any, kind: Kind | None = None) -> Content:
    """A content in one of the forms that are kept: PIL images and jax arrays as NumPy arrays, a path's file as bytes.

    Raises:
      InputError: content of another type, a str that names a file (unless `kind` is TEXT), or a file that cannot be
      read.
    """
    if hasattr(content, "getbands"):
        return decoded(content)
    if isinstance(content, jax.Array):
        return np.asarray(content)
    if isinstance(content, os.PathLike):
        try:
            return Path(content).read_bytes()
        except OSError as error:
            raise InputError(f"library: {os.fspath(content)!r} cannot be read ({error}); expected a file") from error
    if isinstance(content, str):
        if kind != "TEXT":
            check_text(content, "library")
        return str(content)  # a `Text` too
    ids = isinstance(content, list | tuple) and bool(content) and all(type(token) is int for token in content)
    if ids or isinstance(content, bytes | np.ndarray):
        return content
    raise InputError(f"library: content of type {type(content).__name__}; expected text, bytes, an array or token ids")


def kind_of(content: Content) -> Kind:
    """The kind of a content where none is given."""
    if isinstance(content, bytes) and not is_encoded(content):
        return "FILE"
    word = sort_of(Text(content) if isinstance(content, str) else content, "library")
    return cast(Kind, word.upper())


def check_kind(reference: Reference, content: Content) -> None:
    """Raises InputError where a kind does not go with its content. FILE goes with any."""
    wanted = {"TEXT": ("TEXT",), "TOKENS": ("TOKENS",), "IMAGE": ("IMAGE", "FILE")}.get(reference.kind)
    if wanted is not None and kind_of(content) not in wanted:
        raise InputError(f"{reference}: content is {kind_of(content)}; expected {' or '.join(wanted)}")


def named_content(name: str, content: Any, chunk: Chunk | None, kind: Kind | None) -> tuple[Reference, Content | None]:
    """Returns what a library puts: a reference, its kind told from the content where none is given, and the content.

    Raises:
      InputError: as `as_content` and `check_name`.
    """
    content = None if content is None else as_content(content, kind)
    if kind is None:
        kind = "IMAGE" if content is None else kind_of(content)
    return Reference(*check_name(kind, name)), content


def check_quota(what: str, coming: int, used: int, quota: int) -> None:
    """Raises LibraryFullError where bytes that come into a static library exceed its quota."""
    if used + coming > quota:
        raise LibraryFullError(f"{what}: {coming} bytes, {used} of {quota} are taken; expected room within the quota")


def entry_blob(
    reference: Reference,
    content: Content | None,
    chunk: Chunk | None,
    vector: Float[AnyArray, " D"] | None,
    metadata: Mapping[str, Any],
    expires: float | None,
) -> Blob:
    """A resource as an object.

    Raises:
      InputError: neither content nor chunk, empty content, or metadata that are not JSON. NotFiniteError: the vector.
      DtypeError: an array of a dtype that objects do not hold.
    """
    if content is None and chunk is None:
        raise InputError(f"{reference}: neither content nor a chunk; expected one of them")
    if content is not None:
        check_kind(reference, content)
    word, array = _array_of(reference, content)
    arrays = {"content": array}
    if vector is not None:
        arrays["vector"] = np.asarray(vector, np.float32).reshape(-1)
        if not np.isfinite(arrays["vector"]).all():
            raise NotFiniteError(f"{reference}: a vector with NaN or infinity; expected finite values")
    body = {
        "kind": reference.kind,
        "name": reference.name,
        "version": reference.version,
        "content": word,
        "digest": "" if content is None else content_digest(content),
        "chunk": None if chunk is None else [chunk.backbone, chunk.id, chunk.nbytes],
        "metadata": _plain(reference, metadata),
        "withdrawn": False,
    }
    return Blob("entry", body, arrays, expires)


def withdrawn_blob(reference: Reference) -> Blob:
    """A version that says that there is none any more."""
    body = {"kind": reference.kind, "name": reference.name, "version": reference.version, "content": "none"}
    more = {"digest": "", "chunk": None, "metadata": {}, "withdrawn": True}
    return Blob("entry", body | more, {"content": _NOTHING}, None)


def _plain(reference: Reference, metadata: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"{reference}: metadata {str(metadata)[:80]}; expected JSON ({error})") from error


def _array_of(reference: Reference, content: Content | None) -> tuple[str, np.ndarray]:
    if content is None:
        return "none", _NOTHING
    if isinstance(content, np.ndarray):
        word, array = "array", content
    elif isinstance(content, str | bytes):
        raw = encoded(content) if isinstance(content, str) else content
        word, array = type(content).__name__, np.frombuffer(raw, np.uint8)
    else:
        word, array = "tokens", np.asarray(list(content), np.int64)
    if not array.size:
        raise InputError(f"{reference}: empty content; expected some")
    return word, array


def _content_of(word: str, arrays: Mapping[str, np.ndarray]) -> str | bytes | np.ndarray | tuple[int, ...] | None:
    if word == "none":
        return None
    array = arrays["content"]
    if word == "array":
        return array
    if word == "tokens":
        return tuple(array.tolist())
    return array.tobytes().decode() if word == "str" else array.tobytes()


def _reference_and_chunk(body: Mapping[str, Any]) -> tuple[Reference, tuple[str, str] | None]:
    chunk = body["chunk"]
    return Reference(body["kind"], body["name"], body["version"]), (chunk[0], chunk[1]) if chunk else None


def _listed(header: Header, path: str) -> LibraryEntry:
    """Raises StoreCorruptError where the object is no entry."""
    _check_body(header.body)
    reference, chunk = _reference_and_chunk(header.body)
    nbytes = header.size + chunk_bytes(header.body)
    number = number_of(header.body)
    return LibraryEntry(reference, nbytes, header.expires, chunk, header.body["withdrawn"], path, number)


def chunk_bytes(body: Mapping[str, Any]) -> int:
    """What the chunk that was put with an entry counts for, beside the entry's file."""
    return body["chunk"][2] if body["chunk"] else 0


def resource_of(body: Mapping[str, Any], arrays: Mapping[str, np.ndarray], expires: float | None) -> Resource:
    """A resource by its object's body and leaves."""
    reference, chunk = _reference_and_chunk(body)
    content = _content_of(body["content"], arrays)
    return Resource(reference, content, body["digest"], body["metadata"], arrays.get("vector"), expires, chunk)


def entry_name(names: Names, body: Mapping[str, Any]) -> Name:
    """The name that a tenant's entry has by what it says about itself. Raises StoreCorruptError as `_check_body`."""
    _check_body(body)
    library = "static" if body["version"] is None else "dynamic"
    return names.entry(library, body["kind"], body["name"], version=body["version"])


def _check_body(body: Mapping[str, Any]) -> None:
    """Raises StoreCorruptError where an object does not say what an entry says."""
    try:
        kind, name, version, chunk = (body[word] for word in ("kind", "name", "version", "chunk"))
        texts = (kind, name, body["content"], body["digest"])
        whole = all(type(text) is str for text in texts) and isinstance(body["metadata"], dict)
        whole = whole and check_name(kind, name) == (kind, name) and type(body["withdrawn"]) is bool
        whole = whole and type(body.get("number", 0)) is int
        whole = whole and (version is None or (type(version) is int and 0 < version < _MOST_VERSIONS))
        whole = whole and (chunk is None or ([type(part) for part in chunk] == [str, str, int] and chunk[2] >= 0))
    except MALFORMED:
        whole = False
    if not whole:
        raise StoreCorruptError("object: an entry that does not say what entries say; expected kind, name, version, …")


def check_resource(body: Mapping[str, Any], arrays: Mapping[str, np.ndarray], expires: float | None) -> None:
    """Raises StoreCorruptError where an entry's leaves are not what its body says."""
    try:
        resource_of(body, arrays, expires)
    except MALFORMED as error:
        kind = type(error).__name__  # the error itself may hold content
        raise StoreCorruptError(f"object: the body does not make an entry ({kind}); expected one that does") from None


@contextlib.contextmanager
def changing(root: str, folder: str) -> Iterator[None]:
    """Alone, among the threads and processes that change the library in a folder. Raises StoreError."""
    _make_folder(root, folder)  # the tenant may have been deleted
    with typed_errors("library: lock"), locked(root, below=f"{folder}/lock", shared=False):
        yield


def _make_folder(root: str, folder: str) -> None:
    if not os.path.isdir(f"{root}/{folder}"):
        with typed_errors("library: open"):
            make_directories(root, folder)


class LibraryEntries:
    """The entries of one tenant's library.

    Args:
      tenant_disk: whose.
      library: a word; libraries of different words do not meet.
    """

    def __init__(self, tenant_disk: TenantDisk, library: str):
        self.tenant_disk, self.disk, self.library = tenant_disk, tenant_disk.disk, library
        self.folder = os.path.dirname(tenant_disk.names.entry(library).folder)
        _make_folder(self.disk.root, self.folder)
        self._contents = Contents(self.disk, self.folder, self._look)
        self._floors = Floors(self.disk)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Alone, among the threads and processes that change this library. Raises StoreError."""
        with changing(self.disk.root, self.folder):
            yield

    def name(self, kind: str, name: str, version: int | None = None) -> Name:
        """What an entry's file is called."""
        return self.tenant_disk.names.entry(self.library, kind, name, version=version)

    def versions(self, kind: str, name: str) -> list[int]:
        """The versions that are there, ascending."""
        own = self.name(kind, name)
        entries = self.disk.of_chunk(own)
        return sorted(int(entry.part[1:]) for entry in entries if entry.part[1:].isdecimal())

    def read(self, name: Name) -> Resource | None:
        """A resource, verified; None where it is absent, expired, withdrawn, or damaged (then quarantined).

        None too where an encrypted static library had a later one of its name. It stays where it is.
        """
        floor = self._floors.of(name.folder)  # first: an entry is there before its floor
        found = self.disk.get(name)
        if found is None:
            return None
        header = found.header
        try:
            _check_body(header.body)
            check_resource(header.body, found.arrays, header.expires)
        except StoreCorruptError as error:  # whole, and no entry: somebody else wrote it
            if found.file is not None:
                self.disk.quarantine(name, found.file, str(error))
            return None
        body = header.body
        if body["withdrawn"]:
            return None
        if floor is not None and body["version"] is None and not floor.takes(name.chunk, number_of(body)):
            self.disk.counters.add("replayed")
            return None
        return resource_of(body, found.arrays, header.expires)

    def listed(self) -> list[LibraryEntry]:
        """Every entry that is there and has not expired, in no order. Headers are read once each.

        Of an encrypted static library without those that had been replaced or deleted and were put back.
        """
        now, floors = self.disk.clock(), self._floors.all(self.folder)
        found: list[LibraryEntry] = []
        for seen in self._contents.refresh().values():
            if seen.listed is not None and _lives(seen.expires, now):
                held = seen.listed.reference.version is not None  # an older version that somebody reads, maybe
                found += [seen.listed] if held or _taken(seen.listed, floors) else []
        return found

    def newest(self) -> dict[tuple[str, str], LibraryEntry]:
        """The newest version of every dynamic reference, by kind and name; none that is below its floor."""
        floors, newest = self._floors.all(self.folder), dict[tuple[str, str], LibraryEntry]()
        for entry in sorted(self.listed(), key=lambda entry: entry.reference.version or 0):
            newest[entry.reference.kind, entry.reference.name] = entry
        return {key: entry for key, entry in newest.items() if _taken(entry, floors)}

    def least(self, kind: str, name: str) -> int:
        """The lowest version of an encrypted dynamic reference that may be the current one."""
        own = self.name(kind, name)
        floor = self._floors.of(own.folder)
        return 0 if floor is None else floor.numbers.get(own.chunk, 0)

    def at(self, name: Name) -> LibraryEntry | None:
        """An entry by its name, if it is there and has not expired."""
        return self._alive(self._contents.look(name.path)[0])

    def _alive(self, seen: Seen[LibraryEntry] | None) -> LibraryEntry | None:
        if seen is None or seen.listed is None or not _lives(seen.expires, self.disk.clock()):
            return None
        floor = self._floors.of(os.path.dirname(seen.listed.path)) if seen.listed.reference.version is None else None
        return seen.listed if floor is None or _taken(seen.listed, {os.path.dirname(seen.listed.path): floor}) else None

    def room(self, name: Name) -> tuple[LibraryEntry | None, int]:
        """An entry by its name, and the bytes of all others, when what has expired was taken away."""
        seen, nbytes, expiring = self._contents.look(name.path)
        if self._remove_expired(expiring):
            seen, nbytes, _ = self._contents.look(name.path)
        entry = self._alive(seen)
        if self._floors.kept:  # what was put back does not count
            nbytes = sum(listed.nbytes for listed in self.listed())
        return entry, nbytes - (0 if entry is None else entry.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries that have not expired."""
        _, nbytes, expiring = self._contents.look()
        now = self.disk.clock()
        if not self._floors.kept and all(now < expires for expires in expiring.values()):
            return nbytes
        return sum(listed.nbytes for listed in self.listed())

    def _look(self, entry: DirectoryEntry) -> Seen[LibraryEntry]:
        with self.disk.reading(name_at(entry.path), noticed=False) as opening:
            if opening is not None:
                try:
                    return Seen(entry.file, opening[0].expires, _listed(opening[0], entry.path))
                except StoreCorruptError as error:
                    self.disk.quarantine(name_at(entry.path), entry.file, str(error))
        return Seen(entry.file, self.disk.expires(entry.path), None)

    def vector(self, listed: LibraryEntry) -> np.ndarray | None:
        """What a retriever finds an entry by, [D] float32; its content is not read. None: it has none, or is gone."""
        with self.disk.reading(name_at(listed.path), noticed=False) as opening:
            if opening is None or "vector" not in opening[0].leaves:
                return None
            try:
                return opening[1](["vector"])["vector"]
            except StoreError:
                return None

    def vectors(self, entries: Iterable[LibraryEntry]) -> Iterator[tuple[str, np.ndarray]]:
        """Reads (reference without version, vector) of every entry that has a vector."""
        for entry in entries:
            vector = self.vector(entry)
            if vector is not None:
                yield str(Reference(entry.reference.kind, entry.reference.name)), vector

    def put(self, name: Name, blob: Blob) -> None:
        """Durable when it returns, sealed like all that is the tenant's, outside the budgets.

        Raises:
          As `ChunkStore.put`; then what was there is still there.
        """
        self.tenant_disk.expect_open()
        self._floors.put(name, blob)

    def remove(self, listed: LibraryEntry, store: TenantStore) -> bool:
        """Takes an entry away, and the chunk that was put with it where no other entry of this library has it."""
        gone = self.disk.delete(listed.path)
        if listed.reference.version is None:
            self._floors.removed([listed.path])
        self.delete_unused_chunk(listed.chunk, store)
        return gone

    def delete_unused_chunk(self, chunk: tuple[str, str] | None, store: TenantStore) -> None:
        """Deletes a chunk that an entry had, where no other entry of this library has it."""
        if chunk is None or (self._contents.has_chunk(chunk) and any(each.chunk == chunk for each in self.listed())):
            return
        store.delete(chunk[1], chunk[0])

    def purge(self, name: Name) -> None:
        """Deletes what is in quarantine of an entry, in any version. Raises StoreError."""
        purge(self.disk.root, name.tenant, name.chunk)

    def remove_expired(self) -> int:
        """Takes away what is past its time (the chunks have the same one, and go by it). How many entries."""
        return self._remove_expired(self._contents.look()[2])

    def _remove_expired(self, expiring: Mapping[str, float]) -> int:
        now = self.disk.clock()
        paths = [path for path, expires in expiring.items() if now >= expires]
        gone = [path for path in paths if self.disk.delete(path, self.disk.has_expired)]
        self._floors.removed(gone)
        return len(gone)


def _taken(listed: LibraryEntry, floors: Mapping[str, Floor]) -> bool:
    """Whether an entry is not one that had been replaced, withdrawn or deleted before."""
    name = name_at(listed.path)
    floor = floors.get(name.folder)
    return floor is None or floor.takes(name.chunk, listed.number)


def _lives(expires: float | None, now: float) -> bool:
    return expires is None or now < expires
