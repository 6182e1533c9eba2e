"""What the ahead-of-time tests share: compiling for a device that is not there; the arguments of kernels as shapes."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from pallas_kernels import targeting
from pallas_kernels.rotate_patch.shapes import Shape

SPEC = jax.ShapeDtypeStruct


@pytest.fixture(autouse=True)
def without_the_compilation_cache():
    """The cache cannot load what was compiled for a device that is not there, and a hit would dump nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether there is one was settled when the process first compiled anything
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def compile_on(device, kind: AbstractDevice, platform: str, function, arguments, donate: tuple[int, ...] = ()):
    """`function`, compiled for one device of a topology, kernels chosen as on `platform` ("tpu" or "gpu")."""
    place = lambda leaf: SPEC(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=kind)), targeting(platform):
        return jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(place, arguments)).compile()


def chunk_of(shape: Shape, tokens: int, rank: int, dtype: str = "bfloat16") -> dict:
    """A chunk of this shape as rotate_patch takes it, with scales where the dtype has eight bits."""
    given = {"x": SPEC((*shape.leading, tokens, shape.heads, shape.width), dtype)}
    if shape.rotary:
        given |= dict.fromkeys(("cos", "sin"), SPEC((tokens, shape.rotary // 2), jnp.float32))
    if rank:
        given["u"] = SPEC((*shape.leading, tokens, rank), dtype)
        given["v"] = SPEC((*shape.leading, rank, shape.heads * shape.width), dtype)
    if dtype != "bfloat16":
        given["x_scale"] = SPEC((*shape.leading, 1, shape.heads, shape.width), jnp.float32)
    if dtype != "bfloat16" and rank:
        given["u_scale"] = SPEC((*shape.leading, 1, rank), jnp.float32)
        given["v_scale"] = SPEC((*shape.leading, rank, 1), jnp.float32)
    return given
