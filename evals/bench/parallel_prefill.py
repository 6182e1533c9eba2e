"""Chunk-parallel prefill with selected-token recompute, beside ring attention and one device: time, bytes and FLOPs.

InfoFlow KV (its section 7 and table 5) reports the time to first token on 4 GPUs. Here four devices of one host share
its cores and its memory. So seconds show how much work a method does in all, launches included; they show neither that
devices work at once nor what a link costs. Two counts stand for these: bytes that a device sends, mean over devices,
read from the compiled program, and FLOPs of the busiest device, from the traced one.

A random decoder, 512 wide, with four layers and float32; a question of 16 tokens; a share of 0.15 is selected.

* `prepared`: the chunks' KV is there; scores, recompute and question.
* `on the fly`: the same after every device prefilled its chunk.
* `ring`: context and question in one pass, exact. `single`: the same on one device.

Selections whose bytes are counted: "even", spread over the context; "last", all at its end, on one device.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.utils.traced_flops import traced_flops
from models import ModelBackbone
from models.families.family import with_dtype
from models.parallel import (
    ChunkLayout,
    MeshBackbone,
    chunk_parallel_prefill,
    lay_out,
    place_blocks,
    plan_exchange,
    prefill_chunks,
    prefill_chunks_apart,
    read_question,
    recompute_and_read,
    ring_forward,
    ring_prefill,
    score_context,
    spread_backbone,
)

from ..results.environment import environment
from .benchmark import Benchmark, Row, measured_row
from .checkpoints import qwen2_config, random_backbone, tiny_config
from .collectives import exchanged_bytes
from .timing import interleave_calls, ratios

AXIS = "chunks"
RATIO = 0.15
BAR = 0.2
"""Bytes over ring attention's that a selection of `RATIO` may take."""
AGREEMENT = 1e-4
"""Largest difference of logits, over the largest magnitude, of what is timed as exact."""


@dataclasses.dataclass(frozen=True)
class ParallelShapes:
    """Sizes of one comparison.

    Attributes:
      tokens, question: of the context, one chunk per device, and of the question.
      kv_heads: of 8 query heads; 0: latent attention in DeepSeek-V2-Lite's proportions.
      share_first: as of `lay_out`.
      selection: which tokens are selected, for counting bytes.
      devices, width, layers, dtype: of the mesh and the decoder.
    """

    tokens: int
    kv_heads: int
    share_first: bool = False
    selection: Literal["even", "last"] = "even"
    question: int = 16
    devices: int = 4
    width: int = 512
    layers: int = 4
    dtype: str = "float32"

    @property
    def count(self) -> int:
        """Selected tokens."""
        return int(RATIO * self.tokens + 0.5)


class TracedProgram(NamedTuple):
    """A jitted program, its static arguments, and shapes of the others."""

    function: Any
    static: tuple[Any, ...]
    arguments: tuple[Any, ...]

    def lower(self) -> Any:
        """Lowers the program for the devices of its mesh; nothing runs."""
        return self.function.lower(*self.static, *self.arguments)

    def sent_bytes(self) -> float:
        """Compiles the program and counts the bytes that a device sends, mean over devices."""
        # LLVM, which takes most of the time, changes nothing that devices exchange.
        quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
        return exchanged_bytes(self.lower().compile(compiler_options=quick).as_text())

    def flops(self) -> int:
        """Counts the matrix products of one device, that with most of them."""
        return traced_flops(functools.partial(self.function, *self.static), *self.arguments)


def small_backbone(shapes: ParallelShapes, seed: int = 0) -> ModelBackbone:
    """Makes the random decoder of `ParallelShapes`."""
    width, layers = shapes.width, shapes.layers
    if shapes.kv_heads:
        raw = qwen2_config(width, 3 * width, heads=8, layers=layers, kv_heads=shapes.kv_heads, vocabulary=1024)
        return typed(random_backbone(raw, seed), shapes.dtype)

    # Latents of a quarter of the width; one dense layer below experts.
    latent = {"kv_lora_rank": width // 4, "q_lora_rank": None, "v_head_dim": width // 8, "qk_nope_head_dim": width // 8}
    latent |= {"qk_rope_head_dim": width // 32, "qk_head_dim": width // 8 + width // 32, "head_dim": width // 32}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "moe_intermediate_size": width // 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers}
    raw = tiny_config("DeepseekV2ForCausalLM") | latent | sizes | heads
    return typed(random_backbone(raw, seed), shapes.dtype)


def typed(backbone: ModelBackbone, dtype: str) -> ModelBackbone:
    """Returns a backbone with its parameters in another type."""
    parameters = jax.tree.map(lambda leaf: leaf.astype(dtype), backbone.parameters)
    return ModelBackbone(with_dtype(backbone.config, dtype), parameters)


def host_mesh(devices: int) -> jax.sharding.Mesh:
    """Makes a mesh of so many devices; of the host's processor, as many as are asked for if jax has not started.

    Raises:
      ConfigError: jax has started with fewer devices.
    """
    # Where jax has started, with the devices that it has.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", devices)
    if len(jax.devices()) < devices:
        raise ConfigError(
            f"devices: got {len(jax.devices())}; expected {devices}, or a process in which jax has not begun"
        )
    return jax.make_mesh((devices,), (AXIS,))


def parallel_programs(shapes: ParallelShapes) -> dict[str, TracedProgram]:
    """Returns the programs of a chunk-parallel prefill, "prefill", "score" and "recompute", and of the "ring".

    Recompute is planned for the selection that `shapes` names.
    """
    backbone = small_backbone(shapes)
    over = spread_backbone(backbone, host_mesh(shapes.devices), AXIS)
    context, question = drawn_tokens(backbone, shapes, 0)
    layout = lay_out(shapes.tokens, shapes.devices, None, shapes.share_first)
    cache, state = _cache_shapes(over, layout), _shapes(over.state)
    blocks, lengths = _shapes(place_blocks(over, context, layout)), _shapes(over.place(layout.lengths))
    asked, graph = _shapes(over.place(question)), backbone.programs.graph

    # Where each selected token lies.
    place = np.zeros(shapes.tokens, np.int32)
    place[layout.index[layout.live]] = layout.live
    tokens = np.arange(shapes.count) + shapes.tokens - shapes.count
    if shapes.selection == "even":
        tokens = np.arange(shapes.count) * shapes.tokens // shapes.count
    slots, plan = plan_exchange(backbone, layout, place[tokens][None], "least", AXIS)

    scored = (shapes.layers - 2, shapes.layers - 1)
    scoring = (graph, over.mesh, AXIS, scored, "mass", shapes.count, layout.copied)
    recomputing = (state, cache, blocks, _shapes(over.place(slots, None, AXIS)), lengths, asked)

    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), context, question)
    total = shapes.tokens + shapes.question
    around = _shapes(place_blocks(over, whole, lay_out(total, shapes.devices)).tokens)
    rows = _shapes(over.place(np.arange(shapes.tokens, total, dtype=np.int32)[None]))
    return {
        "prefill": TracedProgram(prefill_chunks, (graph, over.mesh, AXIS), (state, blocks)),
        "score": TracedProgram(score_context, scoring, (state, cache, lengths, asked)),
        "recompute": TracedProgram(recompute_and_read, (graph, over.mesh, plan), recomputing),
        "ring": TracedProgram(ring_forward, (graph, over.mesh, AXIS), (state, around, rows)),
    }


def drawn_tokens(backbone: ModelBackbone, shapes: ParallelShapes, seed: int) -> tuple[Tokens, Tokens]:
    """Draws a context and a question."""
    total, vocabulary = shapes.tokens + shapes.question, backbone.config.text.vocabulary
    ids = np.random.default_rng(seed).integers(3, vocabulary, (1, total)).astype(np.int32)
    whole = backbone.embed(ids)
    return whole.take(0, shapes.tokens), whole.take(shapes.tokens, total)


def _shapes(tree: Any) -> Any:
    """Returns shapes in place of arrays, laid over the mesh as these."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def _cache_shapes(over: MeshBackbone, layout: ChunkLayout) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a context's KV over the mesh."""
    kv, sharding = {}, NamedSharding(over.mesh, P(None, None, AXIS))
    for channel in over.backbone.layout.channels:
        shape = (over.backbone.layout.layers, 1, len(layout.index), channel.heads, channel.width)
        kv[channel.name] = jax.ShapeDtypeStruct(shape, over.backbone.config.text.dtype, sharding=sharding)
    return kv


# ------------------------------------------------------------------------------------------------------------- rows


def run(*, repeats: int = 5, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Counts bytes and FLOPs, and times the four methods in turns.

    Args:
      quick: small sizes.

    Raises:
      ConfigError: as `host_mesh`.
    """
    # Before anything is computed: jax then starts with as many devices.
    host_mesh(ParallelShapes(1, 1).devices)
    lengths = (256,) if quick else (2048, 8192)
    heads = (4, 0) if quick else (8, 4, 2, 1, 0)
    timed = (256,) if quick else (2048, 4096)

    rows: list[Row] = []
    for tokens in timed:
        rows += time_rows(ParallelShapes(tokens, kv_heads=4), repeats, seed)
    for tokens in lengths:
        for kv_heads in heads:
            rows += traffic_rows(tokens, kv_heads)

    config = {"ratio": RATIO, "repeats": repeats, "seed": seed, "quick": quick, "devices": 4}
    return {"config": config, "environment": environment(), "rows": rows}


def traffic_rows(tokens: int, kv_heads: int) -> list[Row]:
    """Makes rows of bytes and FLOPs of one decoder: with the first chunk shared and not, by selection."""
    rows = list[Row]()
    counts: dict[tuple[Any, ...], tuple[float, int]] = {}
    for share_first in (False, True):
        for selection in ("even", "last"):
            shapes = ParallelShapes(tokens, kv_heads, share_first, selection)  # type: ignore[arg-type]
            sent, flops = dict[str, float](), dict[str, int]()
            for name, program in parallel_programs(shapes).items():
                # What does not depend on the selection, or on copies, is the same program.
                key = (name, share_first and name != "ring", selection if name == "recompute" else "")
                if key not in counts:
                    counts[key] = program.sent_bytes(), program.flops()
                sent[name], flops[name] = counts[key]

            labels = {"tokens": tokens, "heads": f"8/{kv_heads}" if kv_heads else "latent", "selection": selection}
            labels |= {"first": "shared" if share_first else "apart"}
            ours = sum(size for name, size in sent.items() if name != "ring")
            counted = {"ours": ours, "theirs": sent["ring"], "parts": sent}
            rows.append(measured_row("bytes over the ring's", [ours / sent["ring"]], at_most=BAR, **labels, **counted))

            # Prepared, nothing but scores and recompute is computed.
            later = flops["score"] + flops["recompute"]
            for metric, ours in (("prepared", later), ("on the fly", flops["prefill"] + later)):
                counted = {"ours": ours, "theirs": flops["ring"], "parts": flops}
                name = f"FLOPs over the ring's, busiest device, {metric}"
                rows.append(measured_row(name, [ours / flops["ring"]], **labels, **counted))
    return rows


def time_rows(shapes: ParallelShapes, repeats: int, seed: int) -> list[Row]:
    """Times the four methods in turns; rows are seconds over those of one device, neighbouring repeats."""
    over = spread_backbone(small_backbone(shapes, seed), host_mesh(shapes.devices))
    context, question = drawn_tokens(over.backbone, shapes, seed)
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), context, question)
    asked = np.arange(shapes.tokens, shapes.tokens + shapes.question)[None]
    apart = prefill_chunks_apart(over, context)

    calls: dict[str, Callable[[], Any]] = {
        "single": lambda: over.backbone.prefill(whole, logits=asked).logits,
        "ring": lambda: ring_prefill(over, context, question)[0],
        "on the fly": lambda: chunk_parallel_prefill(over, context, question, ratio=RATIO).logits,
        "prepared": lambda: read_question(over, apart, question, ratio=RATIO).logits,
    }
    exact, ring = (np.asarray(calls[name]()) for name in ("single", "ring"))
    valid = bool(np.abs(ring - exact).max() <= AGREEMENT * np.abs(exact).max())
    samples = interleave_calls(calls, repeats)

    labels = {"tokens": shapes.tokens, "heads": f"8/{shapes.kv_heads}"}
    rows = []
    for name in ("ring", "on the fly", "prepared"):
        counted: dict[str, Any] = {"unit": "×", "seconds": samples, "agrees": valid}
        counted |= {"ours": float(np.median(samples[name])), "theirs": float(np.median(samples["single"]))}
        metric, values = f"{name}: seconds over one device's", ratios(samples[name], samples["single"])
        rows.append(measured_row(metric, values, **labels, **counted))
    for name in ("on the fly", "prepared"):
        metric, values = f"{name}: seconds over the ring's", ratios(samples[name], samples["ring"])
        rows.append(measured_row(metric, values, **labels, unit="×"))
    return rows


BENCHMARK = Benchmark("parallel_prefill", run, labels=("tokens", "heads", "first", "selection"))
