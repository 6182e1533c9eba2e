"""KV tagged with its frame: one dictionary type per frame, so that KV in the wrong frame is rejected, not misread.

Functions that produce KV (`prefill`, `to_engine`, `apply_patch`, …) return these types. Functions that read KV reject
the wrong type but accept a plain dictionary, whose frame is unknown. The types are pytrees and survive jit, vmap and
`tree.map`; a comprehension over one produces a plain dictionary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
from jax.tree_util import DictKey

from ..errors import LayoutError

Frame = Literal["phase_free", "local", "engine"]


class FramedKV(dict[str, Any]):
    """Dictionary {channel: array} in the frame that its type names."""

    frame: ClassVar[Frame]

    def copy(self) -> "FramedKV":
        """Copies the dictionary, in the same frame."""
        return type(self)(self)


class PhaseFreeKV(FramedKV):
    """KV with keys before RoPE: what `prefill` returns, chunks hold and patches are formed from."""

    frame = "phase_free"


class LocalKV(FramedKV):
    """KV with keys rotated to positions relative to the chunk's start."""

    frame = "local"


class EngineKV(FramedKV):
    """KV with keys rotated to their positions in the sequence: what contexts consist of."""

    frame = "engine"


def _register(kind: type[FramedKV]) -> None:
    """Registers a type of KV as a pytree whose leaves are sorted by channel, as jax sorts those of a dictionary."""

    def flatten(kv: FramedKV) -> tuple[list[Any], tuple[str, ...]]:
        names = tuple(sorted(kv))
        return [kv[name] for name in names], names

    def flatten_with_keys(kv: FramedKV) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        leaves, names = flatten(kv)
        return [(DictKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], names

    def unflatten(names: tuple[str, ...], leaves: Any) -> FramedKV:
        return kind(zip(names, leaves, strict=True))

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)


# jax takes a subclass of `dict` for a leaf unless it is registered.
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
      LayoutError: the KV is in another frame; `kv` is not a mapping.
    """
    if not isinstance(kv, Mapping):
        raise LayoutError(f"{what}: got a {type(kv).__name__}; expected {{channel: array}}")
    if isinstance(kv, FramedKV) and kv.frame not in expected:
        raise LayoutError(
            f"{what}: got KV that is {_WORDS[kv.frame]}; expected it "
            f"{' or '.join(_WORDS[frame] for frame in expected)} ({_CONVERSIONS[expected[0]]})"
        )
