"""What reads transcripts: SmolLM2-135M with its tokenizer, or a small shipped instance that takes words as ids."""

import re
import types
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from kvpatch_jax.core import Buckets
from models import ModelBackbone, load

from ..real_weights import checkpoint
from ..trained import MAIN, shipped

WORD_IDS = (20, 60)
"""Ids that the small instance reads as words: among them are no placeholders of images."""


class PromptReader(NamedTuple):
    """A backbone and its tokenizer.

    Attributes:
      name: of the model. encode: `encode` of a `tokenizers.Tokenizer`. decode: ids to text.
    """

    name: str
    backbone: ModelBackbone
    encode: Callable[..., Any]
    decode: Callable[[list[int]], str]


def load_decoder(path: str | None) -> PromptReader:
    """Loads SmolLM2-135M.

    Raises:
      ConfigError: its weights are not installed.
    """
    backbone = load(checkpoint(path), dtype="float32", angles="float32", buckets=Buckets(16, 2))
    tokenizer = backbone.tokenizer
    return PromptReader("SmolLM2-135M", backbone, tokenizer.encode, tokenizer.decode)


def load_small() -> PromptReader:
    """Loads the small instance, which was never trained on text: for previews of the programs alone."""
    backbone = load(shipped(MAIN), dtype="float32", buckets=Buckets(16, 1))
    first, last = WORD_IDS

    def encode(text: str, add_special_tokens: bool = False) -> Any:
        pieces = list(re.finditer(r"\n|[^\S\n]*(?:\w+|[^\w\s])", text))
        ids = [first + zlib.crc32(piece.group().encode()) % (last - first) for piece in pieces]
        return types.SimpleNamespace(ids=ids, offsets=[piece.span() for piece in pieces])

    return PromptReader(MAIN, backbone, encode, lambda ids: " ".join(map(str, ids)))
