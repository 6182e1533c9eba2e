"""Over a mesh of devices a model is read in shards and gives one device's numbers, exchanging two sums per layer.

What needs eight devices runs in a program of its own (`mesh_cases.py`), whose facts are asserted here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
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
from tests.models.mesh_cases import LOADED, TOWERS

ROOT = Path(__file__).parents[2]
BAR = 1e-5
"""Of the largest magnitude, float32; 4.2e-6 was reached (GLM-4.5V), else 3e-6."""
BARS: dict[str, float] = dict.fromkeys(("gqa", "gqa-every", "mha-every", "mla-every", "image-every", "hybrid"), 2e-4)
DEFAULT = ("gqa", "experts", "collectives")
FORWARDS = ("gqa-every", "few-every", "mha-every", "mla-every", "image-every", *TOWERS, "hybrid")
LAST = P(None, None, None, "tensor")
"""Of a cache: over its KV heads."""


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
        (
            "qwen2",
            3,
            {},
            "mesh: got 2 kv_heads over 3 devices of axis 'tensor'; expected a number of devices that divides 2, or a "
            "multiple of it",
        ),
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


def test_a_mesh_of_one_device_loads_the_same_parameters(tmp_path):
    directory = write_checkpoint("phi3_short", tmp_path / "phi3_short")
    mesh = jax.make_mesh((1,), ("tensor",))
    over, alone = load(directory, "bfloat16", mesh=mesh), load(directory, "bfloat16")
    assert over.mesh == mesh
    assert alone.mesh is None
    assert over.replaced(over.parameters).mesh == over.mesh
    jax.tree.map(np.testing.assert_array_equal, over.parameters, alone.parameters)


# ---------------------------------------------------------------------------------------------- on eight devices


def facts_of(module: str, *arguments: str, devices: int = 8) -> dict[str, Any]:
    """What a program of `tests.models` says with so many devices on the host.

    LLVM tries less hard: most of the time goes into compiling, and both sides of each comparison are compiled alike.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"tests.models.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Of the default cases."""
    return facts_of("mesh_cases", str(tmp_path_factory.mktemp("mesh")), *DEFAULT)


@pytest.fixture(scope="module")
def all_facts(tmp_path_factory):
    """Of all others."""
    return facts_of("mesh_cases", str(tmp_path_factory.mktemp("mesh")), *FORWARDS, "loads", "memory")


def check_forward(name: str, facts: dict[str, Any]) -> None:
    """Every result within the bar, every cache over its KV heads (latents and tails on each device), parameters as
    asked for, with the file's values.
    """
    worst = max(facts["errors"], key=facts["errors"].__getitem__)
    assert facts["errors"][worst] <= BARS.get(name, BAR), f"{worst}: off by {facts['errors'][worst]:.2e}"
    calls = {"prefill", "decode"} | ({"generate"} if name.endswith("-every") else set())
    assert {"embed", *calls} <= facts["errors"].keys()
    assert facts["same_fingerprint"]
    check_parameters(facts)
    for call, lies in facts["cache"].items():
        spread = 1 if call.split()[-1] in ("ckv", "kpe", "tail") else facts["mesh"]["tensor"]
        shape = list(lies["shape"])
        assert lies["shard"] == [*shape[:3], shape[3] // spread, shape[4]], call
        assert lies["devices"] == np.prod(list(facts["mesh"].values())), call


def check_parameters(facts: dict[str, Any]) -> None:
    assert facts["as_asked"]
    assert facts["same_values"]


def test_a_forward_over_devices_equals_one_devices(facts):
    check_forward("gqa", facts["gqa"])
    shards = {name: lies["shard"] for name, lies in facts["gqa"]["parameters"].items()}
    assert shards["decoder.layers.attention.key.kernel"] == [3, 64, 8]
    assert shards["decoder.layers.attention.query.kernel"] == [3, 64, 16]
    assert shards["decoder.layers.mlp.down.kernel"] == [3, 12, 64]
    assert shards["decoder.embedding"] == [40, 64]


def test_a_step_exchanges_two_sums_per_layer_and_nothing_of_a_pool(facts):
    """The scan's body is in the program once: a sum behind attention and one behind the MLP, of one token's width."""
    assert facts["collectives"] == [["all-reduce", 64], ["all-reduce", 64]]


def test_each_device_computes_its_experts_and_their_sum_is_all_that_is_exchanged(facts):
    assert set(facts["experts"]["errors"]) == {"by chance", "one device"}
    assert max(facts["experts"]["errors"].values()) <= 1e-5
    assert facts["experts"]["collectives"] == [["all-reduce", 12 * 8]]


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORWARDS)
def test_every_call_and_tower_over_devices_equals_one_devices(all_facts, name):
    check_forward(name, all_facts[name])
    parameters = {path: lies["shard"] for path, lies in all_facts[name]["parameters"].items()}
    if name == "few-every":
        assert "recompute" in all_facts[name]["errors"]
        assert all_facts[name]["mesh"] == {"tensor": 2, "tensor_copies": 4}
        assert parameters["decoder.layers.attention.key.kernel"] == [3, 64, 8]
        assert parameters["decoder.layers.attention.query.kernel"] == [3, 64, 16]
    if name == "qwen2_5_vl":  # heads over one axis, windows and patches over the other; widths over both
        assert parameters["visual.blocks.qkv.kernel"] == [4, 32, 96]
        assert parameters["visual.blocks.output.kernel"] == [4, 16, 32]
        assert parameters["visual.blocks.mlp.gate.kernel"] == [4, 32, 12]
        assert parameters["visual.merger.mlp.inner.kernel"] == [128, 32]


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOADED)
def test_every_kind_of_tensor_is_read_in_shards(all_facts, name):
    check_parameters(all_facts["loads"][name])
    assert "bfloat16" in all_facts["loads"][name]["dtypes"]


@pytest.mark.nightly
def test_the_host_holds_one_shard_at_a_time(all_facts):
    memory, python = all_facts["memory"], 4 * 2**20
    assert memory["peak"] <= memory["largest_shard"] + memory["largest_slice"] + python
    assert memory["peak"] < memory["largest"] < memory["model"]
    assert memory["read"] == memory["model"]  # float32 in the file as on the devices: every byte is read once
