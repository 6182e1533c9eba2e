"""Over several devices a model in shards, or chunks prefilled apart, give the numbers of one device.

What needs eight devices is in `mesh_cases.py`, run in a process of its own.
"""

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
from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from kvpatch_jax.models import FAMILIES, load
from kvpatch_jax.models.attention import Mask
from kvpatch_jax.models.checkpoints import flatten_params
from kvpatch_jax.models.decoder.sharding import cache_specs, partition_specs, split_mesh
from kvpatch_jax.models.families.family import abstract, parameters, tower_heads
from kvpatch_jax.models.parallel import prefill_chunks_apart, read_question, readouts, spread_backbone
from kvpatch_jax.models.parallel.prefill import lay_out
from kvpatch_jax.models.random_weights import random_backbone
from tests.goldens.load import golden_config, write_checkpoint
from tests.models.mesh_cases import SMALL, check, sequence
from tests.shared.arrays import placed

pytestmark = pytest.mark.usefixtures("highest_precision")
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
def test_eight_devices_give_one_devices_numbers(tier, tmp_path):
    """XLA settles the number of devices once per process, and other tests want one.

    LLVM tries less hard: most of the time goes into compiling, and both sides of each comparison are compiled alike.
    """
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", tier, f"--basetemp={tmp_path / 'over'}"]
    command.append(str(Path(__file__).with_name("mesh_cases.py")))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_chunks_of_one_device_answer_as_its_joined_caches():
    check(random_backbone(SMALL), 2, (10, 10, 10, 10), jax.devices()[:1])


def test_bad_input_is_refused(unchecked):
    for tokens, chunks, message in (
        (40, (9, 11, 12, 9), "a multiple of 4 of them, each at least 1, that add up to 40"),
        (40, (0, 20, 12, 8), "each at least 1"),
        (3, None, "at least one for each of 4 devices"),
    ):
        with pytest.raises(InputError, match=f"got .*; expected .*{message}"):
            lay_out(tokens, 4, chunks)
    backbone, devices = random_backbone(SMALL), jax.devices()[:1]
    windowed = random_backbone(SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0})
    over, (context, question) = spread_backbone(backbone, devices), sequence(backbone, 2, (10, 10, 10, 10))
    with pytest.raises(ConfigError, match="got a sliding window of 4 tokens; expected full attention"):
        spread_backbone(windowed)
    cache = prefill_chunks_apart(over, context, (10, 10, 10, 10))
    with pytest.raises(ShapeError, match="expected 39 tokens"):
        prefill_chunks_apart(over, context.take(0, 39), kv=cache.gather())
    with pytest.raises(InputError, match=r"ratio: got 1.2; expected 0 to 1"):
        read_question(over, cache, question, ratio=1.2)
    with pytest.raises(ShapeError, match="question: got 1 rows; expected the context's 2"):
        read_question(over, cache, sequence(backbone, 1, (20, 20))[1], ratio=0.1)


def test_queries_taken_in_blocks_read_the_same(monkeypatch):
    """What a part of the keys adds to a mean, and the logarithm of its weights, against float64."""
    rng, scale = np.random.default_rng(4), 0.3
    shapes = (2, 37, 4, 8), (2, 29, 2, 8), (2, 29, 2, 5)
    query, key, value = (placed(rng.standard_normal(shape, np.float32)) for shape in shapes)
    places = rng.integers(-1, 29, (2, 37)).astype(np.int32)  # some queries see nothing
    scores = np.einsum("BTNH,BSNH->BTNS", query, np.repeat(key, 2, axis=2)).astype(np.float64) * scale
    scores = np.where((np.arange(29) <= places[..., None])[:, :, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        logarithms = np.log(np.exp(scores).sum(-1))
    empty = np.isneginf(logarithms)
    weights = np.exp(scores - np.where(empty, 0, logarithms)[..., None])
    mixed = np.einsum("BTNS,BSNW->BTNW", weights, np.repeat(value, 2, axis=2))
    for most in (29 * 5, 2**20):
        monkeypatch.setattr(readouts, "DENSE_SCORES", most)
        run = jax.jit(readouts.readout, static_argnums=4)
        output, weight = run(query, key, value, Mask(causal=True, query_places=places), scale)
        np.testing.assert_allclose(np.asarray(output)[~empty], mixed[~empty], atol=2e-6)
        np.testing.assert_allclose(np.asarray(weight).reshape(empty.shape), logarithms, atol=2e-6)
    assert empty.any()
