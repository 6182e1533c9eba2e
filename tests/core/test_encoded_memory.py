"""Placing an encoded chunk reads about a third of the bytes, and unpacks one layer at a time, on every platform."""
# pyright: reportOptionalMemberAccess=false

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.core import encode_kv, ops, quantised
from tests.shared.ahead_of_time import without_the_compilation_cache  # noqa: F401

LAYOUT = kvp.KVLayout.gqa(28, 4, 128, kvp.Rope(1e6, 128))
TOKENS, RANK = 1024, 32


def test_no_layer_but_one_is_unpacked_at_a_time():
    rng = np.random.default_rng(0)
    layout = kvp.KVLayout.gqa(16, 4, 64, kvp.Rope(1e4, 64))
    kv = {name: jnp.asarray(rng.normal(size=(16, 128, 4, 64)), jnp.bfloat16) for name in "kv"}
    chunk = kvp.Chunk(kv, np.arange(128, dtype=np.int32), 128, 128, "c", layout, "tiny")
    packed = kvp.encode_chunk(chunk, "k4v4")
    compiled = ops.jitted_apply.lower(layout, dict(packed.kv), {}, chunk.local, jnp.int32(3)).compile()
    memory = compiled.memory_analysis()
    layer = 128 * 4 * 64 * 4
    assert memory.temp_size_in_bytes <= 2 * layer
    assert memory.argument_size_in_bytes <= 0.36 * chunk.nbytes


def arguments_of(word: str | None) -> tuple:
    """Shapes of what `ops.apply` takes: KV in 16 bits or encoded, and factors of rank 32 in 16 or 4 bits."""
    kv = {name: jax.ShapeDtypeStruct((28, TOKENS, 4, 128), jnp.bfloat16) for name in LAYOUT.names}
    factors = {}
    for name in LAYOUT.names:
        u, v = (28, TOKENS, RANK), (28, RANK, 512)
        factors[name] = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (u, v))
    if word is not None:
        encoding = kvp.core.KVEncoding.of(word)
        kv = jax.eval_shape(lambda kv: encode_kv(LAYOUT, kv, encoding), kv)
        factors = jax.eval_shape(
            lambda factors: {
                name: (quantised(u, "int4", -2), quantised(v, "int4", -1)) for name, (u, v) in factors.items()
            },
            factors,
        )
    return kv, factors, jax.ShapeDtypeStruct((TOKENS,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.device
@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "H200",
            marks=pytest.mark.skipif(find_spec("jax_cuda13_plugin") is None, reason="jax_cuda13_plugin is missing"),
        ),
        pytest.param("v5e", marks=pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is missing")),
    ],
)
def test_encoded_chunks_take_a_third_and_one_layer_is_unpacked(device):
    from evals.bench.ahead_of_time import compile_for

    kind = "NVIDIA H200" if device == "H200" else "v5e:2x2"
    found = {}
    for word in (None, "k4v4"):
        compiled = compile_for(kind, functools.partial(ops.apply, LAYOUT), arguments_of(word))
        memory = compiled.memory_analysis()
        found[word] = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    layer = TOKENS * 512 * 4 * 2
    # Every argument is read once.
    assert found["k4v4"][0] <= 0.4 * found[None][0]
    # One layer of both channels in float32, its product with the factors, and the factors of all layers.
    assert found["k4v4"][1] <= 4 * layer + 2 * 28 * (TOKENS + 512) * RANK * 4 * 2
