"""Compiled for TPUs, pages split over chips stay where they lie; only what is read goes between chips.

Needs the extra `kernels`, not a TPU.
"""

import importlib.util
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split_pages import CASES, bytes_between

from evals.bench.ahead_of_time import ENVIRONMENT
from kvpatch_jax.pool import page_format
from tests.shared.ahead_of_time import without_the_compilation_cache  # noqa: F401

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
PAGES, PAGE_SIZE, TOKENS, RANK, LAYERS = 2048, 16, 256, 16, 2


def programs(name: str):
    """What splices, turns and reads pages of a case, compiled for chips of a v5e; and bytes of the pages on each."""
    os.environ.update(ENVIRONMENT)
    from jax.experimental import topologies

    case = CASES[name]
    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[: case.devices]
    mesh = jax.sharding.Mesh(np.array(chips).reshape(1, -1), ("data", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data", None, "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    given = lambda dtype, *shape, on=whole: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=on)

    describe = page_format.JoinedLayout if case.width == 64 else page_format.InterleavedLayout
    split = page_format.Split(case.devices, sharding, "model")
    form = describe.of(case.layout(), case.packing, split)
    pages = tuple(given(case.dtype, PAGES, PAGE_SIZE, *form.row, on=sharding) for _ in range(LAYERS))
    by_heads = split.over(None, None, None if case.heads % case.devices else "model")
    kv = {name: given(case.dtype, LAYERS, TOKENS, case.heads, case.width, on=by_heads) for name in "kv"}
    left, right = (LAYERS, TOKENS, RANK), (LAYERS, RANK, case.heads * case.width)
    factors = {name: (given(case.dtype, *left), given(case.dtype, *right)) for name in "kv"}
    slots, scalar, local = given("int32", TOKENS), given("int32"), given("float32", TOKENS)
    lowered = {
        "splice": page_format.jitted_splice.lower(form, pages, slots, scalar, kv, factors, local, scalar),
        "turn": page_format.jitted_rotate.lower(form, pages, slots, slots, scalar),
        "read": page_format.jitted_read.lower(form, pages, slots),
    }
    pool = LAYERS * PAGES * PAGE_SIZE * math.prod(form.row) * jnp.dtype(case.dtype).itemsize // case.devices
    return {name: program.compile() for name, program in lowered.items()}, pool


@pytest.mark.parametrize("name", CASES)
def test_on_chips_pages_stay_where_they_lie(name):
    compiled, pool = programs(name)
    for what, program in compiled.items():
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None
        assert text is not None
        between = bytes_between(text)
        assert memory.temp_size_in_bytes < pool / 64
        assert memory.alias_size_in_bytes == (0 if what == "read" else pool)
        assert max(between, default=0) < pool / 32
        assert bool(between) == (what == "read")
