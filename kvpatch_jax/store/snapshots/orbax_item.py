"""A store, or arrays of a mesh, as an item of an Orbax checkpoint, in a job of one or several processes.

Orbax syncs array data, but not its own small files and directories: `make_durable` does. `arrays` is imported where
it is needed, because Orbax takes a second to import.
"""

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

from ...errors import InputError, StoreSnapshotError
from ..disk.tenant_disk import TenantStore
from ..io.files import make_private, sync_directory, sync_file_system, typed_errors
from ..tiers.device_placement import Placement
from .array_entries import ArrayContents, entries_of
from .manifest import MANIFEST, Summary
from .multihost import TIMEOUT, ProcessGroup
from .restore import holds_arrays, load_objects
from .save import save_objects


class StoreItem:
    """A store's tenant, or chunks as arrays, as an item of an Orbax checkpoint.

    `ocp.save_checkpointables(path, {"chunk_store": StoreItem(store), "model": parameters})` saves it with a model;
    `ocp.load_checkpointables` and `ocp.training.Checkpointer` accept it too.

    `StoreItem(store)` saves a snapshot of the tenant's objects and libraries in the background. Loading adds what the
    item holds, snapshot or arrays, to the store: verified, all or nothing.

    `StoreItem(store, arrays=True)` saves them as Orbax arrays (zarr3) with stacked layers, in parts of 1 GiB. They
    depend on neither secret nor key of the store: they contain ids, and are not encrypted.

    `StoreItem(contents=ArrayContents(chunks, patches))` saves those, whose kv may be sharded over a mesh of several
    processes. All have the same in the same order; arrays that are not sharded are taken from the first process.
    `StoreItem(placement=...)` loads arrays without a store, as `contents`, onto any mesh.

    Several processes save and load together, each with its own store object over one root, into a checkpoint on a
    shared file system. Orbax names a checkpoint when the first process is done; so all processes wait for all, and if
    one fails all raise: there is no partial checkpoint. Arrays of a store take one process.

    Args:
      store: the store.
      arrays: saves the store as arrays. Orbax's options apply (`array_options.saving.use_compression`, …).
      contents: what is saved in place of a store's objects.
      placement: a sharding or device for kv [L, T, K, H], or one per channel: each device reads its own part. By
        default kv are on the host.
      copy, skip_damaged: as for `save_snapshot` and `load_snapshot`.
      timeout: seconds for which processes wait for one another.

    Attributes:
      contents: after loading without a store, what the arrays hold.
      summary: counts of this process's last save or load of a store.

    Raises:
      InputError: a store together with contents or a placement, or arrays without a store.
    """

    def __init__(
        self,
        store: TenantStore | None = None,
        *,
        arrays: bool = False,
        contents: ArrayContents | None = None,
        placement: Placement | None = None,
        copy: bool = False,
        skip_damaged: bool = False,
        timeout: float | int = TIMEOUT,
    ):
        if arrays if store is None else contents is not None or placement is not None:
            raise InputError(
                "StoreItem: got arrays without a store, or a store with contents or a placement; expected a store "
                "(with arrays or not), or contents to save, or a placement to load"
            )
        self.store, self.arrays, self.contents, self.placement = store, arrays, contents, placement
        self.copy, self.skip_damaged, self.timeout = copy, skip_damaged, timeout
        self.summary: Summary | None = None

    def _together(self) -> ProcessGroup:
        """Starts the operation without awaiting, so that its order among other items is the same in every process."""
        together = ProcessGroup(self.timeout)
        if self.store is not None:
            together.expect_one_root(self.store.tenant_disk.disk.root)
        return together

    async def save(self, directory: Any) -> Awaitable[None]:
        """Starts to save; Orbax calls it, and awaits the result in the background.

        Raises:
          InputError: there is nothing to save, or a process has another root.
          DtypeError: objects cannot hold a dtype of the contents.
          StoreReadOnlyError: the root is read-only, so that its equality cannot be checked.
        """
        try:
            if self.store is None:
                return await self._save_contents(directory)
            return (
                self._save_arrays(self.store, directory) if self.arrays else self._save_snapshot(self.store, directory)
            )
        except Exception:
            await directory.await_creation()  # Orbax has begun it, and warns of what was never awaited
            raise

    def _save_snapshot(self, store: TenantStore, directory: Any) -> Awaitable[None]:
        together = self._together()

        async def saved() -> None:
            path = local_path(await directory.await_creation())
            await asyncio.to_thread(self._save, store, path, together)

        return saved()

    async def _save_contents(self, directory: Any) -> Awaitable[None]:
        from .arrays import save_entries, tree_handler

        together = self._together()
        with together.agreeing("StoreItem: save"):
            entries = entries_of(ArrayContents() if self.contents is None else self.contents)
        pending = await save_entries(directory, entries, tree_handler())

        async def saved() -> None:
            await pending
            if together.index == 0:
                _make_private(os.fspath(directory.path))

        return saved()

    def _save_arrays(self, store: TenantStore, directory: Any) -> Awaitable[None]:
        from .arrays import expect_one_process, save_store_arrays, tree_handler

        expect_one_process("a store as arrays")
        handler = tree_handler()  # here, because Orbax's options are the caller's

        async def saved() -> None:
            path = local_path(await directory.await_creation())
            self.summary = await asyncio.to_thread(save_store_arrays, store, directory, handler)
            _make_private(path)

        return saved()

    def _save(self, store: TenantStore, path: str, together: ProcessGroup) -> None:
        error: Exception | None = None
        try:
            self._save_shared(store, path, together)
        except Exception as raised:  # whatever failed, the others must not wait for this process in vain
            error = raised

        together.wait()
        missing = not os.path.exists(f"{path}/{MANIFEST}")
        together.wait()  # when the first process returns, Orbax renames the directory in which the others look
        if error is not None:
            raise error
        if missing:
            raise StoreSnapshotError(f"checkpoint {path}: got no snapshot of the first process; expected one")

    def _save_shared(self, store: TenantStore, path: str, together: ProcessGroup) -> None:
        """Saves the shared root in the first process, after the puts of all."""
        marks = [f"{path}/flushed-{index:05d}" for index in range(together.count)]
        try:
            store.flush()
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
            self.summary = save_objects(store, path, copy=self.copy)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Loads the item; Orbax calls it. All is done before it returns, because Orbax wraps later errors.

        Raises:
          StoreError: as `load_snapshot` and `save`; or another process failed.
        """
        together = self._together()
        path = os.fspath(directory) if self.store is None else local_path(directory)
        if together.count == 1:
            await asyncio.to_thread(self._load, path, together)
        else:
            with together.agreeing(f"checkpoint {path}: load"):
                self._load(path, together)

        async def loaded() -> None:
            pass

        return loaded()

    def _load(self, path: str, together: ProcessGroup) -> None:
        if self.store is None:
            from .arrays import load_contents

            self.contents = load_contents(path, self.placement)
            return
        if together.count > 1 and holds_arrays(path):
            from .arrays import expect_one_process

            expect_one_process("a store from arrays")  # in every process
        if together.index == 0:
            self.summary = load_objects(self.store.tenant_disk, path, copy=self.copy, skip_damaged=self.skip_damaged)


def _make_private(path: str) -> None:
    """Removes others' permissions, which Orbax gives by umask, from a local directory."""
    if "://" not in path:
        with typed_errors(f"checkpoint {path}: write"):
            make_private(path)


def local_path(directory: Any) -> str:
    """Returns a checkpoint's path. Raises InputError if it is not on this machine's file system."""
    path = os.fspath(directory)
    if "://" in path:
        raise InputError(
            f"checkpoint: got {path}; expected a path on this machine's file system (contents may be elsewhere)"
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
