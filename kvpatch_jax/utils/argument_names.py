"""Rejection of other libraries' argument names, with an error that gives the name used here."""

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
"""Names of arguments here, by the names that other libraries use."""


def with_our_names[**Given, Made](call: Callable[Given, Made]) -> Callable[Given, Made]:
    """Wraps a function so that another library's name for one of its arguments raises an InputError with our name.

    Any other unknown name raises Python's TypeError, as usual.
    """
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: Given.args, **options: Given.kwargs) -> Made:
        for name in options:
            if name not in known and OURS.get(name) in known:
                raise InputError(f"{call.__name__}: got {name}={options[name]!r:.80}; expected {OURS[name]}=")
        return call(*args, **options)

    return checked
