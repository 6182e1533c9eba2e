"""The arrays of one call of `rotate_patch` or `splice`: how they must fit, and what every kernel refuses."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from .errors import KernelError

LAYOUTS = ("half", "pairs")
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that may carry scales."""
WIDE = ("bfloat16", "float16", "float32", "float64")
KERNEL_DTYPES = ("bfloat16", "float32")
"""What kernels read and write, beside `NARROW`, which they only read."""
RANK_LIMIT = 256
"""Rank of factors that kernels take at most: a block keeps all of v's rows in fast memory."""
LANES = 128
"""Numbers in a row of a TPU's register: what engines for TPUs pad the rows of their pools to a multiple of."""
INNER_AXES = {"cos": 2, "u": 2, "v": 2, "dense": 3, "x_scale": 3, "u_scale": 2, "v_scale": 2}
"""How many of an operand's last axes are its own; those before them broadcast over x's leading dimensions."""


class Operands(NamedTuple):
    """What R · (x + u v + dense) is made of, as arrays or as their shapes; what is not given is None.

    Attributes:
      x: cached vectors.
      cos, sin: float32 tables of angles, `half` being half of the channels that rotate.
      u, v: factors; v has K·H columns.
      dense: a full correction.
      x_scale, u_scale, v_scale: float32, what stored numbers of eight bits are multiplied by.
    """

    x: Num[Array, "*leading T K H"]
    cos: Float[Array, "*angles T half"] | None = None
    sin: Float[Array, "*angles T half"] | None = None
    u: Num[Array, "*left T M"] | None = None
    v: Num[Array, "*right M columns"] | None = None
    dense: Float[Array, "*corrected T K H"] | None = None
    x_scale: Float[Array, "*scaled 1 K H"] | None = None
    u_scale: Float[Array, "*scaled_left 1 M"] | None = None
    v_scale: Float[Array, "*scaled_right M 1"] | None = None

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
          operation: for messages.
          layout: how a rotary pair lies in a head.

        Raises:
          KernelError: unknown layout word, or shapes that do not fit;
          a scale beside a wide array, or int8 without one.
        """
        if layout not in LAYOUTS:
            raise KernelError(f"{operation}: got layout {layout!r}; expected one of {LAYOUTS}")
        if (self.cos is None) != (self.sin is None) or (self.u is None) != (self.v is None):
            raise KernelError(f"{operation}: got one of a pair alone; expected cos with sin, and u with v")

        tokens, heads, width = self.x.shape[-3:]
        if self.cos is not None and self.sin is not None:
            cos, sin = self.cos.shape, self.sin.shape
            if cos != sin or len(cos) < 2 or 2 * cos[-1] > width or cos[-2] not in (1, tokens):
                expected = f"[..., {tokens}, R/2] with R ≤ {width}"
                raise KernelError(f"{operation}: got cos {cos} and sin {sin}; expected {expected}")

        if self.u is not None and self.v is not None:
            u, v, rank = self.u.shape, self.v.shape, self.rank
            want_u, want_v = (tokens, rank), (rank, heads * width)
            if u[-len(want_u) :] != want_u or v[-len(want_v) :] != want_v:
                expected = f"[..., {want_u}] and [..., {want_v}]"
                raise KernelError(f"{operation}: got u {u} and v {v}; expected {expected}")

        if self.dense is not None and self.dense.shape[-3:] != self.x.shape[-3:]:
            raise KernelError(f"{operation}: got dense {self.dense.shape}; expected [..., {self.x.shape[-3:]}]")

        self._check_scale(operation, "x", 3, -3)
        self._check_scale(operation, "u", 2, -2)
        self._check_scale(operation, "v", 2, -1)

    def _check_scale(self, operation: str, name: str, inner: int, axis: int) -> None:
        """Refuses a scale that does not fit the last `inner` axes of what it scales, of which it has 1 at `axis`."""
        value, scale = getattr(self, name), getattr(self, f"{name}_scale")
        dtype = None if value is None else value.dtype.name
        if scale is None:
            if dtype == "int8":
                raise KernelError(f"{operation}: got {name} of dtype int8 without a scale; expected {name}_scale")
            if dtype not in (None, *WIDE, *NARROW):
                raise KernelError(f"{operation}: got {name} of dtype {dtype}; expected one of {WIDE + NARROW}")
            return

        if value is None or dtype not in NARROW or scale.dtype != jnp.float32:
            found = f"{name} of dtype {dtype}, {name}_scale of dtype {scale.dtype}"
            raise KernelError(f"{operation}: got {found}; expected one of {NARROW} and float32")

        expected = list(value.shape[-inner:])
        expected[axis] = 1
        if scale.shape[-inner:] != tuple(expected):
            raise KernelError(f"{operation}: got {name}_scale {scale.shape}; expected [..., {tuple(expected)}]")

    def with_angles_scaled(self, scale: float) -> "Operands":
        """Multiplies cos and sin, and so what rotates; by 1 nothing, so that no bit changes."""
        if scale == 1.0 or self.cos is None or self.sin is None:
            return self
        return self._replace(cos=self.cos * scale, sin=self.sin * scale)

    def with_width(self, width: int) -> "Operands":
        """Puts zeros behind each head up to `width` channels, as kernels that write whole rows want their operands."""
        own = self.x.shape[-1]
        if own == width:
            return self

        v = self.v
        if v is not None:
            v = spread(v.reshape(*v.shape[:-1], *self.x.shape[-2:]), 0, width)
            v = v.reshape(*v.shape[:-2], -1)

        dense = None if self.dense is None else spread(self.dense, 0, width)
        x_scale = None if self.x_scale is None else spread(self.x_scale, 0, width)
        return self._replace(x=spread(self.x, 0, width), v=v, dense=dense, x_scale=x_scale)

    def factor_scale(self) -> Float[Array, "*scaled M 1"] | None:
        """Returns both factors' scales in one: each is one number per direction, so that either side may take their
        product.
        """
        scales = [] if self.u_scale is None else [jnp.swapaxes(self.u_scale, -1, -2)]
        if self.v_scale is not None:
            scales.append(self.v_scale)
        return functools.reduce(jnp.multiply, scales) if scales else None


def first_reason(checks: Iterable[tuple[bool, str]]) -> str | None:
    """Finds the reason of the first condition that holds; None where none does."""
    return next((reason for condition, reason in checks if condition), None)


def refusals(operands: Operands, out_dtype: str) -> list[tuple[bool, str]]:
    """Lists what no kernel takes, TPU or GPU: (whether it is so here, why it is refused)."""
    x, cos, dense = operands.x, operands.cos, operands.dense
    read = [leaf.dtype.name for leaf in (x, operands.u, operands.v) if leaf is not None]
    wide = [out_dtype] if dense is None else [dense.dtype.name, out_dtype]
    unknown = not set(read) <= {*KERNEL_DTYPES, *NARROW} or not set(wide) <= set(KERNEL_DTYPES)
    checks = [
        (unknown, f"dtypes {read + wide}; expected {KERNEL_DTYPES}, or before the arithmetic {NARROW}"),
        (operands.rank > RANK_LIMIT, f"rank {operands.rank}; expected at most {RANK_LIMIT}"),
        (0 in x.shape, f"an empty array {x.shape}"),
    ]

    # A kernel finds a layer's part of an operand by its number: an operand has the last of x's axes, or one for all.
    leading = x.shape[:-3]

    for name, inner in INNER_AXES.items():
        leaf = getattr(operands, name)
        outer = () if leaf is None else leaf.shape[: leaf.ndim - inner]
        foreign = any(size != 1 for size in outer) and outer != leading[len(leading) - len(outer) :]
        checks.append((foreign, f"{name} with leading dimensions {outer}; expected 1, or the last of {leading}"))

    if cos is not None:
        tokens = x.shape[-3]
        checks.append((cos.shape[-2] != tokens, f"cosines of {cos.shape[-2]} tokens; expected {tokens}"))
    return checks


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


def tables_of_channels(
    cos: Float[Array, "*angles T half"], sin: Float[Array, "*angles T half"], width: int, layout: str
) -> tuple[Float[Array, "*angles T {width}"], Float[Array, "*angles T {width}"]]:
    """Returns cosine and signed sine of every channel of a head: 1 and 0 where nothing rotates.

    With them a rotation is `x · cos + partner(x) · sin`, whichever half of its pair a channel is.
    """

    def join(first: Array, second: Array) -> Array:
        if layout == "half":
            return jnp.concatenate([first, second], -1)
        return jnp.stack([first, second], -1).reshape(*first.shape[:-1], 2 * first.shape[-1])

    rest = [(0, 0)] * (cos.ndim - 1) + [(0, width - 2 * cos.shape[-1])]
    return jnp.pad(join(cos, cos), rest, constant_values=1.0), jnp.pad(join(-sin, sin), rest)


def padded_width(width: int, lanes: int = LANES) -> int:
    """Returns the least multiple of `lanes` that is not below `width`."""
    return -(-width // lanes) * lanes
