"""KV with its frame: dictionaries of one type per frame, so that KV of another frame is refused and not misread.

Functions that make KV (`prefill`, `to_engine`, `apply_patch`, …) return these types; functions that read KV refuse the
wrong type, and accept a plain dictionary as it is. They are pytrees like dictionaries and keep their type through jit,
vmap and `tree.map`; a comprehension over one makes a plain dictionary, whose frame is unknown.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
from jax.tree_util import DictKey

from ..errors import FrameError, LayoutError

Frame = Literal["phase_free", "local", "engine"]


class FramedKV(dict[str, Any]):
    """{channel: array} in the frame that its type says."""

    frame: ClassVar[Frame]

    def copy(self) -> "FramedKV":
        """Copies the dictionary, in the same frame."""
        return type(self)(self)


class PhaseFreeKV(FramedKV):
    """Keys before RoPE: what `prefill` returns, what chunks hold and patches are formed from."""

    frame = "phase_free"


class LocalKV(FramedKV):
    """Keys rotated as from the chunk's own start."""

    frame = "local"


class EngineKV(FramedKV):
    """Keys rotated to their place in the sequence: what a context is made of."""

    frame = "engine"


def _register(kind: type[FramedKV]) -> None:
    names = lambda kv: tuple(sorted(kv))  # as jax orders a dictionary's leaves
    jax.tree_util.register_pytree_with_keys(
        kind,
        lambda kv: ([(DictKey(name), kv[name]) for name in names(kv)], names(kv)),
        lambda names, leaves: kind(zip(names, leaves, strict=True)),
        lambda kv: ([kv[name] for name in names(kv)], names(kv)),
    )


for _kind in (PhaseFreeKV, LocalKV, EngineKV):
    _register(_kind)

_WORDS = {"phase_free": "phase-free", "local": "in the local frame", "engine": "in the engine frame"}
_CONVERSIONS = {
    "engine": "to_engine(layout, kv, local, start) or apply_patch rotates a chunk's keys to their positions",
    "phase_free": "prefill returns it, and to_phase_free(layout, kv, local, start) removes the rotation",
    "local": "to_local(layout, kv, local) makes it",
}


def expect_frame(kv: Mapping[str, Any], what: str, *expected: Frame) -> None:
    """Checks that KV is in an expected frame; a plain dictionary passes.

    Raises:
      FrameError: it is in another frame. LayoutError: not a mapping.
    """
    if not isinstance(kv, Mapping):
        raise LayoutError(f"{what}: KV is a {type(kv).__name__}; expected {{channel: array}}")
    if isinstance(kv, FramedKV) and kv.frame not in expected:
        raise FrameError(
            f"{what}: KV that is {_WORDS[kv.frame]}; expected it {' or '.join(_WORDS[frame] for frame in expected)} "
            f"({_CONVERSIONS[expected[0]]})"
        )
