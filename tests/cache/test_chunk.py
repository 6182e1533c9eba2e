"""Chunks: what they refuse, and padding."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.errors import InputError, LayoutError, NotFiniteError, ShapeError
from tests.shared.operator_cases import LAYOUTS, chunk_of, kv_of


@pytest.mark.parametrize("name", LAYOUTS)
def test_pads_with_zeros(name: str):
    chunk = chunk_of(name, tokens=10)
    wide = chunk.pad(16)
    assert (wide.tokens, wide.length) == (16, 10)
    for channel in chunk.layout.names:
        np.testing.assert_array_equal(wide.kv[channel][:, :10], chunk.kv[channel])
        assert not wide.kv[channel][:, 10:].any()
    assert chunk.nbytes == 10 * chunk.layout.bytes_per_token(jnp.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv": kv_of(LAYOUTS["mla"], 24)}, LayoutError, "ckv"),
        ({"kv": kv_of(LAYOUTS["gqa"], 24, batch=(2, 2))}, ShapeError, "expected"),
        ({"kv": kv_of(LAYOUTS["gqa"], 24) | {"k": jnp.full((3, 24, 2, 16), jnp.nan)}}, NotFiniteError, "'k'"),
        ({"local": np.zeros(23, np.float32)}, InputError, "23"),
        ({"length": 25}, InputError, "25"),
        ({"id": ""}, InputError, "id"),
        ({"id": 3}, InputError, "chunk: id: got a int"),
        ({"span": -1}, InputError, "-1"),
        ({"span": 23}, InputError, "span 23; expected at least 24"),
        ({"local": np.arange(24) + 2**24, "span": 2**25}, InputError, r"below 2\*\*24"),
        ({"local": np.full(24, np.inf, np.float32)}, InputError, "positions from inf"),
        ({"local": np.full(24, np.nan, np.float32)}, InputError, "positions from nan"),
    ],
)
def test_chunks_of_invalid_parts_are_refused(unchecked, change, error, words):
    with pytest.raises(error, match=words):
        chunk_of("gqa", **change)


def test_refuses_to_shrink():
    with pytest.raises(ShapeError, match="at least 24"):
        chunk_of("gqa").pad(12)
