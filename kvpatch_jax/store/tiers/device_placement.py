"""Placement of verified host arrays on devices: whole, in shards, or layer by layer while the next layer is read."""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num

from ...cache import Chunk
from ...core import AnyArray, KVLayout
from ...errors import InputError, StoreCorruptError
from ..format.codec import chunk_layout, digest_in, layer_names, layer_of, unchecked_chunk
from ..format.header import Header

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
    """Returns the chunk with kv on devices: each channel [L, T, K, H] on its target, shard by shard."""
    kv = {name: jax.device_put(value, target_of(placement, name)) for name, value in chunk.kv.items()}
    fields = {field.name: getattr(chunk, field.name) for field in dataclasses.fields(chunk)}
    return unchecked_chunk(**(fields | {"kv": kv}))


class LayerStream:
    """Reader of a canonical, layer by layer; later layers are read while one is used.

    Iterating yields (layer, {channel: [T, K, H]}) in order, verified, once; `layer` reads a single one. Close it with
    `close` or `with`.

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
        names = layer_names(self.layout, layer, self._names)
        if not names:
            raise StoreCorruptError(f"object: got no leaf of layer {layer}; expected its channels")
        values: dict[str, Any] = layer_of(self._header.body, layer, self._read(names))
        if self._placement is None:
            return values
        return {name: jax.device_put(value, target_of(self._placement, name)) for name, value in values.items()}

    def __iter__(self) -> Iterator[tuple[int, dict[str, Num[AnyArray, "..."]]]]:
        with self:
            _ = self.local  # so that iterating verifies the whole object
            yield from self._layers()

    def _layers(self) -> Iterator[tuple[int, dict[str, Num[AnyArray, "..."]]]]:
        # One thread, because the file is read in order.
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvpatch-stream") as reader:
            coming = [reader.submit(self.layer, layer) for layer in range(min(self._ahead, self.layout.layers))]
            try:
                for layer in range(self.layout.layers):
                    values = coming.pop(0).result()
                    if layer + self._ahead < self.layout.layers:
                        coming.append(reader.submit(self.layer, layer + self._ahead))
                    yield layer, values
            finally:
                reader.shutdown(cancel_futures=True)

    def chunk(self, each: Callable[[int, Mapping[str, AnyArray]], object]) -> Chunk:
        """Reads to the end and returns the whole chunk; `each` is called with every layer as soon as it was read.

        Raises:
          StoreError: as iterating. Any exception of `each`.
        """
        with self:
            local = self.local
            layers: list[Mapping[str, AnyArray]] = []
            for layer, values in self._layers():
                each(layer, values)
                layers.append(values)
            kept = self._header.body["hidden"]
            names = [] if kept is None else [f"hidden.{layer}" for layer in kept]
            arrays = self._read(names) if names else {}

        stack = np.stack if self._placement is None else jnp.stack
        return unchecked_chunk(
            kv={name: stack([values[name] for values in layers]) for name in self.layout.names},
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
        )

    def close(self) -> None:
        """Closes the file."""
        self._stack.close()

    def __enter__(self) -> "LayerStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
