"""Texts to token ids: what a tokenizer does not know is told, and not replaced by its token for the unknown."""

import json
from typing import Any

from kvpatch_jax.errors import InputError


def unknown_token(tokenizer: Any) -> str | None:
    """The token that a tokenizer puts for what it does not know, or None where it has none."""
    model = tokenizer.model
    if hasattr(model, "unk_token"):
        return model.unk_token
    number = json.loads(tokenizer.to_str())["model"].get("unk_id")  # Unigram tells only its file
    return None if number is None else tokenizer.id_to_token(number)


def ids_of_text(tokenizer: Any, text: str, unknown: str | None, own: bool = False) -> list[int]:
    """Token ids of a text.

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
                f"text {text[:60]!r}: {part[:40]!r} is not in the tokenizer's vocabulary; expected text that it knows"
            )
    return list(encoding.ids)
