"""A release's tokenizer, in whichever files it comes, gives the ids of its own library; damaged files are refused."""

import base64
import functools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.inputs.gguf_tokenizer import gguf_tokenizer
from kvpatch_jax.models.inputs.texts import read_tokenizer
from kvpatch_jax.models.inputs.tokenizer_files import token_id
from tests.goldens.load import GOLDENS
from tests.models.gguf_files import converted, metadata_of, tiny_tensors, write_gguf

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


X = {"content": "X"}


def write_merges(root: Path) -> None:
    (write_qwen2(root) / "merges.txt").write_text("a b c\n")


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        (write_kimi, {"tokenizer_class": "QWenTokenizer"}, "'QWenTokenizer', beside tiktoken.model; expected TikTok"),
        (write_kimi, {"lines": ["IQ== 0", "nonsense"]}, "expected a token in base64 and a rank"),
        (write_kimi, {"lines": ["IQ== 0", "Ig== 2"]}, "all 256 bytes, and ranks from 0 to 1"),
        (write_kimi, {"added_tokens_decoder": {"3": {"content": "X"}}}, r"'X' with the id 3; expected 400 … 657"),
        (write_kimi, {"added_tokens_decoder": {"400": X, "401": X}}, "are there twice"),
        (write_qwen2, {"added_tokens_decoder": {"7": {"content": "<|im_start|>"}}}, "the id 7; expected 400, the next"),
        (write_merges, {}, "that transformers cannot read"),
    ],
)
def test_damaged_files_are_refused(write, changes, message, tmp_path):
    write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        read_tokenizer(tmp_path)


TOKENS = [*"abcdefgh '12\n", "Ġ", "Ċ", "Ġa", "bc", "<|start|>", "<think>", "Ã", "©", "é", "ab", "abc"]


def tokenizer_metadata(split: str = "smollm", **more: Any) -> dict[str, Any]:
    kinds = [{"<|start|>": 3, "<think>": 4}.get(token, 1) for token in TOKENS]
    named = {
        "model": "gpt2",
        "pre": split,
        "tokens": TOKENS,
        "token_type": kinds,
        "merges": ["Ġ a", "b c", "a bc", "a b"],
        "bos_token_id": TOKENS.index("<|start|>"),
        "eos_token_id": 3,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (named | more).items() if value is not None}


@pytest.mark.parametrize(
    ("split", "given", "pieces"),
    [
        ("smollm", "I'll buy 123 eggs\n\n now", ["I", "'ll", " buy", " ", "1", "2", "3", " eggs", "\n\n", " now"]),
        ("gpt-2", "I'll buy 123 eggs\n\n now", ["I", "'ll", " buy", " 123", " eggs", "\n\n", " now"]),
        ("qwen2", "I'LL buy 123 eggs!\n\n now", ["I", "'LL", " buy", " ", "1", "2", "3", " eggs", "!\n\n", " now"]),
        ("llama-bpe", "I'LL buy 12345 eggs  now", ["I", "'LL", " buy", " ", "123", "45", " eggs", " ", " now"]),
    ],
)
def test_texts_are_split_as_the_models_were_trained(split: str, given: str, pieces: list[str]) -> None:
    tokenizer = gguf_tokenizer(tokenizer_metadata(split), 40)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(given)]
    assert [given[start:stop] for start, stop in spans] == pieces


def test_tokens_merges_and_special_ones() -> None:
    tokenizer = gguf_tokenizer(tokenizer_metadata(), 40)
    names = lambda given: tokenizer.encode(given).tokens
    assert names("abc a<|start|><think>a") == ["abc", "Ġa", "<|start|>", "<think>", "a"]
    assert tokenizer.decode(tokenizer.encode("a<|start|>b<think>").ids) == "ab<think>"
    assert tokenizer.get_vocab_size() == len(TOKENS)
    starting = gguf_tokenizer(tokenizer_metadata("llama-bpe"), 40)
    assert starting.encode("a").tokens == ["<|start|>", "a"]
    assert starting.encode("a", add_special_tokens=False).tokens == ["a"]
    silent = gguf_tokenizer(tokenizer_metadata("llama-bpe", add_bos_token=False), 40)
    assert silent.encode("a").tokens == ["a"]


SCORES = [-9.0, -9.5, -9.6, -9.7, -9.8, -1.0, -2.0, -3.0, -4.0, -5.0]
PIECES: dict[str, float] = dict(zip(("▁", *"abcé", "▁a", "ab", "bc", "abc", "▁ab"), SCORES, strict=True))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    named = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(PIECES.values()),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (named | more).items() if value is not None}


def sentencepiece_by_hand(given: str) -> list[str]:
    """The two neighbours whose union has the highest score are joined, the first of them first, and again."""
    parts = list("▁" + given.replace(" ", "▁"))
    while True:
        joined = [(PIECES.get(one + other, -np.inf), -place) for place, (one, other) in enumerate(pairwise(parts))]
        if not joined or max(joined)[0] == -np.inf:
            break
        place = -max(joined)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    out: list[str] = []
    for part in parts:
        out += [part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()]
    return out


@given(st.text("abc é日", min_size=1, max_size=12))
def test_sentencepiece_joins_by_score_and_spells_the_rest_in_bytes(given: str) -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata(), 1000)
    encoding = tokenizer.encode(given)
    assert encoding.tokens == ["<s>", *sentencepiece_by_hand(given)]
    assert tokenizer.decode(encoding.ids) == given


def test_sentencepiece_without_start_and_space():
    bare = gguf_tokenizer(sentencepiece_metadata(add_bos_token=False, add_space_prefix=False), 1000)
    assert bare.encode("ab a").tokens == ["ab", "▁a"]


def load_with(root: Path, metadata: dict[str, Any]) -> Any:
    tensors = converted(tiny_tensors("llama"), "llama")
    return load(write_gguf(root / "m.gguf", metadata_of("llama") | metadata, tensors))


def test_a_file_brings_tokenizer_and_template(tmp_path):
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    backbone = load_with(tmp_path, tokenizer_metadata() | template)
    prompt = backbone.chat([{"role": "user", "content": "abc"}])
    assert prompt["input_ids"].tolist() == [[TOKENS.index("<|start|>"), TOKENS.index("abc")]]
    assert (backbone.config.to_dict()["bos_token_id"], backbone.config.to_dict()["eos_token_id"]) == (17, 3)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "of kind None, not of the known 'gpt2'"),
        (tokenizer_metadata("tekken"), "splits text as 'tekken', not in one of the known ways"),
    ],
)
def test_without_a_known_tokenizer_text_is_refused_and_tokens_are_taken(tmp_path, metadata, message):
    backbone = load_with(tmp_path, metadata)
    assert backbone.prepare([[1, 2, 3]])["input_ids"].tolist() == [[1, 2, 3]]
    for call in (lambda: backbone.prepare(["abc"]), lambda: backbone.text([1]), lambda: backbone.chat([])):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (tokenizer_metadata(bos_token_id=99, add_bos_token=True), r"tokenizer\.ggml\."),
        (sentencepiece_metadata(scores=[0.0, 1.0]), "scores: got 2 numbers; expected 269"),
    ],
)
def test_tokens_that_do_not_belong_together_are_refused(metadata, message):
    with pytest.raises(ConfigError, match=message):
        gguf_tokenizer(metadata, 1000)
