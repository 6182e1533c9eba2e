"""Buckets: the few sizes that lengths are padded to, so that all lengths of a bucket share one compiled program.

What pads and cuts to other lengths works on the host where the array lies there, since it would compile for each.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..errors import ConfigError
from ..utils.kinds import is_whole
from .layout import AnyArray


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes to pad to: powers of two from `least` up to `smallest`, then `steps` sizes per doubling.

    Up to `smallest`, where compiling takes longer than computing, at most half of a bucket is padding, beyond it with
    four steps at most a fifth. A single token stays one. `smallest` / `steps` must be a multiple of the number of
    patches that a tower merges into one token (4 or 1).

    Raises:
      ConfigError: sizes that are not powers of two, or steps too fine for the smallest size.
    """

    smallest: int = 1024
    steps: int = 4
    least: int = 16

    def __post_init__(self) -> None:
        for name in ("smallest", "steps", "least"):
            value = getattr(self, name)
            if not is_whole(value, 1) or value & (value - 1):
                raise ConfigError(f"bucket {name}: got {value!r:.80}; expected a power of two")
        if self.smallest % (4 * self.steps):
            raise ConfigError(
                f"bucket smallest: got {self.smallest}; expected a multiple of 4 · steps ({4 * self.steps})"
            )

    @property
    def of_keys(self) -> "Buckets":
        """Buckets of contexts: powers of two from `smallest` on. Padding there costs attention alone, and every size
        is compiled with every size of a prompt.
        """
        return Buckets(self.smallest, 1, self.smallest)

    @property
    def of_pixels(self) -> "Buckets":
        """Buckets of a tower's rows of pixels: patches, of which up to four make a token, or tiles of many tokens."""
        return Buckets(4 * self.smallest, self.steps, 1)

    def round_up(self, size: int) -> int:
        """Returns the smallest bucket that holds `size`; 0 for 0."""
        if size < 2:
            return size
        if size <= self.smallest:
            return max(min(self.least, self.smallest), 1 << (size - 1).bit_length())

        # `size` lies in (2^n, 2^(n+1)], which has `steps` buckets of this width.
        step = (1 << ((size - 1).bit_length() - 1)) // self.steps
        return -(-size // step) * step


def bucket(buckets: Buckets | None, size: int) -> int:
    """Returns a size rounded up to its bucket, or unchanged without buckets."""
    return size if buckets is None else buckets.round_up(size)


def zero_padded(value: AnyArray, axis: int, size: int) -> AnyArray:
    """Pads an array with zeros to `size` along an axis, on the host; returns it unchanged if it has that size."""
    if value.shape[axis] == size:
        return value
    # On a device every length would compile a program.
    host = np.asarray(value)
    axis %= host.ndim
    padded = np.zeros((*host.shape[:axis], size, *host.shape[axis + 1 :]), host.dtype)
    padded[(*(slice(None),) * axis, slice(host.shape[axis]))] = host
    return padded


def host_view[Value](value: Value) -> Value | np.ndarray:
    """Returns a jax array that lies in the host's memory as NumPy's, without a copy, and anything else as it is."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer) or not value.is_fully_addressable:
        return value
    first, *others = value.devices()
    return value if others or first.platform != "cpu" else np.asarray(value)


def on_device(value: Any) -> jax.Array:
    """Copies an array of the host to the default device; `jnp.asarray` would compile a program for every shape."""
    if isinstance(value, np.ndarray):
        return jax.device_put(value, may_alias=False)
    # `jnp.asarray` takes 30 µs to return a jax array unchanged.
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def cut(value: Any, axis: int, start: int, stop: int) -> Any:
    """Returns the elements start … stop-1 along an axis, of an array where it lies."""
    index = (*(slice(None),) * axis, slice(start, stop))
    host = host_view(value)
    # One that was put on its device stays there.
    return value[index] if host is value or value.committed else on_device(host[index])
