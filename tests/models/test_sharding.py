"""Over a mesh of devices a model is read in shards and gives one device's numbers, exchanging two sums per layer.

What needs eight devices is in `mesh_cases.py`, run in a process of its own.
"""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import kvpatch_jax.models.directory
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import FAMILIES, load
from kvpatch_jax.models.checkpoints import flatten_params
from kvpatch_jax.models.decoder.sharding import cache_specs, partition_specs, split_mesh
from kvpatch_jax.models.families.family import abstract, parameters, tower_heads
from tests.goldens.load import golden_config, write_checkpoint

LAST = P(None, None, None, "tensor")  # of a cache: over its KV heads


def config_of(family: str, **changes: Any):
    """The tiny model's configuration."""
    raw = golden_config(family)
    families = {entry.model_type: entry for entry in FAMILIES.values()} | FAMILIES
    named = raw.get("architectures") or [raw["model_type"]]
    return families[named[0]].config({**raw, **changes}, "exact", None)


def specs_of(family: str, count: int, **changes: Any) -> dict[str, P]:
    config = config_of(family, **changes)
    shapes = flatten_params(parameters(abstract(config)))
    specs = partition_specs(config.text, shapes, AbstractMesh((count,), ("tensor",)))
    return {".".join(path): spec for path, spec in specs.items()}


# --------------------------------------------------------------------------------------- the table, and bad meshes


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_5_vl", "kimi_vl", "deepseek_ocr2"])
def test_every_parameter_has_a_place(family):
    config = config_of(family)
    shapes = flatten_params(parameters(abstract(config)))
    specs = partition_specs(config.text, shapes, AbstractMesh((2,), ("tensor",)), tower_heads(config))
    assert specs.keys() == shapes.keys()
    matrices = {"query", "key", "value", "output", "up", "gate", "embedding", "head", "inner", "outer"}
    for path, spec in specs.items():
        if matrices & set(path) and path[-1] in ("kernel", "embedding", "gate", "up"):
            assert list(spec).count("tensor") == 1, path
            assert shapes[path].shape[list(spec).index("tensor")] % 2 == 0, path


def test_heads_lie_over_the_axis_and_groups_of_devices_share_a_kv_head():
    layout = config_of("qwen2").text.layout  # 2 KV heads
    mesh = AbstractMesh((3, 8), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit))
    split = split_mesh(mesh, layout)
    assert dict(split.shape) == {"data": 3, "tensor": 2, "tensor_copies": 4}
    assert split.axis_types == (AxisType.Auto, AxisType.Explicit, AxisType.Explicit)
    assert split_mesh(split, layout) == split
    two, four = (AbstractMesh((count,), ("tensor",)) for count in (2, 4))
    assert split_mesh(two, layout) == two

    specs, both = specs_of("qwen2", 4), ("tensor", "tensor_copies")
    attention = "decoder.layers.attention"
    assert specs[f"{attention}.key.kernel"] == specs[f"{attention}.value.kernel"] == P(None, None, "tensor")
    assert specs[f"{attention}.query.kernel"] == P(None, None, both)
    assert specs[f"{attention}.output.kernel"] == specs["decoder.layers.mlp.down.kernel"] == P(None, both, None)
    assert specs["decoder.embedding"] == P(both, None)
    assert cache_specs(layout, two) == cache_specs(layout, four) == dict.fromkeys("kv", LAST)
    assert cache_specs(config_of("deepseek_v3").text.layout, two) == {"ckv": P(), "kpe": P()}
    odd = specs_of("qwen3", 2, vocab_size=301)
    assert odd["decoder.embedding"] == odd["decoder.head.kernel"] == P(None, None)

    # Linear attention over its key heads, also where devices outnumber the KV heads.
    specs = specs_of("qwen3_5", 2)
    assert specs["decoder.layers_0.attention.value.kernel"] == P(None, None, "tensor")
    assert specs["decoder.layers_0.attention.output.kernel"] == P(None, "tensor", None)
    over = P(None, None, None, both)
    caches = {"k": LAST, "v": LAST, "map": over, "state": over, "tail": P()}
    assert cache_specs(config_of("qwen3_5").text.layout, four) == caches


@pytest.mark.parametrize(
    ("family", "count", "changes", "message"),
    [
        ("qwen2", 3, {}, "mesh: got 2 kv_heads over 3 devices of axis 'tensor'; expected .* divides 2, or a multiple"),
        ("deepseek_v3", 4, {"n_routed_experts": 6, "n_group": 2}, "6 experts over 4 devices"),
        ("deepseek_v3", 4, {"moe_intermediate_size": 1}, "2 shared over 4 devices"),
        ("qwen3", 2, {"intermediate_size": 97}, "97 intermediate over 2 devices"),
        ("qwen3_5", 4, {}, "2 linear_heads over 4 devices"),
    ],
)
def test_what_does_not_divide_is_refused(family, count, changes, message):
    with pytest.raises(ConfigError, match=message):
        specs_of(family, count, **changes)


def test_an_unknown_parameter_or_axis_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    config = config_of("qwen3")
    shapes = {("decoder", "layers", "attention", "gate", "kernel"): jax.ShapeDtypeStruct((3, 64, 64), np.float32)}
    with pytest.raises(ConfigError, match=r"decoder\.layers\.attention\.gate\.kernel: got shape \(3, 64, 64\)"):
        partition_specs(config.text, shapes, AbstractMesh((2,), ("tensor",)))

    def never(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(kvpatch_jax.models.directory, "load_weights", never)
    with pytest.raises(ConfigError, match=r"mesh: got axes \('model',\); expected one called 'tensor'"):
        load(write_checkpoint("qwen3", tmp_path / "qwen3"), mesh=Mesh(np.array(jax.devices()[:1]), ("model",)))


@pytest.mark.parametrize("tier", ["not nightly", pytest.param("nightly", marks=pytest.mark.nightly)])
def test_eight_devices_give_one_devices_numbers(run_over_devices, tier):
    run_over_devices("mesh_cases.py", 8, tier)
