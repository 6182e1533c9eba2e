"""The kernels for Hopper GPUs, interpreted, races and uninitialised memory being errors: against float64, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import assert_rounded_once, decoded, expected
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import Codes, KernelUnavailableError, rotate_patch, splice, targeting
from pallas_kernels.rotate_patch import gpu
from pallas_kernels.shapes import SMALL, ChunkShape, draw

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
BY_NAME = {shape.name: shape for shape in SMALL}
LAST = 3
"""Tokens behind the length, of which u is no number, nor x where it is bfloat16."""


def drawn(shape: ChunkShape, factors: str = "bfloat16") -> tuple[dict[str, Any], np.ndarray]:
    """Draws a chunk with padding at its end, and its answer in float64."""
    given = draw(shape, jax.random.key(1), factors)
    x = given["x"]
    exact = expected(shape, given | {"x": decoded(x)})
    if not isinstance(x, Codes):
        given["x"] = x.at[:, -LAST:].set(jnp.nan)
    if shape.rank:
        given["u"] = given["u"].at[:, -LAST:].set(jnp.nan)
    exact[:, -LAST:] = 0
    return given, exact


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_rotate_patch_agrees_with_float64_and_padding_is_zero(shape: ChunkShape):
    given, exact = drawn(shape, "float32" if shape.name == "rope_key" else "bfloat16")
    with targeting("gpu", INTERPRET):
        run = jax.jit(functools.partial(rotate_patch, layout=shape.layout, implementation="gpu"))
        found = run(**given, length=jnp.int32(shape.tokens - LAST))
    assert found.dtype == jnp.bfloat16
    assert_rounded_once(found, exact)


def slots_of(tokens: int, total: int) -> np.ndarray:
    """Slots from the middle of a page; then in no order, of which one is beyond the pool and one before it."""
    rng = np.random.default_rng(0)
    first = np.arange(3, 3 + tokens // 2)
    rest = rng.permutation(np.arange(tokens // 2 + 8, total))[: tokens - tokens // 2]
    slots = np.concatenate([first, rest]).astype(np.int32)
    slots[[-6, -5]] = total, -1
    return slots


@pytest.mark.parametrize("name", ["gqa", "pairs", "rope_key", "keys_4_bits", "values_4_bits"])
def test_splice_writes_named_slots_alone(name: str):
    shape = BY_NAME[name]
    given, exact = drawn(shape)
    before = jax.random.normal(jax.random.key(2), shape.pool(14, 8), jnp.bfloat16)
    kept, slots = (
        np.asarray(before, np.float32).reshape(shape.layers, 112, *exact.shape[2:]),
        slots_of(shape.tokens, 112),
    )
    with targeting("gpu", INTERPRET):
        run = jax.jit(functools.partial(splice, layout=shape.layout, implementation="gpu"))
        after = run(before, slots, **given, length=jnp.int32(shape.tokens - LAST))
    found = np.asarray(after, np.float32).reshape(kept.shape)
    goes = np.flatnonzero((slots >= 0) & (slots < 112) & (np.arange(shape.tokens) < shape.tokens - LAST))
    assert_rounded_once(found[:, slots[goes]], exact[:, goes])
    others = np.setdiff1d(np.arange(112), slots[goes])
    np.testing.assert_array_equal(found[:, others], kept[:, others])


@pytest.mark.parametrize(
    "shape", [ChunkShape("key", 7, 9, 1, 64, 64, 3), ChunkShape("codes", 5, 9, 2, 64, 0, 0, group=32)]
)
def test_blocks_that_go_through_many_layers(shape: ChunkShape, monkeypatch):
    """Where few blocks run at once, each has all layers: memory is filled and sent from again and again."""
    monkeypatch.setattr(gpu, "PROCESSORS", 1)
    given, exact = drawn(shape)
    pool = jnp.zeros(shape.pool(2, 8), jnp.bfloat16)
    with targeting("gpu", INTERPRET):
        found = rotate_patch(**given, length=9 - LAST, implementation="gpu")
        pool = splice(pool, np.arange(9) + 2, **given, length=9 - LAST, implementation="gpu")
    assert_rounded_once(found, exact)
    assert_rounded_once(pool.reshape(shape.layers, 16, *exact.shape[2:])[:, 2 : 11 - LAST], exact[:, :-LAST])


def test_a_pool_without_layers_and_factors_shared_by_layers():
    shape = BY_NAME["values"]._replace(layers=1, tokens=9)
    given, exact = drawn(shape)
    alone = {name: leaf[0] for name, leaf in given.items()}
    with targeting("gpu", INTERPRET):
        pool = splice(jnp.zeros(shape.pool(2, 8)[1:], jnp.bfloat16), np.arange(9) + 2, **alone, implementation="gpu")
        twice: dict[str, Any] = given | {"x": jnp.concatenate([given["x"]] * 2)}
        both = rotate_patch(**twice, length=9 - LAST, implementation="gpu")
    assert_rounded_once(pool.reshape(16, *exact.shape[2:])[2 : 11 - LAST], exact[0, :-LAST])
    assert_rounded_once(both, np.concatenate([exact] * 2))


def test_the_gradient_is_the_reference_s():
    given, _ = drawn(ChunkShape("small", 1, 8, 1, 64, 64, 3), "float32")
    given = jax.tree.map(jnp.nan_to_num, given)

    def loss(given, implementation):
        return (rotate_patch(**given, implementation=implementation).astype(jnp.float32) ** 2).sum()

    with targeting("gpu", INTERPRET):
        found, wanted = (jax.grad(loss)(given, implementation) for implementation in ("gpu", "xla"))
    for name in given:
        ours, reference = (np.asarray(leaf[name], np.float32) for leaf in (found, wanted))
        np.testing.assert_allclose(ours, reference, 0.02, 0.02)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ChunkShape("partial", 1, 8, 1, 64, 32, 0), "32 of 64 channels that rotate; expected all or none"),
        (ChunkShape("narrow", 1, 8, 2, 80, 80, 0), "2 heads of 80, 80 rotary; expected rotating heads of"),
        (ChunkShape("odd", 1, 8, 1, 128, 128, 0, group=32), "1 heads of 128, 128 rotary; expected"),
        (ChunkShape("words", 1, 8, 2, 128, 128, 0, "pairs", 32), "codes in layout 'pairs'"),
        (ChunkShape("groups", 1, 99, 2, 128, 0, 0, group=48), "codes in groups of 48; expected 32, 64"),
        (ChunkShape("rank", 1, 8, 2, 128, 128, 256), "bytes a block; expected what shared memory holds"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_refused_says_why_and_goes_to_the_next(shape: ChunkShape, words: str):
    given = draw(shape, jax.random.key(0), "float32")
    pool = jnp.zeros(shape.pool(1, 8), jnp.bfloat16)
    with targeting("gpu"):
        for call in (rotate_patch, functools.partial(splice, pool, np.arange(shape.tokens) % 8)):
            with pytest.raises(KernelUnavailableError, match=words):
                call(**given, layout=shape.layout, length=8, implementation="gpu")
        found = rotate_patch(**given, layout=shape.layout, implementation=("gpu", "xla"))
    wanted = rotate_patch(**given, layout=shape.layout, implementation="xla")
    np.testing.assert_array_equal(found, wanted)
    assert not pool.is_deleted()
