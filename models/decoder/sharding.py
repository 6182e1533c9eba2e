"""Tensor parallelism: which axis of which parameter, and of which cached channel, lies over the devices of a mesh.

One mesh axis, `"tensor"`. Every parameter of the decoder has a row in `PARAMETERS` that names its axes, and `MESH_AXES`
says which of these lie over the mesh; all others, and further axes of the mesh, replicate. So each device holds whole
heads and whole experts, and a layer needs two sums over the devices: behind attention's output projection and behind
the MLP's (with experts, also the router's scores, which the compiler spreads and gathers). What the heads of latent
attention share (the latent's way down, its norm, and the caches `ckv` and `kpe`) is replicated, as are norms, routers
and the residual.

Vision towers and projectors are replicated as a rule: they are small beside the decoder they feed, their heads and
widths rarely divide by 8, and each image runs through them once.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvpatch_jax.core import KVLayout, check_uniform
from kvpatch_jax.errors import ConfigError, WeightsError

from ..checkpoints import Expected, ParamPath
from .config import DecoderConfig

TENSOR = "tensor"
"""Name of the mesh axis that heads, MLP widths, experts and vocabulary lie over."""

MESH_AXES = {
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "intermediate": TENSOR,
    "shared": TENSOR,
    "experts": TENSOR,
    "vocabulary": TENSOR,
}
"""Logical axis → mesh axis. Axes of `PARAMETERS` that are not here replicate."""

MAY_REPLICATE = ("vocabulary",)
"""Axes that replicate where the mesh does not divide them: vocabularies are often of odd sizes. Others are refused."""

PARAMETERS: dict[str, tuple[str, ...]] = {
    "embedding": ("vocabulary", "width"),
    "norm.weight": ("width",),
    "head.kernel": ("width", "vocabulary"),
    "input_norm.weight": ("width",),
    "mlp_norm.weight": ("width",),
    "attention_post_norm.weight": ("width",),
    "mlp_post_norm.weight": ("width",),
    # Grouped and multi-head attention. An axis of heads is heads times their width, flattened together.
    "attention.query.kernel": ("input", "heads"),  # latent attention's too, from the width or the queries' latent
    "attention.query.bias": ("heads",),
    "attention.key.kernel": ("width", "kv_heads"),
    "attention.key.bias": ("kv_heads",),
    "attention.value.kernel": ("width", "kv_heads"),
    "attention.value.bias": ("kv_heads",),
    "attention.query_norm.weight": ("head_dim",),  # latent attention's: over the queries' latent
    "attention.key_norm.weight": ("head_dim",),
    "attention.output.kernel": ("heads", "width"),
    "attention.output.bias": ("width",),
    # Latent attention.
    "attention.query_down.kernel": ("width", "latent"),
    "attention.query_down.bias": ("latent",),
    "attention.down.kernel": ("width", "latent"),
    "attention.down.bias": ("latent",),
    "attention.latent_norm.weight": ("latent",),
    "attention.up.kernel": ("latent", "heads"),
    # Gated MLP.
    "mlp.gate.kernel": ("width", "intermediate"),
    "mlp.gate.bias": ("intermediate",),
    "mlp.up.kernel": ("width", "intermediate"),
    "mlp.up.bias": ("intermediate",),
    "mlp.down.kernel": ("intermediate", "width"),
    "mlp.down.bias": ("width",),
    # Experts: whole ones on each device, so that a file's tensor is read by one device alone.
    "mlp.router.kernel": ("width", "choice"),
    "mlp.correction": ("choice",),
    "mlp.gate": ("experts", "width", "expert_width"),
    "mlp.up": ("experts", "width", "expert_width"),
    "mlp.down": ("experts", "expert_width", "width"),
    "mlp.shared.gate.kernel": ("width", "shared"),
    "mlp.shared.up.kernel": ("width", "shared"),
    "mlp.shared.down.kernel": ("shared", "width"),
}
"""Decoder parameter → its axes. Parameters of a stack of layers have an axis of layers before these."""

DECODER = "decoder"
STACKS = ("layers", "dense_layers")


def auto_mesh(mesh: Mesh) -> Mesh:
    """Returns the same devices and names with every axis `AxisType.Auto` (`jax.make_mesh` makes Explicit ones).

    Shardings inside the forward are then the compiler's to find; Explicit axes would want one named at every reshape.

    Raises:
      ConfigError: a mesh without the axis "tensor".
    """
    _devices(mesh)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def partition_specs(
    config: DecoderConfig, parameters: Expected, mesh: Mesh | AbstractMesh
) -> dict[ParamPath, PartitionSpec]:
    """Returns how each parameter of a backbone lies over a mesh.

    Args:
      config: the decoder's.
      parameters: path to shape and type of every parameter; those outside the decoder are replicated.

    Raises:
      ConfigError: a mesh without the axis "tensor"; heads, KV heads, MLP widths or experts that its devices do not
        divide (in whole heads and experts); or a parameter of the decoder that the table does not know.
      LayoutError: layers of unlike kinds.
    """
    count, experts = _devices(mesh), config.experts
    check_uniform(config.layout, "mesh")

    # Whole pieces of each logical axis: heads and experts are not cut.
    sizes = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "intermediate": config.intermediate,
        "shared": 0 if experts is None else experts.shared,
        "experts": 0 if experts is None else experts.experts,
        "vocabulary": config.vocabulary,
    }

    specs: dict[ParamPath, PartitionSpec] = {}
    for path, leaf in parameters.items():
        if path[0] != DECODER:
            specs[path] = PartitionSpec()
            continue

        stacked = path[1] in STACKS
        name = ".".join(path[2 if stacked else 1 :])
        axes = (*(("layers",) if stacked else ()), *PARAMETERS.get(name, ()))
        if name not in PARAMETERS or len(axes) != len(leaf.shape):
            raise ConfigError(
                f"parameter {'.'.join(path)}: got shape {leaf.shape}; expected one with axes in the sharding table"
            )
        specs[path] = PartitionSpec(*(_mesh_axis(axis, sizes, count) for axis in axes))
    return specs


def parameter_shardings(config: DecoderConfig, parameters: Expected, mesh: Mesh) -> dict[ParamPath, NamedSharding]:
    """Returns `partition_specs` on the devices of a mesh; raises what that does."""
    return {path: NamedSharding(mesh, spec) for path, spec in partition_specs(config, parameters, mesh).items()}


def cache_specs(layout: KVLayout, mesh: Mesh | AbstractMesh) -> dict[str, PartitionSpec]:
    """Returns how each channel's KV [L,B,T,K,H] lies over a mesh: over KV heads, or for latent attention replicated.

    Raises:
      ConfigError: a mesh without the axis "tensor", or whose devices do not divide the KV heads.
      LayoutError: layers of unlike kinds.
    """
    count = _devices(mesh)
    check_uniform(layout, "mesh")
    if layout.kind == "mla":
        return dict.fromkeys(layout.names, PartitionSpec())

    def over(heads):
        return PartitionSpec(None, None, None, _mesh_axis("kv_heads", {"kv_heads": heads}, count))

    return {channel.name: over(channel.heads) for channel in layout.channels}


def cache_shardings(layout: KVLayout, mesh: Mesh) -> dict[str, NamedSharding]:
    """Returns `cache_specs` on the devices of a mesh; raises what that does."""
    return {name: NamedSharding(mesh, spec) for name, spec in cache_specs(layout, mesh).items()}


def check_parameters(
    parameters: Mapping[ParamPath, jax.Array],
    expected: Expected,
    shardings: Mapping[ParamPath, NamedSharding] | None = None,
) -> None:
    """Checks the type of every parameter and, where given, how it lies over its mesh.

    Raises:
      WeightsError: a parameter of another type or sharding, which it names beside what was expected.
    """
    for path, leaf in parameters.items():
        place = ".".join(path)
        if leaf.dtype != expected[path].dtype:
            raise WeightsError(f"parameter {place}: got type {leaf.dtype}; expected {expected[path].dtype}")
        if shardings is not None and not leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim):
            raise WeightsError(f"parameter {place}: got sharding {leaf.sharding}; expected {shardings[path]}")


def _devices(mesh: Mesh | AbstractMesh) -> int:
    """Returns how many devices lie along the tensor axis."""
    if TENSOR not in mesh.axis_names:
        raise ConfigError(f"mesh: got axes {tuple(mesh.axis_names)}; expected one called {TENSOR!r}")
    return mesh.shape[TENSOR]


def _mesh_axis(axis: str, sizes: Mapping[str, int], count: int) -> Any:
    """Returns the mesh axis that a logical axis lies over, or None."""
    if axis not in MESH_AXES:
        return None
    if sizes[axis] % count == 0:
        return MESH_AXES[axis]
    if axis in MAY_REPLICATE:
        return None

    raise ConfigError(
        f"mesh: got {sizes[axis]} {axis} over {count} devices of axis {TENSOR!r}; expected a number of devices that "
        f"divides {sizes[axis]}"
    )
