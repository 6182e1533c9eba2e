"""Compiles for devices that are not there, with the arguments of kernels as shapes."""

import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from ._target import targeting

SHARED_MEMORY = 232_448
HOPPER = f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: BANDWIDTH l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: MEMORY
  shared_memory_per_block_optin: {SHARED_MEMORY}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 name: "NAME"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "NAME"
"""
GPUS = {"NVIDIA H100": (3_350_000_000_000, 85_899_345_920), "NVIDIA H200": (4_800_000_000_000, 151_397_597_184)}
"""Bandwidth in bytes per second and memory in bytes."""
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
"""What libtpu wants to hear where there is no TPU."""


def compile_for(kind: str, function: Callable, arguments: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compiles a function for one device that is not there, kernels chosen as on its platform.

    Args:
      kind: a name of `GPUS` (needs jax's CUDA plugin), or a TPU's topology such as "v5e:2x2" (needs libtpu).
      arguments: shapes and dtypes.
    """
    if kind in GPUS:
        bandwidth, memory = GPUS[kind]
        text = HOPPER.replace("NAME", kind).replace("BANDWIDTH", str(bandwidth)).replace("MEMORY", str(memory))
        device = topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1").devices[0]
        described, platform = AbstractDevice(device_kind=kind, num_cores=132, platform="cuda"), "gpu"
    else:
        os.environ.update(ENVIRONMENT)
        device = topologies.get_topology_desc(platform="tpu", topology_name=kind).devices[0]
        described, platform = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu"), "tpu"

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))

    mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh), targeting(platform):
        return jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(place, arguments)).compile()
