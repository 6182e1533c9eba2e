"""The MLPs of a mixture of experts, over tokens grouped by the experts that they chose.

`mix_experts` has four implementations of one function; `choose_implementation` says which is taken where.

* "blockwise": the pairs of a token and an expert, sorted by expert and padded per expert to whole blocks of rows; a
  loop over blocks, each reading its one expert's weights. Plain XLA. It reads the weights of chosen experts only, and
  computes at most `block_rows` - 1 rows too many per expert; on CPUs, with some pairs per expert, `ROW_STEP` - 1.
* "ragged": `jax.lax.ragged_dot` over the sorted pairs. XLA lowers it to a grouped kernel on TPUs, but on CPUs and GPUs
  (jax 0.12) to every expert for every row: for Qwen3-30B-A3B 128 times the arithmetic.
* "hopper": the same blocks as "blockwise", of 64 or 128 rows, multiplied all at once by `pallas_kernels.block_product`:
  three launches of a kernel for Hopper GPUs, 16-bit weights.
* "dense": every expert for every token, the unchosen ones weighted with zero. The oracle of the others, and as good
  where tokens choose half of the experts.

Weights may be those of one layer, or of a whole stack of layers and the number of the layer: cutting a layer out of the
stack first would copy all of its experts.

Axis letters: T tokens, X chosen experts per token, D model width, E experts, I width inside an expert, M blocks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import KernelUnavailableError
from pallas_kernels import block_product
from pallas_kernels._target import platform
from pallas_kernels.block_product import what_runs

IMPLEMENTATIONS = ("blockwise", "ragged", "hopper", "dense")
SMALLEST_SPREAD = 2
"""Up to this many experts per chosen one, computing all of them costs no more than grouping."""
LARGEST_BLOCK = 512
CACHE_BLOCK = 16
"""Rows that share a read of an expert's weights almost for free: blocks grow to this before padding is looked at."""
ROW_STEP = 4
"""Of a block that is not full a CPU computes a multiple of so many rows (XLA multiplies fewer bfloat16 rows by float32
copies). Smaller blocks in place of that would read an expert's weights more often.
"""
KERNEL_ROWS = (64, 128)
"""Rows of the kernel's blocks: the tensor cores multiply 64 whether they are filled or not."""
KERNEL_SPREAD = 4
"""Pairs per expert from which the kernel is taken: with fewer, a loop over the experts in use has few trips."""
PART_TOKENS = 4096
"""Forms without a loop over blocks take so many tokens at a time: they hold every pair's row several times over."""


class ExpertWeights(NamedTuple):
    """Gate and up [*lead,E,D,I], down [*lead,E,I,D]; lead is empty, or the axis of a stack of layers."""

    gate: Array
    up: Array
    down: Array


class _LayerExperts(NamedTuple):
    """One layer's experts where they lie, in a stack of all layers'.

    flat: the stack with layers and experts on one axis. experts: how many a layer has. first: index of the layer's
    first expert, may be traced.
    """

    flat: ExpertWeights
    activation: Callable[[Array], Array]
    experts: int
    first: Array | int


class ExpertBlocks(NamedTuple):
    """Pairs laid out in blocks of one expert each.

    tokens [M,rows]: each row's token, or numbers from T on, each once, where a block is not full.
    weights [M,rows]: what the expert's output is multiplied by. expert [M]: whose block it is. used: how many of the M
    blocks hold anything; they are the first ones. places [T,X]: each pair's row, M·rows for one that is left out.
    """

    tokens: Int[Array, "M rows"]
    weights: Float[Array, "M rows"]
    expert: Int[Array, " M"]
    used: Int[Array, ""]
    places: Int[Array, "T X"]


def choose_implementation(
    pairs: int, experts: int, chosen: int, x: Any = None, stack: ExpertWeights | None = None
) -> str:
    """Names the implementation for so many pairs of token and expert: the one that `mix_experts` takes by itself.

    "dense" where tokens choose half of the experts or more. On TPUs "ragged", except where there are fewer pairs than
    experts (decoding). On GPUs "hopper" where kernels are asked for (`pallas_kernels.preferring`, `targeting`), it can
    take the arrays, and there are `KERNEL_SPREAD` pairs per expert. Elsewhere "blockwise".

    Args:
      x, stack: what is to be multiplied, or shapes; without them no kernel is thought of.
    """
    if experts <= SMALLEST_SPREAD * chosen:
        return "dense"
    if platform() == "tpu":
        return "ragged" if pairs >= experts else "blockwise"
    if x is None or stack is None or platform() != "gpu" or pairs < KERNEL_SPREAD * experts:
        return "blockwise"

    rows = kernel_rows(pairs, experts)
    flat = (jax.ShapeDtypeStruct((1, *part.shape[-2:]), part.dtype) for part in stack)
    return "hopper" if all(what_runs(rows, x.dtype, part) == "gpu" for part in flat) else "blockwise"


def mix_experts(
    x: Float[Array, "T D"],
    index: Int[Array, "T X"],
    weights: Float[Array, "T X"],
    stack: ExpertWeights,
    activation: Callable[[Array], Array],
    *,
    layer: Int[Array, ""] | int | None = None,
    implementation: str | None = None,
    skip: bool = False,
) -> Float[Array, "T D"]:
    """Sums each token's chosen experts, weighted; products and sums in float32, the result too.

    Args:
      index: the experts that each token chose, none of them twice. Numbers outside 0 … E-1 are left out.
      weights: what their outputs are multiplied by, float32.
      layer: which layer of the stack; None for weights without an axis of layers.
      implementation: one of `IMPLEMENTATIONS`; None for what `choose_implementation` says.
      skip: "blockwise" looks at run time whether a block holds anything: where most pairs may be left out. (With
        `block_sizes` of several it always does.)

    Raises:
      KernelUnavailableError: an unknown implementation, or "hopper" where the kernel cannot run.
    """
    experts, pairs = stack.gate.shape[-3], index.size
    if implementation is None:
        implementation = choose_implementation(pairs, experts, index.shape[1], x, stack)
    if implementation not in IMPLEMENTATIONS:
        raise KernelUnavailableError(
            f"experts: got implementation {implementation!r}; expected one of {IMPLEMENTATIONS}"
        )
    if implementation == "dense":
        one = stack if layer is None else ExpertWeights(*(_pick(part, layer) for part in stack))
        return _dense(x, index, weights, one, activation)

    # A reshape of leading axes copies nothing, so that experts of all layers are one stack.
    flat = ExpertWeights(*(part.reshape(-1, *part.shape[-2:]) for part in stack))
    own = _LayerExperts(flat, activation, experts, 0 if layer is None else layer * experts)
    if implementation == "blockwise":
        return _blockwise(x, index, weights, own, skip)

    mix: Callable[..., Array] = _ragged if implementation == "ragged" else _by_kernel
    T = x.shape[0]
    if T <= PART_TOKENS:
        return mix(x, index, weights, own)

    # Stretches of tokens one after the other; the padding of the last one chooses no expert.
    parts = -(-T // PART_TOKENS)

    def cut(array: Array, fill: int) -> Array:
        padded = jnp.pad(array, ((0, parts * PART_TOKENS - T), (0, 0)), constant_values=fill)
        return padded.reshape(parts, PART_TOKENS, -1)

    cuts = (cut(x, 0), cut(index, experts), cut(weights, 0))
    mixed = jax.lax.map(lambda part: mix(*part, own), cuts)
    return mixed.reshape(-1, x.shape[1])[:T]


def spread(index: Int[Array, "*lead X"], weights: Float[Array, "*lead X"], experts: int) -> Float[Array, "*lead E"]:
    """Returns weights of the chosen experts as weights of all: zero for the others."""
    return jnp.sum(jax.nn.one_hot(index, experts, dtype=weights.dtype) * weights[..., None], axis=-2)


def expert_load(index: Int[Array, "T X"], experts: int) -> Int[Array, " E"]:
    """Returns how many tokens chose each expert, int32; numbers outside 0 … E-1 are not counted."""
    return jnp.sum(index.reshape(-1)[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)


def _sort_pairs(index: Array, experts: int) -> tuple[Array, Array, Array]:
    """Returns each pair's expert (`experts` for one that is left out), the order by expert, and pairs per expert."""
    pairs = index.reshape(-1)
    pairs = jnp.where((pairs >= 0) & (pairs < experts), pairs, experts)
    return pairs, jnp.argsort(pairs, stable=True), expert_load(index, experts)


def _gated(product: Callable[[Array, Array], Array], x: Array, parts: ExpertWeights, activation: Any) -> Array:
    """Returns down(activation(gate(x)) · up(x)) by this product; what is multiplied is rounded to the type of `x`."""
    inner = activation(product(x, parts.gate).astype(x.dtype)) * product(x, parts.up).astype(x.dtype)
    return product(inner, parts.down)


# --------------------------------------------------------------------------------------------------------- dense


def _dense(
    x: Array, index: Array, weights: Array, one: ExpertWeights, activation: Callable[[Array], Array]
) -> Float[Array, "T D"]:
    """Computes every expert for every token; the unchosen ones are weighted with zero."""

    def product(string, *parts):
        return jnp.einsum(string, *parts, preferred_element_type=jnp.float32)

    gate, up = (product("TD,EDI->TEI", x, part.astype(x.dtype)) for part in (one.gate, one.up))
    inner = activation(gate.astype(x.dtype)) * up.astype(x.dtype)
    inner = (inner * spread(index, weights, one.gate.shape[0])[..., None]).astype(x.dtype)
    return product("TEI,EID->TD", inner, one.down.astype(x.dtype))


# ----------------------------------------------------------------------------------------------------- blockwise


def block_rows(pairs: int, experts: int) -> int:
    """Returns rows of a block, a power of two: large for speed, but padding stays below a quarter of many pairs.

    With few pairs per expert, reading weights costs more than padded rows: then as many rows as an expert is likely to
    have.
    """
    quarter = max(pairs // (4 * experts), 1)
    likely = -(-pairs // experts)
    return min(max(1 << (quarter.bit_length() - 1), min(1 << (likely - 1).bit_length(), CACHE_BLOCK)), LARGEST_BLOCK)


def block_count(pairs: int, experts: int, rows: int) -> int:
    """Returns the most blocks that so many pairs can make, however they choose."""
    most = min(pairs, experts)
    return (pairs - most) // rows + most


def lay_out_blocks(index: Int[Array, "T X"], weights: Float[Array, "T X"], experts: int, rows: int) -> ExpertBlocks:
    """Sorts pairs by expert and pads each expert's to whole blocks."""
    T, X = index.shape
    count = block_count(T * X, experts, rows)
    pairs, order, sizes = _sort_pairs(index, experts)
    # Blocks up to each expert's last, and by how many rows its pairs move behind the padding of those before it.
    ends = jnp.cumsum(-(-sizes // rows))
    shift = (ends - -(-sizes // rows)) * rows - (jnp.cumsum(sizes) - sizes)
    sort = pairs[order]
    # A pair that is left out goes behind the last block, where writing is dropped.
    place = jnp.where(sort < experts, jnp.arange(T * X) + shift[jnp.minimum(sort, experts - 1)], count * rows)

    def put(empty, values):
        return empty.at[place].set(values, mode="drop").reshape(count, rows)

    tokens = put(T + jnp.arange(count * rows, dtype=jnp.int32), (order // X).astype(jnp.int32))
    scale = put(jnp.zeros(count * rows, weights.dtype), weights.reshape(-1)[order])
    expert = jnp.sum(ends <= jnp.arange(count)[:, None], axis=1)
    places = jnp.zeros_like(place).at[order].set(jnp.minimum(place, count * rows), unique_indices=True).reshape(T, X)
    return ExpertBlocks(tokens, scale, jnp.minimum(expert, experts - 1), ends[-1], places)


def block_sizes(rows: int, skip: bool) -> tuple[int, ...]:
    """Returns how many rows of a block of `rows` the loop may compute, rising: the first number that holds its pairs.

    All of them, or none with `skip`; on CPUs, where experts have a few to some dozen pairs, every `ROW_STEP` of them.
    (Elsewhere a branch at run time is a wait for the device.)
    """
    if platform() == "cpu" and 2 * ROW_STEP <= rows <= CACHE_BLOCK:
        return tuple(range(0, rows + 1, ROW_STEP))
    return (0, rows) if skip else (rows,)


def _blockwise(x: Array, index: Array, weights: Array, own: _LayerExperts, skip: bool) -> Float[Array, "T D"]:
    """Adds up blocks in a loop, each of which reads the weights of its one expert."""
    rows = block_rows(index.size, own.experts)
    blocks, sizes = lay_out_blocks(index, weights, own.experts, rows), block_sizes(rows, skip)

    def add(size: int, mixed: Array, tokens: Array, scale: Array, expert: Array) -> Array:
        if size == 0:
            return mixed
        tokens, scale = tokens[:size], scale[:size]
        inside = x.at[tokens].get(mode="fill", fill_value=0)
        one = ExpertWeights(*(_pick(part, own.first + expert).astype(x.dtype) for part in own.flat))
        out = _gated(_product, inside, one, own.activation) * scale[:, None]
        # A token is in a block once, and so is every number that stands for none.
        return mixed.at[tokens].add(out, mode="drop", unique_indices=True)

    # The pairs of a block are its first rows.
    branches = [functools.partial(add, size) for size in sizes]
    held = jnp.sum(blocks.tokens < len(x), axis=1)
    least = jnp.sum(held[:, None] > jnp.array(sizes[:-1], jnp.int32), axis=1)

    def step(mixed: Array, block: tuple[Array, ...]) -> tuple[Array, None]:
        which, *parts = block
        return jax.lax.switch(which, branches, mixed, *parts), None

    numbered = (least, blocks.tokens, blocks.weights, blocks.expert)
    return jax.lax.scan(step, jnp.zeros_like(x, jnp.float32), numbered)[0]


def _pick(part: Array, at: Array | int) -> Array:
    return jax.lax.dynamic_index_in_dim(part, at, 0, keepdims=False)


def _product(x: Array, weight: Array) -> Array:
    return jnp.matmul(x, weight, preferred_element_type=jnp.float32)


# -------------------------------------------------------------------------------------------------------- ragged


def _ragged(x: Array, index: Array, weights: Array, own: _LayerExperts) -> Float[Array, "T D"]:
    """Multiplies the sorted pairs by `jax.lax.ragged_dot`, and puts them back in order."""
    (T, X), flat = index.shape, own.flat
    _, order, sizes = _sort_pairs(index, own.experts)
    # Experts of other layers are groups without rows.
    groups = jax.lax.dynamic_update_slice(jnp.zeros(len(flat.gate), jnp.int32), sizes, (own.first,))

    def product(x, part):
        return jax.lax.ragged_dot(x, part.astype(x.dtype), groups, preferred_element_type=jnp.float32)

    out = _gated(product, x[order // X], flat, own.activation).astype(x.dtype)
    # Rows behind the last group are whatever the kernel left there.
    out = jnp.where((jnp.arange(T * X) < jnp.sum(sizes))[:, None], out, 0)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(T * X), unique_indices=True)
    return jnp.einsum("TXD,TX->TD", out[back].reshape(T, X, -1), weights, preferred_element_type=jnp.float32)


# -------------------------------------------------------------------------------------------------------- hopper


def kernel_rows(pairs: int, experts: int) -> int:
    """Returns rows of a block for the kernel: as `block_rows`, but no fewer and no more than it can take."""
    return min(max(block_rows(pairs, experts), KERNEL_ROWS[0]), KERNEL_ROWS[-1])


def _by_kernel(x: Array, index: Array, weights: Array, own: _LayerExperts) -> Float[Array, "T D"]:
    """Multiplies all blocks at once by a kernel, and gathers each token's rows."""
    blocks = lay_out_blocks(index, weights, own.experts, kernel_rows(index.size, own.experts))
    which = (own.first + blocks.expert).astype(jnp.int32)

    def product(x, part):
        return block_product(x, part, which, blocks.used.astype(jnp.int32), implementation="gpu")

    inside = x.at[blocks.tokens.reshape(-1)].get(mode="fill", fill_value=0)
    out = _gated(product, inside, own.flat, own.activation)
    # Rows of blocks that hold nothing are anything; no pair's place is there.
    out = out.at[blocks.places].get(mode="fill", fill_value=0)
    return jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1)
