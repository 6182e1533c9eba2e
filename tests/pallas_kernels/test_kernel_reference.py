"""XLA's path is R · (x + u v), rounded once, and runs unless a result has a kernel right and faster, or it is asked."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
# pyright: reportCallIssue=false, reportOptionalMemberAccess=false

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import GQA, SHAPES, arrays, expected

from pallas_kernels import (
    Codes,
    KernelError,
    KernelUnavailableError,
    _dispatch,
    preferring,
    rotate_patch,
    splice,
    targeting,
)
from pallas_kernels._dispatch import Case, dispatch
from pallas_kernels.shapes import ChunkShape
from tests.shared.arrays import placed
from tests.shared.compilations import compilations

PAGES, PAGE_SIZE, TOTAL = 5, 4, 20


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_agrees_with_float64(shape: ChunkShape):
    given, length = arrays(shape), shape.tokens - 2
    exact = expected(shape, given)
    exact[:, length:] = 0
    result = rotate_patch(**given, layout=shape.layout, length=jnp.int32(length))
    np.testing.assert_allclose(result, exact, atol=2e-5)
    # A layer of a batch is the layer alone.
    alone = given | {name: placed(np.asarray(given[name])[-1]) for name in ("x", "u", "v") if name in given}
    result = np.asarray(rotate_patch(**alone, layout=shape.layout))
    np.testing.assert_allclose(result[:length], exact[-1, :length], atol=2e-5)


def test_rounds_once_to_the_dtype_of_x_and_takes_a_dense_correction():
    given = arrays(GQA)
    dense = (given["u"] @ given["v"]).reshape(given["x"].shape)
    factored = rotate_patch(**given)
    np.testing.assert_allclose(rotate_patch(given["x"], given["cos"], given["sin"], dense=dense), factored, atol=1e-5)
    stored = given["x"].astype(jnp.bfloat16)
    wide = rotate_patch(**(given | {"x": stored.astype(jnp.float32)}))
    result = rotate_patch(**(given | {"x": stored}))
    assert result.dtype == jnp.bfloat16
    assert (result == wide.astype(jnp.bfloat16)).all()


@pytest.mark.parametrize("layout", ["half", "pairs"])
def test_sharding_in_types_passes_through(layout: str):
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    given = {"cos": jnp.full((5, 4), 0.6), "sin": jnp.full((5, 4), 0.8), "layout": layout}
    x = placed(np.random.default_rng(0).standard_normal((2, 5, 4, 16)), jnp.float32)
    turned = jax.jit(lambda x: rotate_patch(x, **given))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P(None, None, "heads", None))
        result = turned(jax.device_put(x, sharding))
        assert result.sharding.is_equivalent_to(sharding, 4)
    np.testing.assert_array_equal(result, turned(x))


@pytest.mark.parametrize("by_token", [False, True])
def test_codes_of_four_bits_are_their_numbers_rounded_to_bfloat16(by_token: bool):
    rng, given = np.random.default_rng(0), arrays(ChunkShape("codes", 2, 11, 2, 16, 16, 3))
    codes = rng.integers(0, 16, (2, 11, 32))
    del given["x"]
    groups = (2, 11, 3) if by_token else (2, 3, 32)
    scale, least = (placed(rng.uniform(0.1, 1.0, groups), jnp.bfloat16) for _ in range(2))
    packed = placed(codes[..., :16] + 16 * codes[..., 16:], jnp.uint8)
    every = 12 if by_token else 4
    steps, lows = (np.repeat(np.asarray(part, np.float32), every, -1 if by_token else -2) for part in (scale, least))
    steps, lows = steps[:, :11, :32], lows[:, :11, :32]
    for low, numbers in ((least, codes * steps + lows), (None, (codes - 8) * steps)):
        x = placed(numbers.astype(np.float32).reshape(2, 11, 2, 16), jnp.bfloat16)
        result = rotate_patch(Codes(packed, scale, low, 2, every, by_token), **given)
        np.testing.assert_array_equal(result, rotate_patch(x, **given))


# --------------------------------------------------------------------------------------------------------------- splice


def pool_of(shape: ChunkShape, dtype=jnp.float32) -> jax.Array:
    return placed(np.random.default_rng(7).standard_normal(shape.pool(PAGES, PAGE_SIZE)), dtype)


def slots_of(shape: ChunkShape, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).permutation(TOTAL)[: shape.tokens].astype(np.int32)


def flat(pool) -> np.ndarray:
    """[..., P, O, K, H] → [..., P·O, K, H], as bits."""
    bits = np.asarray(pool)
    bits = bits.view(np.uint16 if bits.dtype.itemsize == 2 else np.uint32)
    return bits.reshape(*bits.shape[:-4], -1, *bits.shape[-2:])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [GQA, SHAPES[2], SHAPES[4]], ids=lambda shape: shape.name)
def test_named_slots_have_what_rotate_patch_makes_and_no_others_change(shape: ChunkShape, padded: bool):
    """Of a pool padded to whole lanes, the padding of named slots becomes zero."""
    chunk, slots, width = arrays(shape, jnp.bfloat16), slots_of(shape), shape.width
    pool, length = pool_of(shape, jnp.bfloat16), shape.tokens - 2
    if padded:
        pool = jnp.pad(pool, [(0, 0)] * 4 + [(0, -width % 128)], constant_values=jnp.nan)
    before, slots[length:] = flat(pool), -5
    turned = np.asarray(jax.jit(rotate_patch, static_argnames="layout")(**chunk, layout=shape.layout))
    written = flat(splice(pool, slots, **chunk, layout=shape.layout, length=length))
    others = np.setdiff1d(np.arange(TOTAL), slots[:length])
    assert (written[..., others, :, :] == before[..., others, :, :]).all()
    named = written[..., slots[:length], :, :]
    wide = lambda value: value.astype(np.float32)
    np.testing.assert_allclose(wide(named[..., :width].view(jnp.bfloat16)), wide(turned[:, :length]), rtol=2**-8)
    assert (named[..., width:] == 0).all()


def test_slots_may_be_traced_and_out_of_range_and_padding_is_written_nowhere():
    chunk, slots = arrays(GQA), slots_of(GQA)
    written = flat(splice(pool_of(GQA), slots_of(GQA), **chunk))
    slots[[1, 3]] = -1, TOTAL
    for length in (0, 7, 12):
        result = flat(jax.jit(splice)(pool_of(GQA), slots, **chunk, length=jnp.int32(length)))
        named = np.setdiff1d(slots[:length], [-1, TOTAL])
        others = np.setdiff1d(np.arange(TOTAL), named)
        assert (result[..., others, :, :] == flat(pool_of(GQA))[..., others, :, :]).all()
        assert (result[..., named, :, :] == written[..., named, :, :]).all()


def test_the_pool_is_written_in_place_and_moving_a_chunk_compiles_nothing():
    again, slots, counts = pool_of(GQA), slots_of(GQA), []
    donating = jax.jit(lambda pool, chunk: splice(pool, slots, **chunk), donate_argnums=0)
    memory = donating.lower(again, arrays(GQA)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == again.nbytes
    for seed in range(3):
        operands = pool_of(GQA), slots_of(GQA, seed)
        with compilations() as compiled:
            splice(*operands, **arrays(GQA), length=np.int32(5 + seed))
        assert operands[0].is_deleted()
        counts.append(len(compiled))
    assert counts[1:] == [0, 0]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "quarter"}, "'quarter'"),
        ({"sin": None}, "one of a pair alone"),
        ({"cos": jnp.zeros((5, 8)), "sin": jnp.zeros((5, 8))}, r"cos \(5, 8\)"),
        ({"dense": jnp.zeros((2, 12, 2, 15))}, r"dense \(2, 12, 2, 15\)"),
        ({"x": jnp.zeros((2, 12, 2, 16), jnp.int8)}, "x of dtype int8"),
        ({"out_dtype": jnp.int8}, "out_dtype int8"),
    ],
)
def test_rotate_patch_refuses_what_does_not_fit(unchecked, change, words):
    with pytest.raises(KernelError, match=f"rotate_patch: got .*{words}"):
        rotate_patch(**(arrays(GQA) | change))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"slots": np.arange(12, dtype=np.int32) % 11}, KernelError, "slot 0 named twice"),
        ({"slots": np.arange(12, dtype=np.int32) + 9}, KernelError, "slot 20; expected 0 to 19"),
        ({"slots": np.arange(12, dtype=np.float32)}, KernelError, "slots of dtype float32"),
        ({"slots": np.arange(11, dtype=np.int32)}, KernelError, r"slots of shape \(11,\)"),
        ({"x": jnp.zeros((2, 12, 2, 16), jnp.bfloat16)}, KernelError, "dtype bfloat16"),
        ({"u": jnp.zeros((2, 12, 33)), "v": jnp.zeros((2, 33, 32))}, KernelError, "rank 33; expected at most"),
        ({"pool": jnp.zeros(GQA.pool(PAGES, PAGE_SIZE, 64))}, KernelError, r"expected .* 16\], or 128 wide"),
        ({"implementation": "cuda"}, KernelUnavailableError, "'cuda'"),
    ],
)
def test_splice_refuses_before_it_writes(unchecked, change, error, words):
    pool = pool_of(GQA)
    before = flat(pool).copy()
    with pytest.raises(error, match=words):
        splice(**({"pool": pool, "slots": slots_of(GQA)} | arrays(GQA) | change))
    assert not pool.is_deleted()
    assert (flat(pool) == before).all()


# ------------------------------------------------------------------------------------------------------------- dispatch


CASE = Case("op", patched=True)


def runs(implementation=None, refuses=()) -> str:
    """What runs of an operation that has a kernel for TPUs, where none of `refuses` takes the call."""

    def run(name: str) -> str:
        if name in refuses:
            raise NotImplementedError("too wide")
        return name

    return dispatch(CASE, implementation, run, kernels=("tpu",))


@pytest.fixture
def results(monkeypatch, tmp_path):
    """The folder of results, as on a TPU of which nothing was measured."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU test")])
    monkeypatch.setattr(_dispatch, "RESULTS", tmp_path)
    _dispatch.measured.cache_clear()
    yield tmp_path
    _dispatch.measured.cache_clear()


def write(folder, day: str, device: str, kernels: dict[str, float]) -> None:
    _dispatch.measured.cache_clear()
    rows = {"environment": {"device": device}, "kernels": kernels}
    (folder / f"{device.replace(' ', '-')}-{day}.json").write_text(json.dumps(rows))


def test_a_kernel_is_taken_where_a_result_has_it_right_and_faster(results, monkeypatch):
    assert runs() == "xla"
    write(results, "2026-01-02", "TPU test", {str(CASE): 1.3, str(Case("op")): 0.0})
    assert runs() == "tpu"
    assert runs(refuses=("tpu",)) == "xla"
    write(results, "2026-01-03", "TPU other", {str(CASE): 0.0})
    assert runs() == "tpu"
    # The latest counts; 0 is a kernel that was wrong.
    write(results, "2026-01-04", "TPU test", {str(CASE): 0.0})
    assert runs() == "xla"
    write(results, "2026-01-05", "TPU test", {str(CASE): 1.0})
    assert runs() == "xla"
    write(results, "2026-01-06", "TPU test", {str(CASE): 1.01})
    assert runs() == "tpu"
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert runs() == "xla"


def test_the_platform_that_is_targeted_decides_where_nothing_is_asked_for():
    assert runs() == "xla"
    with targeting("tpu"):
        assert runs() == "tpu"
        assert runs(refuses=("tpu",)) == "xla"
        assert runs(("gpu", "tpu", "xla")) == "tpu"
        assert runs(("tpu", "xla"), refuses=("tpu",)) == "xla"
        with pytest.raises(KernelUnavailableError, match=r"op: .*'gpu': the operation has no.*'tpu': too wide"):
            runs(("gpu", "tpu"), refuses=("tpu",))
    with targeting("gpu"):
        assert runs() == "xla"
    with pytest.raises(KernelUnavailableError, match="'tpu': the platform is 'cpu'"):
        runs("tpu")
    with pytest.raises(KernelUnavailableError, match="'cuda': unknown; expected one of"):
        runs("cuda")


def test_preferring_says_what_none_means_and_no_more(results):
    with preferring("tpu"):
        assert runs() == "tpu"
        assert runs(refuses=("tpu",)) == "xla"
        assert runs("xla") == "xla"
        with preferring():
            assert runs() == "xla"
    assert runs() == "xla"
    with preferring("gpu"):
        assert runs() == "xla"
    with pytest.raises(KernelUnavailableError, match="'cuda'; expected one of"), preferring("cuda"):
        pass
