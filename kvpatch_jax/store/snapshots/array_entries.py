"""Array entries: objects as a few arrays with stacked layers, from which the same objects can be restored.

They are what the Orbax item saves for other machines and meshes. Arrays may be sharded; their checksums do not depend
on the sharding, so each is verified on its devices.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from ...cache import Chunk, Patch, bits_of, mixed
from ...core import AnyArray, is_packed
from ...errors import InputError, ShapeError, StoreCorruptError
from ..format.codec import chunk_body, chunk_layout, decode, digest_in, encoder_blob, expect_part, unchecked_chunk
from ..format.header import DTYPES, LARGEST_ARRAY, MALFORMED, check_depth, dtype_word
from ..format.layout_codec import kept_by_layer
from ..format.naming import Encoding, encoding_in
from ..format.objects import Blob, Kind
from ..format.packed import kv_encoding, kv_forms, leaves_of, packed_of
from ..format.patch_codec import patch_blob

_BLOCK = 1 << 14
_SECOND = 0x85EBCA77
_DEPTH = 12
_PART = re.compile(r"(?:kv|enc|p|entry|v[0-9]{9})(?:\.[a-z0-9_]{1,40}){0,2}")


@jax.jit
def _device_sum(value: Array) -> UInt32[Array, ""]:
    # Each element is mixed with its index in the whole array, so that a permutation changes the sum.
    index = jnp.zeros(value.shape, jnp.uint32)
    for axis, size in enumerate(value.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, value.shape, axis)
    return jnp.sum(mixed(bits_of(value), index * np.uint32(_SECOND)), dtype=jnp.uint32)


def _host_sum(value: np.ndarray) -> int:
    flat = np.ascontiguousarray(value).reshape(-1)
    flat = flat.view(np.uint32 if flat.dtype.itemsize == 8 else f"u{flat.dtype.itemsize}")
    places = np.arange(min(_BLOCK, flat.size), dtype=np.uint32) * np.uint32(_SECOND)
    total = 0
    for start in range(0, flat.size, _BLOCK):
        bits = flat[start : start + _BLOCK].astype(np.uint32)
        place = places[: len(bits)] + np.uint32(start * _SECOND & 0xFFFFFFFF)
        total += int(mixed(bits, place).sum(dtype=np.uint32))
    return total & 0xFFFFFFFF


def array_sum(value: Shaped[AnyArray, "..."]) -> int:
    """Returns a 32-bit checksum of an array, the same for any sharding and on the host.

    A change of one element always changes it, any other with probability 1 − 2⁻³². On a mesh each device processes its
    own part, so no host needs the whole array.
    """
    return int(_device_sum(value)) if isinstance(value, jax.Array) else _host_sum(value)


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayContents:
    """Chunks and patches as arrays, which may be sharded over a mesh of several processes.

    Attributes:
      chunks: canonicals, unreduced or packed in few bits (`Chunk.encoding`).
      patches: patches, with their own directions.
      reduced: of a store's arrays, canonicals that were reduced to a smaller dtype, in the original dtype, with the
        word of the encoding. Loaded, not saved.
    """

    chunks: Sequence[Chunk] = ()
    patches: Sequence[Patch] = ()
    reduced: Sequence[tuple[Encoding, Chunk]] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayEntry:
    """An object as arrays.

    Attributes:
      about: JSON: kind, part ("kv.int8" and the like), body, expires, revision, leaves (their order in the file),
        arrays (dtype, shape and sum of each).
      arrays: by name; "layers.k" [L, T, K, H] instead of "layer.0.k" and so on, L the layers that keep the channel.
    """

    about: Mapping[str, Any]
    arrays: Mapping[str, AnyArray]

    @property
    def host(self) -> dict[str, np.ndarray]:
        """Arrays on the host."""
        return {name: np.asarray(value) for name, value in self.arrays.items()}


def _described(part: str, blob: Blob, leaves: list[str], arrays: Any) -> ArrayEntry:
    specs = {name: [dtype_word(v.dtype), list(v.shape), array_sum(v)] for name, v in arrays.items()}
    about = {"kind": blob.kind, "part": part, "body": blob.body, "expires": blob.expires, "revision": blob.revision}
    return ArrayEntry(about | {"leaves": leaves, "arrays": specs}, arrays)


def _stacked_name(leaf: str) -> tuple[str, int | None]:
    """Returns the name of a leaf's array, and its layer if the array is stacked."""
    word, _, rest = leaf.partition(".")
    layer, _, name = rest.partition(".")
    return (f"layers.{name}", int(layer)) if word == "layer" else (leaf, None)


def entry_of(blob: Blob, part: str) -> ArrayEntry:
    """Returns the entry of an object, with arrays on the host. `part` is as in `naming.part_of`."""
    stacks: dict[str, list[np.ndarray]] = {}
    for leaf, value in blob.arrays.items():
        stacks.setdefault(_stacked_name(leaf)[0], []).append(value)
    arrays = {name: np.stack(values) if name.startswith("layers.") else values[0] for name, values in stacks.items()}
    return _described(part, blob, list(blob.arrays), arrays)


def entry_of_chunk(chunk: Chunk) -> ArrayEntry:
    """Returns the entry of a canonical. kv and residuals stay on their devices; packed kv are codes and scales."""
    hidden: Any = {} if chunk.hidden is None else chunk.hidden
    kv: dict[str, Any] = {}
    # The leaves of a layer, by channel: its own one, or those of what it is packed in.
    named: dict[str, list[str]] = {}
    for name in chunk.layout.names:
        value: Any = chunk.kv[name]
        own = {name: value}
        if is_packed(value):
            own = leaves_of(value, name)
        named[name] = list(own)
        kv |= {f"layers.{leaf}": part for leaf, part in own.items()}

    arrays: dict[str, AnyArray] = {"local": np.asarray(chunk.local), **kv}
    arrays |= {f"hidden.{layer}": hidden[layer] for layer in sorted(hidden)}
    leaves = ["local"]
    for layer, name, _ in kept_by_layer(chunk.layout):
        leaves += [f"layer.{layer}.{leaf}" for leaf in named[name]]
    part = "kv" if chunk.encoding is None else f"kv.{chunk.encoding}"
    leaves += [name for name in arrays if "hidden" in name]
    return _described(part, Blob("kv", chunk_body(chunk), {}), leaves, arrays)


def entries_of(contents: ArrayContents) -> list[ArrayEntry]:
    """Returns the entries of chunks with their encoder outputs, and of patches.

    Raises:
      InputError: there is nothing to save, or it needs a store: reduced chunks, patches in a shared basis.
      DtypeError: objects cannot hold a dtype.
    """
    if contents.reduced or any(patch.metadata.basis is not None for patch in contents.patches):
        raise InputError(
            "StoreItem: got reduced chunks, or a patch in a shared basis; expected StoreItem(store, arrays=True) of a "
            "store that has them"
        )
    chunks = contents.chunks
    entries = [entry_of_chunk(chunk) for chunk in chunks]
    encoders = [encoder_blob(c.id, c.backbone, np.asarray(c.encoder)) for c in chunks if c.encoder is not None]
    entries += [entry_of(blob, "enc") for blob in encoders]
    entries += [entry_of(patch_blob(patch), "p") for patch in contents.patches]
    if not entries:
        raise InputError("StoreItem: got contents without chunks and patches; expected some")
    return entries


_WORDS = {"kind": str, "part": str, "body": dict, "leaves": list, "arrays": dict, "revision": int}


def check_about(about: Any) -> None:
    """Checks a description strictly, before anything is allocated from it.

    Raises:
      StoreCorruptError: `_described` cannot have made it.
    """
    try:
        whole = set(about) == {*_WORDS, "expires"} and all(type(about[word]) is kind for word, kind in _WORDS.items())
        whole = whole and about["kind"] in get_args(Kind) and _PART.fullmatch(about["part"]) is not None
        whole = whole and 0 <= about["revision"] < 10**20
        expires = about.get("expires")
        whole = whole and (expires is None or (type(expires) is float and math.isfinite(expires)))
        whole = whole and all(map(_is_array, about["arrays"].values()))
        whole = whole and _are_leaves_of(about["leaves"], about["arrays"])
        check_depth(about["body"], _DEPTH)
    except MALFORMED:
        whole = False
    if not whole:
        raise StoreCorruptError("export: got a description of no object; expected kind, part, body, leaves, arrays")


def _is_array(spec: Any) -> bool:
    """Returns whether a description is dtype, shape and checksum of a possible array."""
    word, shape, total = spec
    natural = all(type(size) is int and 0 <= size < 1 << 48 for size in shape)
    whole = word in DTYPES and type(shape) is list and len(shape) <= 9 and natural and type(total) is int
    return whole and math.prod(size or 1 for size in shape) <= LARGEST_ARRAY


def _are_leaves_of(leaves: Sequence[str], arrays: Mapping[str, Any]) -> bool:
    """Returns whether these leaves are what is in some arrays: of a stacked one as many as it has layers, in order."""
    stacks: dict[str, list[int]] = {}
    alone: list[str] = []
    for leaf in leaves:
        name, layer = _stacked_name(leaf)
        if layer is None:
            alone.append(leaf)
        elif leaf != f"layer.{layer}.{name.removeprefix('layers.')}":
            return False  # another way of writing the number
        else:
            stacks.setdefault(name, []).append(layer)

    if sorted([*stacks, *alone]) != sorted(arrays):
        return False
    for name, layers in stacks.items():
        shape = arrays[name][1]
        if layers != sorted(set(layers)) or not shape or shape[0] != len(layers):
            return False
    return True


def nbytes_of(about: Mapping[str, Any]) -> int:
    """Returns the bytes of an entry's arrays."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs_of(about).values())


def specs_of(about: Mapping[str, Any]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Returns dtype and shape of an entry's arrays."""
    return {name: (DTYPES[word], tuple(shape)) for name, (word, shape, _) in about["arrays"].items()}


def empty_array(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array of a dtype and shape that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def check_entry(entry: ArrayEntry) -> None:
    """Verifies every array on its devices. All are processed even after a failure, because all processes take part.

    Raises:
      StoreCorruptError: an array differs from the exported one.
    """
    bad: list[str] = []
    for name, (dtype, shape) in specs_of(entry.about).items():
        value = entry.arrays[name]
        if (value.dtype, value.shape) != (dtype, shape) or array_sum(value) != entry.about["arrays"][name][2]:
            bad.append(f"{name} {value.dtype}{value.shape}")
    if bad:
        raise StoreCorruptError(f"export: got other bits of {bad[0]}; expected those exported")


def blob_of_entry(entry: ArrayEntry) -> Blob:
    """Returns the object of an entry, byte for byte as it was, with arrays on the host."""
    host, rows = entry.host, dict[str, Iterator[int]]()
    arrays: dict[str, np.ndarray] = {}
    for leaf in entry.about["leaves"]:
        name, layer = _stacked_name(leaf)
        # A stack has the layers that keep the channel, in their order.
        row = next(rows.setdefault(name, itertools.count()))
        arrays[leaf] = host[name] if layer is None else host[name][row]
    about = entry.about
    return Blob(about["kind"], about["body"], arrays, about["expires"], about["revision"])


def chunk_of_entry(entry: ArrayEntry) -> tuple[Encoding | None, Chunk]:
    """Returns the encoding and the canonical of an entry. kv and residuals stay on their devices.

    Raises:
      StoreCorruptError: the body does not match its arrays.
    """
    body, arrays = entry.about["body"], entry.arrays
    try:
        expect_part(body, entry.about["part"])
        layout, encoding = chunk_layout(body, entry.about["leaves"]), kv_encoding(body)
        kv: dict[str, Any] = {}
        if encoding is not None:
            for name, form in kv_forms(body, layout, encoding).items():
                kv[name] = packed_of(arrays, f"layers.{name}", form)
            for channel in layout.parts:
                dtype = np.dtype(jnp.dtype(body["dtypes"][channel.name]))
                kv[channel.name] = decode(arrays[f"layers.{channel.name}"], None, dtype)
        for name, dtype in body["dtypes"].items() if encoding is None else ():
            scale = arrays.get(f"layers.{name}.scale")
            kv[name] = decode(arrays[f"layers.{name}"], scale, np.dtype(jnp.dtype(dtype)))
        for name, value in kv.items():
            if value.shape[0] != layout.depth(name):
                raise ShapeError(f"export: got {name} of {value.shape[0]} layers; expected {layout.depth(name)}")
        hidden = None if body["hidden"] is None else {layer: arrays[f"hidden.{layer}"] for layer in body["hidden"]}
        fields = {word: body[word] for word in ("span", "length", "id", "backbone")}
        local = np.asarray(arrays["local"])
        digests = {"content": digest_in(body, "content"), "lead": digest_in(body, "lead")}
        fields |= {"encoder": None, "hidden": hidden, "encoding": body.get("encoding")} | digests
        chunk = unchecked_chunk(kv=kv, local=local, layout=layout, **fields)
    except MALFORMED as error:
        raise StoreCorruptError(
            f"export: got a body of no chunk ({type(error).__name__}); expected a chunk's"
        ) from None
    return encoding_in(entry.about["part"]), chunk
