"""Tensor parallelism: the table of axes, loading over a mesh, and the forward over eight devices against one device.

What needs eight devices runs in a program of its own (`sharding_cases.py`), whose findings are asserted here.
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
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import kvpatch_jax.models.directory
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import FAMILIES, load
from kvpatch_jax.models.checkpoints import flatten_params
from kvpatch_jax.models.decoder.sharding import (
    cache_specs,
    partition_specs,
)
from kvpatch_jax.models.families.family import abstract, parameters, tower_heads
from tests.goldens.load import golden_config, write_checkpoint
from tests.models.sharding_cases import LOADED

ROOT = Path(__file__).parents[2]
BAR = 2e-4
DEFAULT = ("experts", "gqa", "loads", "collectives", "memory")
"""What is run by default, by one program: another one would load everything again.

One forward, of grouped heads; latents and experts are loaded, and the forward of a mixture is held alone.
"""
WHOLE = ("gqa-whole", "mha-whole", "mla-whole", "image-whole")
SLOW = (*WHOLE, "own_mesh", "own_mesh_set", "hybrid")


def config_of(family: str, **changes: Any):
    """The tiny model's configuration."""
    raw = golden_config(family)
    families = {each.model_type: each for each in FAMILIES.values()} | FAMILIES
    named = raw.get("architectures") or [raw["model_type"]]
    return families[named[0]].config({**raw, **changes}, "exact", None)


def specs_of(family: str, count: int, **changes: Any) -> dict[str, P]:
    config = config_of(family, **changes)
    shapes = flatten_params(parameters(abstract(config)))
    specs = partition_specs(config.text, shapes, AbstractMesh((count,), ("tensor",)))
    return {".".join(path): spec for path, spec in specs.items()}


# ------------------------------------------------------------------------------------------------------ the table


PLACED = ("qwen3_moe", "deepseek_v3", "qwen2_5_vl", "kimi_vl", "internvl", "deepseek_ocr2")


@pytest.mark.parametrize("family", PLACED)
def test_every_parameter_of_every_family_has_a_place(family):
    config = config_of(family)
    shapes = flatten_params(parameters(abstract(config)))
    specs = partition_specs(config.text, shapes, AbstractMesh((2,), ("tensor",)), tower_heads(config))
    assert specs.keys() == shapes.keys()
    matrices = {"query", "key", "value", "output", "up", "gate", "embedding", "head"}
    matrices |= {"inner", "outer"}
    for path, spec in specs.items():
        if matrices & set(path) and path[-1] in ("kernel", "embedding", "gate", "up"):
            assert list(spec).count("tensor") == 1, path
            assert shapes[path].shape[list(spec).index("tensor")] % 2 == 0, path


def test_linear_attention_lies_over_its_key_heads():
    """Also where devices outnumber the KV heads: those of a group have key heads of their own."""
    specs = specs_of("qwen3_5", 2)
    assert specs["decoder.layers_0.attention.value.kernel"] == P(None, None, "tensor")
    assert specs["decoder.layers_0.attention.output.kernel"] == P(None, "tensor", None)
    layout, over = config_of("qwen3_5").text.layout, P(None, None, None, "tensor")
    both = P(None, None, None, ("tensor", "tensor_copies"))
    specs = cache_specs(layout, AbstractMesh((4,), ("tensor",)))
    assert specs == {"k": over, "v": over, "map": both, "state": both, "tail": P()}
    with pytest.raises(ConfigError, match="2 linear_heads over 4 devices"):
        specs_of("qwen3_5", 4)


def test_caches_lie_over_heads_and_latent_ones_replicate():
    mesh = AbstractMesh((2,), ("tensor",))
    assert cache_specs(config_of("qwen2").text.layout, mesh) == dict.fromkeys("kv", P(None, None, None, "tensor"))
    assert cache_specs(config_of("deepseek_v3").text.layout, mesh) == {"ckv": P(), "kpe": P()}


def test_vocabulary_that_does_not_divide_is_replicated():
    specs = specs_of("qwen3", 2, vocab_size=301)
    assert specs["decoder.embedding"] == specs["decoder.head.kernel"] == P(None, None)


# --------------------------------------------------------------------------------------------------- bad meshes


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
    ],
)
def test_what_does_not_divide_is_refused(family, count, changes, message):
    with pytest.raises(ConfigError, match=message):
        specs_of(family, count, **changes)


def test_parameter_unknown_to_the_table_is_refused():
    config = config_of("qwen3")
    shapes = {("decoder", "layers", "attention", "gate", "kernel"): jax.ShapeDtypeStruct((3, 64, 64), np.float32)}
    with pytest.raises(ConfigError, match=r"decoder\.layers\.attention\.gate\.kernel: got shape \(3, 64, 64\)"):
        partition_specs(config.text, shapes, AbstractMesh((2,), ("tensor",)))


def test_mesh_without_the_axis_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(kvpatch_jax.models.directory, "load_weights", never)
    directory = write_checkpoint("qwen3", tmp_path / "qwen3")
    with pytest.raises(ConfigError, match=r"mesh: got axes \('model',\); expected one called 'tensor'"):
        load(directory, mesh=Mesh(np.array(jax.devices()[:1]), ("model",)))


# ------------------------------------------------------------------------------------------------- on one device


def test_mesh_of_one_device_loads_the_same_parameters(tmp_path):
    directory = write_checkpoint("phi3_short", tmp_path / "phi3_short")
    mesh = jax.make_mesh((1,), ("tensor",))
    over, alone = load(directory, "bfloat16", mesh=mesh), load(directory, "bfloat16")
    assert over.mesh == mesh
    assert alone.mesh is None
    assert over.replaced(over.parameters).mesh == over.mesh
    jax.tree.map(np.testing.assert_array_equal, over.parameters, alone.parameters)


# ---------------------------------------------------------------------------------------------- on eight devices


def findings(module: str, *arguments: str, devices: int = 8) -> dict[str, Any]:
    """What a program of `tests.models` finds with so many devices on the host.

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
    """What the default cases found."""
    return findings("sharding_cases", str(tmp_path_factory.mktemp("sharded")), *DEFAULT)


@pytest.fixture(scope="module")
def whole_facts(tmp_path_factory):
    """What the slow cases found."""
    return findings("sharding_cases", str(tmp_path_factory.mktemp("sharded")), *SLOW)


COUNTS = {"gqa": 8, "mha": 4, "mla": 4, "image": 2}
CALLS = {"embed", "prefill", "decode"}


def check_forward(name: str, facts: dict[str, Any]) -> None:
    """Every result within the bar, every cache over its KV heads (or, for latent attention, whole on each device)."""
    calls = CALLS | ({"recompute", "generate"} if name.endswith("-whole") else set())
    assert calls <= facts["errors"].keys()
    worst = max(facts["errors"], key=facts["errors"].__getitem__)
    assert facts["errors"][worst] <= BAR, f"{worst}: off by {facts['errors'][worst]:.2e} of the largest magnitude"
    assert facts["same_fingerprint"]
    case = name.removesuffix("-whole")
    assert {call.split()[0] for call in facts["cache"]} == calls - {"embed", "generate"} | {"engine"}
    for call, lies in facts["cache"].items():
        over = 1 if case == "mla" else COUNTS[case]
        assert lies["shape"][3] == lies["shard"][3] * over, call
        assert lies["shape"][:3] == lies["shard"][:3], call
        assert lies["devices"] == (8 if case == "image" else COUNTS[case]), call


def test_forward_over_devices_equals_one_device(facts):
    check_forward("gqa", facts["gqa"])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["own_mesh", "own_mesh_set"])
def test_a_mesh_of_the_users_own_is_taken_as_it_is(whole_facts, name):
    found = whole_facts[name]
    assert found["taken_as_it_is"]
    assert set(found["heads"]) == {"tensor"}
    assert max(found["errors"].values()) <= BAR, found["errors"]


@pytest.mark.nightly
def test_linear_attention_over_devices_equals_one_device(whole_facts):
    """States and maps lie over their heads, the convolution's tail whole on each device."""
    facts = whole_facts["hybrid"]
    assert facts["as_asked"]
    assert facts["same_values"]
    assert max(facts["errors"].values()) <= BAR, facts["errors"]
    for call, lies in facts["cache"].items():
        assert lies["shape"][3] == lies["shard"][3] * (1 if call.endswith("tail") else 2), call


@pytest.mark.nightly
@pytest.mark.parametrize("name", WHOLE)
def test_every_call_over_devices_equals_one_device(whole_facts, name):
    check_forward(name, whole_facts[name])
    check_parameters_lie(whole_facts[name])
    assert whole_facts[name]["dtypes"] == ["float32"]


def check_parameters_lie(facts: dict[str, Any]) -> None:
    """Every parameter lies as was asked for, with the file's values."""
    assert facts["as_asked"]
    assert facts["same_values"]


def test_shards_of_known_parameters(facts):
    check_parameters_lie(facts["gqa"])
    grouped, latent = facts["gqa"]["parameters"], facts["loads"]["deepseek_v3"]["parameters"]
    assert grouped["decoder.layers.attention.key.kernel"]["shard"] == [3, 64, 8]
    assert grouped["decoder.layers.attention.query.kernel"]["shard"] == [3, 64, 16]
    assert grouped["decoder.layers.mlp.down.kernel"]["shard"] == [3, 12, 64]
    assert grouped["decoder.embedding"]["shard"] == [40, 64]
    assert latent["decoder.layers.mlp.gate"]["shard"] == [2, 4, 64, 32]
    assert latent["decoder.layers.attention.down.kernel"]["shard"] == [2, 64, 40]


@pytest.mark.parametrize("name", LOADED)
def test_every_kind_of_tensor_is_read_in_shards(facts, name):
    check_parameters_lie(facts["loads"][name])
    assert "bfloat16" in facts["loads"][name]["dtypes"]


def test_decode_exchanges_two_sums_per_layer_and_no_parameter_or_cache(facts):
    """The scan's body is in the program once: a sum behind attention and one behind the MLP, of one token's width."""
    assert facts["collectives"] == [["all-reduce", 64], ["all-reduce", 64]]


def test_each_device_computes_its_own_experts_and_their_sum_is_all_that_is_exchanged(facts):
    found = facts["experts"]
    assert set(found["errors"]) == {"by chance", "one device"}
    assert max(found["errors"].values()) <= 1e-5
    assert found["collectives"] == [["all-reduce", 12 * 8]]


def test_host_holds_one_shard_at_a_time(facts):
    memory, python = facts["memory"], 4 * 2**20
    assert memory["peak"] <= memory["largest_shard"] + memory["largest_slice"] + python
    assert memory["peak"] < memory["largest"] < memory["model"]
    assert memory["read"] == memory["model"]  # float32 in the file as on the devices: every byte is read once
