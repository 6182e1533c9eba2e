"""Chunks out of and into the KV caches of JAX programs, which are pytrees of arrays."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ..cache import Chunk
from ..core import AnyArray, KVLayout, check_uniform, end_position, ops, to_phase_free
from ..errors import InputError, LayoutError, ShapeError
from ..patching import Placed
from ..utils.kinds import expect_kind

Arrays = dict[str, list[Array]]
"""Arrays of each channel: one of all layers, or one per layer."""


@dataclasses.dataclass(frozen=True)
class CacheAxes:
    """Where a cache keeps the channels of a layout. Hashable: a static argument under jit.

    Attributes:
      layout: of the model: channels k and v of `KVLayout.gqa`, ckv and kpe of `KVLayout.mla`.
      axes: of a channel's arrays, L layers, B sequences, T slots, K heads, H width. Without L there is one array per
        layer, in a list or tuple; without B there is one sequence, without K one head.
      fields: the cache's fields, in the order of the channels; None: fields that are called as the channels.
      ring: whether slots continue at 0 behind the last.

    Raises:
      LayoutError: axes are unknown or missing; layers of unlike kinds.
    """

    layout: KVLayout
    axes: str = "L B T K H"
    fields: tuple[str, ...] | None = None
    ring: bool = False

    def __post_init__(self) -> None:
        expect_kind(self.layout, KVLayout, "cache: layout", "a KVLayout")
        expect_kind(self.axes, str, "cache: axes", "letters, such as 'L B T K H'", LayoutError)
        expect_kind(self.fields, tuple | None, "cache: fields", "a tuple of names, or None", LayoutError)
        check_uniform(self.layout, "cache")
        if sorted(self.letters) != sorted(set(self.letters) & set("LBTKH")) or not {"T", "H"} <= set(self.letters):
            raise LayoutError(f"cache: got axes {self.axes!r:.80}; expected T, H and any other of L B T K H")
        if len(self.fields or self.layout.names) != len(self.layout.names):
            raise LayoutError(f"cache: got fields {self.fields}; expected one for each of {self.layout.names}")

    @functools.cached_property
    def letters(self) -> str:
        """The axes without spaces."""
        return self.axes.replace(" ", "")

    def arrays(self, cache: Any, length: int, slot: Any, row: Any) -> Arrays:
        """Returns a cache's arrays with room for tokens at a place, which may be traced. Raises as the functions."""
        if not isinstance(cache, Mapping) and not dataclasses.is_dataclass(cache) and not hasattr(cache, "_replace"):
            raise LayoutError(f"cache: got a {type(cache).__name__}; expected a mapping, NamedTuple or dataclass")
        layout, arrays = self.layout, Arrays()
        for channel, field in zip(layout.channels, self.fields or layout.names, strict=True):
            arrays[channel.name] = leaves = jax.tree.leaves(_field(cache, field))
            if len(leaves) != (1 if "L" in self.letters else layout.layers):
                raise LayoutError(f"cache.{field}: got {len(leaves)} arrays; expected {self.axes!r}, not quantised")
            for leaf in leaves:
                shape = np.shape(leaf)
                sizes = {"L": layout.layers, "B": 1, "K": 1} | dict(zip(self.letters, shape, strict=False))
                expected = {"L": layout.layers, "K": channel.heads, "H": channel.width}
                if len(shape) != len(self.letters) or not expected.items() <= sizes.items():
                    raise ShapeError(f"cache.{field}: got shape {shape}; expected axes {self.axes!r}, {expected}")
                if not jnp.issubdtype(leaf.dtype, jnp.floating):
                    raise ShapeError(f"cache.{field}: got dtype {leaf.dtype}; expected floating-point numbers")
                _expect_index(f"cache.{field}: got length", length, 1, sizes["T"])
                _expect_index(f"cache.{field}: got slot", slot, 0, sizes["T"] - (1 if self.ring else length))
                _expect_index(f"cache.{field}: got row", row, 0, sizes["B"] - 1)
        return arrays

    def replaced(self, cache: Any, arrays: Arrays) -> Any:
        """Returns a cache with other arrays."""
        fields, kind = {}, type(cache)
        for channel, field in zip(self.layout.names, self.fields or self.layout.names, strict=True):
            fields[field] = jax.tree.unflatten(jax.tree.structure(_field(cache, field)), arrays[channel])
        if isinstance(cache, Mapping):
            return kind({**cache, **fields})
        return cache._replace(**fields) if hasattr(cache, "_replace") else dataclasses.replace(cache, **fields)

    def index(self, array: Array, tokens: int, length: Any, slot: Any, row: Any) -> tuple[tuple[Any, ...], str]:
        """Returns the index of a sequence's tokens in an array, and the letters of the axes of what is there.

        Tokens from `length` on, and those that have no slot, are at an index beyond the last.
        """
        count, offsets = array.shape[self.letters.index("T")], jnp.arange(tokens)
        slots = (slot + offsets) % count if self.ring else slot + offsets
        slots = jnp.where((offsets < length) & (slots >= 0), slots, count)
        indices = {"T": slots, "B": jnp.full_like(slots, row)}
        places = [place for place, letter in enumerate(self.letters) if letter in indices]
        order = [letter for letter in self.letters if letter not in indices]
        # numpy moves indices that are not neighbours to the front.
        order.insert(places[0] if places[-1] - places[0] < 2 else 0, "T")
        return tuple(indices.get(letter, slice(None)) for letter in self.letters), "".join(order)


def chunk_from_cache(
    cache: Any,
    axes: CacheAxes,
    length: int,
    *,
    id: str,
    backbone: str,
    content: str | None = None,
    slot: int = 0,
    row: int = 0,
    start: int = 0,
    local: AnyArray | None = None,
) -> Chunk:
    """Takes the KV of consecutive tokens out of a cache, and removes its positions.

    Of tokens that were prefilled alone this is the canonical; of others its `kv` is what `form_patch` takes.

    Args:
      cache: a mapping, NamedTuple or dataclass, whose keys are rotated to their positions.
      length: number of tokens.
      id, backbone, content: as of `Chunk`: a name, the model's name, and a digest of the tokens.
      slot, row: of the first token on the axis T, and of the sequence on the axis B.
      start, local: the positions are `start + local`, [T] or [T, A]; None: 0, 1, 2, …

    Raises:
      LayoutError: a field is missing, or quantised. ShapeError: arrays of other shapes; arrays of integers.
      InputError: slot, row or length are not in the cache. As `Chunk`.
    """
    expect_kind(axes, CacheAxes, "chunk_from_cache: axes", "a CacheAxes")
    arrays, layout = axes.arrays(cache, length, slot, row), axes.layout
    if local is None:
        local = np.arange(length, dtype=np.float32)
        local = local if layout.rope.axes is None else np.repeat(local[:, None], layout.rope.axes, axis=1)
    kv = to_phase_free(layout, _read(arrays, slot, row, axes=axes, length=length), local, start)
    span = int(end_position(np.asarray(local)[None])[0]) + 1
    return Chunk(kv, local, span, length, id, layout, backbone, content=content)


def place_in_cache[Cache](
    cache: Cache, axes: CacheAxes, placed: Placed, slot: Any = None, *, row: Any = 0, donate: bool = False
) -> Cache:
    """Writes a placed chunk's KV into a cache, by one rotation and one low-rank product. Returns the cache.

    Start, slot and row may be traced. Called eagerly, it is one program for all chunks and patches of the same shapes;
    in a caller's `jit` the chunk is a constant of that program.

    Args:
      placed: a chunk with its patch and start. Padding is not written, so chunks that are padded alike share a program.
      slot, row: as of `chunk_from_cache`. Slot None: the start, which is then one number.
      donate: reuses the cache's buffers and deletes it. A caller's `jit` has `donate_argnums` for that.

    Raises:
      As `chunk_from_cache`. Traced numbers are not checked: tokens beyond the last slot are then dropped.
    """
    expect_kind(axes, CacheAxes, "place_in_cache: axes", "a CacheAxes")
    expect_kind(placed, Placed, "place_in_cache: placed", "a Placed: a chunk, its patch, a start and an antecedent")
    chunk, start = placed.chunk, placed.start
    if chunk.batch is not None or (slot is None and np.ndim(start)) or placed.layout != axes.layout:
        raise LayoutError(
            f"place_in_cache: got {chunk!r} at {start}; expected one chunk of the cache's layout, and a slot"
        )
    slot = start if slot is None else slot
    arrays = axes.arrays(cache, chunk.length, slot, row)
    write, operands = _write_donated if donate else _write, (dict(placed.kv), placed.factors, chunk.local, start)
    arrays = write(arrays, operands, chunk.length, slot, row, axes=axes, layers=placed.layers)
    return axes.replaced(cache, arrays)


def _expect_index(what: str, value: Any, least: int, most: int) -> None:
    """Raises InputError for what is no integer in these bounds. A traced number is not checked."""
    if isinstance(value, Tracer):
        return
    try:
        is_within = least <= operator.index(value) <= most
    except TypeError:
        is_within = False
    if not is_within:
        raise InputError(f"{what} {value!s:.40}; expected {least} to {most}, an integer")


def _field(cache: Any, name: str) -> Any:
    return cache.get(name) if isinstance(cache, Mapping) else getattr(cache, name, None)


def _canonical(letters: str) -> str:
    return "".join(letter for letter in "LTKH" if letter in letters)


def _on_any_mesh(program: Callable[..., Any], arrays: Arrays, out: Any, *operands: Any) -> Any:
    """Runs a program of arrays. On Explicit axes of a mesh, where jax has no rule for it, the compiler divides it."""
    mesh = jax.typeof(jax.tree.leaves(arrays)[0]).sharding.mesh
    if not mesh.explicit_axes:
        return program(arrays, *operands)
    with jax.sharding.use_abstract_mesh(mesh):
        automatic: Any = jax.sharding.auto_axes(program, out_sharding=out)
        return automatic(arrays, *operands)


@functools.partial(jax.jit, static_argnames=("axes", "length"))
def _read(arrays: Arrays, slot: Any, row: Any, *, axes: CacheAxes, length: int) -> dict[str, Array]:
    def read(arrays: Arrays, slot: Any, row: Any) -> dict[str, Array]:
        kv = {}
        for name, leaves in arrays.items():
            index, order = axes.index(leaves[0], length, length, slot, row)
            values = [jnp.einsum(f"{order}->{_canonical(order)}", leaf[index]) for leaf in leaves]
            value = values[0] if "L" in order else jnp.stack(values)
            kv[name] = value if "K" in order else value[..., None, :]
        return kv

    return _on_any_mesh(read, arrays, jax.sharding.PartitionSpec(), slot, row)


def _place(
    arrays: Arrays, operands: tuple[Any, ...], length: Any, slot: Any, row: Any, *, axes: CacheAxes, **options: Any
) -> Arrays:
    def place(arrays: Arrays, operands: tuple[Any, ...], length: Any, slot: Any, row: Any) -> Arrays:
        served = ops.apply(axes.layout, *operands, **options)
        written: Arrays = {}
        for name, leaves in arrays.items():
            value = served[name] if "K" in axes.letters else served[name][..., 0, :]
            index, order = axes.index(leaves[0], value.shape[1], length, slot, row)
            layers = [value] if "L" in order else list(value)
            rows = [jnp.einsum(f"{_canonical(order)}->{order}", layer) for layer in layers]
            pairs = zip(leaves, rows, strict=True)
            written[name] = [leaf.at[index].set(value.astype(leaf.dtype), mode="drop") for leaf, value in pairs]
        return written

    out = jax.tree.map(_partition, arrays)
    return _on_any_mesh(place, arrays, out, operands, length, slot, row)


def _partition(array: Array) -> Any:
    return jax.typeof(array).sharding.spec


_jitted = functools.partial(jax.jit, _place, static_argnames=("axes", "layers"))
_write, _write_donated = _jitted(), _jitted(donate_argnums=0)
