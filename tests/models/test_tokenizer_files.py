"""Tokenizers of releases without a tokenizer.json: the ids of tiktoken and of transformers, and what is refused."""

import base64
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models.inputs.texts import read_tokenizer
from kvpatch_jax.models.inputs.tokenizer_files import token_id
from tests.goldens.load import GOLDENS

GOLD = json.loads((GOLDENS / "tokenizers.json").read_text(encoding="utf-8"))


@functools.cache
def letters() -> list[str]:
    """What byte-level vocabularies write for every byte."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def write_kimi(root: Path, **changes: Any) -> Path:
    lines = changes.pop("lines", [f"{token} {rank}" for rank, token in enumerate(GOLD["tokens"])])
    (root / "tiktoken.model").write_text("\n".join(lines) + "\n")
    special = {number: {"content": name, "special": True} for number, name in GOLD["special"].items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": special} | changes
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root


def write_qwen2(root: Path, **changes: Any) -> Path:
    written = ["".join(letters()[byte] for byte in base64.b64decode(token)) for token in GOLD["tokens"]]
    (root / "vocab.json").write_text(json.dumps({token: rank for rank, token in enumerate(written)}))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in GOLD["merges"])]
    (root / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    added = {number: {"content": name, "special": True} for number, name in GOLD["added"].items()}
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added} | changes
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root


def test_kimis_files_give_tiktokens_ids_and_texts_back(tmp_path):
    tokenizer = read_tokenizer(write_kimi(tmp_path))
    for text, ids in zip(GOLD["texts"], GOLD["kimi"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == len(GOLD["tokens"]) + 258
    assert tokenizer.token_to_id("<|media_pad|>") == token_id(tmp_path, "<|media_pad|>") == len(GOLD["tokens"]) + 23

    # Saved as tokenizer.json, it is read as that and the same.
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = read_tokenizer(tmp_path)
    assert [again.encode(text, add_special_tokens=False).ids for text in GOLD["texts"]] == GOLD["kimi"]


def test_qwen2s_files_give_transformers_ids(tmp_path):
    tokenizer = read_tokenizer(write_qwen2(tmp_path))
    for text, ids in zip(GOLD["texts"], GOLD["qwen2"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
    assert tokenizer.token_to_id("<IMG_CONTEXT>") == token_id(tmp_path, "<IMG_CONTEXT>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer_class": "QWenTokenizer"},
            "'QWenTokenizer', beside tiktoken.model; expected TikTok",
        ),
        ({"lines": ["IQ== 0", "nonsense"]}, "expected a token in base64 and a rank"),
        ({"lines": ["IQ== 0", "Ig== 2"]}, "all 256 bytes, and ranks from 0 to 1"),
        ({"lines": ["IQ== 0"]}, "no token for the byte 0"),
        ({"added_tokens_decoder": {"3": {"content": "[X]"}}}, r"'\[X\]' with the id 3; expected 400 … 657"),
        (
            {"added_tokens_decoder": {"400": {"content": "[X]"}, "401": {"content": "[X]"}}},
            "special tokens that are there twice",
        ),
    ],
)
def test_damaged_tiktoken_files_are_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read_tokenizer(write_kimi(tmp_path, **changes))


def test_tokenizers_that_would_number_tokens_otherwise_are_refused(tmp_path):
    wrong = {"7": {"content": "<|im_start|>"}}
    with pytest.raises(ConfigError, match=r"'<\|im_start\|>' with the id 7; expected 400, the next"):
        read_tokenizer(write_qwen2(tmp_path, added_tokens_decoder=wrong))
    (tmp_path / "merges.txt").write_text("a b c\n")
    with pytest.raises(ConfigError, match="that transformers cannot read"):
        read_tokenizer(tmp_path)
