"""What a prompt is made of, told apart in one place: images, texts and token ids; and sequences from bare strings.

A str is text. One that names a file that is there is refused, for it was likely meant as the image; `Text` says that it
is text all the same, and a `pathlib.Path` is always an image.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from .errors import InputError
from .images import decoded, is_encoded

Sort = Literal["image", "text", "tokens"]


class Text(str):
    """A text that is meant as one, even where a file has its name."""

    __slots__ = ()


def sort_of(item: Any, what: str = "prompt") -> Sort:
    """Tells images, texts and token ids apart.

    Images are paths (`os.PathLike`), PIL images (told by their `getbands`, so that Pillow need not be there), bytes of
    an encoded image, and arrays but integer vectors; token ids are integer vectors, and lists or tuples of integers.

    Raises:
      InputError: a str that names a file, or an item of another kind. `what` begins the message.
    """
    if isinstance(item, str):
        check_text(item, what)
        return "text"
    if isinstance(item, os.PathLike) or hasattr(item, "getbands"):
        return "image"
    if isinstance(item, np.ndarray | jax.Array):
        return "tokens" if item.ndim == 1 and item.dtype.kind in "iu" else "image"
    if isinstance(item, bytes) and is_encoded(item):
        return "image"
    if isinstance(item, list | tuple) and all(_is_token(token) for token in item):
        return "tokens"
    raise InputError(f"{what}: item of type {type(item).__name__}; expected text, token ids or an image")


def _is_token(token: Any) -> bool:
    return isinstance(token, int | np.integer) and not isinstance(token, bool)


def check_text(text: str, what: str) -> None:
    """Raises InputError where a str names a file that is there, and is no `Text`."""
    if not isinstance(text, Text) and os.path.isfile(text):
        raise InputError(
            f"{what}: {text[:300]!r} is a str and the name of a file; expected pathlib.Path(...) or its pixels for the "
            "image, or kvpatch_jax.Text(...) for the text itself"
        )


def one_form(item: Any) -> Any:
    """Reads an item that is an image file or its bytes to pixels (`images.decoded`), so that it is read once."""
    if isinstance(item, os.PathLike):
        return decoded(item, os.fspath(item))
    return decoded(item) if isinstance(item, bytes) else item


def items_of(items: Iterable[Any], what: str) -> list[Any]:
    """Lists the items of a sequence, refusing what only looks like one: a text, a path, an image, a table.

    Raises:
      InputError: a single item, or none at all.
    """
    single = isinstance(items, str | bytes | os.PathLike | np.ndarray | jax.Array | Mapping)
    if single or not isinstance(items, Iterable):
        found = repr(items[:40]) if isinstance(items, str) else f"a {type(items).__name__}"
        raise InputError(f"{what}: {found}; expected a sequence of items, such as [{type(items).__name__} …]")
    found = list(items)
    if not found:
        raise InputError(f"{what}: no items; expected at least one")
    return found


def names_of(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Lists the strings of a sequence of names, in its order.

    Raises:
      InputError: a bare str, whose letters would be taken for names, or anything that is not a str among them.
    """
    if isinstance(names, str | bytes):
        raise InputError(f"{what}: {names[:40]!r}; expected a sequence of names, such as [{names[:40]!r}]")
    if not isinstance(names, Iterable):
        raise InputError(f"{what}: a {type(names).__name__}; expected a sequence of names")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise InputError(f"{what}: a {type(name).__name__} among the names; expected every one as a str")
    return found


def fingerprint_of(backbone: str, what: str) -> str:
    """Returns a backbone's fingerprint as it was given.

    Raises:
      InputError: the backbone itself, an empty fingerprint, or anything else that is not a str.
    """
    if isinstance(backbone, str) and backbone:
        return backbone
    found = repr(backbone) if isinstance(backbone, str) else f"a {type(backbone).__name__}"
    raise InputError(f"{what}: backbone {found}; expected its fingerprint, the str `backbone.fingerprint`")
