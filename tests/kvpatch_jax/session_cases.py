"""What tests of sessions share: a tiny backbone that reads words and images, and images of one size."""

from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from window_oracle import tiny

WORDS = 60


def worded(backbone: Any) -> Any:
    """Gives a backbone a vocabulary of words, w5 to w59, by which texts can be written."""
    words = {f"w{number}": number for number in range(5, WORDS)}
    tokenizer = Tokenizer(models.WordLevel({**words, "<unknown>": 4}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    backbone.tokenizer = tokenizer
    return backbone


def reader() -> Any:
    """A tiny random backbone for images and words, with buckets."""
    return worded(tiny("mrope"))


def image_of(seed: int, height: int = 28) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, 28, 3), np.uint8)


QUESTION = "w7 w11 w20"
