"""cuDNN's attention, lowered for CUDA without a GPU: which call is made, of what, and what is refused. Nothing runs."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from kvpatch_jax.errors import KernelUnavailableError
from kvpatch_jax.models.attention import Mask, attention, using, what_runs
from pallas_kernels import preferring, targeting

SCALE = 0.21
ROWS, TOKENS = 2, 4096
Shapes = tuple[Any, Any, Any]
CAUSAL = Mask(causal=True)


@pytest.fixture
def cudnn(monkeypatch):
    """As if cuDNN 9.11 were there: jax asks for its version before it lowers."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    with targeting("gpu"):
        yield


def shapes(heads=28, kv_heads=4, width=128, value_width=None, dtype: Any = "bfloat16", keys=TOKENS) -> Shapes:
    """Queries, keys and values."""
    one = lambda length, heads, width: jax.ShapeDtypeStruct((ROWS, length, heads, width), jnp.dtype(dtype))
    return one(TOKENS, heads, width), one(keys, kv_heads, width), one(keys, kv_heads, value_width or width)


def calls(arrays: Shapes, mask: Mask) -> list[tuple[str, dict[str, Any]]]:
    """The custom calls of the lowered program: name and configuration."""
    run = lambda query, key, value: attention(query, key, value, mask, scale=SCALE)
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text
    found = re.findall(r'custom_call @(\S+?)\(.*?backend_config = "((?:[^"\\]|\\.)*)"', text)
    return [
        (name, json.loads(re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), config)))
        for name, config in found
    ]


@pytest.mark.parametrize(
    ("arrays", "mask", "kind", "window"),
    [
        (shapes(), CAUSAL, "CAUSAL", 0),
        (shapes(), Mask(causal=True, window=1024), "CAUSAL", 1024),
        (shapes(heads=16, kv_heads=16, width=80), Mask(), "NO_MASK", 0),
        (shapes(heads=4, kv_heads=2, width=64, dtype="float16", keys=300), Mask(), "NO_MASK", 0),
    ],
    ids=["grouped heads", "window", "tower", "across"],
)
def test_one_call_with_the_mask_as_structure(cudnn, arrays: Shapes, mask, kind, window):
    """Grouped heads go in as they are; a window counts the query's own place, as ours does."""
    assert what_runs(*arrays, mask) == "cudnn"
    ((name, config),) = calls(arrays, mask)
    assert name == "__cudnn$fmhaSoftmax"
    said = config["cudnn_fmha_backend_config"]
    assert said["mask_type"] == kind
    assert said["sliding_window_length"] == window
    assert said["fmha_scale"] == pytest.approx(SCALE)
    assert said["is_flash_attention"]
    scores = said["intermediate_tensor_shape"]
    query, key, _ = arrays
    assert [int(size) for size in scores["dimensions"]] == [ROWS, query.shape[2], TOKENS, key.shape[1]]
    assert scores["element_type"] == {"bfloat16": "BF16", "float16": "F16"}[query.dtype.name]


SEGMENTS = np.zeros((ROWS, TOKENS), np.int32)


@pytest.mark.parametrize(
    ("arrays", "mask", "words"),
    [
        (shapes(dtype="float32"), CAUSAL, "types float32, float32 and float32; expected one of 16 bits"),
        (shapes(width=68), CAUSAL, "widths 68 and 68; expected one multiple of 8 up to 128"),
        (shapes(keys=4097), Mask(causal=True, offset=1), "4096 causal queries behind 1 of 4097 keys"),
        (shapes(), Mask(window=70), "a window without causal order"),
        (
            shapes(),
            Mask(causal=True, query_places=SEGMENTS, key_places=SEGMENTS),
            "the mask has arrays of places or of bools",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_and_goes_to_the_next(cudnn, arrays: Shapes, mask, words):
    run = lambda query, key, value: attention(query, key, value, mask, scale=SCALE, implementation="cudnn")
    with pytest.raises(KernelUnavailableError, match=f"'cudnn': {words}"):
        jax.eval_shape(run, *arrays)
    assert what_runs(*arrays, mask, ("cudnn", "xla")) == "blockwise"
    with preferring("gpu"):
        assert what_runs(*arrays, mask) == "blockwise"


def test_without_cudnn_it_is_refused(monkeypatch):
    """An old one or none: jax's own words, in our error."""

    def check():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", check)
    refused = pytest.raises(KernelUnavailableError, match=r"cuDNN cannot be used: cuDNN is not detected\.")
    with targeting("gpu"), using("cudnn"), refused:
        what_runs(*shapes(), CAUSAL)
    with targeting("tpu"), pytest.raises(KernelUnavailableError, match="'cudnn': the platform is 'tpu'"):
        what_runs(*shapes(), CAUSAL, "cudnn")
