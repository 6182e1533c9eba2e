"""Real weights give the logits and texts that transformers, or arithmetic in float64, gives for them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from evals.real_weights import weights_file
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone, load
from tests.goldens.load import GOLDENS

pytestmark = pytest.mark.nightly


def installed(name: str) -> Path:
    """Returns the weights in packages that are installed by hand."""
    try:
        return weights_file(name)
    except InputError as error:
        if "got no package" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def backbone() -> Iterator[ModelBackbone]:
    with jax.default_matmul_precision("highest"):
        yield load(installed("smollm2"), dtype="float32", angles="float32")


@pytest.fixture(scope="module")
def gemma() -> Iterator[ModelBackbone]:
    with jax.default_matmul_precision("highest"):
        yield load(installed("gemma3-270m"), dtype="float32", angles="float32")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "smollm2.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


# -------------------------------------------------------------------------------------------- SmolLM2-135M-Instruct


def test_the_tokenizer_is_the_models_own(backbone: ModelBackbone, golden: dict[str, np.ndarray]) -> None:
    ids = backbone.prepare([str(golden["text"])])["input_ids"]
    assert ids[0].tolist() == golden["input_ids"].tolist()
    assert backbone.text(ids[0]) == str(golden["text"])
    prompt = backbone.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert backbone.text(prompt["input_ids"][0]) == str(golden["chat"])


def test_logits_are_transformers(backbone: ModelBackbone, golden: dict[str, np.ndarray]) -> None:
    tokens = backbone.embed(golden["input_ids"][None])
    logits = np.asarray(backbone.prefill(tokens, logits="all").logits[0])
    assert np.abs(logits[:, golden["columns"]] - golden["logits"]).max() < 2e-4 * np.abs(golden["logits"]).max()
    sums = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    assert np.abs(sums - golden["log_sum"]).max() < 1e-3
    sure = golden["margin"] > 1e-2
    assert sure.mean() > 0.9
    assert np.array_equal(logits.argmax(-1)[sure], golden["best"][sure])


def test_a_text_is_continued_as_transformers_does(backbone: ModelBackbone, golden: dict[str, np.ndarray]) -> None:
    steps = len(golden["continued"])
    found = backbone.generate(backbone.embed(golden["input_ids"][None]), steps)
    assert np.asarray(found)[0].tolist() == golden["continued"].tolist()


# ---------------------------------------------------------------------------------------------------- Gemma 3 270M

HEADS, HEAD, WINDOW, EPSILON = 4, 256, 512, 1e-6


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def rotated(x: np.ndarray, base: float) -> np.ndarray:
    """Rotates [T,K,H] at positions 0 … T−1; a head's second half holds the imaginary parts."""
    half = HEAD // 2
    angles = np.arange(len(x))[:, None, None] * base ** (-np.arange(half) / half)
    real, imaginary = x[..., :half], x[..., half:]
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([real * cosine - imaginary * sine, imaginary * cosine + real * sine], -1)


def layer(x: np.ndarray, weights: Mapping[str, np.ndarray], full: bool) -> np.ndarray:
    """Runs one layer as llama.cpp's graph of Gemma 3 has it: norms multiply by what the file holds."""
    count, base = len(x), 1e6 if full else 1e4
    normed = norm(x, weights["attn_norm"])
    q, k, v = ((normed @ weights[f"attn_{name}"].T).reshape(count, -1, HEAD) for name in "qkv")
    q, k = (rotated(norm(y, weights[f"attn_{name}_norm"]), base) for name, y in (("q", q), ("k", k)))
    distance = np.arange(count)[:, None] - np.arange(count)
    scores = np.einsum("qhd,kd->hqk", q, k[:, 0]) / np.sqrt(HEAD)
    scores = np.where((distance >= 0) & (full | (distance < WINDOW)), scores, -np.inf)
    attention = np.exp(scores - scores.max(-1, keepdims=True))
    attention /= attention.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,kd->qhd", attention, v[:, 0]).reshape(count, -1) @ weights["attn_output"].T
    x = x + norm(mixed, weights["post_attention_norm"])
    normed = norm(x, weights["ffn_norm"])
    gate = normed @ weights["ffn_gate"].T
    gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return x + norm((gate * (normed @ weights["ffn_up"].T)) @ weights["ffn_down"].T, weights["post_ffw_norm"])


def test_logits_are_those_of_float64(gemma: ModelBackbone) -> None:
    import gguf
    from gguf.quants import dequantize

    tensors: dict[str, Any] = {tensor.name: tensor for tensor in gguf.GGUFReader(installed("gemma3-270m")).tensors}
    embedding = tensors["token_embd.weight"]
    ids = np.asarray(gemma.prepare(["The capital of France is"])["input_ids"])[0]
    x = dequantize(embedding.data[ids], embedding.tensor_type).astype(np.float64) * np.sqrt(640)
    for number in range(18):
        weights = {}
        for name, tensor in tensors.items():
            if name.startswith(f"blk.{number}."):
                part = name.split(".")[2]
                weights[part] = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        x = layer(x, weights, full=number % 6 == 5)
    # Every tenth token of the vocabulary is enough to tell.
    rows = np.arange(0, 262_144, 10)
    x = norm(x, tensors["output_norm.weight"].data.astype(np.float64))
    expected = x @ dequantize(embedding.data[rows], embedding.tensor_type).astype(np.float64).T
    logits = np.asarray(gemma.prefill(gemma.embed(ids[None]), logits="all").logits[0])[:, rows]
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_capital_of_france(gemma: ModelBackbone) -> None:
    prompt = gemma.prepare(["The capital of France is called"])
    # The start token that the file asks for, then words with their spaces.
    assert prompt["input_ids"][0].tolist() == [2, 818, 5279, 529, 7001, 563, 2760]
    assert gemma.text(np.asarray(gemma.generate(gemma.embed(**prompt), 2))[0]).startswith(" Paris")
