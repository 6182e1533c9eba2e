"""The XLA path of rotate_patch: what every kernel is held against."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


def widened(value: Num[Array, "..."], scale: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """The float32 numbers that stored ones and their scale stand for."""
    value = value.astype(jnp.float32)
    return value if scale is None else value * scale


def flat(leaf: Array, inner: int) -> Array:
    """A leaf with its leading dimensions merged into one."""
    return leaf.reshape(-1, *leaf.shape[leaf.ndim - inner :])


def product(u: Float[Array, "..."], v: Float[Array, "..."], heads: int) -> Float[Array, "..."]:
    """u v in float32, as [..., T, K, H], from joint factors ([..., T, M], [..., M, K·H])."""
    delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return delta.reshape(*delta.shape[:-1], heads, delta.shape[-1] // heads)


def product_per_head(u: Float[Array, "... K T M"], v: Float[Array, "... K M H"]) -> Float[Array, "... T K H"]:
    """u v of per-head factors, float32."""
    delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.swapaxes(delta, -3, -2)


def rotate(
    x: Float[Array, "..."], cos: Float[Array, "..."], sin: Float[Array, "..."], layout: str
) -> Float[Array, "..."]:
    """Rotates the first 2·cos.shape[-1] channels of float32 x [..., T, K, H]; the rest passes through.

    cos and sin [..., T, R/2] broadcast over x's leading dimensions. `half`: channel i pairs with i + R/2; `pairs`: 2i
    with 2i + 1.
    """
    rotary = 2 * cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if layout == "half":
        first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    else:
        first, second = x[..., 0:rotary:2], x[..., 1:rotary:2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if layout == "half":
        low, high = spread(turned[0], 0, x.shape[-1]), spread(turned[1], rotary // 2, x.shape[-1])
        result = jnp.where(_below(rotary // 2, low), low, high)
    else:
        pairs = jnp.stack(turned, axis=-1)
        result = spread(pairs.reshape(*pairs.shape[:-2], rotary), 0, x.shape[-1])
    return result if rotary == x.shape[-1] else jnp.where(_below(rotary, result), result, x)


def spread(part: Num[Array, "..."], first: int, width: int) -> Num[Array, "..."]:
    """`part` as the channels from `first` on of `width`, among zeros.

    Parts are joined by choosing between them so spread: XLA for CPUs fuses no concatenation of innermost axes, but
    writes what is joined and reads it again. For TPUs and GPUs it compiles both to the same number of passes.
    """
    if part.shape[-1] == width:
        return part
    return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(first, width - first - part.shape[-1])])


def _below(limit: int, like: Array) -> Bool[Array, "..."]:
    """Whether a channel comes before `limit`; of the shape of `like`, and sharded as it where its type says how."""
    place = jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1, out_sharding=jax.typeof(like).sharding)
    return place < limit


def rotate_patch(
    x: Num[Array, "..."],
    cos: Float[Array, "..."] | None,
    sin: Float[Array, "..."] | None,
    u: Num[Array, "..."] | None,
    v: Num[Array, "..."] | None,
    dense: Float[Array, "..."] | None,
    length: Int[Array, ""] | None,
    x_scale: Float[Array, "..."] | None = None,
    u_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    *,
    per_head: bool,
    layout: str,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "..."]:
    """R · (x + u v + dense) in `out_dtype`; tokens from `length` on are zero. Shapes as in `api.rotate_patch`."""
    plan = {"per_head": per_head, "layout": layout, "out_dtype": x.dtype if out_dtype is None else out_dtype}
    at_once = functools.partial(_rotate_patch, **plan)
    arrays = {"cos": cos, "sin": sin, "length": length}
    layered = {"x": x, "u": u, "v": v, "dense": dense, "x_scale": x_scale, "u_scale": u_scale, "v_scale": v_scale}
    if u is None or not _by_layer(x, cos, layered):
        return at_once(**arrays, **layered)
    # XLA writes a product out in float32. On a CPU that is more memory than all else here touches, and the system has
    # to give it anew each call; one layer's stays in the cache.
    return jax.lax.platform_dependent(
        arrays,
        layered,
        cpu=lambda arrays, layered: jax.lax.map(lambda one: at_once(**arrays, **one), layered),
        default=lambda arrays, layered: at_once(**arrays, **layered),
    )


def _by_layer(x: Array, cos: Array | None, layered: dict[str, Array | None]) -> bool:
    """Whether the first axis is one of layers, of all that have layers; and not one that is sharded by its type."""
    whole = x.ndim > 3 and jax.typeof(x).sharding.spec[0] is None and (cos is None or cos.ndim < x.ndim - 1)
    own = [leaf for name, leaf in layered.items() if leaf is not None]
    return whole and all(leaf.shape[: x.ndim - 3] == x.shape[:-3] for leaf in own)


def _rotate_patch(
    x, cos, sin, u, v, dense, length, x_scale, u_scale, v_scale, *, per_head: bool, layout: str, out_dtype
) -> Array:
    value = widened(x, x_scale)
    if u is not None and v is not None:
        u, v = _factor(u, u_scale), _factor(v, v_scale)
        value = value + (product_per_head(u, v) if per_head else product(u, v, x.shape[-2]))
    if dense is not None:
        value = value + dense.astype(jnp.float32)
    if cos is not None and sin is not None:
        value = rotate(value, cos, sin, layout)
    if length is not None:
        value = jnp.where((jnp.arange(x.shape[-3]) < length)[:, None, None], value, 0.0)
    return value.astype(out_dtype)


def _factor(value: Num[Array, "..."], scale: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """A factor as the product takes it: eight-bit and scaled ones widened, others as they are stored."""
    return value if scale is None and value.dtype.itemsize > 1 else widened(value, scale)
