"""The operators on this machine beside their obvious rivals: applying, splicing and forming a patch, a call's overhead.

Placing counts CPU time of all threads, since XLA's do the work and others may use the machine. What a patch is for is
the last comparison: placing a chunk by it beside prefilling the chunk behind what precedes it.
"""

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, ChunkKey, PatchMetadata
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.random_weights import random_backbone

from .benchmark import Benchmark, BenchOptions, Sides, timed
from .kernels import expected, units
from .shapes import qwen2_config, random_ids

MEDIUM = qwen2_config(512, 2048, heads=8, layers=8, kv_heads=2, vocabulary=8192)
"""A twelfth of Qwen2-0.5B's parameters."""
TINY = qwen2_config(32, 64, heads=4, layers=2, kv_heads=2, vocabulary=320)
START, PAGE_SIZE, THETA = 7, 64, 1e6


class PlacingCase:
    """A bfloat16 chunk with channels k and v, a patch of it, and a pool that is donated and goes on."""

    def __init__(self, sizes: tuple[int, ...], seed: int):
        (layers, tokens, heads, width, rank), rng = sizes, np.random.default_rng(seed)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

        self.layout = kvp.KVLayout.gqa(layers, heads, width, kvp.Rope(THETA, width))
        kv = {name: normal(layers, tokens, heads, width) for name in self.layout.names}
        local = jnp.arange(tokens, dtype=jnp.float32)
        self.chunk = kvp.Chunk(kv, local, tokens, tokens, "chunk", self.layout, "none")
        factors = {name: (normal(layers, tokens, rank), normal(layers, rank, heads * width)) for name in kv}
        metadata = PatchMetadata(ChunkKey.of(self.chunk), Antecedent.of("other"), tuple(range(layers)))
        self.patch = kvp.Patch(factors, metadata)
        pages = -(-tokens // PAGE_SIZE) + 1
        self.pool = kvp.pool.make_pool(self.layout, pages, PAGE_SIZE)
        self.slots = rng.permutation(pages * PAGE_SIZE)[:tokens].astype(np.int32)

    def placed(self, patched: bool = True) -> Any:
        """Puts the chunk at its start, with its patch or without."""
        patch, antecedent = (self.patch, ("other",)) if patched else (None, ())
        return kvp.Placed(self.chunk, patch, START, antecedent)

    def apply(self, patched: bool = True) -> Mapping[str, jax.Array]:
        """Applies the operator."""
        return self.placed(patched).apply()

    def splice(self) -> Any:
        """Writes the patched chunk into the pool."""
        self.pool = kvp.pool.splice(self.pool, self.slots, self.placed())
        return self.pool

    def error(self, engine: Mapping[str, Any]) -> float:
        """Measures the error of patched keys in the first layer against float64, in units of bfloat16's last place."""
        width = self.layout.channel("k").width
        angle = (START + np.arange(self.chunk.length))[:, None] * THETA ** (-np.arange(0, width, 2) / width)
        u, v = self.patch.factors["k"]
        chunk = {"x": self.chunk.kv["k"], "cos": np.cos(angle), "sin": np.sin(angle), "u": u, "v": v}
        return units(np.asarray(engine["k"][0], np.float64), expected(chunk, [0], "half")[0])


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the comparisons."""
    small = (2, 16, 2, 16, 4)
    for name, sizes, calls in (
        ("operators.place", small if options.quick else (28, 2048, 4, 128, 16), 1),
        # A chunk so small that checks and dispatch are all that is timed.
        ("operators.overhead", small, 50),
    ):
        case = " × ".join(map(str, sizes[:4])) + f", rank {sizes[4]}"
        yield Benchmark(name, case, functools.partial(_placings, sizes, calls, options.seed))
    tokens, front, rank = (16, 32, 4) if options.quick else (256, 768, 16)
    model, raw = ("tiny", TINY) if options.quick else ("a twelfth of Qwen2-0.5B", MEDIUM)
    prepare = functools.partial(_patching, raw, tokens, front, rank, options.seed)
    yield Benchmark("operators.patch", f"{model}, {tokens} tokens behind {front}, rank {rank}", prepare)


def _placings(sizes: tuple[int, ...], calls: int, seed: int) -> Sides:
    """Prepares every way of placing a chunk beside a jitted x · 2 of both channels: the least that any could take."""
    layers, _, heads, width, _ = sizes
    case = PlacingCase(sizes, seed)
    kv, engine = dict(case.chunk.kv), case.apply(patched=False)
    double = jax.jit(lambda tree: jax.tree.map(lambda value: value * 2, tree))
    sides = {
        "x · 2": lambda: double(kv),
        "memcpy": lambda: [np.asarray(value).copy() for value in kv.values()],
        "blind": lambda: case.apply(patched=False),
        "apply_patch": case.apply,
        "splice": case.splice,
        "relocate": lambda: kvp.relocate(case.layout, engine, START, 99),
    }

    def check() -> dict[str, float]:
        keys = case.splice()["k"].reshape(layers, -1, heads, width)
        return {"apply_patch": case.error(case.apply()), "splice": case.error({"k": keys[:, case.slots]})}

    return Sides({name: timed(side, runs=calls, clock=time.process_time) for name, side in sides.items()}, check)


def _patching(raw: dict[str, Any], tokens: int, front: int, rank: int, seed: int) -> Sides:
    """Prepares serving a chunk by its patch beside prefilling it, and forming the patch."""
    backbone: ModelBackbone = random_backbone(raw, seed)
    embedded = [backbone.embed(**backbone.prepare([random_ids(count, seed)])) for count in (front, tokens)]
    canonical = backbone.prefill(embedded[1]).kv
    local = np.arange(tokens, dtype=np.float32)
    rows = {name: np.asarray(value)[:, 0] for name, value in canonical.items()}
    chunk = kvp.Chunk(rows, local, tokens, tokens, "chunk", backbone.layout, backbone.fingerprint)
    context = kvp.to_engine(backbone.layout, backbone.prefill(embedded[0]).kv, embedded[0].positions, 0)
    behind = embedded[1].shift(front)
    prefilled = backbone.prefill(behind, context=context).kv
    conditioned = {name: np.asarray(value)[:, 0] for name, value in prefilled.items()}
    patch = kvp.form_patch(chunk, conditioned, rank, ("front",), force=True)
    placed = kvp.Placed(chunk, patch, front, ("front",))

    def check() -> dict[str, float]:
        exact = kvp.to_engine(backbone.layout, conditioned, local, front)
        blind = kvp.apply_patch(chunk, None, front, ())
        patched, lost = (
            sum(float(jnp.square(kv[name] - exact[name]).sum()) for name in exact) for kv in (placed.apply(), blind)
        )
        # Drawn weights say nothing of quality: a patch has to be nearer than blind reuse, no more.
        return {"place by the patch": patched / lost}

    calls = {
        "place by the patch": timed(lambda: placed.apply()),
        "prefill behind the front": timed(lambda: backbone.prefill(behind, context=context).kv),
        "prefill alone": timed(lambda: backbone.prefill(embedded[1]).kv),
        "form the patch": timed(lambda: kvp.form_patch(chunk, conditioned, rank, ("front",), force=True).factors),
    }
    return Sides(calls, check)
