"""What released checkpoints need: memory and the least time, from configurations and compilers. No weights are made.

Weights, KV and arithmetic follow from shapes; temporaries are what the compiler says of the very programs that a
backbone runs (plain XLA, no kernel), for a device that need not be here. The least time is the larger of two bounds:
arithmetic at the device's peak rate, and reading every weight once from its memory. Real times are longer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

import pallas_kernels
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import ConfigError, LayoutError
from kvpatch_jax.utils.traced_flops import traced_flops
from models import FAMILIES
from models.checkpoints import flatten_params
from models.decoder.sharding import partition_specs, split_mesh
from models.decoding import Forward
from models.families.family import abstract, parameters, placeholders, tower_heads, with_dtype, with_parameters
from models.families.llava import packing_index
from models.towers.common import patch_places
from models.towers.gemma4 import Gemma4VisionConfig
from models.towers.pixtral import PixtralConfig
from pallas_kernels._ahead_of_time import compile_for_h200, compile_for_tpu

from ..results.tables import markdown_table
from .benchmark import Benchmark
from .released_configs import RELEASED

SPEC: Any = jax.ShapeDtypeStruct
PROMPTS = (4096, 16384)
MEGAPIXELS = (1, 3, 12)
LARGEST_MESH = 8
USED = 0.9
"""Share of a device's memory that weights may take; the rest is for KV, temporaries and the runtime."""
TILES = {
    "LlavaForConditionalGeneration": 1,
    "DeepseekVLForConditionalGeneration": 1,
    "DeepseekVLHybridForConditionalGeneration": 1,
    "LlavaNextForConditionalGeneration": 5,
    "InternVLForConditionalGeneration": 13,
    "SmolVLMForConditionalGeneration": 17,
    "Phi3VForCausalLM": 17,
    "Gemma3ForConditionalGeneration": 1,
}
"""Tiles of one image; of families that cut images, as many as their released settings make of a large one."""


@dataclasses.dataclass(frozen=True)
class DevicePeaks:
    """Published peaks of a device: dense bf16 operations and bytes of memory traffic per second, bytes of memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float


H200 = DevicePeaks("H200", 989e12, 4.8e12, 141e9)
V5E = DevicePeaks("v5e", 197e12, 819e9, 16.0 * 2**30)
"""As NVIDIA's and Google's pages say of one H200 SXM and one TPU v5e chip."""


def run(*, device: str = "h200", checkpoints: Sequence[str] | None = None, quick: bool = False) -> dict[str, Any]:
    """Describes every released checkpoint.

    Args:
      device: what programs are compiled for: "h200" (needs jax's CUDA plugin, no GPU), "v5e" (needs libtpu, no TPU) or
        "cpu".
      checkpoints: their names; None for all of `RELEASED`.
      quick: compiles nothing; only what follows from shapes.
    """
    compilers = {
        "h200": compile_for_h200,
        "v5e": functools.partial(compile_for_tpu, "v5e:2x2"),
        "cpu": lambda function, arguments: jax.jit(function).lower(*arguments).compile(),
    }
    compiler = None if quick else compilers[device]
    rows = {name: describe(RELEASED[name].config, compiler) for name in checkpoints or RELEASED}
    return {"device": device, "jax": jax.__version__, "checkpoints": rows}


def describe(raw: dict[str, Any], compiler: Callable[..., jax.stages.Compiled] | None) -> dict[str, Any]:
    """Describes one checkpoint, in bytes, operations and seconds."""
    config = with_dtype(FAMILIES[raw["architectures"][0]].config(raw, "exact", None), "bfloat16")
    shapes = parameters(abstract(config))
    leaves, kv_bytes = flatten_params(shapes), config.text.layout.bytes_per_token("bfloat16")
    programs = Forward(with_parameters(config, shapes), placeholders(config), layout=config.text.layout, mesh=None)
    row: dict[str, Any] = {
        "weights": _bytes(leaves),
        "kv_per_token": kv_bytes,
        "mesh": on_a_mesh(config, leaves),
        "prefill": {},
        "tower": {},
    }
    calls = {("prefill", str(length)): _prefill(programs, config, length) for length in PROMPTS}
    calls |= {("tower", what): call for what, call in _towers(programs, config).items()}

    for (kind, what), (function, arguments) in calls.items():
        row[kind][what] = {"flops": traced_flops(function, *arguments)}
        if compiler is not None:
            row[kind][what]["temporaries"] = _temporaries(compiler, function, arguments)

    # The least time is the larger of two bounds: arithmetic, and reading every weight once.
    whole, read = _bytes_read(config, leaves)
    for device, count in ((H200, 1), (V5E, row["mesh"]["devices"])):
        prefill = {}
        for length in PROMPTS:
            flops = row["prefill"][str(length)]["flops"]
            prefill[length] = max(flops / device.flops, whole / device.bandwidth) / count

        row[device.name] = {
            "devices": count,
            "fits": (row["weights"] if count == 1 else row["mesh"]["weights"]) < USED * device.memory,
            "prefill": prefill,
            "token": read / device.bandwidth / count,
        }

    return row


def on_a_mesh(config: Any, leaves: Any) -> dict[str, Any]:
    """Finds the most devices, a power of two up to `LARGEST_MESH`, that hold a checkpoint, and what each then holds."""
    count, kv_bytes = LARGEST_MESH, config.text.layout.bytes_per_token("bfloat16")
    while count > 1:
        mesh = AbstractMesh((count,), ("tensor",))
        try:
            specs = partition_specs(config.text, leaves, mesh, tower_heads(config))
        except LayoutError:  # layers of unlike kinds lie over no mesh yet
            break
        except ConfigError:
            count //= 2
            continue

        weights, mesh = 0, split_mesh(mesh, config.text.layout)
        for path, leaf in leaves.items():
            weights += math.prod(NamedSharding(mesh, specs[path]).shard_shape(leaf.shape)) * leaf.dtype.itemsize
        heads = 1 if config.text.latent is not None else mesh.shape["tensor"]
        return {"devices": count, "weights": weights, "kv_per_token": kv_bytes // heads}

    return {"devices": 1, "weights": _bytes(leaves), "kv_per_token": kv_bytes}


def _bytes(leaves: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())


def _bytes_read(config: Any, leaves: Any) -> tuple[float, float]:
    """Counts bytes of the weights that a prompt needs, and that one token needs: the chosen experts alone.

    No tower, and of an embedding that is not also the head, or of every layer's, no more than a row per token.
    """
    experts, whole, single = config.text.experts, 0.0, 0.0
    for path, leaf in leaves.items():
        rows = path[1] == "token_table" or (path[1] == "embedding" and not config.text.tied_embeddings)
        if path[0] != "decoder" or rows:
            continue
        size = leaf.size * leaf.dtype.itemsize
        whole += size
        # Those of shared experts, and of an MLP beside, have longer paths.
        chosen = path[-2] in ("mlp", "experts") and path[-1] in ("gate", "up", "down")
        single += size * experts.chosen / experts.experts if chosen and experts is not None else size

    return whole, single


def _prefill(programs: Forward, config: Any, length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a prefill's function and the shapes of its arguments; logits of the last token."""
    text, axes = config.text, config.text.rope.axes
    positions = (1, length) if axes is None else (1, length, axes)
    deep = len(getattr(getattr(config, "vision", None), "deepstack_layers", ()))
    # Or of every layer what it takes of each token (Gemma 4).
    deep, width = (deep, text.width) if text.per_layer is None else (text.layers, text.per_layer)
    deepstack = SPEC((1, length, deep, width), text.dtype) if deep else None
    tokens = Tokens(SPEC((1, length, text.width), text.dtype), SPEC(positions, jnp.int32), deepstack)
    rows = SPEC((1, 1), jnp.int32)
    function = functools.partial(programs.prefill, start_layer=0, hidden_at=(), chunk=None)
    return lambda state, tokens, rows: function(state, tokens, None, None, rows), (programs.state, tokens, rows)


def _towers(programs: Forward, config: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns the tower's function and shapes: for 1, 3 and 12 megapixels, or for the most tiles of one image."""
    vision = config.family.vision
    if vision is None:
        return {}

    calls = {}
    for what, (pixels, arrays, count) in images_of(config).items():
        ids = np.full((1, count), config.image_token)
        plan = vision.plan(config, ids, {"pixel_values": np.broadcast_to(np.float32(1), pixels), **arrays})
        shapes = jax.tree.map(lambda leaf: SPEC(leaf.shape, leaf.dtype), dict(plan))
        # Gemma 4's tower takes the patches that count alone.
        inputs = shapes.pop("inputs", SPEC(pixels, jnp.float32))
        calls[what] = (programs.encode, (programs.state, inputs, shapes))

    return calls


def images_of(config: Any) -> dict[str, tuple[tuple[int, ...], dict[str, np.ndarray], int]]:
    """Returns the shape of the pixels, further arrays and the number of placeholders of one image, by its size."""
    tower, architecture = config.vision, config.family.architecture
    if isinstance(tower, Gemma4VisionConfig):
        rows, columns = patch_places(14 * tower.pool, 20 * tower.pool, 1)
        places = np.stack([columns, rows], axis=1)[None]
        return {"280 tokens": ((1, len(rows), tower.features), {"image_position_ids": places}, 280)}
    # Pixtral's tower, of Mistral's family and of LLaVA's, takes images of any size.
    pixtral = isinstance(tower, PixtralConfig)
    if architecture in TILES and not pixtral:
        tiles = TILES[architecture]
        side = (tower.channels, tower.image, tower.image)
        if architecture == "LlavaNextForConditionalGeneration":
            shape, sizes = (1, tiles, *side), {"image_sizes": np.array([[tower.image * 2, tower.image * 2]])}
            return {f"{tiles} tiles": (shape, sizes, len(packing_index(config.glue.tiles, sizes["image_sizes"])))}
        if architecture == "Phi3VForCausalLM":  # one row of all crops but the small whole image
            crops = np.array([[tower.image, tower.image * (tiles - 1)]])
            count = len(config.family.vision.tokens(config, {"image_sizes": crops}, 0, None))
            return {f"{tiles} tiles": ((tiles, *side), {"image_sizes": crops}, count)}
        further = {}
        if architecture == "DeepseekVLHybridForConditionalGeneration":
            shape = (tiles, config.high.channels, config.high.image, config.high.image)
            further = {"high_res_pixel_values": np.broadcast_to(np.float32(1), shape)}
        return {f"{tiles} tiles": ((tiles, *side), further, tiles * config.tile_tokens)}

    images = {}
    for size in MEGAPIXELS:
        height, width = _grid(size * 1e6, tower.patch * tower.merge)
        grid = np.array([[1, height * tower.merge, width * tower.merge]])
        patches = int(np.prod(grid))
        shape: tuple[int, ...] = (patches, tower.channels, tower.patch, tower.patch)
        arrays = {"image_sizes": grid[:, 1:] * tower.patch} if pixtral else {"image_grid_thw": grid}
        if not pixtral and not architecture.startswith("Kimi"):
            shape = (patches, tower.features)
        images[f"{size} Mpx"] = (shape, arrays, height * width)

    return images


def _grid(pixels: float, step: int) -> tuple[int, int]:
    """Returns rows and columns of merged patches of an image with sides as 3 to 4."""
    height = max(int(math.sqrt(pixels * 3 / 4) / step), 1)
    return height, max(int(pixels / step**2 / height), 1)


def _temporaries(compiler: Callable[..., jax.stages.Compiled], function: Callable[..., Any], arguments: Any) -> Any:
    """Returns bytes beside arguments and results, or the compiler's refusal in a few words."""
    try:
        with pallas_kernels.preferring("xla"):
            analysis = compiler(function, arguments).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0][:120]
    return None if analysis is None else analysis.temp_size_in_bytes


def table(result: dict[str, Any]) -> str:
    """Formats the result as a Markdown table."""
    head = ("checkpoint", "weights, GiB", "KV of 1k tokens, MiB", "prefill of 4k / 16k, GiB", "tower, GiB", "mesh, GiB")
    head += ("4k / 16k on an H200, ms", "on the mesh of v5e, ms", "one token on either, ms")
    lines = []
    for name, row in result["checkpoints"].items():
        mesh, prefills, tokens = row["mesh"], [], []
        for device in (H200, V5E):
            bound = row[device.name]
            prefill = " / ".join(_milliseconds(seconds) for seconds in bound["prefill"].values())
            prefills.append(prefill if bound["fits"] else "does not fit")
            tokens.append(_milliseconds(bound["token"]) if bound["fits"] else "–")

        cells = [
            f"`{name}`",
            _size(row["weights"]),
            f"{row['kv_per_token'] / 2**10:.0f}",
            " / ".join(_size(call.get("temporaries")) for call in row["prefill"].values()),
            ", ".join(f"{what}: {_size(call.get('temporaries'))}" for what, call in row["tower"].items()) or "none",
            f"{mesh['devices']} × {_size(mesh['weights'])}",
        ]
        lines.append([*cells, *prefills, " / ".join(tokens)])

    return markdown_table(head, lines) + "\n"


def _size(count: Any) -> str:
    """Formats bytes in GiB, and what is no number as it is."""
    if not isinstance(count, int | float):
        return "not compiled" if count is None else str(count)
    return f"{count / 2**30:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"


BENCHMARK = Benchmark("sizes", run, table=table)
