"""Compiles for devices that are not there, with the arguments of kernels as shapes."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from ._target import targeting
from .rotate_patch.shapes import RotateShape

SPEC = jax.ShapeDtypeStruct
SHARED_MEMORY = 232_448
H200 = f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  shared_memory_per_block_optin: {SHARED_MEMORY}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 name: "NVIDIA H200"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "NVIDIA H200"
"""
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu wants to hear where there is no TPU."""


def compile_on(
    device: Any, kind: AbstractDevice, platform: str, function: Callable, arguments: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compiles `function` for one device of a topology, kernels chosen as on `platform` ("tpu" or "gpu")."""

    def place(leaf):
        return SPEC(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))

    mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh), targeting(platform):
        return jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(place, arguments)).compile()


def compile_for_tpu(
    topology: str, function: Callable, arguments: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compiles `function` for one chip of a topology such as "v5e:2x2"."""
    os.environ.update(ENVIRONMENT)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    return compile_on(device, kind, "tpu", function, arguments, donate)


def compile_for_h200(function: Callable, arguments: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compiles `function` for one H200; needs jax's CUDA plugin, not a GPU."""
    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    kind = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    return compile_on(device, kind, "gpu", function, arguments, donate)


def chunk_of(shape: RotateShape, tokens: int, rank: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """Makes a chunk of this shape as rotate_patch takes it, with scales where the dtype has eight bits."""
    narrow = jnp.dtype(dtype).itemsize == 1
    given = {"x": SPEC((*shape.leading, tokens, shape.heads, shape.width), dtype)}
    if shape.rotary:
        given |= dict.fromkeys(("cos", "sin"), SPEC((tokens, shape.rotary // 2), jnp.float32))
    if rank:
        given["u"] = SPEC((*shape.leading, tokens, rank), dtype)
        given["v"] = SPEC((*shape.leading, rank, shape.heads * shape.width), dtype)

    if narrow:
        given["x_scale"] = SPEC((*shape.leading, 1, shape.heads, shape.width), jnp.float32)
    if narrow and rank:
        given["u_scale"] = SPEC((*shape.leading, 1, rank), jnp.float32)
        given["v_scale"] = SPEC((*shape.leading, rank, 1), jnp.float32)
    return given
