"""What Qwen2.5-VL-3B needs for 1280 × 800 screenshots, from shapes alone: FLOPs, bytes, and temporaries of programs.

    python -m evals.bench.real_model  # prints the tables of docs/guides/real-model.md

No weights are read and nothing runs. Programs are those of a session in bfloat16, compiled ahead of time for one H100
and one v5e chip: the extra `kernels` has the compilers, and JAX_PLATFORMS=cpu leaves devices alone. The window has a
lead of 16 tokens and four screenshots; each step evicts one and adds one.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.answers import Sampling
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Buckets, Paged
from kvpatch_jax.models import FAMILIES
from kvpatch_jax.models.decoder.costs import forward_costs
from kvpatch_jax.models.decoding import Forward
from kvpatch_jax.models.decoding.generation import LEAST_ROOM
from kvpatch_jax.models.decoding.sampling import draw_of
from kvpatch_jax.models.families.family import abstract, placeholders
from kvpatch_jax.models.inputs.buckets import pad_images
from kvpatch_jax.models.towers.packed import plan_patches
from pallas_kernels._dispatch import preferring

from .ahead_of_time import compile_for

RELEASED = Path(__file__).parents[2] / "tests" / "models" / "released_configs.json"
NAME, HEIGHT, WIDTH = "Qwen/Qwen2.5-VL-3B-Instruct", 800, 1280
PIXELS = (3136, 12_845_056)
"""min_pixels and max_pixels of the release's preprocessor_config.json."""
LEAD, KEEP, QUESTION, PAGES, PAGE = 16, 4, 32, 512, 16
DEVICES = {"H100, 80 GiB": "NVIDIA H100", "v5e, 16 GiB": "v5e:2x2"}


@functools.cache
def model() -> tuple[Any, Forward]:
    """Reads the released configuration. Returns it, and the model's programs over shapes."""
    raw = json.loads(RELEASED.read_text(encoding="utf-8"))[NAME]["config"]
    config = FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
    return config, Forward(abstract(config), placeholders(config), config.text.layout, None)


@functools.cache
def screenshot() -> tuple[tuple[int, int], int]:
    """Returns a screenshot's grid of patches and its tokens: one for 2 × 2 patches, one in front and one behind."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    vision = model()[0].vision
    height, width = smart_resize(HEIGHT, WIDTH, vision.patch * vision.merge, *PIXELS)
    grid = height // vision.patch, width // vision.patch
    return grid, grid[0] * grid[1] // vision.merge**2 + 2


def behind(keys: int, tokens: int, answered: bool = False) -> tuple[Any, Any]:
    """Makes a prefill of tokens behind keys in the pool, padded as a session pads them, and shapes of its arguments.

    Args:
      answered: the tokens are a question, and the first token of its answer is chosen. The answer gets its own cache.
    """
    config, forward = model()
    layout, size, keys = config.text.layout, Buckets().round_up(tokens), Buckets().of_keys.round_up(keys)

    def shape(*sizes: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    prompt = Tokens(shape(1, size, config.text.width, dtype=jnp.bfloat16), shape(1, size, 3))
    slots = (layout.layers, PAGES, PAGE)
    pool = {part.name: shape(*slots, part.heads, part.width, dtype=jnp.bfloat16) for part in layout.channels}
    paged = Paged(pool, shape(1, keys // PAGE), shape(1, keys, dtype=bool), shape(1, keys))
    draw = jax.tree.map(lambda leaf: shape(*leaf.shape, dtype=leaf.dtype), draw_of(Sampling(), None, (0,)))

    read = forward.state, prompt, paged, None
    if answered:
        return functools.partial(forward.begin.__wrapped__, room=LEAST_ROOM), (*read, shape(1), draw)
    return functools.partial(forward.prefill.__wrapped__, start_layer=0, hidden_at=()), (*read, shape(1, 1))


def tower() -> tuple[Any, Any]:
    """Makes the tower's program for one screenshot."""
    (config, forward), (grid, _) = model(), screenshot()
    pixels = np.zeros((grid[0] * grid[1], config.vision.features), np.float32)
    plan, fills = plan_patches(config.vision, np.array([grid])), config.family.vision.fills(config)
    arrays = pad_images(Buckets().of_pixels, pixels, plan, fills)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    return forward.encode.__wrapped__, (forward.state, *shapes)


def working_bytes(kind: str, program: tuple[Any, Any]) -> int:
    """Compiles a program for a device. Returns the bytes of its temporaries and results."""
    # No kernel of ours is chosen unasked on a device; `compile_for` would choose them.
    with preferring():
        analysis: Any = compile_for(kind, *program).memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def tower_flops() -> int:
    """Counts the FLOPs of the tower's matrix products for one screenshot, as `forward_costs` counts the decoder's."""
    (config, _), (grid, _) = model(), screenshot()
    vision, patches, joined = config.vision, grid[0] * grid[1], config.vision.width * config.vision.merge**2
    # Most layers attend to a window of patches, a few to all.
    window = (vision.window // vision.patch) ** 2
    keys = sum(patches if layer in vision.full_layers else window for layer in range(vision.depth))
    blocks = vision.depth * (4 * vision.width**2 + 3 * vision.width * vision.intermediate)
    merger = (joined**2 + joined * config.text.width) // vision.merge**2
    return 2 * patches * (blocks + 2 * vision.width * keys + vision.features * vision.width + merger)


def flops_table() -> str:
    """Makes the table of a step in which the window slides: tokens and FLOPs of each method."""
    costs, tokens = forward_costs(model()[0].text), screenshot()[1]
    counted = {
        "session": (tokens, costs.flops(tokens, LEAD + (KEEP - 1) * tokens)),
        "prefix cache": (KEEP * tokens, costs.flops(KEEP * tokens, LEAD)),
        "re-prefill": (LEAD + KEEP * tokens, costs.flops(LEAD + KEEP * tokens)),
    }
    table = ["| method | tokens computed | decoder, TFLOP | with the tower, TFLOP |", "| --- | --- | --- | --- |"]
    for name, (count, flops) in counted.items():
        table.append(f"| {name} | {count} | {flops / 1e12:.1f} | {(flops + tower_flops()) / 1e12:.1f} |")
    return "\n".join(table)


def memory_table() -> str:
    """Makes the table of bytes, a column for each device."""
    (config, forward), (_, tokens) = model(), screenshot()
    layout, window = config.text.layout, LEAD + KEEP * tokens
    source = 2 * sum(layout.depth(part.name) * part.features for part in layout.channels if part.rotates)
    held = {
        "weights in bfloat16": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(forward.state)),
        f"pool of {PAGES} pages: KV, and keys without position": PAGES
        * PAGE
        * (layout.bytes_per_token(jnp.bfloat16) + source),
    }
    lines = {name: [size] * len(DEVICES) for name, size in held.items()}
    for name, program in (
        ("the tower", tower()),
        (f"prefill behind {KEEP - 1} screenshots", behind(window - tokens, tokens)),
        (f"question behind {KEEP} screenshots, and its answer's cache", behind(window, QUESTION, answered=True)),
    ):
        lines[f"work: {name}"] = [working_bytes(kind, program) for kind in DEVICES.values()]
    sums = [sum(column[:2]) + max(column[2:]) for column in zip(*lines.values(), strict=True)]
    lines["held, and the largest work"] = sums
    table = [f"| GiB | {' | '.join(DEVICES)} |", "| --- |" + " --- |" * len(DEVICES)]
    for name, sizes in lines.items():
        table.append(f"| {name} | " + " | ".join(f"{size / 2**30:.2f}" for size in sizes) + " |")
    return "\n".join(table)


if __name__ == "__main__":
    print(f"{screenshot()[1]} tokens a screenshot", flops_table(), memory_table(), sep="\n\n")
