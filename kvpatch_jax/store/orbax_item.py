"""A store, or chunks of a mesh, as an item of an Orbax checkpoint: a snapshot, or arrays that any mesh can load.

Arrays are one of Orbax's pytrees, `arrays`, beside `objects.json`, which describes the objects, with a checksum for
each array: Orbax verifies none, cannot save empty ones, and leaves its own small files unsynced (`make_durable`).
"""

import asyncio
import contextlib
import functools
import json
import os
import time
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding

from ..cache import Chunk, Patch, trusted
from ..core import AnyArray, PhaseFreeKV
from ..errors import InputError, KVPatchError, StoreCorruptError, StoreError
from . import codec, snapshot
from .files import Encoded, Stored, sync_folder
from .index import file_errors
from .objects import Objects
from .queue import Job
from .snapshot import add_objects
from .store import ChunkStore, Placement, packed_target

type Placements = Placement | Mapping[str, Placement]

DESCRIPTIONS = "objects.json"


class StoreItem:
    """A store, or chunks and patches, as an item of an Orbax checkpoint.

    `ocp.save_checkpointables(path, {"chunk_store": StoreItem(store), "model": parameters})` saves a snapshot beside a
    model, in the background. Loading adds what the item holds, snapshot or arrays, to a store: all of it, or nothing.

    With `arrays`, the store's objects are saved as Orbax arrays, with neither encryption nor keyed names; `contents`
    saves these, whose kv may be sharded over a mesh. Without a store, arrays are loaded as `contents`.

    Args:
      store: the store, in a job of one process.
      contents: chunks, with their encoder outputs, and patches to save.
      placement: where kv [L, T, K, H] are loaded, or a mapping by channels: each device reads its part. By default they
        are on the host.
      ids: of the chunks to save or load, with their encoder outputs and patches; None: everything.

    Attributes:
      contents: after loading without a store, chunks and patches.

    Raises:
      InputError: a store together with contents or a placement, or arrays without a store.
    """

    def __init__(
        self,
        store: ChunkStore | None = None,
        *,
        arrays: bool = False,
        contents: Sequence[Chunk | Patch] = (),
        placement: Placements | None = None,
        ids: Collection[str] | None = None,
    ):
        if arrays if store is None else len(contents) or placement is not None or jax.process_count() > 1:
            raise InputError(
                "StoreItem: got arrays without a store, or a store with contents, a placement or several processes; "
                "expected a store in one process, or contents to save, or a placement to load"
            )
        self.store, self.arrays, self.placement, self.ids = store, arrays, placement, ids
        self.contents: Sequence[Chunk | Patch] = contents

    async def save(self, directory: Any) -> Awaitable[None]:
        """Starts to save; Orbax calls it, and awaits the result in the background."""
        if self.store is not None and not self.arrays:
            return _save_snapshot(self.store.objects, directory, self.ids)
        with _typed_errors(directory.path, StoreError):
            await directory.await_creation()
            if self.store is None:
                encoded = [item for value in self.contents for item in _encoded(value)]
                objects = [Stored(*item) for item in encoded]
            else:
                objects = await asyncio.to_thread(_stored, self.store.objects, self.ids)
            return await _save_arrays(directory, objects)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Loads the item; Orbax calls it. All is done before it returns, because Orbax wraps later errors."""
        await asyncio.to_thread(self._load, os.fspath(directory))
        return asyncio.sleep(0)

    def _load(self, path: str) -> None:
        is_snapshot = os.path.exists(f"{path}/{snapshot.MANIFEST}")
        if self.store is None and is_snapshot:
            raise StoreCorruptError(f"checkpoint {path}: got a snapshot; expected arrays, or a store to load into")
        if self.store is None:
            self.contents = _load_contents(path, self.placement, self.ids)
        elif is_snapshot:
            snapshot.load_snapshot(path, self.store.objects, ids=self.ids)
        else:
            _load_into(path, self.store.objects, self.ids)


def make_durable(directory: str | os.PathLike[str]) -> None:
    """Syncs all files and names of a finished checkpoint, so that it survives a loss of power.

    Raises:
      StoreError: it does not exist, or cannot be synced.
    """
    path = os.path.abspath(directory)
    with file_errors(f"checkpoint {path}: sync"):
        sync_folder(path)  # fails if it does not exist
        snapshot.sync_tree(path)


# --------------------------------------------------------------------------------------------------------- saving


async def _save_snapshot(objects: Objects, directory: Any, ids: Collection[str] | None) -> None:
    path = os.fspath(await directory.await_creation())
    if "://" in path:
        raise InputError(f"checkpoint: got {path}; expected a path on this machine (arrays may be elsewhere)")
    await asyncio.to_thread(snapshot.save_snapshot, objects, path, ids=ids)


def _encoded(value: Chunk | Patch) -> list[Encoded]:
    """Encodes a chunk, whose kv stay on their devices, with its encoder output, or a patch."""
    if isinstance(value, Patch):
        if value.metadata.basis is not None:
            raise InputError("StoreItem: got a patch in a shared basis; expected StoreItem(store, arrays=True)")
        return [codec.encode_patch_object(value)]
    on_devices = {name: array for name, array in value.kv.items() if isinstance(array, jax.Array)}
    kv = dict(value.kv) | {name: _empty(array.dtype, array.shape) for name, array in on_devices.items()}
    encoded = codec.encode_chunk_object(trusted(value, kv=PhaseFreeKV(kv)))
    objects = [encoded._replace(arrays={**encoded.arrays, **on_devices})]
    if value.encoder is not None:
        objects.append(codec.encode_encoder(value.id, value.backbone, np.asarray(value.encoder)))
    return objects


def _stored(objects: Objects, ids: Collection[str] | None) -> list[Stored]:
    """Reads objects of a store, after its queued puts; large ones are mapped."""
    objects.queue.flush()
    names = objects.with_prefix("", remote=False)
    return [stored for name in names if (stored := objects.read(name)) is not None and codec.is_of(stored, ids)]


def _empty(dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Returns an array that takes no memory."""
    return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), tuple(shape))


async def _save_arrays(directory: Any, objects: Sequence[Stored]) -> Awaitable[None]:
    """Starts to write objects, in all processes of a job, with the caller's options of Orbax."""
    from orbax.checkpoint import v1 as ocp  # it takes a second to import

    tree, descriptions = dict[str, Mapping[str, AnyArray]](), list[dict[str, Any]]()
    for index, stored in enumerate(objects):
        specs = {name: [str(value.dtype), value.shape, array_sum(value)] for name, value in stored.arrays.items()}
        key, about = f"{index:06d}", {"kind": stored.kind, "body": stored.body, "expires": stored.expires}
        descriptions.append(about | {"key": key, "arrays": specs})
        if arrays := {name: value for name, value in stored.arrays.items() if value.size}:
            tree[key] = arrays
    (directory.path / "arrays").mkdir(parents=True, exist_ok=True)
    pending = await ocp.handlers.PyTreeHandler().save(directory / "arrays", tree) if tree else asyncio.sleep(0)

    async def saved() -> None:
        with _typed_errors(directory.path, StoreError):
            await pending
            if jax.process_index() == 0:
                text = json.dumps(descriptions)
                (directory.path / DESCRIPTIONS).write_text(f"{xxhash.xxh3_128_hexdigest(text.encode())}\n{text}")
                if "://" not in os.fspath(directory.path):
                    os.chmod(directory.path, 0o700)  # Orbax's permissions are the umask's

    return saved()


@contextlib.contextmanager
def _typed_errors(path: Any, kind: type[StoreError]) -> Iterator[None]:
    """Raises typed errors: Orbax and TensorStore raise errors of many types."""
    try:
        yield
    except KVPatchError:
        raise
    except Exception as error:
        raise kind(f"checkpoint {path}: got {str(error)[:300]}; expected Orbax to write and read it") from error


def array_sum(value: AnyArray) -> str:
    """Returns the checksum of an array, which is gathered on the host from the devices and processes that hold it."""
    if not getattr(value, "is_fully_addressable", True):
        value = multihost_utils.process_allgather(value, tiled=True)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value))


# -------------------------------------------------------------------------------------------------------- loading


def _read_descriptions(path: str) -> list[dict[str, Any]]:
    from etils import epath

    try:
        checksum, _, text = (epath.Path(path) / DESCRIPTIONS).read_text().partition("\n")
    except (OSError, ValueError) as error:
        raise StoreCorruptError(f"checkpoint {path}: got {error}; expected a finished store item") from error
    if xxhash.xxh3_128_hexdigest(text.encode()) != checksum:
        raise StoreCorruptError(f"checkpoint {path}: got {DESCRIPTIONS} of another checksum; expected its own")
    return json.loads(text)


def _load_objects(
    path: str, descriptions: Sequence[Mapping[str, Any]], placement: Placements | None = None
) -> list[Stored]:
    """Loads and verifies objects, on the host except for kv with a placement.

    Raises:
      StoreCorruptError: Orbax cannot read them, or arrays were changed.
    """
    from etils import epath
    from orbax.checkpoint import v1 as ocp

    arrays = {about["key"]: _templates(about, placement) for about in descriptions}
    template = {key: {name: leaf for name, leaf in leaves.items() if leaf.size} for key, leaves in arrays.items()}
    template = {key: leaves for key, leaves in template.items() if leaves}

    async def read() -> Any:
        context = ocp.Context()  # of its own, because a copy would share the caller's options
        context.pytree_options.loading.partial_load = True
        handler = ocp.handlers.PyTreeHandler(context=context)
        return await (await handler.load(epath.Path(path) / "arrays", template))

    with _typed_errors(path, StoreCorruptError):
        loaded = asyncio.run(read()) if template else {}
    objects, bad = list[Stored](), list[str]()
    for about in descriptions:
        values = arrays[about["key"]] | loaded.get(about["key"], {})
        for name, (dtype, shape, total) in about["arrays"].items():
            value = values[name]
            if (str(value.dtype), list(value.shape)) != (dtype, shape) or array_sum(value) != total:
                bad.append(f"object {about['key']}: {name}")
        size = sum(value.nbytes for value in values.values())
        objects.append(Stored(about["kind"], about["body"], values, 0, about["expires"], size))
    if bad:
        raise StoreCorruptError(f"checkpoint {path}: got other bits of {bad[0]}; expected those saved", tuple(bad))
    return objects


def _templates(about: Mapping[str, Any], placement: Placements | None) -> dict[str, Any]:
    """Returns what Orbax loads each array as: a host array, or kv as `placement` says, packed ones by layers alone."""
    leaves: dict[str, Any] = {}
    for name, (dtype, shape, _) in about["arrays"].items():
        leaves[name] = _empty(dtype, shape)
        channel, _, packed = name.partition(".")
        if placement is None or about["kind"] != "chunk" or channel == "local":
            continue
        target = placement[channel] if isinstance(placement, Mapping) else placement
        target = packed_target(target) if packed else target
        sharding = target if isinstance(target, Sharding) else SingleDeviceSharding(target)
        leaves[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
    return leaves


def _load_into(path: str, objects: Objects, ids: Collection[str] | None) -> None:
    """Adds objects that have not expired to a store, under its names; all are in memory at once."""
    selected = dict[str, Mapping[str, Any]]()
    for about in _read_descriptions(path):
        encoded = Encoded(about["kind"], about["body"], _templates(about, None))
        name = codec.name_of(objects.names, encoded)
        if (about["expires"] is None or about["expires"] > time.time()) and codec.is_of(encoded, ids):
            selected[name] = about
    jobs, ticket = [], objects.index.ticket()
    for name, stored in zip(selected, _load_objects(path, list(selected.values())), strict=True):
        read = functools.partial(Encoded, stored.kind, stored.body, stored.arrays)
        jobs.append(Job(name, read, stored.nbytes, stored.expires, ticket))
    add_objects(objects, jobs)


def _load_contents(path: str, placement: Placements | None, ids: Collection[str] | None) -> list[Chunk | Patch]:
    """Loads chunks, with their encoder outputs, and patches, except those in a basis, which only a store can find."""
    chunks, patches = list[Chunk](), list[Chunk | Patch]()
    encoders: dict[tuple[str, str], np.ndarray] = {}
    selected = []
    for about in _read_descriptions(path):
        is_patch = about["kind"] == "patch" and about["body"]["metadata"]["basis"] is None
        is_content = is_patch or about["kind"] in ("chunk", "encoder")
        if is_content and codec.is_of(Encoded(about["kind"], about["body"], {}), ids):
            selected.append(about)
    for stored in _load_objects(path, selected, placement):
        if stored.kind == "chunk":
            chunks.append(codec.decode_chunk_object(stored))
        elif stored.kind == "patch":
            patches.append(codec.patch_of(codec.decode_patch_parts(stored)))
        else:
            encoders[stored.body["backbone"], stored.body["id"]] = codec.decode_encoder(stored)
    return [trusted(chunk, encoder=encoders.get((chunk.backbone, chunk.id))) for chunk in chunks] + patches
