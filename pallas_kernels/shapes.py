"""Shapes that tests, benchmarks and the accelerator script share, and arguments of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._operands import Codes


class ChunkShape(NamedTuple):
    """A chunk of one channel: x [layers, tokens, heads, width], of which `rotary` channels rotate, factors of a rank.

    Attributes:
      layout: how rotary pairs lie. group: tokens or, `by_token`, columns that share a scale; 0: x is bfloat16.
    """

    name: str
    layers: int
    tokens: int
    heads: int
    width: int
    rotary: int
    rank: int
    layout: str = "half"
    group: int = 0
    by_token: bool = False

    @property
    def x(self) -> tuple[int, int, int, int]:
        """Shape of x."""
        return self.layers, self.tokens, self.heads, self.width

    def pool(self, pages: int, page_size: int, width: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a pool for such chunks, [layers, pages, page_size, heads, width]."""
        return self.layers, pages, page_size, self.heads, width or self.width


SMALL = (
    ChunkShape("gqa", 2, 77, 4, 128, 128, 5),
    ChunkShape("mha", 1, 64, 8, 128, 128, 0),
    ChunkShape("pairs", 2, 67, 2, 128, 128, 3, "pairs"),
    ChunkShape("rope_key", 2, 70, 1, 64, 64, 8),
    ChunkShape("rope_key_pairs", 1, 9, 1, 64, 64, 3, "pairs"),
    ChunkShape("latent", 2, 130, 1, 256, 0, 17),
    ChunkShape("values", 2, 40, 2, 128, 0, 32),
    ChunkShape("keys_4_bits", 2, 77, 4, 128, 128, 5, group=32),
    ChunkShape("keys_4_bits_by_feature", 1, 70, 2, 128, 128, 0, group=70),
    ChunkShape("values_4_bits", 2, 77, 2, 128, 0, 9, group=32, by_token=True),
    ChunkShape("latent_4_bits", 1, 70, 1, 256, 0, 3, group=32, by_token=True),
)
"""One shape for each path of the kernels: odd tokens, ranks that are no multiple of 8."""

PRODUCTION = (
    ChunkShape("qwen2_5_vl_7b", 28, 1024, 4, 128, 128, 32),
    ChunkShape("kimi_vl_rope", 27, 1024, 1, 64, 64, 32),
    ChunkShape("kimi_vl_latent", 27, 1024, 1, 512, 0, 32),
    ChunkShape("llava_1_5_7b", 32, 576, 32, 128, 128, 32),
    ChunkShape("qwen2_5_vl_7b_4_bits", 28, 1024, 4, 128, 128, 32, group=32),
    ChunkShape("qwen2_5_vl_7b_values_4_bits", 28, 1024, 4, 128, 0, 32, group=32, by_token=True),
)
"""Channels of released models: GQA, the two of MLA, MHA, and GQA kept in four bits."""
TOKENS, RANKS, PAGE_SIZES = (256, 1024, 4096, 16384), (0, 8, 32, 64), (16, 64)


class MatrixShape(NamedTuple):
    """Matrices [*batch, tokens, features] to factorise, and the rank asked for."""

    name: str
    batch: tuple[int, ...]
    tokens: int
    features: int
    rank: int


MATRICES = (
    MatrixShape("tall", (2,), 40, 24, 4),
    MatrixShape("wide", (), 12, 48, 6),
    MatrixShape("full", (3,), 8, 20, 8),
    MatrixShape("batched", (2, 3), 30, 16, 1),
)
LARGE_MATRICES = (
    MatrixShape("qwen2_5_vl_7b", (28,), 1024, 512, 32),
    MatrixShape("kimi_vl_latent", (27,), 1024, 512, 32),
)


def arguments_of(shape: ChunkShape, factors: str = "bfloat16", dtype: str = "bfloat16") -> dict[str, Any]:
    """Returns what `rotate_patch` takes for a shape, as shapes and dtypes.

    Args:
      factors: dtype of u and v. dtype: of x, where it is not in four bits.
    """
    layers, tokens, heads, width = shape.x
    columns = heads * width
    x: Any = jax.ShapeDtypeStruct(shape.x, dtype)
    if shape.group:
        count = -(-(columns if shape.by_token else tokens) // shape.group)
        groups = (layers, tokens, count) if shape.by_token else (layers, count, columns)
        scale: Any = jax.ShapeDtypeStruct(groups, jnp.bfloat16)
        codes: Any = jax.ShapeDtypeStruct((layers, tokens, columns // 2), jnp.uint8)
        x = Codes(codes, scale, scale, heads, shape.group, shape.by_token)
    given: dict[str, Any] = {"x": x}
    if shape.rotary:
        given |= dict.fromkeys(("cos", "sin"), jax.ShapeDtypeStruct((tokens, shape.rotary // 2), jnp.float32))
    if shape.rank:
        given["u"] = jax.ShapeDtypeStruct((layers, tokens, shape.rank), factors)
        given["v"] = jax.ShapeDtypeStruct((layers, shape.rank, columns), factors)
    return given


def draw(shape: ChunkShape, key: jax.Array, factors: str = "bfloat16", dtype: str = "bfloat16") -> dict[str, Any]:
    """Draws arguments of a shape: normal numbers, angles up to 2π, codes of all values, scales up to 1/4."""
    given = arguments_of(shape, factors, dtype)
    leaves, structure = jax.tree.flatten(given)
    drawn = []
    for number, leaf in enumerate(leaves):
        own = jax.random.fold_in(key, number)
        if leaf.dtype == jnp.uint8:
            drawn.append(jax.random.bits(own, leaf.shape, jnp.uint8))
        else:
            drawn.append(jax.random.normal(own, leaf.shape, jnp.float32).astype(leaf.dtype))
    given = jax.tree.unflatten(structure, drawn)
    if shape.group:
        scale = jnp.abs(given["x"].scale) / 8
        given["x"] = Codes(given["x"].codes, scale, given["x"].least, shape.heads, shape.group, shape.by_token)
    if shape.rotary:
        angle = jax.random.uniform(jax.random.fold_in(key, len(leaves)), given["cos"].shape, maxval=2 * jnp.pi)
        given |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    return given
