"""TFRecord files of tf.train.Example, without TensorFlow.

A record is its length (8 bytes, little-endian), a checksum of that, the bytes, and their checksum. An Example is a map
from names to lists of bytes or integers (tensorflow/core/example/example.proto, feature.proto). Checksums are not
compared: AndroidControl's files are compressed by gzip, which has its own.
"""

import io
import struct
from collections.abc import Iterator
from typing import Any

from kvpatch_jax.errors import InputError

LONGEST = 1 << 30
"""Longest record, in bytes: an episode of AndroidControl has about 10 MB."""


def examples(stream: io.BufferedIOBase, name: str) -> Iterator[dict[str, list[Any]]]:
    """Reads Examples: for each name its integers, or its bytes, as texts where they are UTF-8.

    Raises:
      InputError: a length beyond the file or `LONGEST`, or a record that is no Example; reading ends there.
    """
    number = 0
    while head := stream.read(12):
        length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else LONGEST + 1
        if length > LONGEST:
            raise InputError(f"{name}[{number}]: got a record of {length} bytes; expected at most {LONGEST}")
        body = stream.read(length + 4)[:-4]
        if len(body) < length:
            raise InputError(f"{name}[{number}]: got a file that ends inside the record; expected a whole one")
        try:
            yield _features(body)
        except (KeyError, IndexError, ValueError) as error:
            raise InputError(f"{name}[{number}]: got {error}; expected a tf.train.Example") from error
        number += 1


def _features(body: bytes) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for _, features in _fields(body):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            for kind, values in _fields(parts.get(2, b"")):
                column = columns.setdefault(parts[1].decode(), [])
                if kind == 1:
                    column += [_text(value) for _, value in _fields(values)]
                elif kind == 3:
                    column += _integers(values)
    return columns


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Reads a number of seven bits a byte; returns it and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (body[at] & 0x7F) << shift
        at += 1
        if body[at - 1] < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields number and bytes of each field of a message; a number's bytes are those that it is written in."""
    at = 0
    while at < len(body):
        key, at = _varint(body, at)
        if key & 7 == 2:
            length, at = _varint(body, at)
        elif key & 7 == 0:
            length = _varint(body, at)[1] - at
        else:
            length = {1: 8, 5: 4}.get(key & 7, len(body) + 1)
        if at + length > len(body):
            raise ValueError(f"a field of {length} bytes where {len(body) - at} are left")
        yield key >> 3, body[at : at + length]
        at += length


def _integers(values: bytes) -> list[int]:
    """Reads an Int64List, packed or not."""
    integers = []
    for _, packed in _fields(values):
        at = 0
        while at < len(packed):
            value, at = _varint(packed, at)
            integers.append(value - (1 << 64) if value >> 63 else value)
    return integers
