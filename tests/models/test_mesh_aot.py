"""Bytes of released checkpoints on each chip of a v5e-8, compiled ahead of time: KV heads repeated, towers divided.

Needs the extra `kernels`, not a TPU.
"""

import importlib.util

import pytest

from evals.bench.collectives import read_collectives
from evals.bench.mesh_sizes import CHECKPOINTS, CHUNK, PAGE, SLOTS, compiled_for_tpus, describe, programs
from evals.bench.released_configs import RELEASED
from tests.pallas_kernels.ahead_of_time import without_the_compilation_cache  # noqa: F401

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
CHIPS, CHIP = 8, 16e9
HEAD = 128
"""Width of a head, in both models."""


def text_of(name: str) -> dict:
    raw = RELEASED[name].config
    return raw.get("text_config", raw)


def decoder_bytes(text: dict) -> int:
    """Of the decoder's bfloat16 weights on one chip: a KV head, an eighth of all else, and whole norms and routers."""
    width, layers, heads = (text[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    qwen3 = "num_experts" in text
    inner = text["num_experts"] * text["moe_intermediate_size"] if qwen3 else text["intermediate_size"]
    shared = 2 * width * heads * HEAD + 3 * width * inner + (0 if qwen3 else heads * HEAD)
    head = 2 * (width * HEAD + (0 if qwen3 else HEAD))
    whole = 2 * width + (2 * HEAD + width * text["num_experts"] if qwen3 else 0)
    tables = (2 if qwen3 else 1) * text["vocab_size"] * width
    return 2 * (layers * (shared // CHIPS + head + whole) + tables // CHIPS + width)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_pool_is_written_where_it_lies_and_nothing_of_it_goes_between_chips(name):
    made, text = programs(RELEASED[name].config), text_of(name)
    pool = 2 * text["num_hidden_layers"] * SLOTS * HEAD * 2  # one KV head, keys and values, 16 bits
    for what in ("splice", "step"):
        compiled = compiled_for_tpus(made[what])
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == pool
        assert memory.temp_size_in_bytes < pool / 64
        found = [(each.kind, each.result) for each in read_collectives(compiled.as_text() or "")]
        # A step's two sums per layer of one row; the body of the scan is in the text once.
        sums = [("all-reduce", 2 * text["hidden_size"])] * 2
        assert found == ([] if what == "splice" else sums)
    assert SLOTS % PAGE == 0 < CHUNK < SLOTS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [*zip(CHECKPOINTS, (3e9, 11e9), strict=True)])
def test_a_v5e_8_holds_them_with_64k_slots(name, most):
    """Prefill of 4096 tokens, a step, a splice and a tower over one megapixel; how much each needs is in the docs."""
    row, text = describe(RELEASED[name].config), text_of(name)
    assert row["weights"] - row["tower"] == decoder_bytes(text)
    assert row["pool"] == 2 * text["num_hidden_layers"] * SLOTS * HEAD * 2
    assert set(row["programs"]) == {"tower", "prefill", "splice", "step"}
    assert row["weights"] + row["pool"] < row["needed"] < most < CHIP
    # Less than twice an even share: KV heads and fused projections of towers are what is repeated.
    assert row["weights"] < 2 * row["whole"] / CHIPS
