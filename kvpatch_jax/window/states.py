"""States of hybrid models in a window: each piece's transition, composed in the order of the pieces.

Transitions lie beside the pool, {part: float32 [L,R,K,W]}. They have no position and occupy no slots; their arrays are
never changed, so branches share them.
"""

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import rotate_patch

from ..core import KVLayout, PackedArray, fold, identity, is_packed, ops, unpack

State = Mapping[str, Float[Array, "L _ _ _"]]
Composed = Mapping[str, Float[Array, "L 1 R _ _"]]
"""Transition of a whole context, as backbones read it."""

COMPOSITIONS = 4
"""Windows whose composed transitions are kept: many questions behind one of them compose once."""


@functools.partial(jax.jit, static_argnames=("layout", "layers"))
def make_state(
    layout: KVLayout,
    parts: Mapping[str, Float[Array, "..."] | PackedArray],
    factors: ops.Factors,
    *,
    layers: tuple[int, ...] | None = None,
) -> dict[str, Float[Array, "L _ _ _"]]:
    """Returns a transition plus what a patch adds to it, in float32.

    `parts` are [L,R,K,W] or, as a prefill gives them, [L,1,R,K,W].
    """
    made = {}
    for name, value in parts.items():
        value = (unpack(value, jnp.float32) if is_packed(value) else value).astype(jnp.float32)
        value = value[:, 0] if value.ndim == 5 else value
        rows = None if layers is None else layout.rows_of(name, layers)
        patching = ops.kernel_arguments(factors.get(name), rows, layout.depth(name))
        made[name] = rotate_patch(value, **patching) if patching else value
    return made


@jax.jit
def _composed(states: tuple[Any, ...], lengths: Int[Array, " n"]) -> dict[str, Float[Array, "L 1 R _ _"]]:
    """Composes states that follow each other; the first one may be a composition."""
    first = {name: value[:, 0] if value.ndim == 5 else value for name, value in states[0].items()}
    composed = fold((first, *states[1:]), [lengths[index] for index in range(len(states))])
    return {name: value[:, None] for name, value in composed.items()}


class Compositions:
    """Compositions of states that were read lately, by the identities of what they consist of."""

    def __init__(self, layout: KVLayout):
        self._layout = layout
        self._kept: OrderedDict[tuple[str, ...], Composed] = OrderedDict()

    @functools.cached_property
    def unit(self) -> dict[str, Any]:
        """Transition of no tokens, which leaves every state as it is."""
        return identity(self._layout)

    def of(self, mades: Sequence[str], states: Sequence[State], lengths: Sequence[int]) -> tuple[Composed, int]:
        """Composes the states of pieces that follow each other.

        Returns:
          The composition, and how many transitions were composed now.
        """
        key, count = tuple(mades), 0
        composed, front = self._kept.pop(key, None), self._kept.get(key[:-1])
        if composed is None and front is not None:
            # Most windows are one of the last time with a piece behind it.
            composed, count = _composed((front, states[-1]), np.array([0, lengths[-1]], np.int32)), 2
        elif composed is None:
            # The program has few numbers of pieces; those that are missing change nothing.
            missing = (1 << (len(states) - 1).bit_length()) - len(states)
            padded = np.array([*lengths, *[0] * missing], np.int32)
            composed, count = _composed((*states, *[self.unit] * missing), padded), len(states)
        self._kept[key] = composed
        while len(self._kept) > COMPOSITIONS:
            self._kept.popitem(last=False)
        return composed, count

    @property
    def recent(self) -> frozenset[tuple[str, ...]]:
        """The identities of what is composed."""
        return frozenset(self._kept)

    def clear(self) -> None:
        """Forgets all compositions."""
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the compositions that are kept."""
        # Other threads count while a run composes.
        return sum(value.nbytes for composed in list(self._kept.values()) for value in composed.values())
