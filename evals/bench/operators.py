"""The operators on this machine: CPU time of placing a chunk over that of a jitted x · 2, and of their checks.

The chunk has channels k and v; x · 2 is of both, and so is the copy. CPU time, since wall time says little on a machine
that others use; and of the whole process, for XLA's threads are where the work is done.
"""

import contextlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata
from kvpatch_jax.core import ops, rotation
from kvpatch_jax.pool import pool

from .benchmark import Row, measured_row
from .timing import interleave_cpu, ratios

BARS = {"blind": 1.0, "patched": 3.0, "spliced": 4.0}
"""CPU time of `apply_patch` without a patch and with one, and of `splice` with one, over the chunk's x · 2, jitted."""
CHECKS_BAR = 150.0
"""Microseconds of CPU time that the checks of a call may take."""
RANK, PAGE_SIZE = 16, 64


class _PlacingCase:
    """A chunk, a patch of it, and a pool that is donated and kept."""

    def __init__(self, layers: int, tokens: int, heads: int, width: int, rank: int, seed: int):
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

        self.layout = kvp.KVLayout.gqa(layers, heads, width, kvp.Rope(1e6, width))
        kv = {name: normal(layers, tokens, heads, width) for name in self.layout.names}
        local = jnp.arange(tokens, dtype=jnp.float32)
        # A second layout, as a store's reader makes it: equal, not the same object.
        equal_layout = kvp.KVLayout.gqa(layers, heads, width, kvp.Rope(1e6, width))
        self.chunk = kvp.Chunk(kv, local, tokens, tokens, "chunk", equal_layout, "none")

        factors = {name: (normal(layers, tokens, rank), normal(layers, rank, heads * width)) for name in kv}
        metadata = PatchMetadata("chunk", "canonical", ("other",), "none", self.layout, tuple(range(layers)))
        self.patch = kvp.Patch(factors, metadata)

        pages = -(-tokens // PAGE_SIZE) + 1
        self.pool = kvp.pool.make_pool(self.layout, pages, PAGE_SIZE)
        self.slots = rng.permutation(pages * PAGE_SIZE)[:tokens].astype(np.int32)

    def apply(self, patch: kvp.Patch | None) -> Any:
        return kvp.apply_patch(kvp.Placed(self.chunk, patch, 7, () if patch is None else ("other",)))

    def splice(self, patch: kvp.Patch | None) -> Any:
        antecedent = () if patch is None else ("other",)
        self.pool = kvp.pool.splice(self.pool, self.slots, kvp.Placed(self.chunk, patch, 7, antecedent))
        return self.pool


def placing_rows(layers: int, tokens: int, heads: int, width: int, repeats: int, seed: int) -> list[Row]:
    """Measures CPU time of placing a bfloat16 chunk, over a jitted x · 2 of it in the same run: least by least."""
    case = _PlacingCase(layers, tokens, heads, width, min(RANK, width // 4), seed)
    kv = dict(case.chunk.kv)
    engine = case.apply(None)
    double = jax.jit(lambda tree: jax.tree.map(lambda value: value * 2, tree))
    calls = {
        "x · 2": lambda: double(kv),
        "memcpy": lambda: [np.asarray(value).copy() for value in kv.values()],
        "blind": lambda: case.apply(None),
        "patched": lambda: case.apply(case.patch),
        "spliced": lambda: case.splice(case.patch),
        "relocated": lambda: kvp.relocate(case.layout, engine, 7, 99),
    }
    samples = interleave_cpu(calls, repeats)

    doubling = samples.pop("x · 2")
    metric = f"placing over x · 2, CPU time, {tokens} × {layers} × {heads} × {width}"
    rows = []

    for arm, seconds in samples.items():
        least = min(seconds) / min(doubling)
        labels = {"arm": arm, "seconds": seconds, "x2_seconds": doubling}
        rows.append(measured_row(metric, ratios(seconds, doubling), at_most=BARS.get(arm), value=least, **labels))

    return rows


def check_rows(repeats: int, seed: int, tokens: int = 2048) -> list[Row]:
    """Measures microseconds of CPU time that public functions take without the compiled programs that they call."""
    case = _PlacingCase(2, tokens, 1, 8, 4, seed)
    engine = case.apply(None)
    calls = {
        "apply_patch, blind": lambda: case.apply(None),
        "apply_patch": lambda: case.apply(case.patch),
        "splice": lambda: case.splice(case.patch),
        "relocate": lambda: kvp.relocate(case.layout, engine, 7, 99),
    }

    def returned(_layout: Any, arrays: Any, *rest: Any, **plan: Any) -> Any:
        return arrays

    # With the programs replaced, what is left of a call is its checks.
    programs = (
        (ops, "jitted_apply"),
        (rotation, "jitted_rotate"),
        (rotation, "jitted_relocate"),
        (pool, "jitted_splice"),
    )

    with contextlib.ExitStack() as stack:
        for module, name in programs:
            stack.enter_context(mock.patch.object(module, name, returned))
        samples = interleave_cpu(calls, max(repeats, 20), times=20)

    rows = []
    for arm, seconds in samples.items():
        micros = [1e6 * value for value in seconds]
        rows.append(measured_row("checks of a call, µs", micros, at_most=CHECKS_BAR, statistic=min, arm=arm))
    return rows
