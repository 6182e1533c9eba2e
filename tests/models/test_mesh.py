"""KV heads repeated over groups of devices, and towers over the devices that divide them, against one device.

What needs eight devices runs in a program of its own (`mesh_cases.py`), whose findings are asserted here.
"""

from typing import Any

import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from kvpatch_jax.models.decoder.sharding import cache_specs, split_mesh
from tests.models.mesh_cases import FAMILIES
from tests.models.test_sharding import config_of, findings, specs_of

BAR = 1e-5
"""Of the largest magnitude, float32; 4.2e-6 was reached (GLM-4.5V), else 3e-6."""
DEFAULT = ("few", "qwen2_5_vl", "collectives", "towers")
LATER = tuple(family for family in FAMILIES if family not in DEFAULT)
SLOW = ("few-whole", *LATER, "session qwen2_5_vl", "session qwen3_vl_moe")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """What the default cases found."""
    return findings("mesh_cases", str(tmp_path_factory.mktemp("mesh")), *DEFAULT)


@pytest.fixture(scope="module")
def slow_facts(tmp_path_factory):
    """What the slow cases found."""
    return findings("mesh_cases", str(tmp_path_factory.mktemp("mesh")), *SLOW)


# --------------------------------------------------------------------------------------------------------- meshes


def test_the_axis_is_split_where_devices_outnumber_kv_heads():
    layout = config_of("qwen2").text.layout  # 2 KV heads
    mesh = AbstractMesh((3, 8), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit))
    split = split_mesh(mesh, layout)
    assert dict(split.shape) == {"data": 3, "tensor": 2, "tensor_copies": 4}
    assert split.axis_types == (AxisType.Auto, AxisType.Explicit, AxisType.Explicit)
    assert split_mesh(split, layout) == split
    two = AbstractMesh((2,), ("tensor",))
    assert split_mesh(two, layout) == two


def test_specs_where_each_kv_head_has_a_group_of_devices():
    specs, both = specs_of("qwen2", 4), ("tensor", "tensor_copies")
    attention = "decoder.layers.attention"
    assert specs[f"{attention}.key.kernel"] == specs[f"{attention}.value.kernel"] == P(None, None, "tensor")
    assert specs[f"{attention}.query.kernel"] == P(None, None, both)
    assert specs[f"{attention}.output.kernel"] == specs["decoder.layers.mlp.down.kernel"] == P(None, both, None)
    assert specs["decoder.embedding"] == P(both, None)
    caches = cache_specs(config_of("qwen2").text.layout, AbstractMesh((4,), ("tensor",)))
    assert caches == dict.fromkeys("kv", P(None, None, None, "tensor"))


# ----------------------------------------------------------------------------------------------- on eight devices


def check_forward(found: dict[str, Any]) -> None:
    """Every result within the bar, each device with one KV head, parameters with the file's values where asked."""
    worst = max(found["errors"], key=found["errors"].__getitem__)
    assert found["errors"][worst] <= BAR, f"{worst}: off by {found['errors'][worst]:.2e} of the largest magnitude"
    assert {"embed", "prefill", "decode"} <= found["errors"].keys()
    assert found["same_fingerprint"]
    assert found["same_values"]
    assert found["as_asked"]
    for call, lies in found["cache"].items():
        assert lies["shard"] == [*lies["shape"][:3], 1, lies["shape"][4]], call


@pytest.mark.nightly
def test_repeated_kv_heads_give_one_devices_result(facts):
    found = facts["few"]
    check_forward(found)
    assert found["mesh"] == {"tensor": 2, "tensor_copies": 4}
    parameters = found["parameters"]
    assert parameters["decoder.layers.attention.key.kernel"]["shard"] == [3, 64, 8]
    assert parameters["decoder.layers.attention.query.kernel"]["shard"] == [3, 64, 16]


@pytest.mark.nightly
def test_a_step_exchanges_two_sums_per_layer_and_nothing_of_a_pool(facts):
    """The scan's body is in the program once: a sum behind attention and one behind the MLP, of one token's width."""
    assert facts["collectives"] == [["all-reduce", 64], ["all-reduce", 64]]


def test_a_tower_over_devices_gives_one_devices_result(facts):
    """Heads over one axis, windows and patches over the other; the widths of MLP and merger over both."""
    found = facts["qwen2_5_vl"]
    check_forward(found)
    assert found["mesh"] == {"tensor": 2, "tensor_copies": 2}
    shards = {name: lies["shard"] for name, lies in found["parameters"].items() if name.startswith("visual")}
    assert shards["visual.blocks.qkv.kernel"] == [4, 32, 96]
    assert shards["visual.blocks.output.kernel"] == [4, 16, 32]
    assert shards["visual.blocks.mlp.gate.kernel"] == [4, 32, 12]
    assert shards["visual.merger.mlp.inner.kernel"] == [128, 32]


def test_images_lie_over_the_devices_that_divide_neither_heads_nor_widths(facts):
    """Four images of four patches, width 12. By results of products on one device."""
    images, both = facts["towers"]["images"], facts["towers"]["both"]
    assert max(images["error"], both["error"]) <= BAR
    # Three heads, an MLP of 27: one image each. Scores are [image · head, patches, patches].
    assert images["shapes"] == ["f32[3,4,4]", "f32[4,12]", "f32[4,27]"]
    # Two heads over two groups: one head of two images each, the MLP of one image each.
    assert {"f32[2,4,4]", "f32[8,6]", "f32[4,27]"} <= set(both["shapes"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["few-whole", *LATER])
def test_every_call_and_tower_over_devices_gives_one_devices_result(slow_facts, name):
    check_forward(slow_facts[name])
    if name == "few-whole":
        assert {"recompute", "generate"} <= slow_facts[name]["errors"].keys()


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_a_session_over_devices_answers_as_on_one(slow_facts, family):
    """Adding, sliding, recalling, and a patched chunk spliced; each device has its KV head's half of the pool."""
    found = slow_facts[f"session {family}"]
    assert found["over"]["answers"] == found["alone"]["answers"]
    assert len({tuple(answer) for answer in found["over"]["answers"]}) > 1
    assert max(found["errors"].values()) <= BAR, found["errors"]
    assert found["over"]["lies"].keys() == {"k", "v", "source"}
    for lies in found["over"]["lies"].values():
        layers, pages, slots, heads, width = lies["shape"]
        assert (heads, lies["shard"], lies["devices"]) == (2, [layers, pages, slots, 1, width], 4)
