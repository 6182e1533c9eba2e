"""Frozen dataclasses as pytrees whose leaves may be anything, as transformations put there what is no array."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def pytree[T](data: Sequence[str], static: Sequence[str]) -> Callable[[type[T]], type[T]]:
    """Registers a dataclass as a pytree, by the names of its leaves and of its static fields.

    Unlike `jax.tree_util.register_dataclass` it does not call the constructor: `tree.map`, `eval_shape` and tests that
    check shapes of constructors would refuse each other's leaves.
    """

    def register(kind: type[T]) -> type[T]:
        def flatten(value: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            leaves = [(jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in data]
            return leaves, tuple(getattr(value, name) for name in static)

        def unflatten(fixed: tuple[Any, ...], leaves: Any) -> T:
            value = object.__new__(kind)
            # Past the constructor of a frozen dataclass.
            vars(value).update(zip((*data, *static), (*leaves, *fixed), strict=True))
            return value

        jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
        return kind

    return register
