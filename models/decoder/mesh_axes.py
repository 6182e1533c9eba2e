"""The mesh axes that a model lies over, and arrays laid over as many of their devices as divide an axis.

One rule, of parameters (`sharding`) and of what towers compute: an array's axes are asked in order; each takes as many
of the devices that are left as divide it, and what none takes is replicated.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float

TENSOR = "tensor"
"""Name of the mesh axis that heads, MLP widths, experts and vocabulary lie over."""
COPIES = "tensor_copies"
"""Where devices outnumber KV heads, `TENSOR` has a group of devices per KV head, and this axis the devices of a group:
all but the KV heads lie over both.
"""


def tensor_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the axes of a mesh that a model lies over."""
    return tuple(axis for axis in (TENSOR, COPIES) if axis in mesh.axis_names)


def device_count(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> int:
    """Returns how many devices these axes of a mesh have together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def dividing_axes(size: int, mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the axes whose devices divide a size: all, else the one with the most devices, else none."""
    options = [option for option in (axes, *((axis,) for axis in axes)) if size % device_count(mesh, option) == 0]
    return max(options, key=lambda option: device_count(mesh, option), default=())


def auto_tensor_axes() -> tuple[str, ...]:
    """Returns the axes with several devices of the mesh that is set, where the compiler finds shardings."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in tensor_axes(mesh) if axis in mesh.auto_axes and mesh.shape[axis] > 1)


def spread(x: Float[Array, "*shape"], *order: int, taken: tuple[str, ...] = ()) -> Float[Array, "*shape"]:
    """Lays these axes of an array, in this order, over the devices of the mesh that is set, by the module's rule.

    Args:
      taken: axes of the mesh that are spoken for.
    """
    mesh, free = jax.sharding.get_abstract_mesh(), tuple(axis for axis in auto_tensor_axes() if axis not in taken)
    spec: list[tuple[str, ...] | None] = [None] * x.ndim
    for number in order:
        own = dividing_axes(x.shape[number], mesh, free)
        spec[number] = own or None
        free = tuple(axis for axis in free if axis not in own)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec)) if any(spec) else x


def spread_tokens(x: Float[Array, "*lead D"], width: int) -> Float[Array, "*lead D"]:
    """Lays tokens over the devices that a width, which they are multiplied into, does not lie over."""
    taken = dividing_axes(width, jax.sharding.get_abstract_mesh(), auto_tensor_axes())
    return spread(x, *range(x.ndim - 1), taken=taken)
