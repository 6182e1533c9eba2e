"""What a prompt is made of, told apart in one place: images, texts and token ids; and sequences from bare strings.

A str is a text. One that looks like a file's name or an address (`looks_like_a_file`) is refused, because a text in
place of an image is an error that nobody sees. A `pathlib.Path` is a file, and a `Text` is that very text. Every
function that takes a text or an image goes by `check_text`.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from ..errors import AmbiguousTextError, InputError
from ..utils.atomic_files import path_of
from .images import decoded, is_encoded

Sort = Literal["image", "text", "tokens"]


_IMAGES = "apng|avif|bmp|gif|hei[cf]|ico|jp2|jpe|jpe?g|jxl|p[bgnp]m|png|qoi|svg|tga|tiff?|webp"
_VIDEOS = "3gp|avi|flv|m2ts|m4v|mkv|mov|mp4|mpe?g|mts|ogv|webm|wmv"
_MOST_WORDS = 8
"""Words of a file's name; more are a sentence."""
_LONGEST = 4096
"""Characters of a path, as Linux has them, and of an address; more are a text."""

_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+[;,]", re.IGNORECASE)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://\S|file:/\S", re.IGNORECASE)
_PATH_START = re.compile(r"/\w|\.{1,2}/|~[\w.-]*/|[a-z]:[\\/]\S|\\\\\w", re.IGNORECASE)
_MEDIA_FILE = re.compile(rf".*[^\s.]\.(?:{_IMAGES}|{_VIDEOS})", re.IGNORECASE)
_ANY_FILE = re.compile(r"[\w.~+()=%/-]*[\w)]\.[a-z][a-z0-9]{1,4}", re.IGNORECASE | re.ASCII)
_SEPARATED = re.compile(r"[\w.~+()=%-]+(?:/[\w.~+()=%-]*)+", re.ASCII)
_WORDS_OR_NUMBERS = re.compile(r"[a-z]+(?:/[a-z]+)+|[\d.,%]+(?:/[\d.,%]+)+", re.IGNORECASE | re.ASCII)


class Text(str):
    """A text that is meant as one, even where it looks like a file's name."""

    __slots__ = ()


def sort_of(item: Any, what: str = "prompt") -> Sort:
    """Tells images, texts and token ids apart.

    A str is a text (see `check_text`). Images are paths (`os.PathLike`), PIL images (told by their `getbands`, so that
    Pillow need not be there), bytes of an encoded image, and arrays but integer vectors; token ids are integer vectors,
    and lists or tuples of integers.

    Raises:
      AmbiguousTextError: a str that looks like a file's name. InputError: an item of another kind. `what` begins the
      message.
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


def looks_like_a_file(text: str) -> bool:
    """Returns whether a str reads as a file's name or an address; which files there are makes no difference.

    Only a str of one line does (white space around it does not count), and only

    - one word that begins as an address does (`https://…`, `s3://…`, `file:/…`), or a data URL;
    - one word that begins as a path does: `/x`, `./`, `../`, `~/`, `C:\\`, `\\\\x`;
    - one word of ASCII with a `/` in it (`shots/run_1`), but for words and numbers alone: `and/or`, `1/2`;
    - one word of ASCII that ends in a dot and two to five letters and digits, a letter first: `shot1.pgn`;
    - up to eight words that end as an image's or a video's name does: `my shot.png`, `Screen Shot at 10.32.11 AM.PNG`.

    So `What is in shot.png?` and `see https://x.org for more` are texts.
    """
    if _DATA_URL.match(text.lstrip()[:200]):
        return True
    line = text.strip()
    if len(line) > _LONGEST or len(line.splitlines()) != 1:
        return False

    words = len(line.split())
    if words > 1:
        return words <= _MOST_WORDS and _MEDIA_FILE.fullmatch(line) is not None
    if _ADDRESS.match(line) or _PATH_START.match(line) or _MEDIA_FILE.fullmatch(line) or _ANY_FILE.fullmatch(line):
        return True
    return _SEPARATED.fullmatch(line) is not None and _WORDS_OR_NUMBERS.fullmatch(line) is None


def check_text(text: str, what: str) -> None:
    """Refuses a str that looks like a file's name or an address, and is no `Text`.

    Raises:
      AmbiguousTextError: it does. `what` begins the message, which says how to pass either.
    """
    if not isinstance(text, Text) and looks_like_a_file(text):
        raise AmbiguousTextError(
            f"{what}: got {text[:300]!r}, which looks like a file's name or an address; expected pathlib.Path(...) for "
            "a file (what has an address is to be downloaded first), or kvpatch_jax.Text(...) for this very text"
        )


def file_of(name: str, what: str) -> Path:
    """Returns the path of a file that is named where only a file can be meant.

    Raises:
      InputError: an address, or as `path_of`. `what` begins the message.
    """
    if _DATA_URL.match(name) or _ADDRESS.match(name):
        raise InputError(f"{what}: got {name[:300]!r}, an address; expected a file on this machine: download it first")
    return path_of(name, what, InputError)


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
