"""Page formats of other engines, made of a pool {channel: [L, P, O, K, H]} and back.

Every round trip keeps every bit. `RAGGED`, `JOINED` and `LATENT` write chunks into an engine's own pages (`splice`),
rotate keys there and read tokens out, without converting any page that is not theirs.

jax's paged attention reads k and v apart, heads outermost. jax's ragged paged attention (TPU) reads them interleaved,
K0 V0 K1 V1 …, each padded to a multiple of 128 lanes; tpu-inference's for heads of 64 reads k and v of a head joined in
one row of 128. Engines with latent attention keep one row per token: the latent, then the rope key, each padded to 128
lanes. Packed heads are filled up to the packing. Padding is zero and is dropped on the way back. A padded pool
(`make_pool(padded=True)`) gives the same pages; to get one back, say `padded`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.splice import LANES, padded_width

from ..core import KVLayout, Pool, arrays_of, check_pool, trimmed
from ..errors import LayoutError, ShapeError
from .page_layout import widened


def _channels(
    layout: KVLayout, pool: Pool, names: tuple[str, str], what: str, lanes: int = 1
) -> tuple[Float[Array, "L P O K _"], Float[Array, "L P O K _"]]:
    """Returns a pool's two channels, each padded to a multiple of `lanes`, after checking that they are these."""
    _check_names(layout, names, what)
    check_pool(layout, pool)
    # A padded pool may have other lanes than are asked for, so its padding is removed first.
    first, second = (widened(value, padded_width(value.shape[-1], lanes)) for value in trimmed(layout, pool).values())
    return first, second


def _made_pool(layout: KVLayout, pool: Pool, padded: bool) -> dict[str, Array]:
    """Returns a pool made of an engine's pages, after checking it; `padded` as in `make_pool`."""
    check_pool(layout, pool, padded=False)
    lanes = LANES if padded else 1
    return {name: widened(value, padded_width(value.shape[-1], lanes)) for name, value in arrays_of(pool).items()}


def _check_names(layout: KVLayout, names: tuple[str, ...], what: str) -> None:
    if layout.names != names:
        raise LayoutError(f"{what}: got channels {layout.names}; expected {names}")


def to_paged_attention(layout: KVLayout, pool: Pool) -> tuple[Float[Array, "L K P O H"], Float[Array, "L K P O H"]]:
    """Makes k_pages and v_pages of `jax.experimental.pallas.ops.{tpu,gpu}.paged_attention`, one entry per layer.

    Raises:
      LayoutError: not a layout of k and v. ShapeError, DtypeError: another pool than the layout's.
    """
    # Heads outermost.
    k, v = _channels(layout, pool, ("k", "v"), "to_paged_attention")
    return jnp.transpose(k, (0, 3, 1, 2, 4)), jnp.transpose(v, (0, 3, 1, 2, 4))


def from_paged_attention(
    layout: KVLayout, k_pages: Float[Array, "L K P O H"], v_pages: Float[Array, "L K P O H"], *, padded: bool = False
) -> dict[str, Float[Array, "L P O K _"]]:
    """Inverts `to_paged_attention`; `padded` as in `make_pool`.

    Raises:
      As `to_paged_attention`.
    """
    _check_names(layout, ("k", "v"), "from_paged_attention")
    pool = {"k": jnp.transpose(k_pages, (0, 2, 3, 1, 4)), "v": jnp.transpose(v_pages, (0, 2, 3, 1, 4))}
    return _made_pool(layout, pool, padded)


def to_ragged_paged_attention(
    layout: KVLayout, pool: Pool, *, lanes: int = LANES, packing: int | None = None
) -> Float[Array, "..."]:
    """Interleaves K and V by head for jax's ragged paged attention: [L, P, O, 2·K, H'] with H padded to H'.

    Args:
      lanes: what H is padded to a multiple of.
      packing: splits 2·K, filled up with zeros, into [2·K / packing, packing], as tpu-inference and sglang-jax store it
        (32 bits ÷ the dtype's bits: 1, 2 or 4); None leaves it whole, as jax's own kernel wants it.

    Raises:
      LayoutError: not a layout of k and v. ShapeError, DtypeError: another pool, or a packing that is no power of two.
    """
    k, v = _channels(layout, pool, ("k", "v"), "to_ragged_paged_attention", lanes)
    # K0 V0 K1 V1 …: the key and the value of a head are neighbours.
    both = jnp.stack([k, v], axis=-2)
    both = both.reshape(*k.shape[:-2], 2 * k.shape[-2], k.shape[-1])
    return both if packing is None else _packed(both, packing, "to_ragged_paged_attention")


def _packed(vectors: Array, packing: int, what: str) -> Array:
    """Heads on an axis before the last as [N, packing], filled up with zeros."""
    if packing not in (1, 2, 4, 8):
        raise ShapeError(f"{what}: got packing {packing}; expected 1, 2, 4 or 8")
    heads = vectors.shape[-2]
    full = -(-heads // packing) * packing
    vectors = jnp.pad(vectors, [(0, 0)] * (vectors.ndim - 2) + [(0, full - heads), (0, 0)])
    return vectors.reshape(*vectors.shape[:-2], full // packing, packing, vectors.shape[-1])


def _unpacked(pages: Array, heads: int) -> Array:
    """Inverts `_packed`, where the pages hold these heads; else all that they hold, to be refused."""
    # Only what is less than a packing is filling; more vectors are other heads.
    whole = pages.reshape(*pages.shape[:-3], -1, pages.shape[-1])
    return whole[..., :heads, :] if whole.shape[-2] - heads in range(pages.shape[-2]) else whole


def from_ragged_paged_attention(
    layout: KVLayout, pages: Float[Array, "..."], *, packed: bool = False, padded: bool = False
) -> dict[str, Float[Array, "L P O K _"]]:
    """Inverts `to_ragged_paged_attention`; `packed` where a packing was given, `padded` as in `make_pool`.

    Raises:
      As `to_ragged_paged_attention`.
    """
    _check_names(layout, ("k", "v"), "from_ragged_paged_attention")
    heads, width = layout.channel("k").heads, layout.channel("k").width
    # Packing fills heads up with zeros, which are dropped here.
    whole = _unpacked(pages, 2 * heads) if packed else pages
    if whole.ndim != 5 or whole.shape[-2] != 2 * heads or whole.shape[-1] < width:
        raise ShapeError(
            f"from_ragged_paged_attention: got pages {pages.shape}; expected {2 * heads} heads of {width} or more"
        )
    pairs = whole.reshape(*whole.shape[:-2], heads, 2, whole.shape[-1])
    pool = {"k": pairs[..., 0, :width], "v": pairs[..., 1, :width]}
    return _made_pool(layout, pool, padded)


def to_joined_heads(layout: KVLayout, pool: Pool, *, packing: int | None = None) -> Float[Array, "L P O N packing F"]:
    """Joins k and v of a head in one row, [L, P, O, K / packing, packing, 2·H]: tpu-inference's pages for heads of 64.

    Args:
      packing: heads on an axis of their own, filled up with zeros; None takes 32 bits ÷ the dtype's bits.

    Raises:
      LayoutError: not a layout of k and v. ShapeError, DtypeError: another pool, or a packing that is no power of two.
    """
    both = jnp.concatenate(_channels(layout, pool, ("k", "v"), "to_joined_heads"), axis=-1)
    # As many heads as fill 32 bits, the unit of a TPU's registers.
    return _packed(both, 4 // both.dtype.itemsize if packing is None else packing, "to_joined_heads")


def from_joined_heads(
    layout: KVLayout, pages: Float[Array, "L P O N packing F"], *, padded: bool = False
) -> dict[str, Float[Array, "L P O K _"]]:
    """Inverts `to_joined_heads`; `padded` as in `make_pool`.

    Raises:
      As `to_joined_heads`.
    """
    _check_names(layout, ("k", "v"), "from_joined_heads")
    heads, width = layout.channel("k").heads, layout.channel("k").width
    whole = _unpacked(pages, heads)
    if whole.shape[-2:] != (heads, 2 * width):
        raise ShapeError(f"from_joined_heads: got pages {pages.shape}; expected {heads} heads of {width} + {width}")
    return _made_pool(layout, {"k": whole[..., :width], "v": whole[..., width:]}, padded)


def to_latent_rows(
    layout: KVLayout, pool: Pool, *, lanes: int = LANES, packing: int | None = None
) -> Float[Array, "..."]:
    """Joins ckv and kpe to one row per token, [L, P, O / packing, packing, C' + R'], each padded to `lanes`.

    Args:
      packing: tokens per packed row; None takes 32 bits ÷ the dtype's bits, as sglang-jax does and tpu-inference did;
        tpu-inference 0.32 takes 32 (its `MLA_KV_PACKING_SIZE`).

    Raises:
      LayoutError: not a latent layout. ShapeError, DtypeError: another pool, or a page that does not pack.
    """
    latent, key = _channels(layout, pool, ("ckv", "kpe"), "to_latent_rows", lanes)
    rows = jnp.concatenate([latent[..., 0, :], key[..., 0, :]], axis=-1)

    # Tokens of a page are packed among themselves, so that a page stays in one piece.
    page_size = rows.shape[2]
    packing = 4 // rows.dtype.itemsize if packing is None else packing
    if page_size % packing:
        raise ShapeError(f"to_latent_rows: got packing {packing}; expected a divisor of the page size {page_size}")
    return rows.reshape(*rows.shape[:2], page_size // packing, packing, rows.shape[-1])


def from_latent_rows(
    layout: KVLayout, rows: Float[Array, "L P N packing F"], *, lanes: int = LANES, padded: bool = False
) -> dict[str, Float[Array, "L P O 1 _"]]:
    """Inverts `to_latent_rows`; `padded` as in `make_pool`.

    Raises:
      As `to_latent_rows`.
    """
    _check_names(layout, ("ckv", "kpe"), "from_latent_rows")
    latent, rope = (layout.channel(name).width for name in layout.names)
    # The rope key begins where the padded latent ends.
    offset = padded_width(latent, lanes)
    if rows.shape[-1] != offset + padded_width(rope, lanes):
        raise ShapeError(
            f"from_latent_rows: got rows of {rows.shape[-1]}; expected {offset} + {padded_width(rope, lanes)} numbers"
        )
    flat = rows.reshape(*rows.shape[:2], rows.shape[2] * rows.shape[3], 1, rows.shape[-1])
    pool = {"ckv": flat[..., :latent], "kpe": flat[..., offset : offset + rope]}
    return _made_pool(layout, pool, padded)
