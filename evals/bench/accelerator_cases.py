"""What the parts on an accelerator share: shapes, fresh arrays, the implementations there are, the machine."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.rotate_patch.shapes import PRODUCTION, SMALL, RotateShape

RANKS = (0, 16, 64)
PAGE_SIZE = 64


class Case(NamedTuple):
    """A chunk's shape at one rank and length."""

    shape: RotateShape
    tokens: int
    rank: int

    @property
    def name(self) -> str:
        """Model, tokens and rank."""
        return f"{self.shape.name} T={self.tokens} M={self.rank}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the chunk, [L, T, K, H]."""
        return (*self.shape.leading, self.tokens, self.shape.heads, self.shape.width)


def cases(tiny: bool, least_tokens: int = 0) -> list[Case]:
    """Lists every production shape at every rank; token counts doubled until they reach `least_tokens`."""
    result = []
    for shape in SMALL[:1] if tiny else PRODUCTION:
        tokens = shape.tokens
        while tokens < least_tokens and not tiny:
            tokens *= 2
        ranks = (0, 4) if tiny else RANKS
        result += [Case(shape, tokens, rank) for rank in ranks if rank or shape.rotary]
    return result


def cases_of_numbers(tiny: bool) -> list[Case]:
    """Lists `cases`, and the rope key of latent attention in pairs, for numerics alone."""
    pairs = [shape._replace(name=f"{shape.name}_pairs", layout="pairs") for shape in PRODUCTION if shape.width == 64]
    shapes = SMALL[2:3] if tiny else pairs
    return cases(tiny) + [Case(shape, shape.tokens, 4 if tiny else 16) for shape in shapes]


def draw(case: Case, key: Array, dtype: str = "bfloat16") -> dict[str, Any]:
    """Draws a chunk as `rotate_patch` takes it, from the device's own generator."""
    keys = jax.random.split(key, 4)
    normal = lambda own, *sizes: jax.random.normal(own, sizes, jnp.float32).astype(dtype)
    given = {"x": normal(keys[0], *case.sizes)}
    if case.shape.rotary:
        angle = jax.random.uniform(keys[1], (case.tokens, case.shape.rotary // 2), maxval=2 * np.pi)
        given |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    if case.rank:
        given["u"] = normal(keys[2], *case.shape.leading, case.tokens, case.rank)
        given["v"] = normal(keys[3], *case.shape.leading, case.rank, case.shape.heads * case.shape.width)
    return given


def implementation(which: str) -> str:
    """Names this platform's kernel where `which` is "kernel" (on a CPU the GPU's, to be refused), else "xla"."""
    platform_ = jax.default_backend()
    if which != "kernel":
        return "xla"
    return platform_ if platform_ in ("gpu", "tpu") else "gpu"
