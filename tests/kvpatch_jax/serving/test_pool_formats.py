"""An engine's pool: where the tokens of its blocks stand, and formats that are refused."""
# pyright: reportArgumentType=false

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from serving_sides import LAYOUT, PAGE

from kvpatch_jax.errors import PoolError
from kvpatch_jax.serving.vllm import ConnectorConfig
from kvpatch_jax.serving.vllm.messages import blocks_from, slots_of
from kvpatch_jax.serving.vllm.worker_side import WorkerSide


def test_slots_of_tokens_follow_the_blocks():
    assert slots_of((5, 2, 9), 4, 3, 9).tolist() == [23, 8, 9, 10, 11, 36]
    assert blocks_from((5, 2, 9), 4, 4, 8) == {2}
    assert blocks_from((5, 2, 9), 4, 3, 9) == {5, 2, 9}
    with pytest.raises(PoolError, match="3 blocks of 4"):
        slots_of((5, 2, 9), 4, 3, 13)


def test_a_pool_of_another_format_is_refused(unchecked, tmp_path):
    worker = WorkerSide(ConnectorConfig.read({"store": str(tmp_path), "backbone": "tiny"}), LAYOUT, PAGE)
    for pages, words in (
        ([jnp.zeros((20, PAGE, 1, 1, 128))], "2 layers|1 layers"),
        ([jnp.zeros((20, 8, 1, 1, 128))] * 2, "8 tokens"),
        ([jnp.zeros((20, PAGE, 1, 4, 128), jnp.float8_e4m3fn)] * 2, "float8_e4m3fn pages; expected 16 or 32 bits"),
        ([jnp.zeros((20, PAGE, 2, 1, 128))] * 2, r"expected rows of \(1, 1, 128\)"),
    ):
        with pytest.raises(ValueError, match=words):
            worker.register(SimpleNamespace(kv_caches=pages))
