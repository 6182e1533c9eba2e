"""Bases in place of the canonical: their numbers, their names, and that patches of one are refused on another."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Member
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.patching import mean_base
from kvpatch_jax.store import ChunkStore
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of

CHUNK = chunk_of("gqa", length=20, content="what it shows")
KVS = [conditioned_of(CHUNK, seed=seed) for seed in range(3)]
BEHIND = [[Member(name, f"content {name}")] for name in "XYZ"]


def test_the_mean_is_that_of_all_antecedents_and_has_no_padding():
    base = mean_base(CHUNK, KVS, BEHIND)
    for name, value in base.kv.items():
        wanted = np.mean([np.asarray(kv[name], np.float64) for kv in KVS], axis=0)
        np.testing.assert_allclose(value[:, :20], wanted[:, :20], atol=1e-6)
        assert not np.asarray(value)[:, 20:].any()
    assert (base.id, base.content, base.length, base.places) == (CHUNK.id, CHUNK.content, 20, CHUNK.places)


def test_names_are_of_the_antecedents_in_any_order():
    base = mean_base(CHUNK, KVS, BEHIND)
    assert mean_base(CHUNK, KVS[::-1], BEHIND[::-1]).lead == base.lead
    behind_a_lead = dataclasses.replace(CHUNK, lead="0" * 32)
    others = [
        mean_base(CHUNK, KVS[:2], BEHIND[:2]),
        mean_base(CHUNK, [*KVS, KVS[0]], [*BEHIND, BEHIND[0]]),
        mean_base(CHUNK, KVS, [["X"], *BEHIND[1:]]),
        mean_base(CHUNK, KVS, [[Member("X", "another")], *BEHIND[1:]]),
        mean_base(behind_a_lead, KVS, BEHIND),
        mean_base(CHUNK, KVS[:1], BEHIND[:1]),
    ]
    leads = [other.lead for other in [base, *others]]
    assert len(set(leads)) == len(leads)
    assert all(lead is not None and len(lead) == 32 for lead in leads)
    # An id without a content does not say what was read.
    first, second = (mean_base(CHUNK, [kv], [["X"]]) for kv in KVS[:2])
    assert first.lead != second.lead


def test_a_patch_of_one_base_is_refused_on_another():
    bases = [CHUNK, mean_base(CHUNK, KVS[1:], BEHIND[1:]), mean_base(CHUNK, KVS[:1], BEHIND[:1])]
    wanted = kvp.to_engine(CHUNK.layout, KVS[0], CHUNK.local, 9)
    for own in bases:
        patch = kvp.form_patch(own, KVS[0], 24, BEHIND[0], method="exact")
        found = kvp.apply_patch(own, patch, 9, BEHIND[0])
        np.testing.assert_allclose(found["k"][:, :20], wanted["k"][:, :20], atol=1e-4)
        for other in bases:
            if other is not own:
                with pytest.raises(PatchMismatchError, match="lead"):
                    kvp.Placed(other, patch, 9, BEHIND[0])


@pytest.mark.nightly
def test_a_base_is_encoded_and_patched_within_a_budget():
    base = kvp.encode_chunk(mean_base(CHUNK, KVS[1:], BEHIND[1:]), "k6v6")
    patch = kvp.form_patch(base, KVS[0], kvp.patching.ByteBudget(3000), BEHIND[0], dtype="int4")
    assert (patch.metadata.chunk.lead, patch.metadata.chunk.encoding) == (base.lead, "k6v6g32")
    found = dict(kvp.apply_patch(base, patch, 0, BEHIND[0]))
    blind = dict(kvp.apply_patch(base, None, 0, BEHIND[0]))
    wanted = kvp.to_engine(CHUNK.layout, KVS[0], CHUNK.local, 0)
    for name in wanted:
        errors = [np.square(np.asarray(own[name] - wanted[name])[:, :20]).sum() for own in (found, blind)]
        assert errors[0] < errors[1] / 3


def test_bases_of_a_chunk_lie_in_a_store_side_by_side(tmp_path):
    bases = [mean_base(CHUNK, KVS, BEHIND), mean_base(CHUNK, KVS[:1], BEHIND[:1])]
    with ChunkStore(tmp_path, secret=b"0" * 32) as store:
        for base in bases:
            store.put(base)
        for base in bases:
            found = store.get(CHUNK.id, "tiny", lead=base.lead)
            np.testing.assert_array_equal(found.kv["k"], base.kv["k"])
        assert store.get(CHUNK.id, "tiny") is None


def test_a_batch_of_chunks_has_a_batch_of_bases():
    layout = LAYOUTS["gqa"]
    fields = {field.name: getattr(CHUNK, field.name) for field in dataclasses.fields(kvp.Chunk)}
    batch = kvp.Chunk(**fields | {"kv": kv_of(layout, 24, batch=(2,))})
    kvs = [kv_of(layout, 24, seed=seed, batch=(2,)) for seed in (3, 4)]
    base = mean_base(batch, kvs, [["X"], ["Y"]])
    wanted = (np.asarray(kvs[0]["v"]) + np.asarray(kvs[1]["v"])) / 2
    np.testing.assert_allclose(base.kv["v"][:, :, :20], wanted[:, :, :20], atol=1e-6)


def test_what_makes_no_base_is_refused(unchecked):
    packed = kvp.encode_chunk(CHUNK, "k4v4")
    for error, call in (
        (InputError, lambda: mean_base(CHUNK, [], [])),
        (InputError, lambda: mean_base(CHUNK, KVS, BEHIND[:2])),
        (InputError, lambda: mean_base("chunk", KVS, BEHIND)),
        (InputError, lambda: mean_base(packed, KVS, BEHIND)),
        (ShapeError, lambda: mean_base(CHUNK, [{name: jnp.zeros((3, 2, 2, 16)) for name in "kv"}], BEHIND[:1])),
    ):
        with pytest.raises(error, match="got"):
            call()
