"""Interpreted, with races as errors, the GPU's and the TPU's kernels equal float64 to one rounding, in place.

Of the interpreters for TPUs one makes errors of races and of uninitialised memory; the other sees words of two heads,
as they are compiled.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import arrays, assert_rounded_once, decoded, expected

from pallas_kernels import (
    Codes,
    KernelError,
    KernelUnavailableError,
    block_product,
    preferring,
    rotate_patch,
    splice,
    targeting,
)
from pallas_kernels.block_product import what_runs
from pallas_kernels.shapes import SMALL, ChunkShape, arguments_of, draw
from tests.shared.arrays import placed

SPEC = jax.ShapeDtypeStruct
ALL = {shape.name: shape for shape in (*SMALL, ChunkShape("partial", 1, 41, 2, 128, 64, 3, "pairs"))}
LAST = 5
"""Tokens behind the length, of which there are no numbers."""
nightly = pytest.mark.nightly


def cases(names: dict[str, list[str]], quick: set[tuple[str, str]]):
    """Pairs of a platform and a shape; interpreting one takes seconds, so that few are looked at by default."""
    pairs = [(platform, name) for platform, shapes in names.items() for name in shapes]
    params = [pytest.param(*pair, marks=() if pair in quick else nightly, id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("platform", "name"), params)


def interpreters(platform: str) -> tuple[Any, ...]:
    if platform == "gpu":
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return (plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),)
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"), True


@pytest.fixture(autouse=True)
def small_blocks_without_races(monkeypatch):
    """Makes blocks of 32 to 96 tokens on TPUs, so that a chunk has several, and an error of what two touch at once."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    from pallas_kernels.rotate_patch import tpu

    monkeypatch.setattr(tpu, "VMEM_BUDGET", 2**20)
    yield
    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found


def chunk_of(shape: ChunkShape, platform: str, factors: str = "bfloat16") -> tuple[dict[str, Any], np.ndarray, int]:
    """Draws arguments, not numbers behind the length, and what float64 makes of them."""
    rng, length = np.random.default_rng(1), shape.tokens - LAST
    numbers = lambda leaf: rng.integers(0, 256, leaf.shape) if leaf.dtype == jnp.uint8 else rng.normal(size=leaf.shape)
    given = jax.tree.map(lambda leaf: placed(numbers(leaf), leaf.dtype), arguments_of(shape, factors))
    given |= {name: value for name, value in arrays(shape).items() if name in ("cos", "sin")}
    x, exact = given["x"], expected(shape, given | {"x": decoded(given["x"])})
    exact[:, length:] = 0
    counted = lambda leaf, axis: np.arange(leaf.shape[axis]).reshape(-1, *[1] * (-1 - axis)) < length
    padding = lambda leaf, axis: placed(np.where(counted(leaf, axis), np.float32(leaf), np.nan), leaf.dtype)
    names = ("u",) if platform == "gpu" else ("u", "cos", "sin")
    given |= {name: padding(given[name], -2) for name in names if name in given}
    if not isinstance(x, Codes):
        given["x"] = padding(x, -3)
    elif x.by_token and platform == "tpu":
        given["x"] = Codes(x.codes, padding(x.scale, -2), x.least, x.heads, x.group, x.by_token)
    return given, exact, length


@cases(
    {"gpu": [shape.name for shape in SMALL], "tpu": [*ALL]},
    {("gpu", "rope_key_pairs"), ("gpu", "values_4_bits"), ("tpu", "rope_key_pairs"), ("tpu", "latent_4_bits")},
)
def test_rotation_and_patch_agree_with_float64_and_padding_is_zero(platform: str, name: str):
    shape = ALL[name]
    given, exact, length = chunk_of(shape, platform, "float32" if name == "rope_key" else "bfloat16")
    results = []
    for interpret in interpreters(platform):
        run = functools.partial(rotate_patch, layout=shape.layout, implementation=platform)
        with targeting(platform, interpret):
            results.append(
                jax.jit(lambda given, length, run=run: run(**given, length=length))(given, jnp.int32(length))
            )
    assert results[0].dtype == jnp.bfloat16
    assert_rounded_once(results[0], exact)
    assert not np.asarray(results[0][:, length:]).any()
    np.testing.assert_array_equal(results[-1], results[0])


def slots_of(kind: str, tokens: int, total: int) -> np.ndarray:
    """From the middle of a page to the end; in no order; or a run and then in no order, two of them out of range."""
    order = np.random.default_rng(3).permutation(total)
    if kind == "end":
        return np.arange(total - tokens, total)
    if kind == "scattered":
        return order[:tokens]
    run = tokens // 2
    slots = np.concatenate([np.arange(7, 7 + run), order[(order < 7) | (order >= 7 + run)]])[:tokens]
    slots[[run + 1, -LAST - 1]] = -1, total
    return slots


@cases(
    {
        "gpu": ["gqa", "pairs", "rope_key", "keys_4_bits", "values_4_bits"],
        "tpu": [name for name in ALL if ALL[name].width % 128 == 0 or name == "rope_key"],
    },
    {("gpu", "rope_key"), ("tpu", "partial")},
)
def test_slots_that_are_named_and_no_others_are_written(platform: str, name: str, request):
    """On TPUs in a pool as wide as the rows of a register."""
    shape, many = ALL[name], request.node.get_closest_marker("nightly") is not None
    pages = -(-shape.tokens // 16) + 2
    width, total = -(-shape.width // 128) * 128 if platform == "tpu" else shape.width, 16 * pages
    given, exact, length = chunk_of(shape, platform)
    # Any bits, those of every NaN among them.
    before = np.random.default_rng(5).integers(0, 2**16, shape.pool(pages, 16, width), np.uint16).view(jnp.bfloat16)
    for number, interpret in enumerate(interpreters(platform)):
        plan: dict[str, Any] = {"layout": shape.layout, "implementation": platform}
        # Traced anew, for another interpreter.
        run = jax.jit(lambda pool, slots, given, length, plan=plan: splice(pool, slots, **given, **plan, length=length))
        kinds = ("mixed", "end", "scattered") if many and not number else ("mixed",)
        for kind in kinds:
            slots = slots_of(kind, shape.tokens, total)
            with targeting(platform, interpret):
                written = np.asarray(run(placed(before), placed(slots, jnp.int32), given, jnp.int32(length)))
            rows, old = (leaf.reshape(shape.layers, total, shape.heads, width) for leaf in (written, before))
            inside = (slots[:length] >= 0) & (slots[:length] < total)
            others = np.setdiff1d(np.arange(total), slots[:length])
            np.testing.assert_array_equal(rows[:, others].view(np.uint16), old[:, others].view(np.uint16))
            rows = rows[:, slots[:length][inside]].astype(np.float64)
            assert_rounded_once(rows[..., : shape.width], exact[:, :length][:, inside])
            assert not rows[..., shape.width :].any()


@nightly
@pytest.mark.parametrize(
    "shape", [ChunkShape("key", 7, 9, 1, 64, 64, 3), ChunkShape("codes", 5, 9, 2, 64, 0, 0, group=32)]
)
def test_blocks_of_gpus_that_go_through_many_layers(shape: ChunkShape, monkeypatch):
    """Where few blocks run at once, each has all layers: memory is filled and sent from again and again."""
    from pallas_kernels.rotate_patch import gpu

    monkeypatch.setattr(gpu, "PROCESSORS", 1)
    given, exact, length = chunk_of(shape, "gpu")
    pool = jnp.zeros(shape.pool(2, 8), jnp.bfloat16)
    with targeting("gpu", *interpreters("gpu")):
        turned = rotate_patch(**given, length=length, implementation="gpu")
        pool = splice(pool, np.arange(9) + 2, **given, length=length, implementation="gpu")
    assert_rounded_once(turned, exact)
    assert_rounded_once(pool.reshape(shape.layers, 16, *exact.shape[2:])[:, 2 : 2 + length], exact[:, :length])


@nightly
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_factors_of_fewer_leading_dimensions_are_shared_and_derivatives_are_the_references(platform: str):
    shape = ChunkShape("shared", 6, 9, 2, 128, 128, 4)
    given = draw(shape, jax.random.key(4), "float32")
    given |= {"x": given["x"].reshape(2, 3, 9, 2, 128), "u": given["u"][:3], "v": given["v"][0]}
    weights = jax.random.normal(jax.random.key(3), given["x"].shape, jnp.bfloat16)
    results = {}
    with targeting(platform, interpreters(platform)[-1]):
        for name in (platform, "xla"):
            run = lambda x, u, v, name=name: rotate_patch(**(given | {"x": x, "u": u, "v": v}), implementation=name)
            value, pull = jax.vjp(run, given["x"], given["u"], given["v"])
            results[name] = np.asarray(value, np.float64), *pull(weights)
    assert_rounded_once(results[platform][0], results["xla"][0])
    for slope, reference in zip(results[platform][1:], results["xla"][1:], strict=True):
        np.testing.assert_allclose(slope.astype(jnp.float32), reference.astype(jnp.float32), 0.02, 0.02)


GQA, CODES = ALL["gqa"], ALL["keys_4_bits"]


@pytest.mark.parametrize(
    ("platform", "shape", "page_size", "words"),
    [
        ("gpu", ChunkShape("partial", 1, 8, 1, 64, 32, 0), 0, "32 of 64 channels that rotate; expected all or none"),
        ("gpu", ChunkShape("odd", 1, 8, 1, 128, 128, 0, group=32), 8, "1 heads of 128, 128 rotary; expected"),
        ("gpu", ChunkShape("groups", 1, 99, 2, 128, 0, 0, group=48), 0, "codes in groups of 48; expected 32, 64"),
        ("gpu", ChunkShape("rank", 1, 8, 2, 128, 128, 256), 8, "bytes a block; expected what shared memory holds"),
        ("tpu", CODES._replace(heads=3), 0, "codes of 3 heads"),
        ("tpu", CODES._replace(group=48), 0, "groups of 48 tokens; expected 32, or all 77"),
        ("tpu", GQA._replace(heads=32, rank=256), 0, "factors of rank 256 over 4096 columns"),
        ("tpu", ALL["rope_key"], 16, "a width of 64; expected a multiple of 128"),
        ("tpu", GQA._replace(heads=5), 16, "5 heads; expected 1, 2, 4 or a multiple of 8"),
        ("tpu", GQA._replace(tokens=65537), 65536, "65537 tokens; expected at most 65536"),
        ("tpu", ALL["latent"], 10, "10 slots; expected a multiple of 16"),
    ],
)
def test_says_what_it_does_not_take_and_leaves_it_to_xla(unchecked, platform, shape, page_size, words):
    def run(pool, slots, given, implementation: str | tuple[str, ...]):
        plan: dict[str, Any] = {"layout": shape.layout, "implementation": implementation}
        return rotate_patch(**given, **plan) if pool is None else splice(pool, slots, **given, **plan)

    arguments = SPEC(shape.pool(20, page_size), jnp.bfloat16), SPEC((shape.tokens,), jnp.int32)
    factors = "float32" if platform == "gpu" else "bfloat16"
    arguments = (*(arguments if page_size else (None, None)), arguments_of(shape, factors))
    with targeting(platform):
        with pytest.raises(KernelUnavailableError, match=words):
            jax.eval_shape(functools.partial(run, implementation=platform), *arguments)
        result = jax.eval_shape(functools.partial(run, implementation=(platform, "xla")), *arguments)
    assert result.shape == (shape.pool(20, page_size) if page_size else shape.x)


def test_a_mesh_whose_axes_are_in_types_is_left_to_xla():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh), targeting("tpu"), pytest.raises(KernelUnavailableError, match="of a mesh in types"):
        jax.eval_shape(lambda given: rotate_patch(**given, implementation="tpu"), arguments_of(GQA))


MATRICES, DEPTH, WIDTH, ROWS, BLOCKS = 5, 128, 192, 64, 3


def drawn(dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    """Rows of three blocks, and the matrices."""
    rng = np.random.default_rng(0)
    shapes = (BLOCKS * ROWS, DEPTH), (MATRICES, DEPTH, WIDTH)
    return placed(rng.standard_normal(shapes[0]), dtype), placed(rng.standard_normal(shapes[1]), dtype)


def exact(x: Any, stack: Any, which: list[int]) -> np.ndarray:
    """In float64."""
    rows, matrices = np.asarray(x, np.float64).reshape(len(which), -1, x.shape[1]), np.asarray(stack, np.float64)
    return np.concatenate([block @ matrices[number] for block, number in zip(rows, which, strict=True)])


def rounded_once(result: Any, expected: np.ndarray) -> None:
    """Sums in float32 may turn a rounding, no more."""
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(expected), 1e-3))) - 7)
    off = np.abs(np.asarray(result, np.float64) - expected)
    assert (off <= 0.51 * unit + 1e-4).all()


@pytest.mark.parametrize("platform", ["xla", "gpu"])
def test_each_block_is_multiplied_by_its_matrix(platform):
    """Blocks behind the last are not looked at: their matrices need not exist, and their rows may hold anything."""
    x, stack = drawn()
    run = jax.jit(lambda *given: block_product(*given, implementation=platform))
    with targeting("gpu", *interpreters("gpu")):
        result = run(x, stack, placed([4, 0, 4], jnp.int32), jnp.int32(BLOCKS))
        alone = run(x.at[ROWS:].set(jnp.nan), stack, placed([2, 1 << 20, -7], jnp.int32), jnp.int32(1))
    assert result.dtype == x.dtype
    rounded_once(result, exact(x, stack, [4, 0, 4]))
    rounded_once(alone[:ROWS], exact(x[:ROWS], stack, [2]))


def test_derivatives_of_block_products_are_those_of_the_products():
    x, stack = drawn()
    weights = np.random.default_rng(1).standard_normal((BLOCKS * ROWS, WIDTH)).astype(np.float32)

    def loss(x, stack):
        result = block_product(x, stack, placed([1, 3, 1], jnp.int32), jnp.int32(BLOCKS), implementation="gpu")
        return (weights * result.astype(jnp.float32)).sum()

    with targeting("gpu", *interpreters("gpu")):
        of_rows, of_matrices = jax.jit(jax.grad(loss, (0, 1)))(x, stack)
    rows, blocks = np.asarray(x, np.float64).reshape(BLOCKS, ROWS, DEPTH), weights.reshape(BLOCKS, ROWS, WIDTH)
    expected = np.zeros(stack.shape)
    np.add.at(expected, [1, 3, 1], np.swapaxes(rows, 1, 2) @ blocks)
    np.testing.assert_allclose(np.float32(of_matrices), expected, atol=0.02 * np.abs(expected).max())
    expected = (blocks @ np.swapaxes(np.asarray(stack, np.float64)[[1, 3, 1]], 1, 2)).reshape(x.shape)
    np.testing.assert_allclose(np.float32(of_rows), expected, atol=0.02 * np.abs(expected).max())


def test_what_multiplies_blocks_follows_from_platform_and_sizes():
    stack = jax.ShapeDtypeStruct((5, 128, 192), jnp.bfloat16)
    assert what_runs(64, stack.dtype, stack) == "xla"
    with targeting("gpu"):
        assert what_runs(64, stack.dtype, stack) == "gpu"
        for rows, shape, dtype, words in (
            (32, (5, 128, 192), "bfloat16", r"blocks of 32 rows; expected one of \(64, 128\)"),
            (64, (5, 128, 192), "float32", "expected one dtype of 16 bits"),
            (64, (5, 100, 192), "bfloat16", "matrices of 100 × 192; expected multiples of 64 and 64"),
        ):
            other = jax.ShapeDtypeStruct(shape, dtype)
            assert what_runs(rows, other.dtype, other) == "xla"
            with pytest.raises(KernelUnavailableError, match=words):
                what_runs(rows, other.dtype, other, "gpu")
    with preferring("gpu"):  # but this is no GPU
        assert what_runs(64, stack.dtype, stack) == "xla"
    with pytest.raises(KernelUnavailableError, match="the platform is 'cpu'"):
        what_runs(64, stack.dtype, stack, "gpu")


def test_blocks_that_do_not_fit_are_refused(unchecked):
    x, stack = drawn()
    which, used = placed([1, 3, 1], jnp.int32), jnp.int32(BLOCKS)
    for rows, numbers, words in (
        (x[:-1], which, "191 rows in 3 blocks"),
        (x[:, :64], which, "rows of 64; expected 128"),
        (x.astype(jnp.float32), which, "rows of float32; expected bfloat16"),
    ):
        with pytest.raises(KernelError, match=words):
            block_product(rows, stack, numbers, used)
