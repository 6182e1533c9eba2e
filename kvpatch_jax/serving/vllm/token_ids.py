"""Program that prints the token ids of separators and openings, for the setting `chunking`.

    python -m kvpatch_jax.serving.vllm.token_ids MODEL/tokenizer.json '<|im_start|>' '###'

A special token has one id wherever it stands. Other text may be split differently beside other text, or share a token
with its neighbours and then have no ids of its own: `token_ids` tries it in several places.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from ...errors import InputError
from ...utils.optional_packages import require

BEFORE = ("", "a", "one.", "}", "1", "\n")
AFTER = ("", "a", "One", " one", "1", "\n", "{")
"""Texts around a separator with which it is tried."""


def token_ids(encode: Callable[[str], list[int]], text: str) -> tuple[list[list[int]], float]:
    """Finds the sequences of token ids that a text has in prompts.

    Args:
      encode: returns the token ids of a text, without special tokens around it.
      text: a separator, or the opening of a message.

    Returns:
      The sequences, the most frequent first, and the share of the places that were tried in which it has one.

    Raises:
      InputError: the text is empty, or shares tokens with its neighbours in every place.
    """
    if not text:
        raise InputError("token_ids: got an empty text; expected at least one character")

    counts: dict[tuple[int, ...], int] = {}
    for before in BEFORE:
        for after in AFTER:
            front, whole, rear = encode(before), encode(before + text + after), encode(after)
            end = len(whole) - len(rear)
            # The text has tokens of its own here if those around it are what they are without it.
            if len(front) < end and whole[: len(front)] == front and whole[end:] == rear:
                ids = tuple(whole[len(front) : end])
                counts[ids] = counts.get(ids, 0) + 1

    if not counts:
        raise InputError(f"token_ids: got {text!r:.80}, which shares tokens with any neighbour; expected another text")
    ordered = sorted(counts, key=lambda ids: -counts[ids])
    return [list(ids) for ids in ordered], sum(counts.values()) / (len(BEFORE) * len(AFTER))


def main(arguments: list[str] | None = None) -> None:
    """Prints a JSON object per text: the text, its sequences of ids, and the share of places with one."""
    parser = argparse.ArgumentParser(description="Prints the token ids of texts, for the connector's setting chunking.")
    parser.add_argument("tokenizer", help="file of a tokenizer, tokenizer.json")
    parser.add_argument("texts", nargs="+", help="separators and openings of messages")
    options = parser.parse_args(arguments)

    tokenizer: Any = require("tokenizers", "tokenizers").Tokenizer.from_file(options.tokenizer)
    for text in options.texts:
        found, share = token_ids(lambda part: tokenizer.encode(part, add_special_tokens=False).ids, text)
        print(json.dumps({"text": text, "ids": found, "places": round(share, 2)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
