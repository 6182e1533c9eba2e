"""A store as an item of an Orbax checkpoint, in a job of one process or of several. Orbax itself is not called here.

Orbax syncs array data and not its own small files and directories: `make_durable` does.
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
    """Makes a store's tenant an item of an Orbax checkpoint.

    `ocp.save_checkpointables(path, {"chunk_store": StoreItem(store), "model": parameters})` saves it beside a model;
    `ocp.load_checkpointables` and `ocp.training.Checkpointer` take it likewise. What is saved is a snapshot of the
    tenant's objects and libraries (`snapshot`), made while the caller goes on; loading adds it to the store, verified,
    all or nothing.

    Several processes save and load together, each with a store object of its own, over one root or over a root each,
    into a checkpoint on a file system that all of them see. Orbax gives a checkpoint its name when the first process is
    done; so here all wait for all, and where one fails all raise: no checkpoint is there in part.

    Args:
      copy, skip_damaged: as of `save_snapshot` and `load_snapshot`.
      shared: whether all processes have one root. Then the first saves it, when the queued puts of all are durable, and
        loads it. Else each saves its own, and takes its share of what was saved: all of it where that was one root,
        else of as many roots as there were every n-th, n being how many processes there are now.
      timeout: seconds that processes wait for one another.
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
        """Starts the operation without awaiting, so that it comes before other items' in every process alike."""
        together = ProcessGroup(self.timeout)
        if self.shared:
            together.expect_one_root(self.store.tenant_disk.disk.root)
        return together

    async def save(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax, which awaits the result in the background.

        Raises:
          InputError: `shared`, and some process has another root. StoreReadOnlyError: that cannot be told.
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
        except Exception as raised:  # whatever it is, nobody must wait for this process in vain
            error = raised
        together.wait()
        missing = [index for index, folder in enumerate(folders) if not os.path.exists(f"{folder}/{MANIFEST}")]
        together.wait()  # when the first process returns, the directory gets its name, and is not where others look
        if error is not None:
            raise error
        if missing:
            raise StoreSnapshotError(f"checkpoint {path}: process {missing[0]} did not finish; expected all to do so")

    def _save_shared(self, path: str, together: ProcessGroup) -> None:
        """The first process saves what all have put."""
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
                    raise StoreSnapshotError(f"checkpoint {path}: puts failed in process {index}, which says why")
                os.unlink(mark)
            save_objects(self.store, path, copy=self.copy)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Called by Orbax. All is done before this returns, since Orbax puts an error of its own around later ones.

        Raises:
          As `load_snapshot`, and `save`. StoreIOError: another process failed, which says why.
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
    """Lists an item's snapshots: one, or one of each process that saved. Raises StoreSnapshotError where some lack."""
    found = sorted(name for name in os.listdir(path) if name.startswith("process-")) if os.path.isdir(path) else []
    if not found:
        return [path]
    folders = [_folder(path, index, len(found)) for index in range(len(found))]
    if [os.path.basename(folder) for folder in folders] != found:
        raise StoreSnapshotError(f"checkpoint {path}: {found}; expected a snapshot of every process that saved")
    return folders


def local_path(directory: Any) -> str:
    """Returns a checkpoint's path. Raises InputError where it is not on this machine's file system."""
    path = os.fspath(directory)
    if "://" in path:
        raise InputError(f"checkpoint {path}: expected a path of this machine's file system (exports may be elsewhere)")
    return path


def make_durable(directory: str | os.PathLike[str]) -> None:
    """Syncs a finished checkpoint, so that it survives a loss of power: files, directories and its own name.

    Raises:
      StoreIOError: it cannot be synced, or is not there.
    """
    path = os.path.abspath(local_path(directory))
    with typed_errors(f"checkpoint {path}: sync"):
        sync_file_system(path)
        sync_directory(os.path.dirname(path))
