"""Bytes on each device of a mesh of TPUs, by the compiler: parameters, pages and the programs that serve an image.

Released checkpoints in bfloat16, compiled ahead of time for a topology: no TPU, and no weights. The programs are those
of a backbone with `load(mesh=)`: attention in plain XLA, experts in `ragged_dot`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import pallas_kernels
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Paged
from kvpatch_jax.pool.pool import jitted_splice
from models import FAMILIES
from models.checkpoints import flatten_params
from models.decoder.sharding import cache_shardings, parameter_shardings, split_mesh
from models.decoding import Forward
from models.families.family import abstract, parameters, placeholders, tower_heads, with_dtype, with_parameters
from pallas_kernels._ahead_of_time import tpu_mesh

from ..results.tables import markdown_table
from .benchmark import Benchmark
from .collectives import exchanged_bytes
from .released_configs import RELEASED
from .sizes import images_of

SPEC: Any = jax.ShapeDtypeStruct
TOPOLOGY = "v5e:2x4"
CHECKPOINTS = ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct")
PROMPT, SLOTS, PAGE, CHUNK, RANK = 4096, 65536, 64, 1024, 16
"""Tokens of a prompt, slots of the pool and of a page, tokens of a chunk and rank of its patch."""


class MeshProgram(NamedTuple):
    """A jitted program and the shapes of its arguments, each with where it lies."""

    program: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def run(*, checkpoints: Sequence[str] | None = None) -> dict[str, Any]:
    """Compiles every program of these checkpoints for all chips of `TOPOLOGY`; needs libtpu.

    Args:
      checkpoints: names of `RELEASED`; None for `CHECKPOINTS`.
    """
    rows = {name: describe(RELEASED[name].config) for name in checkpoints or CHECKPOINTS}
    return {"topology": TOPOLOGY, "jax": jax.__version__, "checkpoints": rows}


def describe(raw: dict[str, Any], topology: str = TOPOLOGY) -> dict[str, Any]:
    """Returns bytes per device of one checkpoint: what lies there, and what each program needs beside it."""
    made = programs(raw, topology)
    leaves = flatten_params(nnx.to_pure_dict(made["step"].arguments[0]))
    row: dict[str, Any] = {
        "whole": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values()),
        "weights": bytes_per_device(leaves),
        "tower": bytes_per_device({path: leaf for path, leaf in leaves.items() if path[0] != "decoder"}),
        "pool": bytes_per_device(made["step"].arguments[2]),
        "programs": {},
    }

    for name, program in made.items():
        compiled = compiled_for_tpus(program)
        memory = compiled.memory_analysis()
        assert memory is not None
        row["programs"][name] = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "exchanged": exchanged_bytes(compiled.as_text() or ""),
        }

    # A program's own arguments are weights and pages, and a few numbers per token.
    beside = max(own["results"] + own["temporaries"] for own in row["programs"].values())
    return row | {"needed": row["weights"] + row["pool"] + beside}


def compiled_for_tpus(given: MeshProgram) -> jax.stages.Compiled:
    """Compiles a program for the TPUs that its arguments lie on, without kernels."""
    with pallas_kernels.preferring("xla"), pallas_kernels.targeting("tpu"):
        return given.program.lower(*given.arguments, **given.options).compile()


def bytes_per_device(tree: Any) -> int:
    """Sums the bytes of the arrays (or shapes) on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def programs(raw: dict[str, Any], topology: str = TOPOLOGY) -> dict[str, MeshProgram]:
    """Returns what serves an image of one megapixel, by name: tower, prefill of a prompt, splice of a chunk, step."""
    config = with_dtype(FAMILIES[raw["architectures"][0]].config(raw, "exact", None), "bfloat16")
    text, layout = config.text, config.text.layout
    mesh = split_mesh(tpu_mesh(topology, "tensor"), layout)
    whole = NamedSharding(mesh, PartitionSpec())

    shapes = flatten_params(parameters(abstract(config)))
    places = parameter_shardings(text, shapes, mesh, tower_heads(config))
    laid = {path: SPEC(leaf.shape, leaf.dtype, sharding=places[path]) for path, leaf in shapes.items()}
    values = jax.tree_util.tree_map_with_path(
        lambda path, _: laid[tuple(key.key for key in path)], parameters(abstract(config))
    )
    forward = Forward(with_parameters(config, values), placeholders(config), layout, mesh)

    def shape(shape: tuple[int, ...], dtype: Any = text.dtype, sharding: Any = whole) -> Any:
        return SPEC(shape, jnp.dtype(dtype), sharding=sharding)

    def prompt(tokens: int, deep: int) -> Tokens:
        positions = shape((1, tokens, *(() if text.rope.axes is None else (text.rope.axes,))), "int32")
        deepstack = shape((1, tokens, deep, text.width)) if deep else None
        return Tokens(shape((1, tokens, text.width)), positions, deepstack)

    over = cache_shardings(layout, mesh)

    def over_heads(*lead: int) -> dict[str, Any]:
        return {
            each.name: shape((layout.layers, *lead, each.heads, each.width), sharding=over[each.name])
            for each in layout.channels
        }

    # One image of a megapixel, as its processor hands it over.
    pixels, arrays, count = images_of(config)["1 Mpx"]
    given = {"pixel_values": np.broadcast_to(np.float32(1), pixels), **arrays}
    plan = config.family.vision.plan(config, np.full((1, count), config.image_token), given)
    plan = {name: shape(value.shape, value.dtype) for name, value in plan.items()}

    # A chunk's KV [L,T,K,H] lies as the pool [L,P,O,K,H] does.
    rows = {name: NamedSharding(mesh, PartitionSpec(*sharding.spec[1:])) for name, sharding in over.items()}
    deep = len(getattr(config.vision, "deepstack_layers", ()))
    pool, one = over_heads(SLOTS // PAGE, PAGE), shape((1, 1), "int32")
    paged = Paged({}, shape((1, PROMPT // PAGE), "int32"), shape((1, PROMPT), bool), shape((1, PROMPT), "int32"))
    chunk = {name: shape((layout.layers, CHUNK, *leaf.shape[3:]), sharding=rows[name]) for name, leaf in pool.items()}
    factors = {
        each.name: (shape((layout.layers, CHUNK, RANK)), shape((layout.layers, RANK, each.heads * each.width)))
        for each in layout.channels
    }
    local = shape((CHUNK, *(() if text.rope.axes is None else (text.rope.axes,))), "float32")
    start = shape(() if text.rope.axes is None else (text.rope.axes,), "int32")
    return {
        "tower": MeshProgram(forward.encode, (forward.state, shape(pixels, "float32"), plan), {}),
        "prefill": MeshProgram(
            forward.prefill,
            (forward.state, prompt(PROMPT, deep), None, None, one),
            {"start_layer": 0, "hidden_at": (), "chunk": None},
        ),
        "splice": MeshProgram(
            jitted_splice,
            (layout, pool, shape((CHUNK,), "int32"), chunk, factors, local, start, shape((), "int32")),
            {},
        ),
        "step": MeshProgram(
            forward.recompute_in_pages,
            (forward.state, prompt(1, 0), pool, paged, one, (one, one), None, None, one),
            {},
        ),
    }


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table: GB (10⁹ bytes) on each device, MB that a device sends."""
    head = ("checkpoint", "weights", "of these tower", "pool", "needed", "program", "arguments", "results")
    head += ("temporaries", "sent, MB")
    lines = []
    for name, row in result["checkpoints"].items():
        first = [f"`{name}`", *(f"{row[part] / 1e9:.2f}" for part in ("weights", "tower", "pool", "needed"))]
        for program, own in row["programs"].items():
            sizes = [f"{own[part] / 1e9:.3f}" for part in ("arguments", "results", "temporaries")]
            lines.append([*first, program, *sizes, f"{own['exchanged'] / 1e6:.1f}"])
            first = [""] * 5
    return markdown_table(head, lines) + "\n"


BENCHMARK = Benchmark("mesh_sizes", run, table=table)
