"""Where answers end: the stop tokens that a checkpoint names, and how many tokens it gives an answer at most."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import read_table
from .tokenizer_files import TOKENIZER_CONFIG_FILE

GENERATION_FILE = "generation_config.json"


def read_stop_tokens(root: Path, tokenizer: Any) -> tuple[int, ...]:
    """Reads where a checkpoint says that answers end, as transformers does.

    `eos_token_id` of generation_config.json, a number or a list; where there is none, that of config.json (its own or
    its text part's), and at last the `eos_token` of tokenizer_config.json. () where nothing says so.

    Raises:
      ConfigError: a file that is not JSON, or an `eos_token_id` that is neither a number nor a list of numbers.
    """
    config = read_table(root / "config.json")
    parts = [config.get(name) for name in ("text_config", "language_config")]
    tables = [read_table(root / GENERATION_FILE), config, *(part for part in parts if isinstance(part, Mapping))]

    for table in tables:
        found = table.get("eos_token_id")
        if found is None:
            continue
        numbers = found if isinstance(found, list) else [found]
        if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
            raise ConfigError(f"{root}: got eos_token_id {found!r}; expected a token id or a list of them")
        return tuple(numbers)

    token = read_table(root / TOKENIZER_CONFIG_FILE).get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    number = tokenizer.token_to_id(text) if tokenizer is not None and isinstance(text, str) else None
    return () if number is None else (number,)


def read_answer_tokens(root: Path) -> int | None:
    """Reads how many tokens an answer has at most: `max_new_tokens` of generation_config.json, or None.

    Raises:
      ConfigError: a file that is not JSON, or a `max_new_tokens` that is not a number of tokens.
    """
    found = read_table(root / GENERATION_FILE).get("max_new_tokens")
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
        raise ConfigError(f"{root}: got max_new_tokens {found!r:.80}; expected a number of tokens, 1 or more")
    return found


def save_generation(root: Path, stop: Sequence[int], answer_tokens: int | None) -> None:
    """Writes generation_config.json: where answers end."""
    table: dict[str, Any] = {"eos_token_id": list(stop)} if stop else {}
    if answer_tokens is not None:
        table["max_new_tokens"] = answer_tokens
    if table:
        (root / GENERATION_FILE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
