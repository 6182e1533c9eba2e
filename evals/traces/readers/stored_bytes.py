"""Bytes of data files, plain or compressed, read in order once and again by place.

A compressed file is unpacked into a temporary file without a name, no further than it is read, so that images inside it
can be read again when they are needed.
"""

import gzip
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.optional_packages import require

_CHUNK = 1 << 20
LONGEST_LINE = 256 << 20
"""Longest line of a text file, in bytes: a request with 100 screenshots has about 60 MB."""


class StoredBytes:
    """A file's bytes, without its compression.

    Attributes:
      path: the file. name: how messages call it.
    """

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        with path.open("rb") as file:
            start = file.read(4)
        opened: Any = None
        if start[:2] == b"\x1f\x8b":
            opened = gzip.open(path, "rb")  # noqa: SIM115 # read on as records are asked for
        elif start == b"\x28\xb5\x2f\xfd":
            opened = require("zstandard", "zstandard", "data").open(str(path), "rb")
        self._file: Any = None
        self._source, self._end = opened, 0
        if opened is not None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 # as long as images may be read again
            for file in (opened, self._file):
                weakref.finalize(self, file.close)

    def read(self, start: int, length: int) -> bytes:
        """Reads `length` bytes at `start`; fewer at the end.

        Raises:
          InputError: a compressed file is damaged or truncated.
        """
        if self._source is None:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(length)

        self._file.seek(self._end)
        while self._end < start + length:
            try:
                chunk = self._source.read(_CHUNK)
            except Exception as error:
                # zstandard's error is a class of the optional package.
                if not isinstance(error, OSError | EOFError | zlib.error) and type(error).__name__ != "ZstdError":
                    raise
                raise InputError(
                    f"{self.name}: got damaged compressed bytes ({error}); expected a whole file"
                ) from error
            if not chunk:
                break
            self._file.write(chunk)
            self._end += len(chunk)
        self._file.seek(start)
        return self._file.read(length)

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yields (start, length, line) of each line; a byte order mark at the file's start is left out.

        A line is without its end, \\n or \\r\\n; `length` counts the end too.

        Raises:
          InputError: a line is longer than `LONGEST_LINE`, or a compressed file is damaged.
        """
        at, buffer, begin = 0, self.read(0, _CHUNK), 0
        if buffer.startswith(b"\xef\xbb\xbf"):
            begin = 3
        searched = begin
        while True:
            end = buffer.find(b"\n", searched)
            if end >= 0:
                yield at + begin, end + 1 - begin, buffer[begin:end].removesuffix(b"\r")
                begin = searched = end + 1
                continue

            # Reading doubles, so that a long line is copied a few times and not once for each chunk.
            if len(buffer) - begin > LONGEST_LINE:
                raise InputError(f"{self.name}: got a line of more than {LONGEST_LINE} bytes; expected shorter ones")
            chunk = self.read(at + len(buffer), max(_CHUNK, len(buffer) - begin))
            at, buffer = at + begin, buffer[begin:]
            begin, searched = 0, len(buffer)
            if not chunk:
                if buffer:
                    yield at, len(buffer), buffer.removesuffix(b"\r")
                return
            buffer += chunk
