"""What tests of sessions share: a tiny backbone that reads words and images, and images of one size."""

from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from window_oracle import tiny

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.session import embedded

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


def state(session: kvp.Session) -> tuple[Any, ...]:
    """Returns all that a refused call must leave as it was."""
    executor, fingerprint = session.runtime.executor, session.backbone.fingerprint
    contents = [*(image_of(seed) for seed in range(10)), kvp.Text("w5")]
    ids = [chunk_id(fingerprint, content) for content in contents]
    provided = [id for id in ids if id in executor.sources]
    return session.window, session.ids, session.gone, executor.books.allocator.counts.tolist(), provided


def logits(session: kvp.Session, question: str = QUESTION) -> np.ndarray:
    """Returns the logits of a question after the window of a session."""
    asked = embedded(session.backbone, [question])
    return np.asarray(session.runtime.executor.prefill(session.window, asked.tokens, asked.length).logits)
