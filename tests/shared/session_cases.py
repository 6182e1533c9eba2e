"""What tests of sessions share: a tiny backbone that reads words and images, images of one size, and an oracle."""

from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

import kvpatch_jax as kvp
from kvpatch_jax.session import batching, embedded
from tests.shared.window_oracle import BUCKETS, Naive, tiny

WORDS = 60
QUESTION = "w7 w11 w20"
IMAGE_TOKENS = 18
"""Of `image_of` with its default height, beginning and end included."""
ONE_TABLE_SIZE = mock.patch.object(batching, "TABLES", BUCKETS.of_keys)
"""Within it, answers of all lengths have tables of one size, and so run the same programs."""


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


def image_of(seed: int, height: int = 28, width: int = 28) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def words(first: int, count: int) -> str:
    return " ".join(f"w{number}" for number in range(first, first + count))


class PatchesAlone:
    """A store of canonicals and patches, which keeps no prefills."""

    def __init__(self, store: kvp.ChunkStore):
        self._store = store
        for name in ("get", "put", "get_patches", "put_patches", "contains", "patch_count"):
            setattr(self, name, getattr(store, name))


class Oracle:
    """What the KV of a window must be: inputs prefilled by plain forwards over contiguous contexts, in a list."""

    def __init__(self, backbone: Any, *items: Any):
        self.backbone, self.naive = backbone, Naive(backbone)
        for number, item in enumerate(items):
            self.put(str(number), item)

    def put(self, name: str, item: Any, index: int | None = None) -> None:
        """Prefills an item behind those in front of an index; those behind it move and stay as they are."""
        tokens = self._tokens(item)
        self.naive.place(name, tokens, len(self.naive.parts) if index is None else index)

    def remove(self, *names: str) -> None:
        self.naive.remove(*names)

    def logits(self) -> np.ndarray:
        """Returns the logits of the question."""
        last = self.naive.parts[-1]
        return np.asarray(self.naive.run(self._tokens(QUESTION), last.start + last.span).logits)

    def _tokens(self, item: Any) -> Any:
        items = [kvp.Text(item) if isinstance(item, str) else item]
        return self.backbone.embed(**self.backbone.prepare(items))


def logits(session: kvp.Session, question: str = QUESTION) -> np.ndarray:
    """Returns the logits of a question after the window of a session."""
    asked = embedded(session.backbone, [question])
    executor = session.runtime.executor
    out = session.runtime.do(lambda: executor.prefill(session.window, asked.tokens, asked.length))
    return np.asarray(out.logits)


def expect_logits(session: kvp.Session, expected: np.ndarray, bar: float = 2e-5) -> None:
    """Compares a session's logits with others, against the largest of them."""
    difference = np.abs(logits(session) - expected).max()
    assert difference <= bar * np.abs(expected).max(), (difference, session.ids)


def settled(session: kvp.Session) -> kvp.session.Stats:
    """Waits for what is stored in the background, and returns the counts."""
    former = session.runtime.former
    assert former is not None
    former.flush()
    assert not former.errors
    return session.stats()


def state(session: kvp.Session) -> tuple[Any, ...]:
    """Returns all that a refused call must leave as it was."""
    executor, sources = session.runtime.executor, session.runtime.executor.sources
    contents = [kvp.cache.chunk_id(session.backbone.fingerprint, image_of(seed)) for seed in range(10)]
    provided = [
        name for name in (*contents, *session.window.ids, *session.window.gone) if sources[name].tokens is not None
    ]
    counts = executor.slots.counts.tolist()
    return session.window, session.ids, session.gone, counts, provided, sorted(executor.branches), session.stats()
