"""Random KV of hybrid layouts, with a convolution's tail and without."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvpatch_jax.cache import Chunk
from kvpatch_jax.core import KVLayout, Rope

LINEAR, FULL = (0, 1, 3), (2, 4)
PLAIN = KVLayout.gqa(5, 2, 8, Rope(1e4, 8))
LAYOUT = PLAIN.with_transitions(LINEAR, 3, 6, 4, tail=(3, 10))
LAYOUTS = {"tail": LAYOUT, "no tail": PLAIN.with_transitions(LINEAR, 3, 6, 4)}
TOKENS = 7
PARTS = {"map", "state", "tail"}


def drawn(
    layout: KVLayout = LAYOUT, seed: int = 0, tokens: int = TOKENS, batch: tuple[int, ...] = (), rows: Any = np.float32
) -> dict[str, np.ndarray]:
    """KV of normal numbers, its maps about half of the unit map; the rows of tokens in another dtype, parts float32."""
    rng, kv = np.random.default_rng(seed), dict[str, np.ndarray]()
    for channel in layout.channels:
        count = tokens if channel.rows is None else channel.rows
        shape = (layout.depth(channel.name), *batch, count, channel.heads, channel.width)
        kv[channel.name] = rng.normal(size=shape).astype(rows if channel.rows is None else np.float32)
    kv["map"] = (0.5 + 0.1 * kv["map"]).astype(np.float32)
    kv["map"] *= np.eye(kv["map"].shape[-1], dtype=np.float32)[:, None, :] + 0.3
    return kv


def chunk_of(
    layout: KVLayout = LAYOUT, seed: int = 0, length: int | None = None, id: str = "page", **options: Any
) -> Chunk:
    kv = drawn(layout, seed, **options)
    tokens = kv["k"].shape[-3]
    local = np.arange(tokens, dtype=np.float32)
    return Chunk(kv, local, tokens, tokens if length is None else length, id, layout, "backbone")


def composed(pieces: list[dict[str, np.ndarray]], lengths: list[int]) -> dict[str, np.ndarray]:
    """The transition of stretches that follow each other, in float64, head by head, from zero and from single tails."""
    depth, heads = pieces[0]["map"].shape[0], pieces[0]["map"].shape[-2]
    width, values = pieces[0]["state"].shape[-3], pieces[0]["state"].shape[-1]
    maps = np.zeros((depth, width, heads, width))
    state = np.zeros((depth, width, heads, values))
    for layer in range(depth):
        for head in range(heads):
            total, reached = np.eye(width), np.zeros((width, values))
            for piece in pieces:
                own = piece["map"][layer, :, head, :].astype(np.float64)
                total, reached = own @ total, own @ reached + piece["state"][layer, :, head, :]
            maps[layer, :, head], state[layer, :, head] = total, reached
    result = {"map": maps, "state": state}
    if "tail" in pieces[0]:
        inputs = [np.zeros_like(pieces[0]["tail"])]
        for piece, length in zip(pieces, lengths, strict=True):
            rows = piece["tail"].shape[-3]
            inputs.append(piece["tail"][:, rows - min(length, rows) :])
        result["tail"] = np.concatenate(inputs, axis=1)[:, -pieces[0]["tail"].shape[-3] :]
    return result


def close(found: Any, wanted: dict[str, np.ndarray], bar: float = 2e-6) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        own = np.asarray(jnp.asarray(found[name]), np.float64)
        assert own.shape == value.shape, name
        assert np.abs(own - value).max() <= bar * np.abs(value).max(), name
