"""Classification of prompt items as images, videos, sounds, texts or token ids; sequences that are not bare strings.

A str is a text. A str that looks like a file's name or an address (`looks_like_a_file`) is rejected, because a text in
place of an image would go unnoticed. A `pathlib.Path` is a file, and a `Text` is always a text. Every function that
takes a text or an image uses `check_text`.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from ..errors import AmbiguousTextError, InputError
from .images import decoded, is_encoded
from .media import AUDIO_SUFFIXES, VIDEO_SUFFIXES, Video, medium_of

Sort = Literal["image", "video", "audio", "text", "tokens"]

_IMAGES = "apng|avif|bmp|gif|hei[cf]|ico|jp2|jpe|jpe?g|jxl|p[bgnp]m|png|qoi|svg|tga|tiff?|webp"
_MEDIA = "|".join(suffix[1:] for suffix in VIDEO_SUFFIXES + AUDIO_SUFFIXES)
_MOST_WORDS = 8
"""Maximum number of words in a file's name; more make a sentence."""
_LONGEST = 4096
"""Maximum length of a path (Linux's limit) or address, in characters; longer strings are texts."""

_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+[;,]", re.IGNORECASE)
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://\S|file:/\S", re.IGNORECASE)
_PATH_START = re.compile(r"/\w|\.{1,2}/|~[\w.-]*/|[a-z]:[\\/]\S|\\\\\w", re.IGNORECASE)
_IMAGE_SUFFIX = re.compile(rf"\.(?:{_IMAGES})", re.IGNORECASE)
_MEDIA_FILE = re.compile(rf".*[^\s.]\.(?:{_IMAGES}|{_MEDIA})", re.IGNORECASE)
_ANY_FILE = re.compile(r"[\w.~+()=%/-]*[\w)]\.[a-z][a-z0-9]{1,4}", re.IGNORECASE | re.ASCII)
_SEPARATED = re.compile(r"[\w.~+()=%-]+(?:/[\w.~+()=%-]*)+", re.ASCII)
_WORDS_OR_NUMBERS = re.compile(r"[a-z]+(?:/[a-z]+)+|[\d.,%]+(?:/[\d.,%]+)+", re.IGNORECASE | re.ASCII)


class Text(str):
    """String that is always a text, even if it looks like a file's name."""

    __slots__ = ()


def sort_of(item: Any, what: str = "prompt") -> Sort:
    """Classifies an item as image, video, audio, text or token ids.

    A str is a text (see `check_text`). A `Video` or `Audio` is one, and so is a path (`os.PathLike`) with the suffix of
    a video's or sound's file. Images are other paths, PIL images (recognised by `getbands`, so that
    Pillow is not required), bytes of an encoded image, and arrays other than integer vectors. Token ids are integer
    vectors, and lists or tuples of integers.

    Raises:
      AmbiguousTextError: a str looks like a file's name. InputError: the item is of another kind. Messages begin with
      `what`.
    """
    if isinstance(item, str):
        check_text(item, what)
        return "text"
    medium = medium_of(item)
    if medium is not None:
        return "video" if isinstance(medium, Video) else "audio"
    if isinstance(item, os.PathLike) or hasattr(item, "getbands"):
        return "image"
    if isinstance(item, np.ndarray | jax.Array):
        return "tokens" if item.ndim == 1 and item.dtype.kind in "iu" else "image"
    if isinstance(item, bytes) and is_encoded(item):
        return "image"
    if isinstance(item, list | tuple):
        # bool is an int, but True is no token.
        whole = [isinstance(token, int | np.integer) and not isinstance(token, bool) for token in item]
        if all(whole):
            return "tokens"
    raise InputError(
        f"{what}: got item of type {type(item).__name__}; expected text, token ids or an image, Video or Audio"
    )


def looks_like_a_file(text: str) -> bool:
    """Returns whether a str looks like a file's name or an address, whether or not such a file exists.

    That is a str of one line (surrounding white space is ignored) which is

    - one word that begins like an address (`https://…`, `s3://…`, `file:/…`), or a data URL;
    - one word that begins like a path: `/x`, `./`, `../`, `~/`, `C:\\`, `\\\\x`;
    - one ASCII word that contains a `/` (`shots/run_1`), except plain words and numbers: `and/or`, `1/2`;
    - one ASCII word that ends in a dot and two to five letters and digits, a letter first: `shot1.pgn`;
    - up to eight words that end like the name of an image, video or sound: `my shot.png`.

    So `What is in shot.png?` and `see https://x.org for more` are texts.
    """
    # A data URL may be longer than any path, so it is looked for first and at its beginning only.
    if _DATA_URL.match(text.lstrip()[:200]):
        return True

    line = text.strip()
    if len(line) > _LONGEST or len(line.splitlines()) != 1:
        return False

    words = len(line.split())
    if words > 1:
        return words <= _MOST_WORDS and _MEDIA_FILE.fullmatch(line) is not None
    # Of a single word from here on, for which these patterns are made.
    if _ADDRESS.match(line) or _PATH_START.match(line) or _MEDIA_FILE.fullmatch(line) or _ANY_FILE.fullmatch(line):
        return True
    return _SEPARATED.fullmatch(line) is not None and _WORDS_OR_NUMBERS.fullmatch(line) is None


def check_text(text: str, what: str) -> None:
    """Checks that a str does not look like a file's name or an address, unless it is a `Text`.

    Raises:
      AmbiguousTextError: it does. The message begins with `what` and says how to pass a file or a text.
    """
    if not isinstance(text, Text) and looks_like_a_file(text):
        raise AmbiguousTextError(
            f"{what}: got {text[:300]!r}, which looks like a file's name or an address; expected pathlib.Path(...) for "
            "a file (what has an address is to be downloaded first), or kvpatch_jax.Text(...) for this very text"
        )


def looks_like_an_address(name: str) -> bool:
    """Returns whether a str, where only a file is allowed, is an address."""
    return bool(_DATA_URL.match(name) or _ADDRESS.match(name))


def sort_of_suffix(path: str | os.PathLike[str]) -> Sort | None:
    """Returns what the suffix of a file's name says it has: image, video or audio; None for another suffix."""
    medium = medium_of(Path(path))
    if medium is not None:
        return "video" if isinstance(medium, Video) else "audio"
    return "image" if _IMAGE_SUFFIX.fullmatch(Path(path).suffix) else None


def one_form(item: Any) -> Any:
    """Decodes an image file or its bytes to pixels (`images.decoded`), and reads videos and sounds (`Video.read`), so
    that each is read once; else returns the item.
    """
    medium = medium_of(item)
    if medium is not None:
        return medium.read()
    if isinstance(item, os.PathLike):
        return decoded(item, os.fspath(item))
    return decoded(item) if isinstance(item, bytes) else item


def items_of(items: Iterable[Any], what: str) -> list[Any]:
    """Lists the items of a sequence; rejects iterables that are single items, such as a text, an array or a mapping.

    Raises:
      InputError: `items` is a single item, or empty.
    """
    # Each of these is iterable, and would be taken apart into letters, rows or keys.
    is_single = isinstance(items, str | bytes | os.PathLike | np.ndarray | jax.Array | Mapping)
    if is_single or not isinstance(items, Iterable):
        shown = repr(items[:40]) if isinstance(items, str) else f"a {type(items).__name__}"
        raise InputError(f"{what}: got {shown}; expected a sequence of items, such as [{type(items).__name__} …]")

    result = list(items)
    if not result:
        raise InputError(f"{what}: got no items; expected at least one")
    return result


def fingerprint_of(backbone: str, what: str) -> str:
    """Checks that a backbone is given by its fingerprint, and returns it.

    Raises:
      InputError: `backbone` is not a str (the backbone itself, for example), or is empty.
    """
    if isinstance(backbone, str) and backbone:
        return backbone
    shown = repr(backbone) if isinstance(backbone, str) else f"a {type(backbone).__name__}"
    raise InputError(f"{what}: got backbone {shown}; expected its fingerprint, the str `backbone.fingerprint`")
