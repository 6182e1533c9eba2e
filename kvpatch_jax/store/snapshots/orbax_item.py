"""A store as an item of an Orbax checkpoint, in a job of one or several processes. This module does not call Orbax.

Orbax syncs array data, but not its own small files and directories: `make_durable` does.
"""

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

from ...errors import InputError, StoreSnapshotError
from ..disk.tenant_disk import TenantStore
from ..io.files import sync_directory, sync_file_system, typed_errors
from .manifest import MANIFEST
from .multihost import TIMEOUT, ProcessGroup
from .restore import load_objects
from .save import save_objects


class StoreItem:
    """A store's tenant as an item of an Orbax checkpoint.

    `ocp.save_checkpointables(path, {"chunk_store": StoreItem(store), "model": parameters})` saves it with a model;
    `ocp.load_checkpointables` and `ocp.training.Checkpointer` accept it too. It saves a snapshot of the tenant's
    objects and libraries in the background; loading adds the verified snapshot to the store, all or nothing.

    Several processes save and load together, each with its own store object, over one root or over a root each, into a
    checkpoint on a shared file system. Orbax names a checkpoint when the first process is done; so all processes wait
    for all, and if one fails all raise: there is no partial checkpoint.

    Args:
      store: the store.
      copy, skip_damaged: as for `save_snapshot` and `load_snapshot`.
      shared: whether all processes have one root. Then the first process saves it, after the queued puts of all are
        durable, and loads it. Otherwise each saves its own root, and loads its share of the saved ones: a single one
        whole, or of several every n-th, where n is the present number of processes.
      timeout: seconds for which processes wait for one another.
    """

    def __init__(
        self,
        store: TenantStore,
        *,
        copy: bool = False,
        skip_damaged: bool = False,
        shared: bool = True,
        timeout: float | int = TIMEOUT,
    ):
        self.store, self.copy, self.skip_damaged, self.shared, self.timeout = store, copy, skip_damaged, shared, timeout

    def _together(self) -> ProcessGroup:
        """Starts the operation without awaiting, so that its order among other items is the same in every process."""
        together = ProcessGroup(self.timeout)
        if self.shared:
            together.expect_one_root(self.store.tenant_disk.disk.root)
        return together

    async def save(self, directory: Any) -> Awaitable[None]:
        """Starts to save; Orbax calls it, and awaits the result in the background.

        Raises:
          InputError: the item is `shared`, and a process has another root.
          StoreReadOnlyError: the root is read-only, so that cannot be checked.
        """
        together = self._together()

        async def saved() -> None:
            path = local_path(await directory.await_creation())
            await asyncio.to_thread(self._save, path, together)

        return saved()

    def _save(self, path: str, together: ProcessGroup) -> None:
        folders = [path] if self.shared else [_folder(path, index, together.count) for index in range(together.count)]

        error: Exception | None = None
        try:
            if self.shared:
                self._save_shared(path, together)
            else:
                with typed_errors(f"checkpoint {path}: write"):
                    os.mkdir(folders[together.index], 0o700)
                save_objects(self.store, folders[together.index], copy=self.copy)
        except Exception as raised:  # whatever failed, the others must not wait for this process in vain
            error = raised

        together.wait()
        missing = [index for index, folder in enumerate(folders) if not os.path.exists(f"{folder}/{MANIFEST}")]
        together.wait()  # when the first process returns, Orbax renames the directory in which the others look
        if error is not None:
            raise error
        if missing:
            raise StoreSnapshotError(
                f"checkpoint {path}: got no snapshot of process {missing[0]}; expected one of each"
            )

    def _save_shared(self, path: str, together: ProcessGroup) -> None:
        """Saves the shared root in the first process, after the puts of all."""
        marks = [f"{path}/flushed-{index:05d}" for index in range(together.count)]
        try:
            self.store.flush()
            if together.index:
                with typed_errors(f"checkpoint {path}: write"), open(marks[together.index], "xb"):
                    pass
        finally:
            together.wait()

        if together.index == 0:
            for index, mark in enumerate(marks[1:], 1):
                if not os.path.exists(mark):
                    raise StoreSnapshotError(
                        f"checkpoint {path}: got failed puts in process {index}, which says why; expected none"
                    )
                os.unlink(mark)
            save_objects(self.store, path, copy=self.copy)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Loads the snapshot; Orbax calls it. All is done before it returns, because Orbax wraps later errors.

        Raises:
          StoreError: as `load_snapshot` and `save`; or another process failed.
        """
        path, together = local_path(directory), self._together()
        if together.count == 1:
            await asyncio.to_thread(self._load, path, together)
        else:
            with together.agreeing(f"checkpoint {path}: load"):
                self._load(path, together)

        async def loaded() -> None:
            pass

        return loaded()

    def _load(self, path: str, together: ProcessGroup) -> None:
        folders = _snapshots(path)
        if self.shared:
            folders = folders if together.index == 0 else []
        elif len(folders) > 1:
            folders = folders[together.index :: together.count]
        for folder in folders:
            load_objects(self.store, folder, copy=self.copy, skip_damaged=self.skip_damaged)


def _folder(path: str, index: int, count: int) -> str:
    return f"{path}/process-{index:05d}-of-{count:05d}"


def _snapshots(path: str) -> list[str]:
    """Returns an item's snapshots: one, or one per saving process. Raises StoreSnapshotError if one is missing."""
    found = sorted(name for name in os.listdir(path) if name.startswith("process-")) if os.path.isdir(path) else []
    if not found:
        return [path]
    folders = [_folder(path, index, len(found)) for index in range(len(found))]
    if [os.path.basename(folder) for folder in folders] != found:
        raise StoreSnapshotError(f"checkpoint {path}: got {found}; expected a snapshot of every process that saved")
    return folders


def local_path(directory: Any) -> str:
    """Returns a checkpoint's path. Raises InputError if it is not on this machine's file system."""
    path = os.fspath(directory)
    if "://" in path:
        raise InputError(
            f"checkpoint: got {path}; expected a path on this machine's file system (exports may be elsewhere)"
        )
    return path


def make_durable(directory: str | os.PathLike[str]) -> None:
    """Syncs files, directories and the name of a finished checkpoint, so that it survives a loss of power.

    Raises:
      StoreIOError: it does not exist, or cannot be synced.
    """
    path = os.path.abspath(local_path(directory))
    with typed_errors(f"checkpoint {path}: sync"):
        sync_file_system(path)
        sync_directory(os.path.dirname(path))
