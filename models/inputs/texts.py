"""Texts to token ids: text stays text, and what a tokenizer does not know is not replaced by its unknown token."""

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.optional_packages import require

from .tokenizer_files import TOKENIZER_CONFIG_FILE as TOKENIZER_CONFIG_FILE
from .tokenizer_files import TOKENIZER_FILE as TOKENIZER_FILE
from .tokenizer_files import read_other_tokenizer

_BREAK = "\ufdd0\ufdd1"
"""Breaks up what is spelled like a control token: two characters that Unicode keeps out of texts."""
_ESCAPED = json.dumps(_BREAK)[1:-1]


def read_tokenizer(root: Path) -> Any:
    """Reads a directory's tokenizer, from `tokenizer.json` or Kimi's or Qwen2's own files; None where it has none.

    Raises:
      ConfigError: a file that is no tokenizer.
    """
    path = root / TOKENIZER_FILE
    if not path.exists() and not path.is_symlink():  # a broken link is told
        return read_other_tokenizer(root)
    tokenizers = require("tokenizers", "tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path}: got {error}; expected a tokenizer") from error


def check_ids(input_ids: Any, vocabulary: int, pads: tuple[int, ...]) -> Int32[np.ndarray, "B T"]:
    """Checks token ids and returns them on the host; placeholders of images (`pads`) may lie past the vocabulary.

    Raises:
      InputError: ids that are not whole numbers, or that the embedding has no row for.
    """
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"input_ids: got {ids.dtype} {list(ids.shape)}; expected whole numbers [rows, tokens]")
    wrong = ids[((ids < 0) | (ids >= vocabulary)) & ~np.isin(ids, pads)]
    if wrong.size:
        raise InputError(f"token ids: got {int(wrong[0])}; expected 0 … {vocabulary - 1}")
    return ids.astype(np.int32)


def unknown_token(tokenizer: Any) -> str | None:
    """Returns the token that a tokenizer puts for what it does not know, or None where it has none."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        return model.unk_token
    number = json.loads(tokenizer.to_str())["model"].get("unk_id")  # Unigram tells only its file
    return None if number is None else tokenizer.id_to_token(number)


class TextEncoder:
    """Texts to token ids, where a text's own spelling of a control token is never that token.

    A text passes `literal`, which breaks up every spelling by two characters that are in no text; what a template
    writes does not. A second form of the tokenizer drops the two characters once control tokens have been told apart,
    so that all the rest is tokenized as ever.

    Args:
      tokenizer: of `tokenizers`.
      controls: ids of control tokens beside those that the tokenizer calls special.
      marks: further texts, and patterns (`re.Pattern`), by which something else than text is recognised in a prompt.
    """

    def __init__(self, tokenizer: Any, controls: Collection[int] = (), marks: Collection[str | re.Pattern[str]] = ()):
        self.tokenizer, self.unknown = tokenizer, unknown_token(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._controls = {token.content for number, token in added.items() if token.special or number in controls}
        # What a text has of the two characters, or of their JSON form, is broken up too, and so stays.
        texts = self._controls | {mark for mark in marks if isinstance(mark, str)} | {_BREAK, _ESCAPED}
        patterns = [mark.pattern for mark in marks if isinstance(mark, re.Pattern)]
        firsts = "".join(sorted({re.escape(text[0]) for text in texts}))
        patterns.append(f"(?=[{firsts}])(?:{'|'.join(map(re.escape, texts))})")
        self._spelling = re.compile(f"(?s)(?={'|'.join(patterns)})(.)")
        self._starts = {text[:size] for text in texts for size in range(1, len(text))}
        self._ends = {text[size:] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts))

    def literal(self, text: str) -> str:
        """Returns a text in which nothing is spelled like a control token, for `encode`."""
        return self._spelling.sub(rf"\1{_BREAK}", text)

    def literals(self, value: Any) -> Any:
        """Returns values of messages with every text in them literal, also where several are put together."""
        if isinstance(value, str):
            text, sizes = self.literal(value), range(1, self._longest)
            first = _BREAK if any(text[:size] in self._ends for size in sizes) else ""
            return first + text + (_BREAK if any(text[-size:] in self._starts for size in sizes) else "")
        if isinstance(value, Mapping):
            return {self.literals(key): self.literals(own) for key, own in value.items()}
        return [self.literals(own) for own in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, own: bool = False) -> list[int]:
        """Returns token ids of a text.

        Args:
          own: whether the tokenizer's own start and end tokens stand around it.

        Raises:
          InputError: a part of the text that only the unknown token stands for. Where the text itself says that token,
            it stands for itself.
        """
        if not text and not own:
            return []
        text = text.replace(_ESCAPED, _BREAK)
        encoding = (self._breaking if _BREAK in text else self.tokenizer).encode(text, add_special_tokens=own)
        number = None if self.unknown is None else self.tokenizer.token_to_id(self.unknown)
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            part = text[start:stop].replace(_BREAK, "").strip()
            if token == number and stop > start and part != self.unknown:
                raise InputError(
                    f"text {text[:60]!r}: got {part[:40]!r}, which is not in the tokenizer's vocabulary; expected text "
                    "that it knows"
                )

        return list(encoding.ids)

    @functools.cached_property
    def _breaking(self) -> Any:
        """The tokenizer with `_BREAK` dropped where texts are normalised, which is behind control tokens."""
        table = json.loads(self.tokenizer.to_str())
        drop = {"type": "Replace", "pattern": {"String": _BREAK}, "content": ""}
        table["normalizer"] = {"type": "Sequence", "normalizers": [drop, *filter(None, [table["normalizer"]])]}
        for token in table["added_tokens"]:
            token["normalized"] = token["normalized"] and token["content"] not in self._controls
        # Nor does the model itself put a control token together.
        model = table["model"]
        if model["type"] == "BPE":
            model["merges"] = [merge for merge in model["merges"] if _joined(merge) not in self._controls]
        elif model["type"] == "Unigram":
            least = min(score for _, score in model["vocab"]) - 1e3
            model["vocab"] = [[text, least if text in self._controls else score] for text, score in model["vocab"]]
        return require("tokenizers", "tokenizers").Tokenizer.from_str(json.dumps(table))


def _joined(merge: str | list[str]) -> str:
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def texts_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Returns the text of each token of placeholders and what stands around them.

    Raises:
      InputError: one that the tokenizer does not have.
    """
    texts = [tokenizer.id_to_token(each) for each in token_ids]
    if None in texts:
        raise InputError(
            f"chat template: got tokens {list(token_ids)} of an image, video or sound, in the tokenizer {texts}; "
            "expected a text for each"
        )
    return texts
