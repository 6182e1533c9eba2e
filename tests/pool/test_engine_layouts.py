"""Pages hold a chunk bit for bit where tpu-inference's kernels store it, on one device or split over several.

Pages are written in place, and come back. NumPy says where, written from what the kernels store; no engine is imported.
Of `merge_kv` (ragged_paged_attention/v3/kernel.py, kernel_hd64.py) and `update_kv_cache` (mla): heads of 128 and more
lie K0 V0 K1 V1 …, each padded to 128 lanes; heads of 64 as k then v in one row; latents as the latent then the rope
key, each padded to 128 lanes, `packing` tokens on an axis of their part. Heads are filled up to the packing with zeros.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pool_cases import bits, same

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, KernelError, LayoutError, PoolError, ShapeError
from tests.shared.arrays import placed
from tests.shared.operator_cases import kv_of, local_of

ROOT = Path(__file__).parents[2]
PAGES = 3
FORMATS = {"interleaved": kvp.pool.RAGGED, "joined": kvp.pool.JOINED, "latent": kvp.pool.LATENT}


class EngineLayoutCase(NamedTuple):
    kind: str
    layout: kvp.KVLayout
    page_size: int
    packing: int
    dtype: jax.typing.DTypeLike = jnp.bfloat16

    @property
    def total(self):
        return PAGES * self.page_size

    @property
    def format(self):
        return FORMATS[self.kind]


def gqa(heads, width, **rope):
    return kvp.KVLayout.gqa(2, heads, width, kvp.Rope(1e4, width, **rope))


CASES = {
    "width 128": EngineLayoutCase("interleaved", gqa(2, 128), 4, 2),
    "width 80, heads padded": EngineLayoutCase("interleaved", gqa(3, 80), 4, 4),
    "width 64, heads padded": EngineLayoutCase("joined", gqa(3, 64, sections=(8, 12, 12)), 4, 2),
    "width 64, float32": EngineLayoutCase("joined", gqa(2, 64), 4, 1, jnp.float32),
    "latent": EngineLayoutCase("latent", kvp.KVLayout.mla(2, rope=kvp.Rope(1e4, 64)), 32, 32),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def numpy_of(value):
    array = np.asarray(value)
    return array.astype(ml_dtypes.bfloat16) if array.dtype == jnp.bfloat16 else array


def oracle_row(case, first, second):
    """One token's two channels, [K, H] each, as the engine's kernel would store it, flat."""
    lanes = lambda vector: np.concatenate([vector, np.zeros(-len(vector) % 128, vector.dtype)])
    if case.kind == "latent":
        return np.concatenate([lanes(first[0]), lanes(second[0])])
    if case.kind == "joined":
        vectors = [np.concatenate([k, v]) for k, v in zip(first, second, strict=True)]
    else:
        vectors = [lanes(vector) for pair in zip(first, second, strict=True) for vector in pair]
    while len(vectors) % case.packing:
        vectors.append(np.zeros_like(vectors[0]))
    return np.concatenate(vectors)


def oracle(case, kv, slots=None, pages=None):
    """KV {channel: [L, T, K, H]} at slots of [L, slots, numbers]."""
    first, second = (numpy_of(kv[name]) for name in case.layout.names)
    slots = range(first.shape[1]) if slots is None else slots
    rows = np.stack(
        [[oracle_row(case, k, v) for k, v in zip(*part, strict=True)] for part in zip(first, second, strict=True)]
    )
    if pages is None:
        pages = np.zeros((len(first), case.total, rows.shape[-1]), rows.dtype)
    pages[:, list(slots)] = rows
    return pages


def pool_of(case, seed=3):
    kv = kv_of(case.layout, case.total, seed, dtype=case.dtype)
    paged = lambda value: np.asarray(value).reshape(len(value), PAGES, case.page_size, *value.shape[2:])
    return kv, {name: placed(paged(value)) for name, value in kv.items()}


def pages_of(case, kv):
    """Pages [L, P, …] of the shape that the engine allocates, filled by the oracle."""
    flat, layout = oracle(case, kv), case.layout
    heads, width = layout.channels[0].heads, layout.channels[0].width
    if case.kind == "latent":
        shape = (case.page_size // case.packing, case.packing, flat.shape[-1])
    elif case.kind == "joined":
        shape = (case.page_size, -(-heads // case.packing), case.packing, 2 * width)
    else:
        shape = (case.page_size, -(-2 * heads // case.packing), case.packing, -(-width // 128) * 128)
    return flat.reshape(layout.layers, PAGES, *shape)


def chunk_of(case, tokens=7, length=6):
    layout = case.layout
    kv = kv_of(layout, tokens, 1, dtype=case.dtype)
    return kvp.Chunk(kv, local_of(layout, tokens), tokens, length, "B", layout, "tiny", content="given")


@cases
def test_pages_are_those_of_the_engine_and_come_back_with_every_bit(case):
    kv, pool = pool_of(case)
    expected = pages_of(case, kv)
    wide = lambda value: np.pad(numpy_of(value), [(0, 0)] * 4 + [(0, -value.shape[-1] % 128)])
    padded = {name: placed(wide(value)) for name, value in pool.items()}
    dirty = {name: placed(np.where(wide(value) == 0, np.nan, wide(value)), case.dtype) for name, value in pool.items()}
    if case.kind == "interleaved":  # with no packed axis
        heads = case.format.to_pages(case.layout, pool)
        assert heads[0].shape == (PAGES, case.page_size, 2 * case.layout.channel("k").heads, expected.shape[-1])
        assert same(case.format.from_pages(case.layout, heads), pool)
    for given in (pool, padded, dirty):  # what lies in the padding reaches no engine
        pages = case.format.to_pages(case.layout, given, case.packing)
        assert (bits(np.stack(pages)) == bits(expected)).all()
    assert same(case.format.from_pages(case.layout, pages), pool)


@pytest.mark.parametrize("case", [*CASES.values()][1:], ids=[*CASES][1:])  # width 80 has all that width 128 has
def test_chunks_are_spliced_turned_and_read_in_pages_of_every_layer(case):
    """Slots that are not named keep their bits, tokens before `first` are not written, padding becomes zero."""
    kv, _ = pool_of(case)
    chunk, layout = chunk_of(case), case.layout
    slots = np.random.default_rng(5).permutation(case.total)[: chunk.tokens].astype(np.int32)
    engine = jax.device_get(kvp.to_engine(layout, chunk.kv, chunk.local, 5))
    for first in (0, 2):
        pages = [placed(layer, case.dtype) for layer in pages_of(case, kv)]
        part = slots.copy()
        part[:first] = part[chunk.length :] = -1
        result = case.format.splice(pages, part, kvp.Placed(chunk, None, 5), first)
        assert all(page.is_deleted() for page in pages)
        written = {name: value[:, first : chunk.length] for name, value in engine.items()}
        expected = oracle(case, written, slots[first : chunk.length], oracle(case, kv))
        flat = np.stack(result).reshape(expected.shape)
        others = np.setdiff1d(np.arange(case.total), slots[first : chunk.length])
        assert (bits(flat[:, others]) == bits(expected[:, others])).all()
        bar = 1e-6 if case.dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(np.float32(flat), np.float32(expected), rtol=bar, atol=bar)

    for name, value in case.format.read(layout, result, slots[: chunk.length]).items():
        part = np.float32(engine[name])[:, 2 : chunk.length]
        np.testing.assert_allclose(np.float32(value)[:, 2:], part, rtol=bar, atol=bar)
    turned = case.format.rotate(layout, result, slots[2 : chunk.length], 3)
    moved = kvp.to_engine(layout, chunk.kv, chunk.local, 8)
    read = case.format.read(layout, turned, slots[2 : chunk.length])
    for name, value in read.items():
        part = np.float32(moved[name])[:, 2 : chunk.length]
        np.testing.assert_allclose(np.float32(value), part, rtol=3 * bar, atol=3 * bar)


def test_refuses_before_it_writes(unchecked):
    case, latent = CASES["width 64, heads padded"], CASES["latent"]
    kv, pool = pool_of(case)
    pages, chunk = [placed(layer, case.dtype) for layer in pages_of(case, kv)], chunk_of(case)
    cut = lambda *index: [layer[(..., *index)] for layer in pages]
    rows, gone = list(jnp.zeros((2, PAGES, 1, 32, 640))), [jnp.array(page) for page in pages]
    gone[0].delete()
    slots = np.arange(chunk.tokens, dtype=np.int32)
    splice = lambda pages=pages, slots=slots, **more: kvp.pool.JOINED.splice(pages, slots, kvp.Placed(chunk), **more)
    for call, error, words in (
        (lambda: splice(cut(slice(1), slice(None), slice(None))), ShapeError, r"expected rows of \(2, 2, 128\)"),
        (lambda: splice(pages[1:]), ShapeError, "2, all alike"),
        (lambda: splice([page.astype(jnp.float16) for page in pages]), ShapeError, "float16"),
        (lambda: splice(gone), PoolError, "donated"),
        (lambda: splice(slots=slots + 9), KernelError, "expected 0 to 11"),
        (lambda: splice(slots=slots * 0), KernelError, "twice"),
        (lambda: splice(slots=slots[1:]), ShapeError, "one per token"),
        (lambda: splice(first=6), InputError, "0 to 5"),
        (lambda: kvp.pool.RAGGED.splice(pages, slots, kvp.Placed(chunk)), ShapeError, r"rows of \(3, 2, 128\)"),
        (lambda: kvp.pool.JOINED.read(latent.layout, pages, slots), LayoutError, "'ckv'"),
        (lambda: kvp.pool.JOINED.to_pages(case.layout, pool, 3), ShapeError, "packing 3"),
        (lambda: kvp.pool.LATENT.read(latent.layout, [row[..., 1:] for row in rows], slots), ShapeError, "640"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not any(layer.is_deleted() for layer in pages)


@pytest.mark.parametrize(
    "names", [("joined, each filled up, encoded",), pytest.param((), id="all", marks=pytest.mark.nightly)]
)
def test_pages_over_devices_are_written_as_on_one(names):
    """The checks of `split_pages.py`, with four devices: only what is read goes between them.

    LLVM tries less hard, on both sides alike.
    """
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, str(Path(__file__).with_name("split_pages.py")), *names]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
