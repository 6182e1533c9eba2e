"""Tokenizers of releases without a `tokenizer.json`: Kimi's by tiktoken's file, others by transformers.

Source of Kimi's: Moonshot's `tokenization_moonshot.py` (tiktoken's byte pairs in `tiktoken.model`, special tokens in
`tokenizer_config.json`).
"""

import base64
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.utils.optional_packages import require

from ..checkpoints import read_table

TOKENIZER_FILE = "tokenizer.json"
TIKTOKEN_FILE = "tiktoken.model"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_OTHER_FILES = ("vocab.json", "tokenizer.model", "vocab.txt")
_TIKTOKEN_CLASS = "TikTokenTokenizer"
_RESERVED = 258
"""Special tokens behind Kimi's vocabulary: 256, and two more in the released code."""
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{_ENDINGS}?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{_ENDINGS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read_other_tokenizer(root: Path) -> Any:
    """Reads a directory's tokenizer from other files than `tokenizer.json`; None where there are none.

    Raises:
      ConfigError: files that are damaged, or that only code of the directory's own reads.
    """
    if (root / TIKTOKEN_FILE).is_file():
        return _tiktoken(root)
    if not any((root / name).is_file() for name in _OTHER_FILES):
        return None

    auto = require("transformers.models.auto.tokenization_auto", "transformers").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(root, local_files_only=True, trust_remote_code=False).backend_tokenizer
    except Exception as error:
        raise ConfigError(
            f"{root}: got tokenizer files that transformers cannot read ({error}); expected a tokenizer"
        ) from error
    for number, entry in (read_table(root / TOKENIZER_CONFIG_FILE).get("added_tokens_decoder") or {}).items():
        if tokenizer.token_to_id(entry["content"]) != int(number):
            raise ConfigError(
                f"{root / TOKENIZER_CONFIG_FILE}: got {entry['content']!r} with the id {number}; expected "
                f"{tokenizer.token_to_id(entry['content'])}, the next behind the vocabulary"
            )
    return tokenizer


def token_id(root: Path, token: str) -> int | None:
    """Returns the id of a token that was added to a vocabulary, from whichever of a directory's tokenizer files
    names it.

    Raises:
      ConfigError: such a file that is not JSON.
    """
    for name in ("added_tokens.json", TOKENIZER_CONFIG_FILE, TOKENIZER_FILE):
        table = read_table(root / name)
        found = table if name == "added_tokens.json" else {}
        # `tokenizer_config.json` keys them by id, `tokenizer.json` lists them.
        try:
            for number, entry in (table.get("added_tokens_decoder") or {}).items():
                found[str(entry.get("content"))] = int(number)
            for entry in table.get("added_tokens") or ():
                found[str(entry.get("content"))] = int(entry["id"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{root / name}: got added tokens of another form ({error!r:.80}); expected each with an id and content"
            ) from error
        if token in found:
            return int(found[token])
    return None


def _tiktoken(root: Path) -> Any:
    """Reads Kimi's tokenizer: tiktoken's tokens, and special tokens behind them."""
    config = read_table(root / TOKENIZER_CONFIG_FILE)
    if config.get("tokenizer_class") != _TIKTOKEN_CLASS:
        raise ConfigError(
            f"{root / TOKENIZER_CONFIG_FILE}: got tokenizer_class {config.get('tokenizer_class')!r}, beside "
            f"{TIKTOKEN_FILE}; expected {_TIKTOKEN_CLASS}, or a tokenizer.json"
        )
    ranks = _read_ranks(root / TIKTOKEN_FILE)
    given = {int(number): str(entry["content"]) for number, entry in (config.get("added_tokens_decoder") or {}).items()}
    numbers = range(len(ranks), len(ranks) + _RESERVED)
    outside = sorted(set(given) - set(numbers))
    if outside:
        raise ConfigError(
            f"{root / TOKENIZER_CONFIG_FILE}: got special token {given[outside[0]]!r} with the id {outside[0]}; "
            f"expected {numbers.start} … {numbers.stop - 1}, behind {TIKTOKEN_FILE}"
        )

    # Every id of the reserved ones has a token, named or not, so that each of the embedding's last rows stands for one.
    names = [given.get(number, f"<|reserved_token_{number}|>") for number in numbers]
    converter = require("transformers.convert_slow_tokenizer", "transformers").TikTokenConverter(
        TIKTOKEN_FILE, pattern=_KIMI, extra_special_tokens=names
    )
    # In place of tiktoken's own reader.
    converter.load_tiktoken_bpe = lambda file: ranks
    tokenizer = converter.converted()
    if any(tokenizer.token_to_id(name) != number for number, name in zip(numbers, names, strict=True)):
        raise ConfigError(
            f"{root / TOKENIZER_CONFIG_FILE}: got special tokens that are there twice; expected each once"
        )
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Returns tokens and ranks, the token in base64 and its rank on a line each.

    Raises:
      ConfigError: a line of another form, ranks that are not 0, 1, 2, …, or a byte that no token stands for.
    """
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError as error:  # base64's own error is one
        raise ConfigError(f"{path}: got {error}; expected a token in base64 and a rank on each line") from error
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent or sorted(ranks.values()) != list(range(len(ranks))):
        found = f"no token for the byte {absent[0]}" if absent else "others"
        raise ConfigError(f"{path}: got {found}; expected all 256 bytes, and ranks from 0 to {len(ranks) - 1}")
    return ranks
