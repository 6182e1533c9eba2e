"""Prompts of text and stored images: FLOPs and seconds to the first token of MPIC and VLCache beside what they replace.

FLOPs are of traces: no weights of the large shapes exist. Seconds are of random decoders on this machine, each method
beside two-step full reuse (MPIC section 2.2) in turns; images' KV is drawn, because no figure depends on its values.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PhaseFreeKV
from kvpatch_jax.repair import (
    PromptPiece,
    RepairBudget,
    Repaired,
    SplicedCache,
    encoder_cached_reprefill,
    mpic,
    prefix_caching,
    splice_prompt,
    two_step_reuse,
    vlcache,
)
from kvpatch_jax.utils.traced_flops import traced_flops
from models import FAMILIES, ModelBackbone
from models.families.family import abstract, parameters

from ..results.environment import environment
from .benchmark import Benchmark, Row, comparison_row, measured_row
from .checkpoints import LARGE, SEVEN_BILLION, filled_backbone, qwen2_config, random_backbone
from .timing import interleave_calls, interleave_cpu

SMALL = qwen2_config(576, 1536, heads=9, layers=30, kv_heads=3, vocabulary=49152)
"""The shape of SmolLM2-135M."""
GLYPHS = qwen2_config(128, 384, heads=4, layers=4, kv_heads=2, vocabulary=320)
"""About the shape of the instances that are shipped."""
LARGEST_SHARE = 0.25
LARGEST_RATIO = 0.9
IMAGE_TOKENS = 576
"""Of one image in LLaVA 1.5."""
VLCACHE_TEXT = 20
"""Tokens of text in VLCache's tables."""


@dataclasses.dataclass(frozen=True)
class PromptShape:
    """Sizes of a prompt: text, then images, then text; half of the text stands in front.

    Attributes:
      images: number of images. tokens: of each. text: tokens of text in all.
    """

    images: int
    tokens: int
    text: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each piece; negative ones are images."""
        return (self.text // 2, *[-self.tokens] * self.images, self.text - self.text // 2)

    @property
    def description(self) -> str:
        """In words."""
        return f"{self.images} × {self.tokens} image tokens, {self.text} of text"


@dataclasses.dataclass(frozen=True)
class ReuseMethod:
    """A method under its name in rows, with its budget; `prefix`: the text in front is stored."""

    name: str
    repair: Callable[..., Repaired]
    budget: RepairBudget | float
    prefix: bool = False


REPREFILL = ReuseMethod("encoder-cached re-prefill", encoder_cached_reprefill, 1.0)
PREFIX = ReuseMethod("prefix caching", prefix_caching, 1.0, prefix=True)
TWO_STEP = ReuseMethod("two-step full reuse", two_step_reuse, RepairBudget(tokens=0))
MPIC_32 = ReuseMethod("MPIC-32", mpic, RepairBudget(tokens=32))
MPIC_8 = ReuseMethod("MPIC-8", mpic, RepairBudget(tokens=8))
VLCACHE = ReuseMethod("VLCache, static r = 0.1", vlcache, 0.1)
VLCACHE_LOW = ReuseMethod("VLCache, static r = 0.02", vlcache, 0.02)

FLOPS_SHAPES = (PromptShape(1, 2048, VLCACHE_TEXT), PromptShape(4, 512, VLCACHE_TEXT), PromptShape(4, 512, 200))
TIMED = (
    ("Qwen2-0.5B's shape, 4 layers", LARGE | {"num_hidden_layers": 4}),
    ("SmolLM2-135M's shape, 6 layers", SMALL | {"num_hidden_layers": 6}),
    ("a shipped instance's shape", GLYPHS),
)
TIMED_SHAPES = tuple(PromptShape(images, IMAGE_TOKENS, text) for images in (1, 4) for text in (20, 60, 200))
LONG_REPEATS = 2
"""Of methods that run all images, whose time says little of the others'."""


def run(*, repeats: int = 5, seed: int = 0, quick: bool = False, busy: bool = False) -> dict[str, Any]:
    """Counts FLOPs and measures seconds.

    Args:
      busy: counts CPU seconds, where others use the machine too.
    """
    flops_shapes = FLOPS_SHAPES[:1] if quick else FLOPS_SHAPES
    rows = []
    for name, raw in (("glyphs", GLYPHS),) if quick else (("7B", SEVEN_BILLION), ("0.5B", LARGE)):
        for shape in flops_shapes:
            rows += flops_rows(name, raw, shape)

    for name, raw in TIMED[2:] if quick else TIMED:
        backbone = random_backbone(raw, seed)
        for shape in (PromptShape(1, 64, 20),) if quick else TIMED_SHAPES:
            rows += timed_rows(name, backbone, shape, repeats, seed, busy)
            print(f"{name}, {shape.description}: done", flush=True)

    config = {"repeats": repeats, "seed": seed, "quick": quick, "busy": busy}
    return {"config": config, "environment": environment(), "rows": rows}


# ------------------------------------------------------------------------------------------------------------- FLOPs


def flops_rows(name: str, raw: Mapping[str, Any], shape: PromptShape) -> list[Row]:
    """Counts what each method spends as a share of encoder-cached re-prefill's FLOPs."""
    whole = reuse_flops(raw, shape, REPREFILL)
    rows = []
    for method in (MPIC_32, VLCACHE, VLCACHE_LOW, TWO_STEP, PREFIX):
        judged = method in (MPIC_32, VLCACHE)
        share = reuse_flops(raw, shape, method) / whole
        bar = LARGEST_SHARE if judged else None
        rows.append(
            measured_row(
                f"FLOPs of {method.name} / re-prefill's", [share], at_most=bar, model=name, prompt=shape.description
            )
        )
    return rows


def reuse_flops(raw: Mapping[str, Any], shape: PromptShape, method: ReuseMethod) -> int:
    """Counts the FLOPs of serving one prompt, as `Repaired.flops` does; neither weights nor KV exist."""
    config = FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
    # Nothing is run, so that shapes do for parameters.
    no_weights: Any = lambda _, leaf: jax.ShapeDtypeStruct(leaf, jnp.float32)  # noqa: E731
    backbone = filled_backbone(config, no_weights)
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), dict(parameters(abstract(config)))
    )
    splice = jax.eval_shape(lambda: drawn_splice(backbone, shape, 0, method.prefix))

    def serve(own: SplicedCache, held: Any) -> Any:
        repaired = method.repair(backbone.replaced(held), own, method.budget)
        return repaired.cache, repaired.logits

    return traced_flops(serve, splice, weights)


# ----------------------------------------------------------------------------------------------------------- seconds


def timed_rows(
    name: str, backbone: ModelBackbone, shape: PromptShape, repeats: int, seed: int, busy: bool
) -> list[Row]:
    """Times every method in turns: MPIC-32 beside two-step full reuse, with its bar, and the others beside it too."""
    splices = {prefix: drawn_splice(backbone, shape, seed, prefix) for prefix in (False, True)}
    measure = interleave_cpu if busy else interleave_calls

    def call(method: ReuseMethod) -> Callable[[], object]:
        return lambda: method.repair(backbone, splices[method.prefix], method.budget).logits

    rows = []
    for methods, times in (((MPIC_32, MPIC_8, VLCACHE), repeats), ((PREFIX, REPREFILL), LONG_REPEATS)):
        samples = measure({method.name: call(method) for method in (TWO_STEP, *methods)}, times)
        for method in methods:
            bar = LARGEST_RATIO if method is MPIC_32 else None
            pair = {"ours": samples[method.name], "theirs": samples[TWO_STEP.name]}
            metric = f"{'CPU ' if busy else ''}seconds of {method.name} / two-step full reuse's"
            rows.append(
                comparison_row(metric, pair, at_most=bar, sense="at most", model=name, prompt=shape.description)
            )
    return rows


def drawn_splice(backbone: ModelBackbone, shape: PromptShape, seed: int, prefix: bool = False) -> SplicedCache:
    """Draws a prompt whose images (and with `prefix` the text in front) have stored KV."""
    layout, generator, first = backbone.layout, np.random.default_rng(seed), 0
    pieces: list[PromptPiece] = []
    for place, length in enumerate(shape.lengths):
        count = abs(length)
        embeddings = generator.standard_normal((1, count, backbone.config.text.width), np.float32)
        positions = np.arange(first, first + count, dtype=np.int32)[None]
        kv = None
        if length < 0 or (prefix and place == 0):
            kv = PhaseFreeKV(
                {
                    channel.name: jnp.asarray(
                        generator.standard_normal((layout.layers, 1, count, channel.heads, channel.width), np.float32)
                    )
                    for channel in layout.channels
                }
            )
        pieces.append(PromptPiece(Tokens(jnp.asarray(embeddings), positions), kv))
        first += count
    return splice_prompt(backbone, pieces)


BENCHMARK = Benchmark("prompt_reuse", run, ("model", "prompt"))
