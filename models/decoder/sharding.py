"""Tensor parallelism: which axis of which parameter, and of which cached channel, lies over the devices of a mesh.

One mesh axis, `"tensor"`. Every parameter of the decoder has a row in `PARAMETERS` that names its axes, and `MESH_AXES`
says which of these lie over the mesh; all others, and further axes of the mesh, replicate. So each device holds whole
heads and whole experts, and a layer needs two sums over the devices: behind attention's output projection and behind
the MLP's (with experts, also the router's scores, which the compiler spreads and gathers). What the heads of latent
attention share (the latent's way down, its norm, and the caches `ckv` and `kpe`) is replicated, as are norms, routers
and the residual.

Linear attention lies over its key heads, each with its value heads, over all devices; its maps and states too.

Where the devices are a multiple of the KV heads, `split_mesh` splits the axis in two: a group of devices per KV head,
each of which holds that one head's projections and cache, and within a group its query heads.

Towers and projectors take as many devices as divide their heads and widths (`TOWER_PARAMETERS`), and their images or
patches lie over the others (`mesh_axes`). Query, key and value in one matrix stay whole, for no part of it is one of
heads; each device multiplies its heads' part. What is not in the table is replicated.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvpatch_jax.core import KVLayout, check_uniform
from kvpatch_jax.errors import ConfigError, WeightsError

from ..checkpoints import Expected, ParamPath
from .config import DecoderConfig
from .mesh_axes import COPIES, TENSOR, device_count, dividing_axes, tensor_axes

MESH_AXES = {
    "heads": (TENSOR, COPIES),
    "kv_heads": (TENSOR,),
    "linear_heads": (TENSOR, COPIES),
    "intermediate": (TENSOR, COPIES),
    "shared": (TENSOR, COPIES),
    "experts": (TENSOR, COPIES),
    "vocabulary": (TENSOR, COPIES),
    "tower_heads": (TENSOR, COPIES),
    "tower_width": (TENSOR, COPIES),
}
"""Logical axis → mesh axes, of those that the mesh has. Axes of parameters that are not here replicate."""

MAY_REPLICATE = ("vocabulary", "tower_heads", "tower_width")
"""Axes that lie over fewer devices, or none, where the mesh does not divide them: vocabularies and towers are often of
odd sizes. Others are refused.
"""

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
    # Linear attention: heads are its key heads, each with its value heads.
    "linear.query.kernel": ("width", "linear_heads"),
    "linear.key.kernel": ("width", "linear_heads"),
    "linear.value.kernel": ("width", "linear_heads"),
    "linear.gate.kernel": ("width", "linear_heads"),
    "linear.strength.kernel": ("width", "linear_heads"),
    "linear.decay.kernel": ("width", "linear_heads"),
    "linear.inputs.kernel": ("width", "linear_heads"),
    "linear.rates.kernel": ("width", "linear_heads"),
    "linear.query_taps": ("linear_heads", "taps"),
    "linear.key_taps": ("linear_heads", "taps"),
    "linear.value_taps": ("linear_heads", "taps"),
    "linear.decay_rate": ("linear_heads",),
    "linear.decay_bias": ("linear_heads",),
    "linear.norm.weight": ("head_dim",),
    "linear.output.kernel": ("linear_heads", "width"),
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
    "mlp.shared_gate.kernel": ("width", "choice"),
    "mlp.shared.gate.kernel": ("width", "shared"),
    "mlp.shared.up.kernel": ("width", "shared"),
    "mlp.shared.down.kernel": ("shared", "width"),
}
"""Decoder parameter → its axes. Parameters of a stack of layers have an axis of layers before these. What is called
`linear` here is the `attention` of layers with linear attention.
"""

_INTO, _OUT_OF = ("width", "tower_width"), ("tower_width", "width")
TOWER_PARAMETERS: dict[str, tuple[str, ...]] = {
    **{f"{part}.kernel": ("width", "tower_heads") for part in ("query", "key", "value")},
    **{f"{part}.bias": ("tower_heads",) for part in ("query", "key", "value")},
    "output.kernel": ("tower_heads", "width"),
    **{f"{part}.kernel": _INTO for part in ("gate", "up", "inner")},
    **{f"{part}.bias": ("tower_width",) for part in ("gate", "up", "inner")},
    **{f"{part}.kernel": _OUT_OF for part in ("down", "outer")},
}
"""End of the name of a parameter outside the decoder → its last axes. Others replicate."""

DECODER = "decoder"
STACKS = ("layers", "dense_layers")


def split_mesh[M: Mesh | AbstractMesh](mesh: M, layout: KVLayout) -> M:
    """Returns the mesh that a model lies over: `mesh`, with its axis "tensor" split where devices outnumber KV heads.

    Of K KV heads over a multiple of K devices, "tensor" becomes K groups, and "tensor_copies" the devices of a group,
    neighbours in the mesh. A mesh that was split, and one for latent attention, is returned as it is.

    Raises:
      ConfigError: a mesh without the axis "tensor", or with a number of devices on it that neither divides the KV heads
        nor is a multiple of them. LayoutError: layers of unlike kinds.
    """
    if not layout.parts:
        check_uniform(layout, "mesh")
    count, heads = _devices(mesh), layout.channels[0].heads
    if layout.kind == "mla" or COPIES in mesh.axis_names or heads % count == 0:
        return mesh
    if count % heads:
        raise ConfigError(
            f"mesh: got {heads} kv_heads over {count} devices of axis {TENSOR!r}; expected a number of devices that "
            f"divides {heads}, or a multiple of it"
        )

    def replaced[T](values: tuple[T, ...], two: tuple[T, T]) -> tuple[T, ...]:
        at = mesh.axis_names.index(TENSOR)
        return (*values[:at], *two, *values[at + 1 :])

    sizes = replaced(tuple(mesh.shape.values()), (heads, count // heads))
    names, types = replaced(mesh.axis_names, (TENSOR, COPIES)), mesh.axis_types
    kind = types[mesh.axis_names.index(TENSOR)]
    types = replaced(types, (kind, kind))
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names, axis_types=types)  # type: ignore[return-value]
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)  # type: ignore[return-value]


def auto_mesh(mesh: Mesh) -> Mesh:
    """Returns the same devices and names with every axis `AxisType.Auto` (`jax.make_mesh` makes Explicit ones).

    Shardings inside the forward are then the compiler's to find; Explicit axes would want one named at every reshape.

    Raises:
      ConfigError: a mesh without the axis "tensor".
    """
    _devices(mesh)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def partition_specs(
    config: DecoderConfig,
    parameters: Expected,
    mesh: Mesh | AbstractMesh,
    tower_heads: Mapping[str, int] | None = None,
) -> dict[ParamPath, PartitionSpec]:
    """Returns how each parameter of a backbone lies over `split_mesh` of a mesh.

    Args:
      config: the decoder's.
      parameters: path to shape and type of every parameter.
      tower_heads: heads of each tower, by the first name of its parameters; of others attention is replicated.

    Raises:
      ConfigError: a mesh without the axis "tensor"; heads, MLP widths or experts that its devices do not divide (in
        whole heads and experts), KV heads that they neither divide nor are a multiple of; or a parameter of the
        decoder that the table does not know.
    """
    mesh, experts = split_mesh(mesh, config.layout), config.experts
    kinds = {name: config.layer_kinds[layers[0]] for name, layers in config.stacks}
    linear = {name: kind.linear for name, kind in kinds.items() if kind.linear is not None}

    # Whole pieces of each logical axis: heads and experts are not cut.
    sizes = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "intermediate": config.intermediate,
        "linear_heads": next((own.key_heads for own in linear.values()), 0),
        "shared": 0 if experts is None else experts.shared,
        "experts": 0 if experts is None else experts.experts,
        "vocabulary": config.vocabulary,
    }

    specs: dict[ParamPath, PartitionSpec] = {}
    for path, leaf in parameters.items():
        own = sizes
        if path[0] == DECODER:
            stacked = path[1].startswith(STACKS)
            name = ".".join(path[2 if stacked else 1 :])
            name = name.replace("attention.", "linear.", 1) if path[1] in linear and "attention." in name else name
            axes = (*(("layers",) if stacked else ()), *PARAMETERS.get(name, ()))
            if name not in PARAMETERS or len(axes) != len(leaf.shape):
                raise ConfigError(
                    f"parameter {'.'.join(path)}: got shape {leaf.shape}; expected one with axes in the sharding table"
                )
        else:
            axes = TOWER_PARAMETERS.get(".".join(path[-2:]), ())
            axes = ("layers",) * (len(leaf.shape) - len(axes)) + axes if len(axes) <= len(leaf.shape) else ()
            own = dict(zip(axes, leaf.shape, strict=False))
            own |= {"tower_heads": (tower_heads or {}).get(path[0], 1)}

        specs[path] = _spec(axes, own, mesh)
    return specs


def parameter_shardings(
    config: DecoderConfig, parameters: Expected, mesh: Mesh, tower_heads: Mapping[str, int] | None = None
) -> dict[ParamPath, NamedSharding]:
    """Returns `partition_specs` on the devices of a mesh; raises what that does."""
    specs, mesh = partition_specs(config, parameters, mesh, tower_heads), split_mesh(mesh, config.layout)
    return {path: NamedSharding(mesh, spec) for path, spec in specs.items()}


def cache_specs(layout: KVLayout, mesh: Mesh | AbstractMesh) -> dict[str, PartitionSpec]:
    """Returns how each channel's KV [L,B,T,K,H], or pool [L,P,O,K,H], lies over `split_mesh` of a mesh: over KV heads,
    or for latent attention replicated. Of a transition map and state lie over their heads, the tail is replicated.

    Raises:
      ConfigError: as `split_mesh`.
    """
    mesh = split_mesh(mesh, layout)
    if layout.kind == "mla":
        return dict.fromkeys(layout.names, PartitionSpec())

    specs = {}
    for channel in layout.channels:
        axis = "kv_heads" if channel.rows is None else "linear_heads"
        over = () if channel.name == "tail" else (None, None, None, *_spec((axis,), {axis: channel.heads}, mesh))
        specs[channel.name] = PartitionSpec(*over)
    return specs


def cache_shardings(layout: KVLayout, mesh: Mesh) -> dict[str, NamedSharding]:
    """Returns `cache_specs` on the devices of a mesh; raises what that does."""
    specs, mesh = cache_specs(layout, mesh), split_mesh(mesh, layout)
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


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
    """Returns how many devices a model lies over."""
    if TENSOR not in mesh.axis_names:
        raise ConfigError(f"mesh: got axes {tuple(mesh.axis_names)}; expected one called {TENSOR!r}")
    return device_count(mesh, tensor_axes(mesh))


def _spec(axes: tuple[str, ...], sizes: Mapping[str, int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the mesh axes that logical axes of these sizes lie over; raises ConfigError as `partition_specs`."""
    spec: list[Any] = []
    for axis in axes:
        over = tuple(name for name in MESH_AXES.get(axis, ()) if name in mesh.axis_names)
        taken = dividing_axes(sizes[axis], mesh, over) if over else ()
        if taken != over and axis not in MAY_REPLICATE:
            count = device_count(mesh, over)
            raise ConfigError(
                f"mesh: got {sizes[axis]} {axis} over {count} devices of axis {TENSOR!r}; expected a number of devices "
                f"that divides {sizes[axis]}"
            )
        spec.append(None if not taken else taken[0] if len(taken) == 1 else taken)
    return PartitionSpec(*spec)
