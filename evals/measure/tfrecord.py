"""TFRecord files of tf.train.Example, without TensorFlow.

A record is its length (8 bytes), the masked CRC-32C of that, the bytes, and their masked CRC-32C, little-endian
(TensorFlow's docs, "TFRecords format details"). An Example is a Features, a map from names to lists of bytes, floats or
integers (tensorflow/core/example/example.proto, feature.proto).
"""

import dataclasses
import struct
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt32

from kvpatch_jax.errors import InputError

from .stored_bytes import StoredBytes

LONGEST_RECORD = 1 << 30
"""Longest record, in bytes: an episode of AndroidControl has about 10 MB."""

_LANES = 1024


def _table() -> UInt32[np.ndarray, "256"]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


_TABLE = _table()


def crc32c(content: bytes) -> int:
    """Computes the CRC-32C (Castagnoli) of bytes.

    Without its start value the sum is linear, so the bytes are divided among lanes that run side by side; neighbouring
    lanes are then joined, the first moved on by the zeros that stand for the second.
    """
    # The start value, all ones, is the complement of the first four bytes; zeros in front change nothing after that.
    head = bytes(byte ^ 0xFF for byte in content[:4]) + content[4:]
    if len(content) < 4:
        register = 0xFFFFFFFF
        for byte in content:
            register = int(_TABLE[(register ^ byte) & 0xFF]) ^ (register >> 8)
        return register ^ 0xFFFFFFFF

    lanes = _LANES if len(head) >= 4 * _LANES else 1
    columns = -(-len(head) // lanes)
    padded = np.zeros(lanes * columns, np.uint8)
    padded[len(padded) - len(head) :] = np.frombuffer(head, np.uint8)
    registers = np.zeros(lanes, np.uint32)
    for column in padded.reshape(lanes, columns).T:
        registers = _TABLE[(registers ^ column) & 0xFF] ^ (registers >> 8)

    # What `columns` zero bytes make of each bit of a register; squared, of twice as many.
    moved = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if lanes > 1:
        for _ in range(columns):
            moved = _TABLE[moved & 0xFF] ^ (moved >> 8)
    while len(registers) > 1:
        registers = _apply(moved, registers[::2]) ^ registers[1::2]
        moved = _apply(moved, moved)
    return int(registers[0]) ^ 0xFFFFFFFF


def _apply(operator: UInt32[np.ndarray, "32"], values: UInt32[np.ndarray, " N"]) -> UInt32[np.ndarray, " N"]:
    bits = (values[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    return np.bitwise_xor.reduce(np.where(bits, operator, np.uint32(0)), axis=1).astype(np.uint32)


def masked(crc: int) -> int:
    """Masks a sum as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(content: bytes) -> bytes:
    """Returns a record of a TFRecord file."""
    length = struct.pack("<Q", len(content))
    sums = (struct.pack("<I", masked(crc32c(part))) for part in (length, content))
    return length + next(sums) + content + next(sums)


@dataclasses.dataclass(frozen=True)
class ExampleRecord:
    """One Example: for each name, its integers, or where its bytes are in the file, (start, length) each."""

    number: int
    spans: dict[str, list[tuple[int, int]]]
    integers: dict[str, list[int]]


def examples(source: StoredBytes) -> Iterator[ExampleRecord]:
    """Reads the Examples of a TFRecord file.

    Raises:
      InputError: a sum is wrong, a length is longer than the file or than `LONGEST_RECORD`, or a record is no Example.
      What follows such a record cannot be trusted, so reading ends there.
    """
    start, number = 0, 0
    while head := source.read(start, 12):
        where = f"{source.name} record {number}"
        if len(head) < 12 or masked(crc32c(head[:8])) != struct.unpack("<I", head[8:])[0]:
            raise InputError(f"{where}: got a length whose sum is wrong; expected a TFRecord")
        length = struct.unpack("<Q", head[:8])[0]
        if length > LONGEST_RECORD:
            raise InputError(f"{where}: got a length of {length} bytes; expected at most {LONGEST_RECORD}")
        body = source.read(start + 12, length + 4)
        if len(body) < length + 4:
            raise InputError(
                f"{where}: got a file that ends after {len(body)} of {length + 4} bytes; expected a whole one"
            )
        if masked(crc32c(body[:length])) != struct.unpack("<I", body[length:])[0]:
            raise InputError(f"{where}: got bytes whose sum is wrong; expected them undamaged")

        spans: dict[str, list[tuple[int, int]]] = {}
        integers: dict[str, list[int]] = {}
        try:
            _features(body[:length], start + 12, spans, integers)
        except (IndexError, ValueError) as error:
            raise InputError(f"{where}: got {error}; expected a tf.train.Example") from error
        yield ExampleRecord(number, spans, integers)
        start, number = start + 12 + length + 4, number + 1


def _features(
    body: bytes, offset: int, spans: dict[str, list[tuple[int, int]]], integers: dict[str, list[int]]
) -> None:
    """Collects an Example's features; `offset` is the body's place in the file."""
    for example_field, begin, end in _fields(body, 0, len(body)):
        if example_field != 1:
            continue
        for feature_field, entry, entry_end in _fields(body, begin, end):
            if feature_field != 1:
                continue
            parts = {field: (start, stop) for field, start, stop in _fields(body, entry, entry_end)}
            if not {1, 2} <= set(parts):
                continue
            name = body[slice(*parts[1])].decode()
            for kind, start, stop in _fields(body, *parts[2]):
                if kind == 1:
                    found = [(offset + a, b - a) for field, a, b in _fields(body, start, stop) if field == 1]
                    spans.setdefault(name, []).extend(found)
                elif kind == 3:
                    integers.setdefault(name, []).extend(_integers(body, start, stop))


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if shift > 63:
            raise ValueError("a number of more than 10 bytes")
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (field, start, end) of the values of a message, numbers as the bytes that they are written in."""
    while at < end:
        key, at = _varint(body, at)
        wire = key & 7
        if wire == 2:
            length, at = _varint(body, at)
        elif wire == 0:
            length = _varint(body, at)[1] - at
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > end:
            raise ValueError(f"a field of {length} bytes where {end - at} are left")
        yield key >> 3, at, at + length
        at += length


def _integers(body: bytes, start: int, end: int) -> list[int]:
    """Reads an Int64List, packed or not."""
    values = []
    for field, at, stop in _fields(body, start, end):
        while field == 1 and at < stop:
            value, at = _varint(body, at)
            values.append(value - (1 << 64) if value >> 63 else value)
    return values
