"""Tokenizers and chat templates out of a GGUF file's metadata.

Of two kinds: byte-level BPE with the split that its model was trained on, and SentencePiece's BPE (Llama 2, Mistral),
whose merges follow from the scores. Source: llama.cpp's names of splits (`tokenizer.ggml.pre`), and the
`tokenizer.json` of the models they are named after.
"""

from collections.abc import Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.utils.optional_packages import require

from .chat import ChatTemplate

_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_LONGEST = 256
"""Characters of a token that may be put together of two."""
_SPACE = "▁"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "smollm": None,  # every digit alone, then GPT-2's split
    "gpt-2": None,
}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def missing_tokenizer(metadata: Mapping[str, Any]) -> str | None:
    """Says why no tokenizer can be made of this metadata; None where one can."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind == "llama":
        return None
    if kind != "gpt2":
        return f"the file's tokenizer is of kind {kind!r}, not of the known 'gpt2' (byte-level BPE) and 'llama'"
    if _SAME.get(str(split), split) not in _SPLITS:
        return f"the file's tokenizer splits text as {split!r}, not in one of the known ways {[*_SPLITS, *_SAME]}"
    return None


def gguf_tokenizer(metadata: Mapping[str, Any], vocabulary: int) -> Any:
    """Makes a tokenizer (of `tokenizers`), for metadata of which `missing_tokenizer` says nothing.

    Args:
      vocabulary: how many tokens the embedding has rows for.

    Raises:
      ConfigError: tokens, merges or numbers of tokens that do not belong together.
    """
    tokenizers = require("tokenizers", "tokenizers")
    tokens = _texts(metadata, "tokens")
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    if len(tokens) > vocabulary or len(set(tokens)) != len(tokens) or len(kinds) not in (0, len(tokens)):
        raise ConfigError(
            f"tokenizer.ggml.tokens: got {len(tokens)} texts, {len(set(tokens))} of them different, and token_type "
            f"{len(kinds)} numbers; expected up to {vocabulary} different ones, and as many numbers"
        )

    make = _sentencepiece if metadata.get("tokenizer.ggml.model") == "llama" else _byte_level
    try:
        tokenizer = make(tokenizers, metadata, tokens)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"tokenizer.ggml.merges: got {error}; expected merges that make a tokenizer of the file's tokens"
        ) from error

    # Control tokens are left out where text is decoded without special tokens; those that somebody added stay.
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_UNKNOWN, _CONTROL)]
    added = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER]

    def whole(token, special):
        return tokenizers.AddedToken(token, normalized=False, special=special)

    tokenizer.add_special_tokens([whole(token, True) for token in special])
    tokenizer.add_tokens([whole(token, False) for token in added])
    _add_start(tokenizers, tokenizer, metadata, tokens)
    return tokenizer


def _byte_level(tokenizers: Any, metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Builds byte-level BPE with the split that the file names."""
    merges = [tuple(merge.split(" ")) for merge in _texts(metadata, "merges")]
    named = str(metadata["tokenizer.ggml.pre"])
    split = _SAME.get(named, named)
    numbers = {token: number for number, token in enumerate(tokens)}
    # Llama 3 takes a piece that is a token as it is, whatever its merges would make of it.
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, merges, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()

    # Without a pattern GPT-2's own split is used, which `ByteLevel` has; SmolLM2 cuts off every digit first.
    pattern, pre = _SPLITS[split], tokenizers.pre_tokenizers
    steps = [pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps = [pre.Split(tokenizers.Regex(pattern), behavior="isolated"), *steps]
    elif split == "smollm":
        steps = [pre.Digits(individual_digits=True), *steps]
    tokenizer.pre_tokenizer = pre.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokenizers: Any, metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Builds SentencePiece's BPE: spaces are written out, one before the text; what no token has is spelled in
    bytes.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        found = len(scores) if isinstance(scores, list) else scores
        raise ConfigError(f"tokenizer.ggml.scores: got {found!r} numbers; expected {len(tokens)}, as there are tokens")

    numbers = {token: number for number, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
    model = tokenizers.models.BPE(
        numbers, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in numbers
    )

    # Decoding goes the way back: spaces, then bytes that make characters, then the space that was put in front.
    tokenizer = tokenizers.Tokenizer(model)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [tokenizers.normalizers.Prepend(_SPACE)] if prefixed else []
    tokenizer.normalizer = tokenizers.normalizers.Sequence([*prepend, tokenizers.normalizers.Replace(" ", _SPACE)])

    decoders = tokenizers.decoders
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Returns every two tokens that make a third, the one of the highest score first."""
    known = set(tokens)
    found: list[tuple[float, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token) if len(token) <= _LONGEST else 0):
            if token[:cut] in known and token[cut:] in known:
                found.append((score, token[:cut], token[cut:]))
    # A stable sort: of equal scores the token that the file lists first is made first.
    found.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in found]


def gguf_chat_template(metadata: Mapping[str, Any], name: str) -> ChatTemplate | None:
    """Returns the file's chat template with the special tokens it may name; None where it has none."""
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None

    tokens = metadata.get("tokenizer.ggml.tokens", [])
    found = []
    for ours, theirs in _NAMES.items():
        number = metadata.get(f"tokenizer.ggml.{ours}_token_id")
        if isinstance(number, int) and isinstance(tokens, list) and 0 <= number < len(tokens):
            found.append((theirs, str(tokens[number])))

    return ChatTemplate(source, tuple(found), name)


def _add_start(tokenizers: Any, tokenizer: Any, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Has the tokenizer put its start token before a text, where the file says so (Llama's: unless it says not)."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    absent = kind == "llama" or split in ("llama-bpe", "llama3", "llama-v3")
    if not metadata.get("tokenizer.ggml.add_bos_token", absent):
        return

    number = metadata.get("tokenizer.ggml.bos_token_id")
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ConfigError(f"tokenizer.ggml.bos_token_id: got {number!r}; expected 0 … {len(tokens) - 1}")

    start = tokens[number]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, number)]
    )


def _texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigError(f"tokenizer.ggml.{name}: got a {type(found).__name__}; expected a list of texts")
    return found
