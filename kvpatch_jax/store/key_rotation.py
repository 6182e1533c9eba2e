"""Rotation of a tenant's key: every object is encrypted again, in place, while others read and write.

    1. KEY states both keys: the new one, with which objects are written from now on, and the retiring one
    2. each object that states the retiring key is read, encrypted with the new one, and replaced
    3. what is in quarantine is deleted; it is encrypted with the retiring key
    4. KEY states the new key alone, once no object states the other

A process that is killed leaves objects of both keys, each whole, and KEY says so; the next call goes on. Meanwhile a
read with either key gives the object, or raises StoreKeyError if it has the other key; a put with the retiring key
raises StoreKeyError.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable

from ..errors import InputError, StoreCorruptError, StoreError, StoreKeyError, StoreVersionError
from .disk import quarantine
from .disk.directory import DirectoryEntry, directory_entry, reading
from .disk.disk import Disk
from .disk.key_check import NAME, PLAIN, KeyState, changing_keys, check_key, read_keys, survey_objects, write_keys
from .disk.outbox import Outbox
from .disk.revisions import Tombstones
from .disk.root_config import names_secret, read_secret
from .disk.shard import locked_shards
from .format.buffers import Buffers
from .format.encryption import AesGcm, Encryption, Plain, is_sealed
from .format.header import Header
from .format.naming import ObjectNames, name_at
from .format.objects import blob_of
from .io.files import NotRegularError, typed_errors, written
from .io.thread_pool import ThreadPool
from .remotes.remote_store import RemoteStore
from .tiers.remote_tier import RemoteReader

_rotators = ThreadPool(8, "kvpatch-rotate")
_PASSES = 4
"""Number of times that the objects are listed: those that are written or deleted meanwhile are looked at again."""

ObjectProgress = Callable[[list[DirectoryEntry]], Iterable[DirectoryEntry]]


@dataclasses.dataclass(frozen=True)
class RotationReport:
    """Result of `rotate_key`.

    Attributes:
      objects: number of objects and entries that were encrypted with the new key by this call.
      nbytes: bytes of their files.
      remote: number of objects of the remote store that were.
      dropped: number of files that were deleted from quarantine.
      left: objects that stay with the old key because they could not be read or were changed all the time.
      finished: whether the old key is no longer valid; not if `left` has any.
    """

    objects: int
    nbytes: int
    remote: int
    dropped: int
    left: list[str]
    finished: bool


def rotate_key(
    root: str | os.PathLike[str],
    tenant: str = "default",
    *,
    old: bytes | None,
    new: bytes,
    secret: bytes | None = None,
    remote: RemoteStore | None = None,
    progress: ObjectProgress = list,
) -> RotationReport:
    """Encrypts every object of a tenant with another master key, keeping revision, expiry and time of the last use.

    To be called again if it was interrupted, or if an object could not be read. What was copied before (snapshots,
    exports, other roots) keeps the old key.

    Args:
      old: the key until now; None: the objects are not encrypted yet.
      new: the key from now on.
      secret: the secret of the names, if the root does not store it.
      remote: a remote store whose objects of the tenant are rotated too. Other roots that share it are rotated
        separately.
      progress: wraps the objects to show progress.

    Raises:
      InputError: there is no store, it has nothing of the tenant, the keys are equal or too short, or the secret is not
        the root's.
      StoreKeyError: the objects are encrypted with another key, or a rotation between other keys is unfinished; nothing
        was changed.
      StoreError: an object could not be written, or the remote store failed; the rotation is unfinished.
    """
    root = os.path.abspath(os.fspath(root))
    if not os.path.isdir(f"{root}/obj"):
        raise InputError(f"store {root}: got no store there; expected a directory with obj/")
    buffers = Buffers(wipe=True)
    before: Encryption = Plain() if old is None else AesGcm(old, tenant, buffers)
    after = AesGcm(new, tenant, buffers)
    if before.check == after.check:
        raise InputError("rotate_key: got the same key twice; expected a new one")
    names = ObjectNames(tenant, read_secret(root) if secret is None else names_secret(root, secret))

    rotation = _Rotation(Disk(root, buffers=buffers, encryption=before), Disk(root, buffers=buffers, encryption=after))
    rotation.begin(names.space, Tombstones(root, names))
    for _ in range(_PASSES):
        done = rotation.objects
        rotation.left = []
        for entry in progress(_listed(root, names)):
            rotation.rotate(entry)
        if rotation.objects == done and not rotation.left:
            break

    rotated = 0 if remote is None else rotation.rotate_remote(remote, f"{names.space}/")
    dropped, finished = 0, not rotation.left
    if finished:
        dropped = len(quarantine.purge(root, names.tenant_name))
        rotation.finish(names.space)
    return RotationReport(rotation.objects, rotation.nbytes, rotated, dropped, sorted(rotation.left), finished)


class _Rotation:
    """A rotation that is going on. `before` reads with the retiring key, `after` writes with the new one."""

    def __init__(self, before: Disk, after: Disk):
        self.before, self.after = before, after
        self.root = after.root
        self.retiring = before.encryption.check or PLAIN
        self.objects = self.nbytes = 0
        self.left: list[str] = []

    def begin(self, space: str, tombstones: Tombstones) -> None:
        """Notes both keys, unless a call before did. Raises StoreKeyError for keys that are not the tenant's."""
        old, new = self.before.encryption.check, self.after.encryption.check
        assert new is not None
        state = read_keys(self.root, space)
        if state is None:
            # Never written, or lost: the objects decide, and the files are repaired.
            found = survey_objects(self.root, space, new)
            if found == "none" and not os.path.lexists(f"{self.root}/{space}/{NAME}"):
                raise InputError(
                    f"rotate_key: got a tenant with nothing in {self.root}; expected one that put something"
                )
            check_key(self.root, space, new if found == "stated" else old)
            if found == "others" and old is None:
                raise StoreKeyError(f"store {self.root}: got no old key; expected the one of this tenant's objects")
        elif state.current != new:
            check_key(self.root, space, old)

        with changing_keys(self.root, space):
            state = read_keys(self.root, space) or KeyState(self.retiring)
            # An unfinished rotation may also be turned round.
            if state in (KeyState(self.retiring), KeyState(self.retiring, new)):
                write_keys(self.root, space, KeyState(new, self.retiring))
            elif state not in (KeyState(new), KeyState(new, self.retiring)):
                raise StoreKeyError(
                    f"store {self.root}: got keys of another rotation than the unfinished one; expected its keys"
                )
        # Writers look at the keys in the locks of their shards: who saw the old state has written after this.
        for path in sorted({os.path.dirname(entry.path) for entry in self.after.scan(space)}):
            with (
                typed_errors(f"store {self.root}: rotate"),
                contextlib.suppress(FileNotFoundError),
                locked_shards(self.root, [path]),
            ):
                pass
        # What only waits for the remote store is rotated under its name.
        outbox = Outbox(self.root, space.removeprefix("obj/"), tombstones)
        for waiting in outbox.entries():
            if not waiting.deletion:
                outbox.bring_back(name_at(waiting.path))

    def finish(self, space: str) -> None:
        """Ends the validity of the retiring key."""
        with changing_keys(self.root, space):
            state = read_keys(self.root, space)
            if state is not None and state.retiring == self.retiring:
                write_keys(self.root, space, KeyState(state.current))

    def rotate(self, entry: DirectoryEntry) -> None:
        """Encrypts an object again if it states the retiring key."""
        name = name_at(entry.path)
        try:
            file = written(os.stat(f"{self.root}/{entry.path}", follow_symlinks=False))
            with reading(self.root, entry.path) as (_, header):
                if not self._is_retiring(header):
                    return
        except (FileNotFoundError, NotADirectoryError, NotRegularError):
            return  # gone, or no object
        except StoreVersionError:
            self.left.append(entry.path)
            return
        except (OSError, StoreCorruptError):
            file = (0, 0, 0)  # it is read twice below, and moved to quarantine if it is damaged

        with contextlib.suppress(StoreKeyError):  # another process may have rotated it meanwhile
            found = self.before.get(name)
            if found is not None:
                blob = self.after.encryption.sealed(blob_of(found.header, found.arrays), name.file)
                if nbytes := self.after.writer.replace(name, blob, file, entry.used):
                    self.objects += 1
                    self.nbytes += nbytes
                    return
        if not self.before.delete(entry.path, self.before.has_expired) and self._states_retiring(entry.path):
            self.left.append(entry.path)

    def _is_retiring(self, header: Header) -> bool:
        return (header.body.get("check") if is_sealed(header) else PLAIN) == self.retiring

    def _states_retiring(self, path: str) -> bool:
        """Returns whether an object is there and may have the retiring key."""
        try:
            with reading(self.root, path) as (_, header):
                return self._is_retiring(header)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, StoreError):
            return True

    def rotate_remote(self, remote: RemoteStore, prefix: str) -> int:
        """Encrypts the objects of a remote store again. Returns their number. Raises StoreError."""
        tier = RemoteReader(remote, self.before)

        def rotate(path: str) -> int:
            name = name_at(path)
            try:
                stored = remote.stored(name)
                if stored is None or (isinstance(stored.header, Header) and not self._is_retiring(stored.header)):
                    return 0
                if isinstance(stored.header, StoreError):
                    raise stored.header
                pending = tier.open(name)
            except (StoreCorruptError, StoreVersionError, StoreKeyError):
                stored = pending = None
            arrays = None if pending is None else pending.whole()
            if stored is None or pending is None or arrays is None:
                self.left.append(path)
                return 0
            blob = self.after.encryption.sealed(blob_of(pending.header, arrays), name.file)
            if not remote.replace(name, blob, stored.generation):
                self.left.append(path)
                return 0
            return 1

        return sum(_rotators.run_all(functools.partial(rotate, path) for path in remote.paths(prefix)))


def _listed(root: str, names: ObjectNames) -> list[DirectoryEntry]:
    """Lists entries and objects."""
    found: list[DirectoryEntry] = []
    with typed_errors(f"store {root}: rotate"):
        for below in (names.libraries, names.space):
            for above, _, files in os.walk(f"{root}/{below}"):
                for file in files:
                    path = os.path.relpath(f"{above}/{file}", root)
                    with contextlib.suppress(StoreCorruptError, FileNotFoundError):
                        found.append(directory_entry(name_at(path).path, os.lstat(f"{root}/{path}")))
    return found
