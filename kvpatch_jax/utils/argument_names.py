"""Names that other libraries give to arguments, refused with the name that is ours."""

import functools
import inspect
from collections.abc import Callable

from ..errors import InputError

OURS = {
    "max_tokens": "steps",
    "max_new_tokens": "steps",
    "num_tokens": "steps",
    "stop_token_ids": "stop",
    "stop_tokens": "stop",
    "eos_token_id": "stop",
}
"""Our name for an argument, by what others call it."""


def with_our_names[**Given, Made](call: Callable[Given, Made]) -> Callable[Given, Made]:
    """Wraps a function so that another library's name for one of its arguments is an InputError with ours.

    Any other unknown name stays Python's TypeError.
    """
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: Given.args, **options: Given.kwargs) -> Made:
        for name in options:
            if name not in known and OURS.get(name) in known:
                raise InputError(f"{call.__name__}: got {name}={options[name]!r:.80}; expected {OURS[name]}=")
        return call(*args, **options)

    return checked
