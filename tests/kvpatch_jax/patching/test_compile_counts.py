"""Moving a chunk, another chunk, another patch, another length: nothing compiles again."""
# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

import jax
import numpy as np
from operator_cases import LAYOUTS, chunk_of, conditioned_of

import kvpatch_jax as kvp
from kvpatch_jax import ops


def test_forming_and_applying_compile_once():
    for name in ("gqa", "mla", "interleaved"):
        layout = LAYOUTS[name]
        ops.jitted_form.clear_cache()
        ops.jitted_apply.clear_cache()
        for seed, length in ((0, 24), (1, 24), (2, 19)):
            chunk = chunk_of(name, seed=seed, length=length)
            for antecedent in (("A",), ("A", "C")):
                conditioned = conditioned_of(chunk, seed=seed + len(antecedent))
                patch = kvp.form_patch(chunk, conditioned, 4, antecedent, key=jax.random.key(seed))
                for start in (0, 7, np.int32(60), 5 if layout.rope.axes is None else np.array([1, 2, 3])):
                    kvp.apply_patch(kvp.Placed(chunk, patch, start, antecedent))
        assert ops.jitted_form._cache_size() == 1
        assert ops.jitted_apply._cache_size() == 1


def test_orbit_and_update_compile_once():
    ops.accumulate.clear_cache()
    ops.jitted_merge.clear_cache()
    for seed in range(2):
        chunk = chunk_of("gqa", seed=seed)
        acc = None
        for ordering in range(3):
            acc = kvp.accumulate(acc, conditioned_of(chunk, seed=ordering), chunk, ("A", "C"))
        patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))
        correction = kvp.correction_patch(chunk, patch, conditioned_of(chunk, seed=3), 4, ("C",))
        kvp.update_patch(patch, correction)
    assert ops.accumulate._cache_size() == 1
    assert ops.jitted_merge._cache_size() == 1
