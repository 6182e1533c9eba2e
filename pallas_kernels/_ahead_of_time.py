"""Compiles for devices that are not there, with the arguments of kernels as shapes."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from ._target import targeting
from .rotate_patch.shapes import RotateShape

SPEC = jax.ShapeDtypeStruct
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
    place = lambda leaf: SPEC(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=kind)), targeting(platform):
        return jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(place, arguments)).compile()


def compile_for_tpu(
    topology: str, function: Callable, arguments: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compiles `function` for one chip of a topology such as "v5e:2x2"."""
    os.environ.update(ENVIRONMENT)
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    kind = AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    return compile_on(device, kind, "tpu", function, arguments, donate)


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
