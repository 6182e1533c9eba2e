"""Tokenizers of releases without a `tokenizer.json`, made into those of `tokenizers`: Kimi's and Qwen2's files.

Sources: Moonshot's `tokenization_moonshot.py` (tiktoken's byte pairs: `tiktoken.model`, special tokens in
`tokenizer_config.json`), transformers' Qwen2Tokenizer (`vocab.json` and `merges.txt`).
"""

import base64
import binascii
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.utils.optional_packages import require

from ..checkpoints import read_table

TOKENIZER_FILE = "tokenizer.json"
TIKTOKEN_FILE = "tiktoken.model"
VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_TIKTOKEN_CLASSES = ("TikTokenTokenizer",)
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
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
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_other_tokenizer(root: Path) -> Any:
    """Reads a directory's tokenizer from other files than `tokenizer.json`; None where there are none that are known.

    Raises:
      ConfigError: files of a tokenizer that is not known by its `tokenizer_class`, or that are damaged.
    """
    if (root / TIKTOKEN_FILE).is_file():
        return _tiktoken(root)
    if (root / VOCABULARY_FILE).is_file() and (root / MERGES_FILE).is_file():
        return _qwen2(root)
    return None


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
    config = _config(root, TIKTOKEN_FILE, _TIKTOKEN_CLASSES)
    ranks = _read_ranks(root / TIKTOKEN_FILE)
    tokenizers = require("tokenizers", "tokenizers")
    vocabulary = {_as_text(token): rank for token, rank in ranks.items()}
    # tiktoken looks a whole piece up before it joins anything.
    model = tokenizers.models.BPE(vocabulary, _merges(ranks), ignore_merges=True)
    tokenizer = _byte_level(tokenizers, model, _KIMI)

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
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    if any(tokenizer.token_to_id(name) != number for number, name in zip(numbers, names, strict=True)):
        raise ConfigError(
            f"{root / TOKENIZER_CONFIG_FILE}: got special tokens that are there twice; expected each once"
        )
    return tokenizer


def _qwen2(root: Path) -> Any:
    """Reads Qwen2's tokenizer from its vocabulary and merges."""
    config = _config(root, VOCABULARY_FILE, _QWEN2_CLASSES)
    tokenizers = require("tokenizers", "tokenizers")
    try:
        model = tokenizers.models.BPE.from_file(str(root / VOCABULARY_FILE), str(root / MERGES_FILE))
    except Exception as error:
        raise ConfigError(
            f"{root / VOCABULARY_FILE} and {MERGES_FILE}: got files that cannot be read ({error}); expected a "
            "vocabulary and merges"
        ) from error

    tokenizer = _byte_level(tokenizers, model, _QWEN2)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    added = {int(number): entry for number, entry in (config.get("added_tokens_decoder") or {}).items()}

    # `tokenizers` numbers added tokens in the order in which they come.
    for number, entry in sorted(added.items()):
        flags = {name: bool(entry.get(name, False)) for name in _FLAGS}
        tokenizer.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        if tokenizer.token_to_id(entry["content"]) != number:
            raise ConfigError(
                f"{root / TOKENIZER_CONFIG_FILE}: got {entry['content']!r} with the id {number}; expected "
                f"{tokenizer.token_to_id(entry['content'])}, the next behind {VOCABULARY_FILE}"
            )

    return tokenizer


def _config(root: Path, file: str, known: tuple[str, ...]) -> dict[str, Any]:
    config = read_table(root / TOKENIZER_CONFIG_FILE)
    if config.get("tokenizer_class") not in known:
        raise ConfigError(
            f"{root / TOKENIZER_CONFIG_FILE}: got tokenizer_class {config.get('tokenizer_class')!r}, beside {file}; "
            f"expected {' or '.join(known)}, or a tokenizer.json"
        )
    return config


def _byte_level(tokenizers: Any, model: Any, pattern: str) -> Any:
    """Returns a tokenizer that cuts texts by a pattern and byte pairs."""
    tokenizer = tokenizers.Tokenizer(model)
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Returns tokens and ranks, the token in base64 and its rank on a line each.

    Raises:
      ConfigError: a line of another form, ranks that are not 0, 1, 2, …, or a byte that no token stands for.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines()):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(
                f"{path}: got line {number + 1}, {line[:40]!r}; expected a token in base64 and a rank"
            ) from error

    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(
            f"{path}: got {len(ranks)} tokens whose ranks are not 0 … {len(ranks) - 1}; expected each once"
        )

    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise ConfigError(f"{path}: got no token for the byte {absent[0]}; expected all 256")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Returns every pair of tokens that make one, in the order in which tiktoken joins them: by the rank of what
    comes out.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(first, second) for first, second in pairs if first in ranks and second in ranks]
        for first, second in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]])):
            merges.append((_as_text(first), _as_text(second)))
    return merges


@functools.cache
def _letters() -> tuple[str, ...]:
    """Returns the visible letter that byte-level tokenizers write for each byte (GPT-2's)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte) if byte in plain else chr(next(others)) for byte in range(256))


def _as_text(token: bytes) -> str:
    letters = _letters()
    return "".join(letters[byte] for byte in token)
