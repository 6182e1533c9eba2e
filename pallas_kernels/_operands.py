"""The arrays of one call of `rotate_patch` or `splice`: how they must fit, and what every kernel refuses."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from .errors import KernelError

LAYOUTS = ("half", "pairs")
RANK_LIMIT = 256
"""Rank of factors that kernels take at most: a block keeps all of v's rows in fast memory."""
RANK_STEP = 16
"""What kernels pad the rank to a multiple of."""
LANES = 128
"""Numbers in a row of a TPU's register: what engines for TPUs pad the rows of their pools to a multiple of."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scale", "least"),
    meta_fields=("heads", "group", "by_token"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """Cached vectors in four bits: least + scale · code in float32, rounded once to bfloat16.

    Attributes:
      codes: uint8 [..., T, K·H/2]; byte j of a token has column j in its lower half, and column j + K·H/2 in its upper.
      scale: bfloat16 [..., groups, K·H] of groups of tokens, or, `by_token`, [..., T, groups] of groups of columns.
      least: likewise, what code 0 stands for; None: code 8 is zero.
      heads: K. group: numbers in a group; the last may be shorter.
    """

    codes: Any  # arrays, or, as leaves of a tree, whatever stands for them
    scale: Any
    least: Any
    heads: int
    group: int
    by_token: bool

    dtype = jnp.dtype(jnp.bfloat16)
    """What it stands for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded vectors, [..., T, K, H]."""
        *leading, columns = self.codes.shape
        return (*leading, self.heads, 2 * columns // self.heads)

    @property
    def ndim(self) -> int:
        """Number of axes of the decoded vectors."""
        return len(self.shape)


class Operands(NamedTuple):
    """What R · (x + u v + dense) is made of, as arrays or as their shapes; what is not given is None.

    Attributes:
      x: cached vectors [..., T, K, H], an array or `Codes`.
      cos, sin: float32 tables of angles, `half` being half of the channels that rotate.
      u, v: factors; v has K·H columns.
      dense: a full correction.
    """

    x: Any
    cos: Float[Array, "*angles T half"] | None = None
    sin: Float[Array, "*angles T half"] | None = None
    u: Float[Array, "*left T M"] | None = None
    v: Float[Array, "*right M columns"] | None = None
    dense: Float[Array, "*corrected T K H"] | None = None

    @property
    def rotary(self) -> int:
        """Channels that rotate."""
        return 0 if self.cos is None else 2 * self.cos.shape[-1]

    @property
    def rank(self) -> int:
        """Rank of the factors; 0 where there are none."""
        return 0 if self.u is None else self.u.shape[-1]

    def check(self, operation: str, layout: str) -> None:
        """Refuses operands that do not fit each other.

        Args:
          operation: for messages. layout: how a rotary pair lies in a head.

        Raises:
          KernelError: unknown layout word, shapes that do not fit, or a dtype that is not floating-point.
        """
        if layout not in LAYOUTS:
            raise KernelError(f"{operation}: got layout {layout!r}; expected one of {LAYOUTS}")
        if (self.cos is None) != (self.sin is None) or (self.u is None) != (self.v is None):
            raise KernelError(f"{operation}: got one of a pair alone; expected cos with sin, and u with v")
        for name, leaf in zip(self._fields, self, strict=True):
            if leaf is not None and not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise KernelError(f"{operation}: got {name} of dtype {leaf.dtype}; expected a floating-point dtype")

        tokens, heads, width = self.x.shape[-3:]
        if self.cos is not None and self.sin is not None:
            cos, sin = self.cos.shape, self.sin.shape
            if cos != sin or len(cos) < 2 or 2 * cos[-1] > width or cos[-2] not in (1, tokens):
                expected = f"[..., {tokens}, R/2] with R ≤ {width}"
                raise KernelError(f"{operation}: got cos {cos} and sin {sin}; expected {expected}")

        if self.u is not None and self.v is not None:
            u, v, rank = self.u.shape, self.v.shape, self.rank
            want_u, want_v = (tokens, rank), (rank, heads * width)
            if u[-2:] != want_u or v[-2:] != want_v:
                expected = f"[..., {want_u}] and [..., {want_v}]"
                raise KernelError(f"{operation}: got u {u} and v {v}; expected {expected}")

        if self.dense is not None and self.dense.shape[-3:] != self.x.shape[-3:]:
            raise KernelError(f"{operation}: got dense {self.dense.shape}; expected [..., {self.x.shape[-3:]}]")

    def with_angles_scaled(self, scale: float) -> "Operands":
        """Multiplies cos and sin, and so what rotates; by 1 nothing, so that no bit changes."""
        if scale == 1.0 or self.cos is None or self.sin is None:
            return self
        return self._replace(cos=self.cos * scale, sin=self.sin * scale)

    def refuse(self, out_dtype: Any) -> None:
        """Raises NotImplementedError for what no kernel takes, TPU or GPU."""
        leading, tokens = self.x.shape[:-3], self.x.shape[-3]
        foreign = []
        for name, inner in (("u", 2), ("v", 2)):
            leaf = getattr(self, name)
            outer = () if leaf is None else leaf.shape[:-inner]
            if any(size != 1 for size in outer) and outer != leading[len(leading) - len(outer) :]:
                foreign.append(f"{name} with leading dimensions {outer}; expected 1, or the last of {leading}")
        angles = () if self.cos is None else self.cos.shape[:-1]
        refuse(
            (self.x.dtype != jnp.bfloat16, f"x of {self.x.dtype}; expected bfloat16, or codes of four bits"),
            (jnp.dtype(out_dtype) != jnp.bfloat16, f"a result in {jnp.dtype(out_dtype)}; expected bfloat16"),
            (self.dense is not None, "a dense correction; expected factors"),
            (self.rank > RANK_LIMIT, f"rank {self.rank}; expected at most {RANK_LIMIT}"),
            (self.u is not None and not self.rank, "rank 0; expected 1 or more"),
            (0 in self.x.shape, f"an empty array {self.x.shape}"),
            (bool(foreign), "; ".join(foreign)),
            # Blocks keep a table of one layer while they go through the layers.
            (bool(angles) and angles[-1] != tokens, f"cosines of {angles[-1:]} tokens; expected {tokens}"),
            (any(size != 1 for size in angles[:-1]), f"cosines {angles}; expected one table for all layers"),
        )


def refuse(*checks: tuple[bool, str]) -> None:
    """Raises NotImplementedError with the reason of the first condition that holds."""
    for condition, reason in checks:
        if condition:
            raise NotImplementedError(reason)


def flat(leaf: Num[Array, "..."], inner: int) -> Num[Array, "..."]:
    """Merges a leaf's leading dimensions, all but the last `inner`, into one."""
    return leaf.reshape(-1, *leaf.shape[leaf.ndim - inner :])


def spread(part: Num[Array, "*axes _"], first: int, width: int) -> Num[Array, "*axes {width}"]:
    """Returns `part` as the channels from `first` on of `width`, among zeros.

    Parts are joined by choosing between them so spread: XLA for CPUs fuses no concatenation of innermost axes, but
    writes what is joined and reads it again. For TPUs and GPUs it compiles both to the same number of passes.
    """
    if part.shape[-1] == width:
        return part
    return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(first, width - first - part.shape[-1])])


def padded_width(width: int, lanes: int = LANES) -> int:
    """Returns the least multiple of `lanes` that is not below `width`."""
    return -(-width // lanes) * lanes


def bfloat16_factors(
    u: Float[Array, "*left T M"], v: Float[Array, "*right M columns"]
) -> tuple[Float[Array, "lefts T N"], Float[Array, "rights N columns"]]:
    """Makes factors in bfloat16 whose product is that of u and v to 16 bits; leading dimensions merged, and the rank
    padded to a multiple of 16.

    A float32 factor becomes the sum of two pieces of 8 bits of significand; the product of both second pieces is left
    out. They lie one behind the other along the rank.
    """
    us, vs = _pieces(flat(u, 2)), _pieces(flat(v, 2))
    kept = [(left, right) for left in range(len(us)) for right in range(len(vs)) if left + right < 2]
    rank = len(kept) * u.shape[-1]
    left = jnp.concatenate([us[number] for number, _ in kept], -1)
    right = jnp.concatenate([vs[number] for _, number in kept], -2)
    right = jnp.pad(right, [(0, 0), (0, -rank % RANK_STEP), (0, 0)])
    return spread(left, 0, padded_width(rank, RANK_STEP)), right


def _pieces(value: Array) -> list[Array]:
    """Splits a value into bfloat16 numbers whose sum it is to 16 bits, the larger first; bfloat16 is one piece."""
    if value.dtype == jnp.bfloat16:
        return [value]
    value = value.astype(jnp.float32)
    # Not a conversion there and back: XLA may leave that out.
    first = jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
    return [first.astype(jnp.bfloat16), (value - first).astype(jnp.bfloat16)]
