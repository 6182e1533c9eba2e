"""A naive window: whole phase-free arrays in a list, built by plain prefills over contiguous contexts.

It knows operations and no edits, pools, slots or books, and works out starts, fronts and patched KV by itself.
"""

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.models import Buckets, ModelBackbone, load
from tests.goldens.load import write_checkpoint
from tests.shared.transition_cases import composed

BUCKETS = Buckets(smallest=128, steps=1, least=32)  # coarse, so that most tests run the same programs
FAMILIES = {
    "gqa": "qwen2",
    "mrope": "qwen2_5_vl",
    "kimi": "kimi_vl",  # MLA
    "deepstack": "qwen3_vl",  # features of images enter several layers
    "gemma3": "gemma3",  # and images whose tokens see each other
    "hybrid": "qwen3_5",  # linear attention on three layers of four
}


def tiny(name: str, buckets: Buckets | None = BUCKETS) -> ModelBackbone:
    """A tiny random backbone of a layout."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write_checkpoint(FAMILIES[name], Path(folder) / "model"), buckets=buckets)


@functools.cache
def backbone_of(name: str) -> Any:
    """Returns one tiny backbone of a layout for all tests of a process."""
    return tiny(name)


class Watched:
    """A copy of a backbone that counts its forwards, and whose forwards fail once `left` of them have run."""

    def __init__(self, backbone: Any):
        self.backbone: Any = copy.copy(backbone)
        self.forwards, self.left, self.failure = 0, 0, None
        for name in ("prefill", "prefill_padded"):
            setattr(self.backbone, name, self._watching(getattr(backbone, name)))

    def fail(self, failure: Any, after: int = 0) -> None:
        """Lets forwards raise an exception, or give NaN, or (None) succeed again."""
        self.failure, self.left = failure, after

    def _watching(self, run: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            self.forwards += 1
            if self.failure is not None:
                self.left -= 1
            if self.failure is None or self.left >= 0:
                return run(*args, **options)
            if self.failure == "nan":
                out = run(*args, **options)
                return out._replace(logits=out.logits * np.nan)
            raise self.failure

        return watched


def tokens_of(backbone: ModelBackbone, seed: int, length: int) -> Tokens:
    """Tokens of random text; where positions have axes, some of an image-like grid among them, so that axes differ."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 40, (1, length))
    axes = backbone.layout.rope.axes
    positions = None
    if axes is not None:
        positions = np.repeat(np.arange(length, dtype=np.int32)[None, :, None], axes, axis=2)
        if length > 4:  # time stands still over two by two patches, as the rule has it
            positions[0, 1:5] = 1 + np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
            positions[0, 5:] = 3 + np.arange(length - 5)[:, None]
    return backbone.embed(ids, position_ids=positions)


def span_of(tokens: Tokens) -> int:
    return int(np.asarray(tokens.positions).max()) + 1


@dataclasses.dataclass
class NaivePart:
    """One piece: its tokens, and its KV as it is served [L,1,T,K,H]."""

    id: str
    tokens: Tokens
    start: int
    kv: dict[str, np.ndarray]

    @property
    def span(self) -> int:
        return span_of(self.tokens)


class Naive:
    """What a window's KV must be."""

    def __init__(self, backbone: ModelBackbone):
        # All prefills behind a context are of 128 tokens behind as many; those of a hybrid model are few.
        self.backbone = backbone
        self.behind = backbone if backbone.layout.parts else backbone.with_buckets(BUCKETS.of_keys)
        self.parts: list[NaivePart] = []

    def close(self) -> None:
        """Every part right behind the one in front."""
        place = 0
        for part in self.parts:
            part.start, place = place, place + part.span

    def context(self, count: int | None = None) -> dict[str, jnp.ndarray] | None:
        """The first parts in the engine frame, one behind the other."""
        turned = [
            kvp.to_engine(self.backbone.layout, part.kv, np.asarray(part.tokens.positions)[0], part.start)
            for part in self.parts[:count]
        ]
        if not turned:
            return None
        # On the host, where no length compiles a program.
        rows = {name: jax.device_put(np.concatenate([kv[name] for kv in turned], axis=2)) for name in turned[0]}
        return rows | transition_behind(self.backbone.layout, self.parts[:count])

    def run(self, tokens: Tokens, start: int, count: int | None = None) -> Any:
        context = self.context(count)
        return (self.backbone if context is None else self.behind).prefill(tokens.shift(start), context)

    def place(self, id: str, tokens: Tokens, index: int, kv: dict[str, Any] | None = None) -> None:
        """Puts a part at an index: with its KV, or prefilled behind those in front as they stand afterwards."""
        self.parts.insert(index, NaivePart(id, tokens, 0, {}))
        self.close()
        part = self.parts[index]
        rows = self.run(tokens, part.start, index).kv if kv is None else kv
        part.kv = {name: np.asarray(value) for name, value in rows.items()}

    def remove(self, *ids: str) -> None:
        self.parts = [part for part in self.parts if part.id not in ids]
        self.close()


def transition_behind(layout: kvp.KVLayout, parts: Sequence[NaivePart]) -> dict[str, jnp.ndarray]:
    """What linear layers hold behind the parts, from zeros, in float64."""
    if not layout.parts:
        return {}
    pieces = [{channel.name: part.kv[channel.name][:, 0] for channel in layout.parts} for part in parts]
    transition = composed(pieces, [part.tokens.embeddings.shape[1] for part in parts])
    return {name: jnp.asarray(value[:, None], jnp.float32) for name, value in transition.items()}


def added(chunk: kvp.Chunk, patch: kvp.Patch) -> dict[str, np.ndarray]:
    """Canonical and patch summed in float64, [L,1,T,K,H]; of a transition [L,1,R,K,W]."""
    found = {}
    for name, value in chunk.kv.items():
        rows = chunk.layout.channel(name).rows
        total = np.asarray(value, np.float64)[:, : rows or chunk.length]
        factors = patch.factors.get(name)
        if isinstance(factors, tuple):
            u, v = (np.asarray(leaf, np.float64) for leaf in factors)
            total = total + (u @ v).reshape(len(u), -1, *total.shape[2:])[:, : rows or chunk.length]
        elif factors is not None:
            total = total + np.asarray(factors, np.float64)[:, : rows or chunk.length]
        found[name] = total.astype(np.float32)[:, None]
    return found


def rows_of(executor: Any, window: Any) -> dict[str, np.ndarray]:
    """The window's KV as the executor's context has it, in the order of the sequence: {channel: [L,S,K,H]}."""
    context = executor.context(window)
    if context is None:
        return {}
    if not hasattr(context, "table"):
        return {name: np.asarray(value)[:, 0] for name, value in context.items()}
    table, seen, places = (np.asarray(value)[0] for value in (context.table, context.seen, context.places))
    found = {name: np.asarray(value)[:, 0] for name, value in (context.transition or {}).items()}
    for name, value in context.pool.items():
        pages = np.asarray(value, np.float32)[:, table]
        flat = pages.reshape(pages.shape[0], -1, *pages.shape[3:])[:, seen]
        width = executor.layout.channel(name).width
        found[name] = flat[:, np.argsort(places[seen]), :, :width]
    return found


def expect_equal(executor: Any, window: Any, naive: Naive, bar: float) -> None:
    """Compares a context with what it must be, against the largest value of each channel."""
    found, expected = rows_of(executor, window), naive.context()
    assert [piece.start for piece in window.pieces] == [part.start for part in naive.parts]
    assert set(found) == set(expected or {})
    for name, value in (expected or {}).items():
        wanted = np.asarray(value, np.float32)[:, 0]
        assert found[name].shape == wanted.shape
        assert np.abs(found[name] - wanted).max() <= bar * np.abs(wanted).max(), name


def owners(executor: Any) -> np.ndarray:
    """How many pieces of all branches have each slot."""
    counts = np.zeros_like(executor.slots.counts)
    for residents in executor.branches.values():
        for resident in residents.values():
            counts[resident.slots] += 1
    return counts
