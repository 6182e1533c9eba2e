"""Patch operators on plain arrays: deficit, factorise, apply, accumulate. They jit, vmap and differentiate.

Shapes: kv {channel: [L, ..., T, K, H]} with any batch dimensions between layers and tokens; the parts of a transition
have their own rows in place of T, in kv and in factors alike, and no padding. Factors of a channel are u [L, ..., T, M]
and v [L, ..., M, F], or one dense array [L, ..., T, K, H], or `RaggedFactors`, with a rank for each layer. Every leaf
may be a `PackedArray`, and so may kv. Static: layouts, ranks, layer sets, padded lengths.
Traced: arrays, starts, local positions, lengths, keys. Nothing is checked here: callers check their arguments first.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, Num

from pallas_kernels import Case, Codes, candidates, factorise, rotate_patch
from pallas_kernels.factorise import merge as merge_factors

from .buckets import Buckets
from .few_bits import PackedArray, quantised, unpack
from .layout import PARTS, AnyArray, KVLayout
from .rope import rope_tables
from .rope import rotate as rotate

Leaf = AnyArray | PackedArray
_POWERS = Buckets(64, 1)


def padded_directions(count: int) -> int:
    """Returns the size to which directions of all layers are padded in programs: 32, 64, 128, …"""
    return _POWERS.round_up(max(count, 32))


@functools.partial(jax.tree_util.register_dataclass, data_fields=("u", "v", "rows"), meta_fields=())
@dataclasses.dataclass(frozen=True, eq=False)
class RaggedFactors:
    """Low-rank factors of a channel with a rank for each layer: all layers' directions, one below the other.

    A pytree; a store has its arrays on the host.

    Attributes:
      u: [R, T], the directions' coefficients, singular values included. v: [R, F], orthonormal in each layer.
      rows: integers [L, M], which of the R directions a layer has, the strongest first; R where it has no more.
    """

    u: Any
    v: Any
    rows: Any

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each layer."""
        return tuple(int(number) for number in (np.asarray(self.rows) < self.v.shape[0]).sum(axis=1))

    def by_layer(self) -> tuple[Array, Array]:
        """Returns u [L, T, M] and v [L, M, F] in float32, zero where a layer has fewer directions than M."""
        u, v = (value_of(leaf).astype(jnp.float32) for leaf in (self.u, self.v))
        # Indices beyond the last direction give zeros. Rows are kept in 16 bits where these suffice.
        rows = jnp.asarray(self.rows, jnp.int32)
        u, v = (leaf.at[rows].get(mode="fill", fill_value=0.0) for leaf in (u, v))
        return jnp.swapaxes(u, -1, -2), v

    def __iter__(self) -> Iterator[Array]:
        """Yields u and v with as many directions in every layer, as `by_layer` returns them."""
        return iter(self.by_layer())

    def __getitem__(self, index: int) -> Array:
        """Returns u (0) or v (1) with as many directions in every layer, as `by_layer` returns them."""
        return self.by_layer()[index]

    def padded(self) -> "RaggedFactors":
        """Pads R and M by directions of zeros to few sizes, so that patches of a size and chunk share a program.

        For programs alone: on the host, because a padding on a device would be a program for each R. Traced factors
        are returned as they are.
        """
        leaves = jax.tree.leaves(self)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self
        # Zeros of codes, scales and numbers alike decode to zeros.
        size = padded_directions(self.v.shape[0])
        u, v = jax.tree.map(functools.partial(_zeros_behind, axis=0, size=size), (self.u, self.v))
        rows = np.asarray(self.rows, np.int32)
        total = jax.tree.leaves(u)[0].shape[0]
        # A padded place is that of no direction; so is the number of those that were there, whose row is zero now.
        short = _POWERS.round_up(max(rows.shape[1], 8)) - rows.shape[1]
        rows = np.pad(rows, [(0, 0), (0, short)], constant_values=total)
        return RaggedFactors(u, v, jax.device_put(rows))


def _zeros_behind(leaf: Array | np.ndarray, axis: int, size: int) -> Array:
    widths = [(0, 0)] * leaf.ndim
    widths[axis] = (0, size - leaf.shape[axis])
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(np.pad(np.asarray(leaf), widths) if widths[axis][1] else leaf)


ChannelFactors = tuple[Leaf, Leaf] | Leaf | RaggedFactors
Factors = dict[str, ChannelFactors]


@dataclasses.dataclass(frozen=True)
class FormPlan:
    """Static options of `form`.

    Attributes:
      ranks: (channel, rank) pairs; rank None stores the deficit dense; omitted channels get no patch.
      method: "randomised" or "exact".
      dtype: of the factors; an 8-bit dtype gets one scale per direction, int2 to int7 one per group (`quantised`).
    """

    ranks: tuple[tuple[str, int | None], ...]
    method: Literal["randomised", "exact"] = "randomised"
    dtype: str = "float32"


def value_of(leaf: Leaf) -> Num[AnyArray, "..."]:
    """Returns the values of a factor, decoded."""
    return unpack(leaf, jnp.float32) if isinstance(leaf, PackedArray) else leaf


def is_low_rank(factors: ChannelFactors | tuple | np.ndarray) -> TypeGuard[tuple[Leaf, Leaf]]:
    """Returns whether a channel holds (u, v) rather than a dense correction."""
    return isinstance(factors, tuple)


def token_mask(x: Array, length: Array | int, axis: int) -> Array:
    """Marks tokens below `length` (a scalar, or one per batch), shaped to broadcast over x with tokens at `axis`."""
    length = jnp.asarray(length)
    tokens = x.shape[axis]
    mask = jnp.arange(tokens) < length[..., None]
    return mask.reshape(*mask.shape, *([1] * (-1 - axis)))


def deficit(
    conditioned: dict[str, Float[Array, "L *B T _ _"]],
    base: dict[str, Float[Array, "L *B T _ _"]],
    length: Int[Array, "..."] | int | None = None,
) -> dict[str, Float[Array, "L *B T _ _"]]:
    """Computes Δ = conditioned − base in float32, zero on padding. Kamera eq. 2, in the frame of both operands.

    Args:
      conditioned, base: {channel: [L, ..., T, K, H]}.
      length: number of tokens that are not padding, a scalar or one per batch; None for all.
    """
    delta = {}
    for name in base:
        # The difference of two close 16-bit numbers has few bits left.
        value = conditioned[name].astype(jnp.float32) - base[name].astype(jnp.float32)
        # Parts of a transition have no padding.
        own = None if name in PARTS else length
        delta[name] = value if own is None else jnp.where(token_mask(value, own, -3), value, 0.0)
    return delta


def flatten_heads(delta: Float[Array, "*leading T K H"]) -> Float[Array, "*leading T F"]:
    """Joins heads: [..., T, K, H] → [..., T, K·H]."""
    return delta.reshape(*delta.shape[:-2], delta.shape[-2] * delta.shape[-1])


def _factorise_masked(
    matrix: Array, rank: int, plan: FormPlan, key: Array, length: Array | int | None
) -> tuple[Array, Array]:
    """Factorises [..., T, F] into u and v, with exact zeros in u on padding."""

    def factorise_matrix(matrix: Array, key: Array) -> tuple[Array, Array]:
        return factorise(matrix, rank=rank, method=plan.method, key=key)

    # A factorisation has no sharding rule, so jax rejects it on Explicit axes of a mesh. There they are left to the
    # compiler inside the function; its results are small, and are replicated on every device.
    meshes = [jax.typeof(array).sharding.mesh for array in (matrix, key)]
    explicit = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if explicit is None:
        u, v = factorise_matrix(matrix, key)
    else:
        with jax.sharding.use_abstract_mesh(explicit):
            replicated: Any = jax.sharding.auto_axes(factorise_matrix, out_sharding=jax.sharding.PartitionSpec())
            u, v = replicated(matrix, key)

    if length is not None:
        u = jnp.where(token_mask(u, length, -2), u, 0.0)
    return u, v


def factorise_deficit(
    delta: dict[str, Float[Array, "L *B T _ _"]],
    key: Key[Array, ""],
    length: Int[Array, "..."] | int | None = None,
    *,
    plan: FormPlan,
) -> Factors:
    """Factorises a deficit {channel: float32 [L, ..., T, K, H]} that is zero on padding, every layer of it."""
    factors: Factors = {name: quantised(delta[name], plan.dtype, -1) for name, rank in plan.ranks if rank is None}
    low_rank = [(name, rank) for name, rank in plan.ranks if rank is not None]

    # Each channel draws its own random matrix.
    for index, (name, rank) in enumerate(low_rank):
        channel_key = jax.random.fold_in(key, index)
        own = None if name in PARTS else length
        u, v = _factorise_masked(flatten_heads(delta[name]), rank, plan, channel_key, own)
        # One scale per direction where the dtype has 8 bits: along tokens in u, along features in v.
        factors[name] = quantised(u, plan.dtype, -2), quantised(v, plan.dtype, -1)
    return factors


def form(
    conditioned: dict[str, Float[Array, "L *B T _ _"]],
    base: dict[str, Float[Array, "L *B T _ _"]],
    length: Int[Array, "..."] | int,
    key: Key[Array, ""],
    *,
    plan: FormPlan,
) -> Factors:
    """Factorises KV(B|A) − base, phase-free: Kamera App. A `form_patch`."""
    return factorise_deficit(deficit(conditioned, base, length), key, length, plan=plan)


def _spread(value: AnyArray, layers: tuple[int, ...] | None, total: int) -> AnyArray:
    """Scatters the rows of the kept layers into zeros for all `total` layers."""
    # Kernels run over all layers in one launch; zeros correct nothing.
    if layers is None or len(layers) == total:
        return value
    return jnp.zeros((total, *value.shape[1:]), value.dtype).at[np.asarray(layers)].set(value)


def kernel_arguments(factors: ChannelFactors | None, layers: tuple[int, ...] | None, total: int) -> dict:
    """Returns a channel's factors as keyword arguments of the kernels, for all layers, quantised ones as they are."""
    if factors is None:
        return {}

    if isinstance(factors, RaggedFactors):
        factors = factors.by_layer()
    if is_low_rank(factors):
        arguments: dict = {}
        for name, leaf in zip("uv", factors, strict=True):
            # Decoded for all layers at once: they are small.
            arguments[name] = _spread(value_of(leaf), layers, total)
        return arguments

    return {"dense": _spread(value_of(factors), layers, total)}  # pyright: ignore[reportArgumentType]


def correction(
    layout: KVLayout, factors: Factors, *, layers: tuple[int, ...] | None = None
) -> dict[str, Float[Array, "L *B T _ _"]]:
    """Computes the dense correction {channel: float32 [L, ..., T, K, H]} of factors, for the channels that have any."""
    result = {}
    for name, channel_factors in factors.items():
        channel, kept = layout.channel(name), None if layers is None else layout.rows_of(name, layers)
        arguments = kernel_arguments(channel_factors, kept, layout.depth(name))
        if "dense" in arguments:
            result[name] = arguments["dense"].astype(jnp.float32)
            continue

        u = arguments["u"]
        # The kernel itself computes u v, onto zeros, so that both round alike.
        zero = jnp.zeros((*u.shape[:-1], channel.heads, channel.width), jnp.float32)
        result[name] = rotate_patch(zero, **arguments)

    return result


def apply(
    layout: KVLayout,
    kv: Mapping[str, Float[Array, "L *B T _ _"] | PackedArray],
    factors: Factors,
    local: Num[Array | np.ndarray, "..."],
    start: Int[Array, "..."],
    *,
    layers: tuple[int, ...] | None = None,
) -> dict[str, Float[Array, "L *B T _ _"]]:
    """Computes R(start + local) · (kv + u v) from phase-free kv and a patch, rounded once. Kamera eq. 1.

    Packed channels are decoded one layer at a time, to the numbers that their decoded twins have, or, in four bits, by
    a kernel where one is taken. Without factors the
    result is exactly the rotation. For shapes see the module's docstring; the result has kv's shapes and dtypes.
    """
    arguments = operator_arguments(layout, factors, local, start, layers)
    result: dict[str, Any] = {}
    # Channels of as many layers and one order of pairs go through one loop.
    for names, kernel in layout.kernels(rotate_patch):
        packed: dict[str, Any] = {name: kv[name] for name in names if isinstance(kv[name], PackedArray)}
        for name in [name for name in packed if kernel_decodes("rotate_patch", packed[name], arguments[name])]:
            result[name] = kernel(codes_of(packed.pop(name)), **arguments[name])
        if packed:
            result |= jax.lax.map(_layer_program(arguments, kernel), _layered(packed, arguments))

    for name, own in arguments.items():
        if name in result:
            continue
        kernel = functools.partial(rotate_patch, layout=layout.rope_of(name).cached)
        result[name] = kernel(kv[name], **own) if own else kv[name]  # pyright: ignore[reportArgumentType]
    return result


def kernel_decodes(operation: str, packed: PackedArray, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a kernel is tried for an operation on a packed channel: in four bits, decoded to bfloat16."""
    if packed.bits != 4 or packed.scaled or packed.dtype != jnp.bfloat16 or packed.heads is None:
        return False
    return candidates(Case(operation, packed.heads == 1, "u" in arguments, packed=True))[0] != "xla"


def codes_of(packed: PackedArray) -> Codes:
    """Returns an array of four bits as kernels take it."""
    (codes,), heads = packed.planes, packed.heads or 1
    return Codes(codes, packed.scale, packed.least, heads, packed.group, packed.axis == -1)


def _layered(kv: Mapping[str, PackedArray], arguments: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, dict]]:
    """Returns what has layers of every channel: its codes, and of its arguments the factors with their scales."""
    return {name: (value, layered_arguments(arguments[name])) for name, value in kv.items()}


def layered_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of a kernel's keyword arguments whose first axis is that of layers: factors and their scales."""
    return {word: value for word, value in arguments.items() if word in _LAYERED}


def _layer_program(
    arguments: dict[str, dict[str, Any]], kernel: Callable[..., Array]
) -> Callable[[dict[str, tuple[Any, dict]]], dict[str, Array]]:
    """Returns a function of one layer of what `_layered` returns, which decodes, patches and rotates every channel."""

    def program(operands: dict[str, tuple[Any, dict]]) -> dict[str, Array]:
        result = {}
        for name, (x, own) in operands.items():
            others = {word: value for word, value in arguments[name].items() if word not in own}
            if not own and "cos" not in others:
                result[name] = unpack(x)
                continue
            # Rounded to x's dtype, because patches are formed against those numbers. A CPU converts to bfloat16 slowly.
            value = jax.lax.reduce_precision(unpack(x, jnp.float32), 8, 7) if x.dtype == jnp.bfloat16 else unpack(x)
            # A rotation reads every number twice, and a fused program would decode it twice.
            value = jax.lax.optimization_barrier(value) if "cos" in others else value
            result[name] = kernel(value, out_dtype=x.dtype, **own, **others)
        return result

    return program


_LAYERED = ("u", "v", "dense")
"""Keyword arguments of the kernels whose first axis is that of layers."""


def operator_arguments(
    layout: KVLayout,
    factors: Factors,
    local: Num[Array | np.ndarray, "..."],
    start: Int[Array, "..."],
    layers: tuple[int, ...] | None,
) -> dict[str, dict[str, Any]]:
    """Returns the kernels' keyword arguments for every channel: its factors, and cos and sin tables if it rotates."""
    # One table for all channels and layers that rotate by the same angles.
    tables = {rope: rope_tables(rope, local, start) for rope in layout.ropes}
    result = {}
    for channel in layout.channels:
        name, kept = channel.name, None if layers is None else layout.rows_of(channel.name, layers)
        result[name] = kernel_arguments(factors.get(name), kept, layout.depth(name))
        if channel.rotates:
            rope = layout.rope_of(name)
            cos, sin = tables[rope]
            result[name] |= {"cos": cos, "sin": sin, "scale": rope.attention_scaling}
    return result


@jax.jit
def accumulate(
    total: dict[str, Float[Array, "L *B T _ _"]],
    conditioned: dict[str, Float[Array, "L *B T _ _"]],
    base: dict[str, Float[Array, "L *B T _ _"]],
    length: Int[Array, "..."] | int,
) -> dict[str, Float[Array, "L *B T _ _"]]:
    """Adds conditioned − base to a running float32 sum, from which an orbit patch is formed; one program per shape."""
    delta = deficit(conditioned, base, length)
    return {name: total[name] + delta[name] for name in delta}


jitted_deficit = jax.jit(deficit)
"""`deficit`, compiled once per padded shape."""

jitted_factorise = jax.jit(factorise_deficit, static_argnames=("plan",))
"""`factorise_deficit`, compiled once per plan and padded shape."""

jitted_apply = jax.jit(apply, static_argnames=("layout", "layers"))
"""`apply`, compiled once per layout, layer set and padded shape; another chunk or start does not compile again."""

jitted_merge = jax.jit(merge_factors, static_argnames=("rank",))
"""`merge_factors` (the kernels' `merge`), compiled once per rank and padded shape."""
