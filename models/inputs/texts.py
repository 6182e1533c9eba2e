"""Texts to token ids: what a tokenizer does not know is told, and not replaced by its token for the unknown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.optional_packages import require

from .tokenizer_files import TOKENIZER_FILE as TOKENIZER_FILE
from .tokenizer_files import read_other_tokenizer


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


def ids_of_text(tokenizer: Any, text: str, unknown: str | None, own: bool = False) -> list[int]:
    """Returns token ids of a text.

    Args:
      own: whether the tokenizer's own start and end tokens stand around it.
      unknown: the tokenizer's `unknown_token`. Where the text itself says it, it stands for itself.

    Raises:
      InputError: a part of the text that only the unknown token stands for.
    """
    encoding = tokenizer.encode(text, add_special_tokens=own)
    number = None if unknown is None else tokenizer.token_to_id(unknown)
    for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        part = text[start:stop].strip()
        if token == number and stop > start and part != unknown:
            raise InputError(
                f"text {text[:60]!r}: got {part[:40]!r}, which is not in the tokenizer's vocabulary; expected text "
                "that it knows"
            )

    return list(encoding.ids)


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
