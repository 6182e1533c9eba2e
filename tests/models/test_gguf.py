"""GGUF files: equal to the Hugging Face directories they were converted from, or refused by name."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvpatch_jax.core import Scaling
from kvpatch_jax.errors import ConfigError, InputError, MissingExtraError, WeightsError
from kvpatch_jax.models import load
from kvpatch_jax.models.checkpoints import GgufFile, TensorSource, flatten_params
from kvpatch_jax.models.inputs.gguf_tokenizer import gguf_tokenizer
from tests.models.gguf_files import (
    HEAD,
    HEADS,
    KV_HEADS,
    WIDTH,
    converted,
    in_pairs,
    metadata_of,
    tiny_tensors,
    write_gguf,
)

HF: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": HEAD,
        "sliding_window": 24,
        "rope_local_base_freq": 10000.0,
    },
}


def open_gguf(path: Path) -> TensorSource:
    return GgufFile(path)


def write_directory(root: Path, architecture: str, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    root.mkdir(parents=True)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": 40,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    (root / "config.json").write_text(json.dumps(HF[architecture] | sizes | config))
    save_file(tensors, root / "model.safetensors")
    return root


def write_model(path: Path, architecture: str = "llama", **more: Any) -> Path:
    return write_gguf(path, metadata_of(architecture, **more), converted(tiny_tensors(architecture), architecture))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("llama", {"tied": True, "bias": True}),
        ("qwen2", {}),
        ("gemma3", {"tied": True}),
    ],
)
def test_a_file_loads_as_the_directory_it_was_converted_from(
    tmp_path: Path, architecture: str, options: dict[str, bool]
) -> None:
    tensors = tiny_tensors(architecture, **options)
    more = {"attention__key_length": HEAD, "attention__value_length": HEAD, "rope__dimension_count": HEAD}
    more |= {"attention__sliding_window": 24} if architecture == "gemma3" else {}
    file = write_gguf(tmp_path / "model.gguf", metadata_of(architecture, **more), converted(tensors, architecture))
    extra = {"attention_bias": True} if "bias" in options else {}
    backbone, plain = load(file), load(write_directory(tmp_path / "plain", architecture, tensors, **extra))
    assert backbone.config.text == plain.config.text
    found, expected = (flatten_params(each.parameters) for each in (backbone, plain))
    assert found.keys() == expected.keys()
    # Gemma's norms are stored with 1 added, which rounds.
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=1e-6 if architecture == "gemma3" else 0)


def test_a_directory_of_one_file_is_that_file(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf")
    assert load(tmp_path).config.text == load(tmp_path / "model.gguf").config.text
    write_model(tmp_path / "other.gguf")
    with pytest.raises(WeightsError, match=r"got 2 GGUF files \(model\.gguf, other\.gguf\); expected the name of one"):
        load(tmp_path)


def test_a_saved_backbone_is_a_plain_directory(tmp_path: Path) -> None:
    from kvpatch_jax.models import save

    backbone = load(write_model(tmp_path / "model.gguf"))
    again = load(save(backbone, tmp_path / "saved"))
    assert again.config.text == backbone.config.text
    found, expected = (flatten_params(each.parameters) for each in (again, backbone))
    assert all(np.array_equal(found[path], expected[path]) for path in expected)


@given(st.data())
def test_any_region_is_that_of_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.getbasetemp() / "regions"
    architecture = data.draw(st.sampled_from(["llama", "qwen2"]))
    path = root / f"{architecture}.gguf"
    source = open_gguf(path if path.exists() else write_model(path, architecture))
    tensors = tiny_tensors(architecture)
    name = data.draw(st.sampled_from(sorted(tensors)))
    region = []
    for size in tensors[name].shape:
        start = data.draw(st.integers(0, size - 1))
        region.append(slice(start, data.draw(st.integers(start + 1, size))))
    assert np.array_equal(source.read(name, tuple(region)), tensors[name][tuple(region)])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_read_exactly(tmp_path: Path, dtype: Any) -> None:
    tensors = {name: value.astype(dtype) for name, value in tiny_tensors("llama").items()}
    source = open_gguf(write_gguf(tmp_path / "m.gguf", metadata_of("llama"), converted(tensors, "llama")))
    assert all(np.array_equal(source.read(name), value.astype(np.float32)) for name, value in tensors.items())


# ------------------------------------------------------------------------------------------------- ropes


def factors_of_llama3(factor: float, width: int, theta: float) -> np.ndarray:
    """By the rule of Llama 3.1's release, one frequency at a time."""
    out = []
    for pair in range(width // 2):
        wave = 2 * np.pi * theta ** (2 * pair / width)
        if wave < 8192 / 4:
            out.append(1.0)
        elif wave > 8192 / 1:
            out.append(factor)
        else:
            share = (8192 / wave - 1) / (4 - 1)
            out.append(1 / ((1 - share) / factor + share))
    return np.array(out, np.float32)


def config_with_factors(path: Path, factors: np.ndarray, **more: Any) -> dict[str, Any]:
    tensors = converted(tiny_tensors("llama"), "llama") | {"rope_freqs.weight": factors}
    return GgufFile(write_gguf(path, metadata_of("llama", **more), tensors)).config


def scaling_of(path: Path) -> Scaling:
    scaling = load(path).layout.rope.scaling
    assert scaling is not None
    return scaling


def test_factors_divide_the_frequencies_and_those_of_llama3_are_its_scaling(tmp_path: Path) -> None:
    factors = factors_of_llama3(8.0, HEAD, 500000.0)
    theta: dict[str, Any] = {"rope__freq_base": 500000.0}
    config_with_factors(tmp_path / "m.gguf", factors, **theta)
    rope, plain = (load(path).layout.rope for path in (tmp_path / "m.gguf", write_model(tmp_path / "p.gguf", **theta)))
    assert np.allclose(rope.inverse_frequencies * factors, plain.inverse_frequencies, rtol=1e-6)
    assert rope.attention_scaling == 1.0

    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    directory = write_directory(tmp_path / "hf", "llama", tiny_tensors("llama"), rope_parameters=llama3, rope_theta=5e5)
    assert np.allclose(load(directory).layout.rope.inverse_frequencies, rope.inverse_frequencies, rtol=1e-6)


def test_scaling_of_the_metadata(tmp_path: Path) -> None:
    more = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16}
    scaling = scaling_of(write_model(tmp_path / "yarn.gguf", "qwen2", **more))
    assert (scaling.kind, scaling.factor, scaling.original) == ("yarn", 4.0, 16)
    more = {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}
    assert scaling_of(write_model(tmp_path / "linear.gguf", **more)).kind == "linear"


# ------------------------------------------------------------------------------------------------- quantised types


def q4_1(blocks: np.ndarray) -> np.ndarray:
    """Two float16 (scale, smallest), then 16 bytes: value i in the low half of byte i, value i + 16 in the high one."""
    out = np.zeros((len(blocks), 32), np.float32)
    for number, block in enumerate(blocks):
        scale, least = (np.float32(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0]) for at in (0, 2))
        for place in range(16):
            byte = int(block[4 + place])
            out[number, place] = scale * np.float32(byte & 15) + least
            out[number, place + 16] = scale * np.float32(byte >> 4) + least
    return out


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """A float16 scale, then 32 signed bytes."""
    out = np.zeros((len(blocks), 32), np.float32)
    for number, block in enumerate(blocks):
        scale = np.float32(np.frombuffer(block[:2].tobytes(), np.float16)[0])
        out[number] = scale * np.frombuffer(block[2:].tobytes(), np.int8).astype(np.float32)
    return out


@pytest.mark.parametrize(("kind", "size", "meant"), [(3, 20, q4_1), (8, 34, q8_0)])
def test_quantised_types_by_loops_over_their_bits(tmp_path: Path, kind: int, size: int, meant: Any) -> None:
    rng = np.random.default_rng(kind)
    blocks = rng.integers(0, 256, (HEADS * HEAD, size), np.uint8)
    blocks[:, :4] = rng.uniform(-1, 1, (len(blocks), 2)).astype(np.float16).view(np.uint8)[:, :4]
    tensors: dict[str, Any] = converted(tiny_tensors("llama"), "llama")
    tensors["blk.1.attn_q.weight"] = kind, (HEADS * HEAD, WIDTH), in_pairs(blocks, HEADS).tobytes()
    path = write_gguf(tmp_path / "m.gguf", metadata_of("llama"), tensors)
    name, expected = "model.layers.1.self_attn.q_proj.weight", meant(blocks)
    assert np.array_equal(open_gguf(path).read(name), expected)
    assert np.array_equal(open_gguf(path).read(name, (slice(3, 9), slice(5, 30))), expected[3:9, 5:30])
    half = load(path, dtype="bfloat16").parameters["decoder"]["layers"]["attention"]["query"]["kernel"]
    assert np.array_equal(half[1], expected.T.astype(ml_dtypes.bfloat16))


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gguf", "gguf.gguf_reader"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"gguf.*: got .*kvpatch_jax\[gguf\]"):
        load(write_model(tmp_path / "m.gguf"))


# ------------------------------------------------------------------------------------------------- tokenizers

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
        ("deepseek-r1-qwen", "x12", ["x", "1", "2"]),
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


PIECES = {
    "▁": -9.0,
    "a": -9.5,
    "b": -9.6,
    "c": -9.7,
    "é": -9.8,
    "▁a": -1.0,
    "ab": -2.0,
    "bc": -3.0,
    "abc": -4.0,
    "▁ab": -5.0,
}
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


SENTENCEPIECE = gguf_tokenizer(sentencepiece_metadata(), 1000)


@given(st.text("abc é日", min_size=1, max_size=12))
def test_sentencepiece_joins_by_score_and_spells_the_rest_in_bytes(given: str) -> None:
    encoding = SENTENCEPIECE.encode(given)
    assert encoding.tokens == ["<s>", *sentencepiece_by_hand(given)]
    assert SENTENCEPIECE.decode(encoding.ids) == given


def test_sentencepiece_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="scores: got 2 numbers; expected 269"):
        gguf_tokenizer(sentencepiece_metadata(scores=[0.0, 1.0]), 1000)
    with pytest.raises(ConfigError, match="scores: got None numbers"):
        gguf_tokenizer(sentencepiece_metadata(scores=None), 1000)
    bare = gguf_tokenizer(sentencepiece_metadata(add_bos_token=False, add_space_prefix=False), 1000)
    assert bare.encode("ab a").tokens == ["ab", "▁a"]


def test_a_file_brings_tokenizer_and_template(tmp_path: Path) -> None:
    metadata = (
        metadata_of("llama")
        | tokenizer_metadata()
        | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    )
    backbone = load(write_gguf(tmp_path / "m.gguf", metadata, converted(tiny_tensors("llama"), "llama")))
    prompt = backbone.chat([{"role": "user", "content": "abc"}])
    assert prompt["input_ids"].tolist() == [[TOKENS.index("<|start|>"), TOKENS.index("abc")]]
    assert (backbone.config.to_dict()["bos_token_id"], backbone.config.to_dict()["eos_token_id"]) == (17, 3)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({}, "of kind None, not of the known 'gpt2'"),
        (tokenizer_metadata("tekken"), "splits text as 'tekken', not in one of the known ways"),
    ],
)
def test_without_a_known_tokenizer_text_is_refused_and_tokens_are_taken(
    tmp_path: Path, tokens: dict[str, Any], message: str
) -> None:
    backbone = load(
        write_gguf(tmp_path / "m.gguf", metadata_of("llama") | tokens, converted(tiny_tensors("llama"), "llama"))
    )
    assert backbone.prepare([[1, 2, 3]])["input_ids"].tolist() == [[1, 2, 3]]
    for call in (lambda: backbone.prepare(["abc"]), lambda: backbone.text([1]), lambda: backbone.chat([])):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["a"] * 24},
        {"merges": ["a q"]},
        {"bos_token_id": 99, "add_bos_token": True},
    ],
)
def test_tokens_that_do_not_belong_together_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\."):
        gguf_tokenizer(tokenizer_metadata(**change), 40)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2'; expected one of llama, qwen2, gemma3"),
        ({"split.count": 3}, "got one of 3 files"),
        ({"llama.expert_count": 8}, r"got llama\.expert_count = 8, which this library does not know"),
        ({"llama.block_count": 3}, r"no tensor 'model\.layers\.2\."),
        ({"llama.embedding_length": 64}, r"embed_tokens\.weight' of shape \(40, 32\); expected \(40, 64\)"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope', which is not read"),
    ],
)
def test_metadata_of_another_model_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata_of("llama") | change, converted(tiny_tensors("llama"), "llama"))
    with pytest.raises((ConfigError, WeightsError), match=message):
        load(path)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    tensors: dict[str, Any] = converted(tiny_tensors("llama"), "llama")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"blk.0.ffn_up.weight": np.ones((2, 2), np.float32)}, r"mlp\.up_proj\.weight' of shape \(2, 2\)"),
        ({"blk.0.attn_v.weight": (4096, (16, 32), b"")}, "4096.* is not a valid GGMLQuantizationType"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, r"'rope_freqs\.weight' of shape \(3,\) .*expected 4"),
    ]
    for change, message in cases:
        with pytest.raises(WeightsError, match=message):
            load(write_gguf(tmp_path / "m.gguf", metadata_of("llama"), tensors | change))
    tensors.pop("blk.1.ffn_norm.weight")
    with pytest.raises(WeightsError, match=r"no tensor 'model\.layers\.1\.post_attention_layernorm\.weight'"):
        load(write_gguf(tmp_path / "m.gguf", metadata_of("llama"), tensors))


def test_a_file_cut_short_anywhere_is_told(tmp_path: Path) -> None:
    metadata = metadata_of("llama") | tokenizer_metadata()
    whole = write_gguf(tmp_path / "whole.gguf", metadata, converted(tiny_tensors("llama"), "llama")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 4200, 397), *range(4200, len(whole) - 32, 19973)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            open_gguf(cut)
