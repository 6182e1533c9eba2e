"""An attention kernel is taken only where it can run, gets the mask as structure, and else says why it is not taken.

Nothing runs on a device: cuDNN's calls are lowered for CUDA, splash attention is interpreted.
"""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.errors import KernelUnavailableError
from kvpatch_jax.models.attention import Mask, attention, using, what_runs
from pallas_kernels import preferring, targeting
from tests.shared.arrays import placed

SCALE = 0.21
ROWS, TOKENS = 2, 4096
CAUSAL = Mask(causal=True)
PLACES = np.zeros((ROWS, TOKENS), np.int32)
Shapes = tuple[Any, Any, Any]


def shapes(heads=28, kv_heads=4, width=128, dtype="bfloat16", keys=TOKENS, queries=TOKENS) -> Shapes:
    """Queries, keys and values."""
    spec = lambda length, heads: jax.ShapeDtypeStruct((ROWS, length, heads, width), jnp.dtype(dtype))
    return spec(queries, heads), spec(keys, kv_heads), spec(keys, kv_heads)


@pytest.fixture
def cudnn(monkeypatch):
    """As if cuDNN 9.11 were there: jax asks for its version before it lowers."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    with targeting("gpu"):
        yield


@pytest.mark.parametrize(
    ("arrays", "mask", "kind", "window"),
    [
        (shapes(), CAUSAL, "CAUSAL", 0),
        (shapes(), Mask(causal=True, window=1024), "CAUSAL", 1024),
        (shapes(heads=4, kv_heads=2, width=64, dtype="float16", keys=300), Mask(), "NO_MASK", 0),
    ],
    ids=["grouped heads", "window", "across"],
)
def test_cudnn_gets_one_call_with_the_mask_as_structure(cudnn, arrays: Shapes, mask, kind, window):
    """Grouped heads go in as they are; a window counts the query's own place, as ours does."""
    assert what_runs(*arrays, mask) == "cudnn"
    run = lambda query, key, value: attention(query, key, value, mask, scale=SCALE)
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" not in text
    ((name, config),) = re.findall(r'custom_call @(\S+?)\(.*?backend_config = "((?:[^"\\]|\\.)*)"', text)
    assert name == "__cudnn$fmhaSoftmax"
    settings = json.loads(re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), config))
    settings = settings["cudnn_fmha_backend_config"]
    assert settings["mask_type"] == kind
    assert settings["sliding_window_length"] == window
    assert settings["fmha_scale"] == pytest.approx(SCALE)
    assert settings["is_flash_attention"]
    query, key, _ = arrays
    sizes = [int(size) for size in settings["intermediate_tensor_shape"]["dimensions"]]
    assert sizes == [ROWS, query.shape[2], TOKENS, key.shape[1]]


@pytest.mark.parametrize(
    ("arrays", "mask", "words"),
    [
        (shapes(dtype="float32"), CAUSAL, "types float32, float32 and float32; expected one of 16 bits"),
        (shapes(width=68), CAUSAL, "widths 68 and 68; expected one multiple of 8 up to 128"),
        (shapes(keys=4097), Mask(causal=True, offset=1), "4096 causal queries behind 1 of 4097 keys"),
        (shapes(), Mask(window=70), "a window without causal order"),
        (shapes(), Mask(causal=True, query_places=PLACES, key_places=PLACES), "the mask has arrays of places or"),
    ],
)
def test_what_cudnn_cannot_do_is_refused_and_goes_to_the_next(cudnn, arrays: Shapes, mask, words):
    run = lambda query, key, value: attention(query, key, value, mask, scale=SCALE, implementation="cudnn")
    with pytest.raises(KernelUnavailableError, match=f"'cudnn': {words}"):
        jax.eval_shape(run, *arrays)
    assert what_runs(*arrays, mask, ("cudnn", "xla")) == "blockwise"
    with preferring("gpu"):
        assert what_runs(*arrays, mask) == "blockwise"


def test_the_form_of_attention_follows_from_sizes_platform_and_what_is_asked():
    small, large, step = shapes(queries=512, keys=2048), shapes(), shapes(queries=1)
    assert what_runs(*small, Mask()) == "dense"
    assert what_runs(*large, Mask()) == what_runs(*small, Mask(), "blockwise") == "blockwise"
    assert what_runs(*shapes(queries=1, keys=2**20), Mask()) == "dense"  # a step of decoding
    assert what_runs(*large, Mask(), ("cudnn", "splash", "xla")) == "blockwise"
    with preferring("tpu"):  # but this is no TPU
        assert what_runs(*large, CAUSAL) == "blockwise"
    with targeting("tpu"):
        assert what_runs(*large, CAUSAL) == "splash"
        assert what_runs(*step, Mask(causal=True, offset=4095)) == "dense"
        assert what_runs(*large, Mask(allowed=np.ones((1, 1, TOKENS, TOKENS), bool))) == "blockwise"
        with using("xla"):
            assert what_runs(*large, CAUSAL) == "blockwise"
        with pytest.raises(KernelUnavailableError, match="1 queries; expected at least 128"):
            what_runs(*step, CAUSAL, "splash")
    with pytest.raises(KernelUnavailableError, match=r"'cudnn': the platform is 'cpu'; 'flash': unknown"):
        what_runs(*small, Mask(), ("cudnn", "flash"))
    with pytest.raises(KernelUnavailableError, match="attention: got 'flash'; expected one of"), using("flash"):
        pass


QUERIES, KEYS = 200, 330
SEGMENTS = np.sort(np.random.default_rng(0).integers(-1, 3, (ROWS, KEYS)), axis=1).astype(np.int32)
PACKED: dict[str, Any] = {"query_segments": SEGMENTS[:, ::-1][:, :QUERIES], "key_segments": SEGMENTS}
MASKS = {
    "window": Mask(causal=True, offset=KEYS - QUERIES, window=70),
    "packed": Mask(causal=True, offset=KEYS - QUERIES, **PACKED),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MASKS)
def test_splash_interpreted_equals_the_dense_form(name, monkeypatch):
    from kvpatch_jax.models.attention import splash

    monkeypatch.setattr(splash, "BLOCK", 128)
    rng, mask = np.random.default_rng(1), MASKS[name]
    sizes = ((ROWS, QUERIES, 4, 72), (ROWS, KEYS, 2, 72), (ROWS, KEYS, 2, 40))
    query, key, value = (placed(rng.normal(size=size), "float32") for size in sizes)
    arrays = query, key, value
    with targeting("tpu", interpret=True):
        assert what_runs(*arrays, mask) == "splash"
        mixed = attention(*arrays, mask, scale=SCALE)
    np.testing.assert_allclose(mixed, attention(*arrays, mask, scale=SCALE, implementation="dense"), atol=2e-5)
