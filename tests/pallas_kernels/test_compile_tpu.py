"""Kernels compiled ahead of time for TPUs, at production shapes. Needs the extra `kernels`, not a TPU."""

import importlib.util
import math
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from pallas_kernels import rotate_patch, targeting
from pallas_kernels.rotate_patch.shapes import PRODUCTION, Shape

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@pytest.fixture(autouse=True)
def without_the_compilation_cache():
    """The cache cannot load what was compiled for a device that is not there."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def compiled_for(topology: str, function, *arguments):
    """`function`, compiled for one chip of a TPU that is not there."""
    os.environ.update(ENVIRONMENT)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=kind)), targeting("tpu"):
        return jax.jit(function).lower(*jax.tree.map(place, arguments)).compile()


@pytest.mark.parametrize("rank", [0, 16, 64])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("shape", PRODUCTION, ids=lambda shape: shape.name)
def test_rotate_patch_compiles_to_one_kernel_without_copying_the_channel(shape: Shape, topology: str, rank: int):
    if not shape.rotary and not rank:
        pytest.skip("a plain channel without a patch is a copy")
    spec = jax.ShapeDtypeStruct
    for tokens in (shape.tokens, 4 * shape.tokens + 1):
        given = {"x": spec((*shape.leading, tokens, shape.heads, shape.width), jnp.bfloat16)}
        if shape.rotary:
            given |= dict.fromkeys(("cos", "sin"), spec((tokens, shape.rotary // 2), jnp.float32))
        if rank:
            given["u"] = spec((*shape.leading, tokens, rank), jnp.bfloat16)
            given["v"] = spec((*shape.leading, rank, shape.heads * shape.width), jnp.bfloat16)
        run = lambda given, length: rotate_patch(**given, layout=shape.layout, length=length, implementation="tpu")
        text = compiled_for(topology, run, given, spec((), jnp.int32)).as_text()
        assert text is not None
        assert text.count('custom_call_target="tpu_custom_call"') == 1
        if shape.width % 128 == 0:
            elements = shape.leading[0] * tokens * shape.heads * shape.width
            copied = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
            assert elements not in [math.prod(map(int, sizes.split(","))) for sizes in copied]
