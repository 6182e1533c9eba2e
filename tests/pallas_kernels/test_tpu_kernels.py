"""The TPU kernels of rotate_patch and splice, interpreted on a CPU, against float64.

One interpreter makes errors of races and of uninitialised memory; the other sees words of two heads, as they are
compiled.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import assert_rounded_once, decoded, expected
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import KernelUnavailableError, rotate_patch, splice, targeting
from pallas_kernels._operands import Codes
from pallas_kernels.rotate_patch import tpu
from pallas_kernels.shapes import SMALL, ChunkShape, arguments_of, draw
from tests.shared.arrays import placed

RACES = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SPEC = jax.ShapeDtypeStruct
ALL = {shape.name: shape for shape in (*SMALL, ChunkShape("partial", 1, 41, 2, 128, 64, 3, "pairs"))}
QUICK = ("gqa", "rope_key_pairs", "partial", "keys_4_bits", "latent_4_bits")
"""Shapes that are looked at by default: interpreting one takes seconds."""


def cases(names, quick):
    return pytest.mark.parametrize(
        "name", [name if name in quick else pytest.param(name, marks=pytest.mark.nightly) for name in names]
    )


@pytest.fixture(autouse=True)
def small_blocks_without_races(monkeypatch):
    """Makes blocks of 32 to 96 tokens, so that a chunk has several, and an error of what two touch at once."""
    monkeypatch.setattr(tpu, "VMEM_BUDGET", 2**20)
    yield
    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found


def chunk_of(shape: ChunkShape, length: int) -> tuple[dict, np.ndarray]:
    """Draws arguments, not numbers from `length` on, and what float64 makes of them."""
    given = draw(shape, jax.random.key(1))
    exact = expected(shape, given | {"x": decoded(given["x"])})[:, :length]
    padding = lambda leaf, axis: jnp.where(jnp.arange(leaf.shape[axis])[:, None] < length, leaf, jnp.nan)
    given |= {name: padding(given[name], -2) for name in ("u", "cos", "sin") if name in given}
    x = given["x"]
    if not isinstance(x, Codes):
        given["x"] = x.at[:, length:].set(jnp.nan)
    elif x.by_token:
        given["x"] = Codes(x.codes, padding(x.scale, -2), x.least, x.heads, x.group, x.by_token)
    return given, exact


@cases(ALL, QUICK)
def test_rotation_and_patch_agree_with_float64(name: str):
    shape = ALL[name]
    length = shape.tokens - 5
    given, exact = chunk_of(shape, length)

    def run(interpret) -> np.ndarray:
        with targeting("tpu", interpret):
            plan: dict[str, Any] = {"layout": shape.layout, "implementation": "tpu"}
            found = jax.jit(lambda given, length: rotate_patch(**given, **plan, length=length))(
                given, jnp.int32(length)
            )
            return np.asarray(found, np.float64)

    results = run(RACES), run(True)
    assert_rounded_once(results[0][:, :length], exact)
    assert not results[0][:, length:].any()
    np.testing.assert_array_equal(results[1], results[0])


def slots_of(kind: str, tokens: int, total: int) -> np.ndarray:
    """From the middle of a page to the end; in no order; or a run and then in no order, two of them out of range."""
    order = np.random.default_rng(3).permutation(total)
    if kind == "end":
        return np.arange(total - tokens, total)
    if kind == "scattered":
        return order[:tokens]
    slots = np.concatenate([np.arange(7, 47), order[(order < 7) | (order >= 47)]])[:tokens]
    slots[[34, -6]] = -1, total
    return slots


def spliced(shape: ChunkShape):
    plan: dict[str, Any] = {"layout": shape.layout, "implementation": "tpu"}
    return jax.jit(lambda pool, slots, given, length: splice(pool, slots, **given, **plan, length=length))


@cases([name for name in ALL if ALL[name].width % 128 == 0 or name == "rope_key"], ("partial", "latent"))
def test_slots_that_are_named_and_no_others_are_written(name: str):
    """In a pool as wide as the rows of a register."""
    shape = ALL[name]
    length, pages = shape.tokens - 5, -(-shape.tokens // 16) + 2
    width, total = -(-shape.width // 128) * 128, 16 * pages
    given, exact = chunk_of(shape, length)
    # Any bits, those of every NaN among them.
    before = np.random.default_rng(5).integers(0, 2**16, shape.pool(pages, 16, width), np.uint16).view(jnp.bfloat16)
    for interpret, kinds in ((RACES, ("end", "mixed", "scattered")), (True, ("mixed",) if shape.heads > 1 else ())):
        run = spliced(shape)  # traced anew, for another interpreter
        for kind in kinds:
            slots = slots_of(kind, shape.tokens, total)
            with targeting("tpu", interpret):
                found = np.asarray(run(placed(before), placed(slots, jnp.int32), given, jnp.int32(length)))
            rows, old = (leaf.reshape(shape.layers, total, shape.heads, width) for leaf in (found, before))
            slots = slots[:length]
            written = (slots >= 0) & (slots < total)
            others = np.setdiff1d(np.arange(total), slots)
            np.testing.assert_array_equal(rows[:, others].view(np.uint16), old[:, others].view(np.uint16))
            rows = rows[:, slots[written]].astype(np.float64)
            assert_rounded_once(rows[..., : shape.width], exact[:, written])
            assert not rows[..., shape.width :].any()


def test_factors_of_fewer_leading_dimensions_are_shared():
    given = draw(ChunkShape("shared", 6, 9, 2, 128, 128, 4), jax.random.key(4), "float32")
    given |= {"x": given["x"].reshape(2, 3, 9, 2, 128), "u": given["u"][:3], "v": given["v"][0]}
    with targeting("tpu", True):
        found, wanted = (np.asarray(rotate_patch(**given, implementation=name), np.float64) for name in ("tpu", "xla"))
    assert_rounded_once(found, wanted)


def test_derivatives_are_the_references():
    shape = ALL["partial"]
    given = draw(shape, jax.random.key(2))
    weights = jax.random.normal(jax.random.key(3), shape.x, jnp.bfloat16)

    def gradients(implementation: str):
        run = lambda x, u, v: rotate_patch(
            **(given | {"x": x, "u": u, "v": v}), layout=shape.layout, implementation=implementation
        )
        with targeting("tpu", True):
            return jax.vjp(run, given["x"], given["u"], given["v"])[1](weights)

    for found, wanted in zip(gradients("tpu"), gradients("xla"), strict=True):
        np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))


GQA, CODES = ALL["gqa"], ALL["keys_4_bits"]


@pytest.mark.parametrize(
    ("shape", "page_size", "words"),
    [
        (CODES._replace(heads=3), 0, "codes of 3 heads"),
        (CODES._replace(heads=1), 0, "codes of 128 columns; expected a multiple of 256"),
        (CODES._replace(group=48), 0, "groups of 48 tokens; expected 32, or all 77"),
        (GQA._replace(heads=32, rank=256), 0, "factors of rank 256 over 4096 columns"),
        (ALL["rope_key"], 16, "a width of 64; expected a multiple of 128"),
        (GQA._replace(heads=5), 16, "5 heads; expected 1, 2, 4 or a multiple of 8"),
        (GQA._replace(tokens=65537), 65536, "65537 tokens; expected at most 65536"),
        (ALL["latent"], 10, "10 slots; expected a multiple of 16"),
    ],
)
def test_says_what_it_does_not_take_and_leaves_it_to_xla(unchecked, shape: ChunkShape, page_size: int, words: str):
    def run(pool, slots, given, implementation: str | tuple[str, ...]):
        plan: dict[str, Any] = {"layout": shape.layout, "implementation": implementation}
        return rotate_patch(**given, **plan) if pool is None else splice(pool, slots, **given, **plan)

    arguments = SPEC(shape.pool(20, page_size), jnp.bfloat16), SPEC((shape.tokens,), jnp.int32)
    arguments = (*(arguments if page_size else (None, None)), arguments_of(shape))
    with targeting("tpu"):
        with pytest.raises(KernelUnavailableError, match=words):
            jax.eval_shape(functools.partial(run, implementation="tpu"), *arguments)
        result = jax.eval_shape(functools.partial(run, implementation=("tpu", "xla")), *arguments)
    assert result.shape == (shape.pool(20, page_size) if page_size else shape.x)


def test_a_mesh_whose_axes_are_in_types_is_left_to_xla():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh), targeting("tpu"), pytest.raises(KernelUnavailableError, match="of a mesh in types"):
        jax.eval_shape(lambda given: rotate_patch(**given, implementation="tpu"), arguments_of(GQA))
