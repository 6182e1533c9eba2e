"""What checks types in the tests: jaxtyping where annotations name arrays, beartype alone where they do not.

jaxtyping binds and checks every call twice over, so that the names of axes agree; of a function that takes and returns
no array there is nothing to agree, and half of such a function's time would go there.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

_jaxtyped = jaxtyping.jaxtyped
# With the error that jaxtyping raises: a TypeError, which readers of hostile files turn into their own.
_CHECK: Callable[[Any], Any] = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    """Stands in for `jaxtyping.jaxtyped` where the import hook decorates with it; switched off by the same setting."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not inspect.isfunction(function) or _names_arrays(function):
        return _jaxtyped(function, typechecker=typechecker)
    return _when_called(function)


def _names_arrays(function: Callable[..., Any]) -> bool:
    """Whether an annotation holds one of jaxtyping's types, or is a string, of which nothing is known."""
    return any(isinstance(hint, str) or "jaxtyping" in repr(hint) for hint in function.__annotations__.values())


def _when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    checked = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if checked is None:
            checked = _CHECK(function)
        return checked(*args, **kwargs)

    return call


def install() -> None:
    """Has the import hook decorate so. To be called before the packages are imported."""
    jaxtyping.jaxtyped = jaxtyped
