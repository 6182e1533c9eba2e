"""Prompts of words for the tests of segment reuse."""

import re
import types
import zlib
from typing import Any

import numpy as np

from kvpatch_jax.segments import SegmentPrompt

WORDS = [f"word{number}" for number in range(200)]


def encode(text: str, add_special_tokens: bool = False) -> Any:
    """Tokenises into words, marks and line ends; equal words are equal ids below 250."""
    pieces = list(re.finditer(r"\n|[^\S\n]*(?:\w+|[^\w\s])", text))
    ids = [zlib.crc32(piece.group().encode()) % 250 for piece in pieces]
    return types.SimpleNamespace(ids=ids, offsets=[piece.span() for piece in pieces])


def words(seed: int, count: int) -> str:
    """A line of random words."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def prompt(text: str) -> SegmentPrompt:
    """The prompt of a text."""
    return SegmentPrompt.of_text(text, encode)


def id_prompt(ids: Any) -> SegmentPrompt:
    """A prompt whose text names its ids."""
    names = [f"{token} " for token in ids]
    starts = np.cumsum([0, *map(len, names[:-1])])
    return SegmentPrompt(np.array(ids, np.int32), "".join(names), starts)
