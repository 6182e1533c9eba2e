"""Placement of verified host arrays on devices: whole, in shards, or layer by layer while the next layer is read."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num

from ...cache import Chunk
from ...core import AnyArray, KVLayout, is_packed
from ...errors import InputError, StoreCorruptError
from ..format.codec import chunk_layout, digest_in, expect_part, layer_names, layer_of, unchecked_chunk
from ..format.header import Header
from ..format.naming import part_of
from ..format.packed import decoded, stacked

Target = jax.sharding.Sharding | jax.Device
Placement = Target | Mapping[str, Target]


def target_of(placement: Placement, channel: str) -> Target:
    """Returns the target of a channel.

    Raises:
      InputError: the mapping lacks the channel, or it is no placement.
    """
    targets = _targets(placement)
    if not isinstance(targets, Mapping):
        return targets
    if channel not in targets:
        raise InputError(f"placement: got channels {sorted(targets)}; expected one for {channel!r} too")
    return targets[channel]


def _targets(placement: Any) -> Placement:
    """Returns the placement. Raises InputError if it is of another type."""
    targets = list(placement.values()) if isinstance(placement, Mapping) else [placement]
    for target in targets:
        if not isinstance(target, jax.sharding.Sharding | jax.Device):
            raise InputError(f"placement: got {target!r:.80}; expected a jax.sharding.Sharding or a jax.Device")
    return placement


def placement_key(placement: Placement) -> tuple:
    """Returns a key that is equal for placements with the same targets."""
    targets = _targets(placement)
    return tuple(sorted(targets.items())) if isinstance(targets, Mapping) else (targets,)


def place_chunk(chunk: Chunk, placement: Placement) -> Chunk:
    """Returns the chunk with kv on devices: each channel [L, T, K, H] on its target, shard by shard.

    Of packed kv, codes and scales are placed as `packed_target` says.
    """
    kv: dict[str, Any] = {}
    for name, value in chunk.kv.items():
        target = target_of(placement, name)
        put = _put_part if is_packed(value) else _put
        kv[name] = jax.tree.map(functools.partial(put, target), value)
    fields: dict[str, Any] = {field.name: getattr(chunk, field.name) for field in dataclasses.fields(chunk)}
    fields["kv"] = kv
    return unchecked_chunk(**fields)


def packed_target(target: Target, shape: tuple[int, ...]) -> Target:
    """Returns where a part of packed kv goes, [L, T or groups, columns], of a target for [L, T, K, H].

    It is partitioned as the target's layers and tokens, where their numbers are divisible. Heads are not: a byte has
    codes of heads that are far apart, so every device of a head axis has all of them.

    Raises:
      InputError: a sharding without names of axes.
    """
    if not isinstance(target, jax.sharding.Sharding) or isinstance(target, jax.sharding.SingleDeviceSharding):
        return target
    if not isinstance(target, jax.sharding.NamedSharding):
        raise InputError(f"placement: got {target!r:.80} for packed kv; expected a NamedSharding or a device")
    spec: list[Any] = []
    for size, axes in zip(shape[:2], target.spec[:2], strict=False):
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        parts = math.prod(target.mesh.shape[name] for name in names)
        spec.append(axes if size % parts == 0 else None)
    return jax.sharding.NamedSharding(target.mesh, jax.P(*spec))


def _put(target: Target, value: Any) -> jax.Array:
    return jax.device_put(value, target)


def _put_part(target: Target, part: Any) -> jax.Array:
    return jax.device_put(part, packed_target(target, part.shape))


class LayerStream:
    """Reader of a canonical, layer by layer; later layers are read while one is used.

    Iterating yields (layer, {channel: [T, K, H]}) in order, verified, once; `layer` reads a single one. Channels in few
    bits are decoded, so that one layer at a time is in full precision; `chunk` keeps them packed. Close it with `close`
    or `with`.

    Attributes:
      layout, span, length: properties of the chunk, known before any layer is read.

    Raises (while iterating):
      StoreCorruptError: a layer is damaged; all layers before it were correct.
      StoreIOError: a layer cannot be read.
    """

    def __init__(
        self,
        header: Header,
        read: Callable[[Sequence[str]], dict[str, np.ndarray]],
        placement: Placement | None,
        stack: contextlib.ExitStack,
        ahead: int = 2,
    ):
        self._header, self._read, self._placement, self._stack, self._ahead = header, read, placement, stack, ahead
        self._names = list(header.leaves)
        expect_part(header.body, part_of(header.name))
        self.layout: KVLayout = chunk_layout(header.body, self._names)
        self.span: int = header.body["span"]
        self.length: int = header.body["length"]

    @functools.cached_property
    def local(self) -> np.ndarray:
        """Local positions of the chunk, read on first use. Raises as iterating."""
        return self._read(["local"])["local"]

    def layer(self, layer: int) -> dict[str, Num[AnyArray, "..."]]:
        """Reads and verifies {channel: [T, K, H]} of one layer; layers may be read in any order.

        Raises:
          InputError: there is no such layer. StoreError: as iterating.
        """
        if not 0 <= layer < self.layout.layers:
            raise InputError(f"stream: got layer {layer}; expected 0 to {self.layout.layers - 1}")
        return self._placed(self._stored(layer))

    def _stored(self, layer: int) -> dict[str, Any]:
        """Reads one layer; channels in few bits stay packed."""
        names = layer_names(layer, self._names)
        if not names and any(self.layout.rows_of(name, (layer,)) for name in self.layout.names):
            raise StoreCorruptError(f"object: got no leaf of layer {layer}; expected its channels")
        return layer_of(self._header.body, layer, self._read(names))

    def _placed(self, stored: dict[str, Any]) -> dict[str, Num[AnyArray, "..."]]:
        """Decodes a layer, and places it."""
        values = decoded(stored)
        if self._placement is None:
            return values
        return {name: jax.device_put(value, target_of(self._placement, name)) for name, value in values.items()}

    def __iter__(self) -> Iterator[tuple[int, dict[str, Num[AnyArray, "..."]]]]:
        with self:
            _ = self.local  # so that iterating verifies the whole object
            for layer, values, _ in self._layers():
                yield layer, values

    def _layers(self) -> Iterator[tuple[int, dict[str, Num[AnyArray, "..."]], dict[str, Any]]]:
        """Yields every layer, decoded and placed, and as it is stored."""

        def read(layer: int) -> tuple[dict[str, Num[AnyArray, "..."]], dict[str, Any]]:
            stored = self._stored(layer)
            return self._placed(stored), stored

        # One thread, because the file is read in order.
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvpatch-stream") as reader:
            coming = [reader.submit(read, layer) for layer in range(min(self._ahead, self.layout.layers))]
            try:
                for layer in range(self.layout.layers):
                    values, stored = coming.pop(0).result()
                    if layer + self._ahead < self.layout.layers:
                        coming.append(reader.submit(read, layer + self._ahead))
                    yield layer, values, stored
            finally:
                reader.shutdown(cancel_futures=True)

    def chunk(self, each: Callable[[int, Mapping[str, AnyArray]], object]) -> Chunk:
        """Reads to the end and returns the whole chunk; `each` is called with every layer as soon as it was read.

        Raises:
          StoreError: as iterating. Any exception of `each`.
        """
        with self:
            local = self.local
            layers: list[Mapping[str, Any]] = []
            packed = self._header.body.get("encoding") is not None
            for layer, values, stored in self._layers():
                each(layer, values)
                layers.append(stored if packed else values)
            kept = self._header.body["hidden"]
            names = [] if kept is None else [f"hidden.{layer}" for layer in kept]
            arrays = self._read(names) if names else {}

        stack = np.stack if self._placement is None or packed else jnp.stack
        kv: dict[str, Any] = {}
        for name in self.layout.names:
            parts = [layers[layer][name] for layer in self.layout.layers_of(name)]
            kv[name] = stacked(parts, np.stack) if packed else stack(parts)
        chunk = unchecked_chunk(
            kv=kv,
            local=local,
            span=self.span,
            length=self.length,
            id=self._header.body["id"],
            layout=self.layout,
            backbone=self._header.body["backbone"],
            encoder=None,
            hidden=None if kept is None else {layer: arrays[f"hidden.{layer}"] for layer in kept},
            content=digest_in(self._header.body, "content"),
            lead=digest_in(self._header.body, "lead"),
            encoding=self._header.body.get("encoding"),
        )
        return place_chunk(chunk, self._placement) if packed and self._placement is not None else chunk

    def close(self) -> None:
        """Closes the file."""
        self._stack.close()

    def __enter__(self) -> "LayerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
