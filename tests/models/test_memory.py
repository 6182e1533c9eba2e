"""Memory of real sizes on CPUs, by the compiler's own analysis: bounded, and linear in the tokens."""

import itertools

import pytest

from tests.models.compiled_memory import (
    GIB,
    NATIVE,
    TWELVE_MEGAPIXELS,
    compiled_here,
    paged_programs,
    pool_copies,
    prefill_program,
    temporaries,
    temporaries_here,
    tower_program,
)


@pytest.mark.nightly
def test_prefills_of_a_7b_model_grow_linearly():
    sizes = [temporaries_here(prefill_program(tokens)) for tokens in (16384, 32768, 65536)]
    assert sizes[0] < 3
    assert all(larger < 2.1 * smaller for smaller, larger in itertools.pairwise(sizes)), sizes


@pytest.mark.nightly
def test_chunks_bound_the_memory():
    found = temporaries_here(prefill_program(65536, 2048))
    assert found < 4
    # What is left to grow are the keys of one layer.
    assert temporaries_here(prefill_program(131072, 2048)) < 1.5 * found


@pytest.mark.nightly
@pytest.mark.parametrize("name", NATIVE)
def test_a_tower_over_12_megapixels(name):
    height, width = TWELVE_MEGAPIXELS
    small, large = (temporaries_here(tower_program(name, grid)) for grid in ((height // 4 * 2, width), (height, width)))
    assert large < 4
    assert large < 2.2 * small


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["prefill", "step"])
def test_a_pool_is_read_and_written_where_it_lies(name):
    """Temporaries are those of the window's keys and of one layer's weights, and do not grow with the pool."""
    compiled = {slots: compiled_here(paged_programs(4096, slots, layers=2)[name]) for slots in (65536, 131072)}
    for slots, program in compiled.items():
        assert pool_copies(program, slots) == []
    small, large = (temporaries(program) for program in compiled.values())
    assert large - small < 0.001
    if name == "step":
        analysis = compiled[65536].memory_analysis()
        assert analysis is not None
        assert analysis.alias_size_in_bytes >= 2 * 2 * 65536 * 4 * 128 * 2
        assert small < 0.5, small * GIB
