"""Encoded chunks on this machine: CPU time and memory of placing them, beside the same chunk in 16 bits.

CPU time of the whole process and least by least, as in `operators`: a machine that others use says little in wall time.
Memory is the compiler's own count for one placing: what goes in, and what is written beside the result.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata
from kvpatch_jax.core import ops

from ..results.environment import environment
from .benchmark import Benchmark, Row, measured_row
from .timing import interleave_cpu, ratios

WORDS = ("k4v4", "k3v3", "k5v5gall", "k6v6", "k8v8")
TIME_BAR, MEMORY_BAR = 1.5, 0.4
"""Of 4 bits: CPU time of placing over that of the chunk in 16 bits, and bytes that go in over its bytes."""
BARRED = "k4v4"
RANK, PAGE_SIZE = 32, 64


def run(*, repeats: int = 9, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Times placing and splicing at the shape of a 7B model's image of 1024 tokens; `quick` a tiny one."""
    layers, tokens, heads, width = (2, 64, 2, 16) if quick else (28, 1024, 4, 128)
    case = _EncodedCase(layers, tokens, heads, width, min(RANK, width // 4), seed)
    rows = [*case.time_rows(repeats), *case.memory_rows(), *case.encoding_rows(repeats)]
    config = {"layers": layers, "tokens": tokens, "heads": heads, "width": width, "seed": seed, "quick": quick}
    return {"config": config, "environment": environment(), "rows": rows}


class _EncodedCase:
    """A bfloat16 chunk and its encodings, each with a patch in 4 bits and in 16 of the same rank, and pools."""

    def __init__(self, layers: int, tokens: int, heads: int, width: int, rank: int, seed: int):
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

        layout = kvp.KVLayout.gqa(layers, heads, width, kvp.Rope(1e6, width))
        kv = {name: normal(layers, tokens, heads, width) for name in layout.names}
        chunk = kvp.Chunk(kv, np.arange(tokens, dtype=np.float32), tokens, tokens, "chunk", layout, "none")
        factors = {name: (normal(layers, tokens, rank), normal(layers, rank, heads * width)) for name in kv}
        self.layout, self.tokens = layout, tokens
        self.placed: dict[str, kvp.Placed] = {}
        self.alike: dict[str, kvp.Placed] = {}
        self.blind: dict[str, kvp.Placed] = {}

        for word in ("16 bits", *WORDS):
            own = chunk if word == "16 bits" else kvp.encode_chunk(chunk, word)
            antecedent, all_layers = ("other",), tuple(range(layers))
            metadata = PatchMetadata(
                "chunk", "canonical", antecedent, "none", layout, all_layers, encoding=own.encoding
            )
            patch = kvp.Patch(factors, metadata)
            few = patch if word == "16 bits" else kvp.quantise(patch, "int4")
            self.placed[word] = kvp.Placed(own, few, 7, ("other",))
            self.alike[word] = kvp.Placed(own, patch, 7, ("other",))
            self.blind[word] = kvp.Placed(own, None, 7)
        pages = -(-tokens // PAGE_SIZE) + 1
        self.pools = {word: kvp.pool.make_pool(layout, pages, PAGE_SIZE) for word in self.placed}
        self.slots = rng.permutation(pages * PAGE_SIZE)[:tokens].astype(np.int32)

    def splice(self, word: str) -> Any:
        self.pools[word] = kvp.pool.splice(self.pools[word], self.slots, self.placed[word])
        return self.pools[word]

    def time_rows(self, repeats: int) -> list[Row]:
        """Measures CPU time of placing an encoded chunk with its patch over the chunk in 16 bits with its own."""
        operations = {
            "apply_patch": lambda word: kvp.apply_patch(self.placed[word]),
            "apply_patch, factors in 16 bits": lambda word: kvp.apply_patch(self.alike[word]),
            "apply_patch, blind": lambda word: kvp.apply_patch(self.blind[word]),
            "splice": self.splice,
        }
        rows = []
        for operation, call in operations.items():
            samples = interleave_cpu({word: functools.partial(call, word) for word in self.placed}, repeats)
            plain = samples.pop("16 bits")
            for word, seconds in samples.items():
                least = min(seconds) / min(plain)
                bar = TIME_BAR if word == BARRED and operation != "apply_patch, blind" else None
                labels = {"operation": operation, "encoding": word, "seconds": seconds, "plain_seconds": plain}
                metric = "CPU time over 16 bits"
                rows.append(measured_row(metric, ratios(seconds, plain), at_most=bar, value=least, **labels))
        return rows

    def memory_rows(self) -> list[Row]:
        """Reads from the compiler what placing takes in, and what it writes beside its result."""
        plain = next(iter(self.placed.values())).chunk.nbytes
        rows = []
        for word, placed in self.placed.items():
            arguments = (placed.layout, dict(placed.kv), placed.factors, placed.chunk.local, placed.start)
            memory = ops.jitted_apply.lower(*arguments, **placed.options).compile().memory_analysis()
            assert memory is not None
            labels: dict[str, Any] = {"operation": "apply_patch", "encoding": word}
            bar = MEMORY_BAR if word == BARRED else None
            kept = [placed.chunk.nbytes / plain]
            rows.append(measured_row("bytes kept over 16 bits", kept, at_most=bar, **labels))
            layer = [memory.temp_size_in_bytes / (plain / self.layout.layers)]
            rows.append(measured_row("bytes written beside the result, layers in 16 bits", layer, **labels))
        return rows

    def encoding_rows(self, repeats: int) -> list[Row]:
        """Measures CPU time of encoding a chunk and of decoding all of it, over copying it in 16 bits."""
        chunk = self.placed["16 bits"].chunk
        calls: dict[str, Any] = {"copy": lambda: [np.asarray(value).copy() for value in chunk.kv.values()]}
        for word in WORDS:
            calls[f"encode {word}"] = functools.partial(_arrays_of_encoded, chunk, word)
            calls[f"decode {word}"] = functools.partial(_decoded_arrays, self.placed[word].chunk)
        samples = interleave_cpu(calls, repeats)
        copying = samples.pop("copy")
        rows = []
        for name, seconds in samples.items():
            operation, _, word = name.partition(" ")
            least = min(seconds) / min(copying)
            labels = {"operation": operation, "encoding": word, "seconds": seconds}
            rows.append(measured_row("CPU time over a copy", ratios(seconds, copying), value=least, **labels))
        return rows


def _arrays_of_encoded(chunk: kvp.Chunk, word: str) -> list[Any]:
    return jax.tree.leaves(dict(kvp.encode_chunk(chunk, word).kv))


def _decoded_arrays(chunk: kvp.Chunk) -> list[Any]:
    return list(kvp.decode_chunk(chunk).kv.values())


BENCHMARK = Benchmark("encoded", run, labels=("operation", "encoding"))
