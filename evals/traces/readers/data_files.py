"""Images and videos that records name: found below the data's folder, and checked before they are decoded."""

import base64
import binascii
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from kvpatch_jax.cache.images import decoded, expect_small
from kvpatch_jax.errors import ImageError, InputError

from .items import StoredImage
from .records import Record

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options of reading a data set.

    Attributes:
      media: folder that images and videos are named from; None: the data's own, and the folders beside it that the
        format's release has.
      limit: of records that are read; None: all.
      most_image_bytes: largest image, as RGB pixels and as a file: 256 MiB are 89 megapixels.
      verify: decodes every image while reading, so that truncated ones are refused here and not while measuring.
      text_characters: longest piece of a text that the format does not divide itself.
      frames: frames sampled of a video; None: as the model's settings say.
      keep: of trajectories that do not say which screenshots leave: how many of the newest stay; None: all.
      instruct: whether questions have the instructions around them that their evaluations write ("Answer the question
        using a single word or phrase."); without them, a question and its options are as the record has them.
    """

    media: Path | None = None
    limit: int | None = None
    most_image_bytes: int = 256 << 20
    verify: bool = False
    text_characters: int = 2000
    frames: int | None = None
    keep: int | None = None
    instruct: bool = True

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("most_image_bytes", 1), ("text_characters", 1), ("frames", 1), ("keep", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise InputError(f"{name}: got {value!r:.80}; expected an integer of at least {least}")


class DataFolder:
    """The files that a data set's records name.

    Args:
      base: the folder of the data's files. options: how they are read.
      beside: names of folders in `base`, or beside it, where the format's release has them.

    Names are relative and may not lead out of these folders. Links are followed, since a hub's cache consists of them.
    """

    def __init__(self, base: Path, options: ReadOptions, beside: tuple[str, ...] = ()):
        self.base, self.options = base, options
        self._places = [base, *(base / name for name in beside), *(base.parent / name for name in beside)]
        if options.media is not None:
            self._places = [Path(options.media)]
        self._checked: dict[Path, str | None] = {}

    def find(self, name: Any, field: str) -> Path:
        """Finds a file or folder by its relative name.

        Raises:
          InputError: it is no text, an address, absolute, leads out of the folder, or is not there.
        """
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            raise InputError(f"{field}: got {name!r:.80}; expected a file's name")
        if _ADDRESS.match(name):
            raise InputError(f"{field}: got the address {name!r:.80}; expected a file: nothing is downloaded")
        pure = PurePosixPath(name.replace("\\", "/"))
        if pure.is_absolute() or ".." in pure.parts:
            raise InputError(f"{field}: got {name!r:.200}; expected a name below the data's folder")
        for place in self._places:
            try:
                if (place / pure).exists():
                    return place / pure
            except OSError as error:
                raise InputError(f"{field}: got {name!r:.80} ({error.strerror}); expected a file's name") from error
        tried = ", ".join(place.name or str(place) for place in self._places)
        raise InputError(f"{field}: got {name!r:.200}, which is no file; expected it in {tried}")

    def image(self, name: Any, field: str) -> Path:
        """Finds an image and checks its header and size, without decoding it (unless `verify`).

        Raises:
          InputError: as `find`. ImageError: it is no image or too large.
        """
        path = self.find(name, field)
        if path not in self._checked:
            try:
                self.check(path, path.name)
                self._checked[path] = None
            except ImageError as error:
                self._checked[path] = str(error)
        if self._checked[path] is not None:
            raise ImageError(f"{field}: {self._checked[path]}")
        return path

    def check(self, source: Path | bytes, name: str) -> None:
        """Checks an image's size before it is decoded; decodes it where the options say so.

        Raises:
          ImageError: it is no image or too large.
        """
        expect_small(source, self.options.most_image_bytes, name)
        if self.options.verify:
            decoded(source, name)

    def stored(self, read: Callable[[], bytes], field: str, where: str, content: bytes | None = None) -> StoredImage:
        """Returns an image inside a data file after checking it as `image` does.

        Args:
          read: returns its bytes; it must not keep them. content: its bytes where they are at hand.

        Raises:
          ImageError: it is no image or too large.
        """
        try:
            self.check(read() if content is None else content, where)
        except ImageError as error:
            raise ImageError(f"{field}: {error}") from error
        return StoredImage(read, f"{where} {field}")

    def image_of(self, record: Record, field: str) -> Path | StoredImage:
        """Returns a record's image: the name of a file, or bytes with their path as the hub's Parquet files have them.

        Raises:
          InputError: the field is neither. ImageError: it is no image or too large.
        """
        value = record[field]
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            reload = record.reload
            return self.stored(lambda: reload()[field]["bytes"], field, record.where, value["bytes"])
        if isinstance(value, dict):
            value = value.get("path")
        return self.image(value, field)

    def images_in(self, folder: Path, field: str) -> list[Path]:
        """Lists a folder's images by the numbers in their names, each checked as `image` does.

        Raises:
          InputError: there are none. ImageError: one is no image or too large.
        """
        paths = [path for path in folder.iterdir() if path.suffix.lower() in _IMAGE_SUFFIXES and path.is_file()]
        if not paths:
            raise InputError(f"{field}: got {folder.name!r} without images; expected one for each page")
        paths.sort(key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)])
        for path in paths:
            if path not in self._checked:
                self.check(path, path.name)
                self._checked[path] = None
        return paths


def base64_bytes(text: Any, field: str) -> bytes:
    """Decodes base64.

    Raises:
      InputError: it is no base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise InputError(f"{field}: got {text!r:.40} ({error}); expected base64") from error
