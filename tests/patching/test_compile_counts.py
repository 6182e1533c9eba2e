"""Moving a chunk, another chunk, another patch, another length: nothing compiles again."""

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of


@pytest.mark.parametrize("name", ["gqa", "mla", "interleaved"])
def test_forming_and_applying_compile_once(name: str):
    """One program each for every chunk, length of its bucket, antecedent and place."""
    layout = LAYOUTS[name]
    counts = []
    for seed, length in ((0, 24), (1, 24), (2, 19)):
        chunk = chunk_of(name, seed=seed, length=length)
        for antecedent in (("A",), ("A", "C")):
            conditioned = conditioned_of(chunk, seed=seed + len(antecedent))
            last = seed + (5 if layout.rope.axes is None else np.array([1, 2, 3]))
            with compilations() as compiled:
                patch = kvp.form_patch(chunk, conditioned, 4, antecedent, key=jax.random.key(seed))
                for start in (seed, 7 + seed, np.int32(60 + seed), last):
                    kvp.apply_patch(chunk, patch, start, antecedent)
            counts.append((compiled.count("jit(factorise_deficit)"), compiled.count("jit(apply)"), len(compiled)))
    assert max(form for form, _, _ in counts) <= 1
    assert max(apply for _, apply, _ in counts) <= 1
    assert [total for _, _, total in counts[1:]] == [0] * 5


def test_orbit_and_update_compile_once():
    totals = []
    for seed in range(2):
        chunk = chunk_of("gqa", seed=seed)
        orders = [conditioned_of(chunk, seed=ordering) for ordering in range(3)]
        own, other = conditioned_of(chunk), conditioned_of(chunk, seed=3)
        with compilations() as compiled:
            acc = None
            for conditioned in orders:
                acc = kvp.accumulate(acc, conditioned, chunk, ("A", "C"))
            patch = kvp.form_patch(chunk, own, 4, ("A",))
            correction = kvp.correction_patch(chunk, patch, other, 4, ("C",))
            kvp.update_patch(patch, correction)
        totals.append(compiled)
    assert totals[0].count("jit(accumulate)") <= 1  # of three orders
    assert not totals[1]
