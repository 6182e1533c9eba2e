"""Attention kernels of platforms: interpreted here, never run; what they refuse, and how they are chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.errors import KernelUnavailableError
from kvpatch_jax.models.attention import Mask, attention, splash, using, what_runs
from kvpatch_jax.models.attention.dense import dense
from pallas_kernels import preferring, targeting
from tests.shared.arrays import placed

SCALE = 0.21
ROWS, QUERIES, KEYS = 2, 200, 330
SEGMENTS = np.sort(np.random.default_rng(0).integers(-1, 3, (ROWS, KEYS)), axis=1).astype(np.int32)
MASKS = {
    "behind a context": Mask(causal=True, offset=KEYS - QUERIES),
    "window": Mask(causal=True, offset=KEYS - QUERIES, window=70),
    "packed": Mask(query_segments=SEGMENTS[:, ::-1][:, :QUERIES], key_segments=SEGMENTS),
    "padded context": Mask(
        causal=True,
        offset=KEYS - QUERIES,
        query_segments=np.zeros((1, QUERIES), np.int32),
        key_segments=np.where((np.arange(KEYS) > 40) & (np.arange(KEYS) < 100), -1, 0).astype(np.int32)[None],
    ),
}


def drawn(heads: int, kv_heads: int, width: int, value_width: int, dtype: str = "float32"):
    rng = np.random.default_rng(1)
    one = lambda *shape: placed(rng.normal(size=shape), dtype)
    return one(ROWS, QUERIES, heads, width), one(ROWS, KEYS, kv_heads, width), one(ROWS, KEYS, kv_heads, value_width)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MASKS)
def test_splash_interpreted_equals_the_dense_form(name, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)
    arrays, mask = drawn(4, 2, 72, 40), MASKS[name]
    with targeting("tpu", interpret=True):
        assert what_runs(*arrays, mask) == "splash"
        found = attention(*arrays, mask, scale=SCALE)
    np.testing.assert_allclose(found, dense(*arrays, mask.dense(QUERIES, KEYS), SCALE), atol=2e-5)


def test_kernels_are_taken_where_they_can_be():
    each = lambda size, heads: jax.ShapeDtypeStruct((1, size, heads, 128), jnp.bfloat16)
    shapes, causal = (each(4096, 28), each(4096, 4), each(4096, 4)), Mask(causal=True)
    step = (each(1, 28), each(4096, 4), each(4096, 4))
    with targeting("tpu"):
        assert what_runs(*shapes, causal) == "splash"
        assert what_runs(*step, Mask(causal=True, offset=4095)) == "dense"
        assert what_runs(*shapes, Mask(allowed=np.ones((1, 1, 4096, 4096), bool))) == "blockwise"
        with using("xla"):
            assert what_runs(*shapes, causal) == "blockwise"
        with pytest.raises(KernelUnavailableError, match="1 queries; expected at least 128"):
            what_runs(*step, causal, "splash")
    with targeting("gpu"):
        with pytest.raises(KernelUnavailableError, match=r"'splash': the platform is 'gpu'"):
            what_runs(*shapes, causal, "splash")
        with pytest.raises(KernelUnavailableError, match="'cudnn': 4096 causal queries behind 1 of 4096 keys"):
            what_runs(*shapes, Mask(causal=True, offset=1), "cudnn")
    with preferring("tpu"):  # but this is no TPU
        assert what_runs(*shapes, causal) == "blockwise"
    with pytest.raises(KernelUnavailableError, match="attention: got 'flash'; expected one of"), using("flash"):
        pass
