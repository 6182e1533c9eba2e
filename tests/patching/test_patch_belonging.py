"""A patch of another chunk, base, layout, backbone or antecedent raises; `allow_stale` excuses the antecedent alone."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member, check_factors, identity, patch_digest
from kvpatch_jax.core import RaggedFactors
from kvpatch_jax.errors import InputError, LayoutError, PatchMismatchError, ShapeError, StalePatchError
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of, kv_of

A = ("A1", "A2")
ONE, TWO = Member("A1", "one"), Member("A2", "two")
BARE, OTHER = identity("A1", "bare"), identity("A1", "patch 3fa")


def page(**more) -> kvp.Chunk:
    return chunk_of("gqa", **{"id": "page", **more})


def form(chunk: kvp.Chunk, antecedent: Any = A, seed: int = 9, **more) -> kvp.Patch:
    return kvp.form_patch(chunk, conditioned_of(chunk, seed=seed), 4, antecedent, method="exact", **more)


def twice_as_far(chunk: kvp.Chunk) -> kvp.Chunk:
    return dataclasses.replace(chunk, local=np.asarray(chunk.local) * 2, span=2 * chunk.span)


@pytest.fixture(scope="module")
def chunk() -> kvp.Chunk:
    return page()


@pytest.fixture(scope="module")
def patch(chunk) -> kvp.Patch:
    return form(chunk)


OTHERS = {
    "id 'page'; expected 'other'": lambda: page(id="other"),
    "backbone 'tiny'; expected 'other'": lambda: page(backbone="other"),
    "layout": lambda: chunk_of("blocked", id="page"),
    "content": lambda: page(seed=1),
    "local positions": lambda: twice_as_far(page()),
    "lead None; expected 'a lead'": lambda: page(lead="a lead"),
    "encoding None; expected 'k4v4g32'": lambda: kvp.encode_chunk(page(), "k4v4"),
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_patch_serves_no_other_chunk(chunk, patch, words: str):
    """Nor does any other patch serve this one, whatever is allowed."""
    other = OTHERS[words]()
    for stale in (False, True):
        with pytest.raises(PatchMismatchError, match=words):
            kvp.apply_patch(other, patch, 3, A, allow_stale=stale)
    with pytest.raises(PatchMismatchError):
        kvp.apply_patch(chunk, form(other), 3, A, allow_stale=True)
    with pytest.raises(PatchMismatchError):
        kvp.correction_patch(other, patch, conditioned_of(other), 4, A)
    with pytest.raises(PatchMismatchError):
        kvp.accumulate(kvp.accumulate(None, conditioned_of(chunk), chunk, A), conditioned_of(other), other, A)
    # How angles are computed is no part of what is stored, nor are the numbers that are packed another encoding.
    floats = dataclasses.replace(chunk, layout=chunk.layout.with_angles("float32"))
    kvp.Placed(floats, patch, 3, A)
    packed = kvp.encode_chunk(page(), "k4v4")
    kvp.Placed(kvp.cache.decode_chunk(packed), form(packed), 3, A)


def test_what_is_unknown_of_a_chunk_differs_from_nothing(chunk, patch):
    for word in ("content", "places"):
        key = dataclasses.replace(patch.metadata.chunk, **{word: None})
        unknown = kvp.Patch(patch.factors, dataclasses.replace(patch.metadata, chunk=key))
        kvp.Placed(page(seed=1) if word == "content" else twice_as_far(chunk), unknown, 3, A)
    # Positions are equal whatever their dtype.
    kvp.Placed(dataclasses.replace(chunk, local=np.asarray(chunk.local).astype(np.int32)), patch, 3, A)


def test_a_base_is_the_one_that_the_patch_was_formed_of(chunk, patch):
    conditioned, target = conditioned_of(chunk, 2, 1), conditioned_of(chunk, 2, 2)
    removal = kvp.removal_patch(chunk, target, conditioned, 4, ("A2",), A)
    serve = lambda antecedent=("A2",), before=A, **more: kvp.apply_patch(
        chunk, removal, 3, antecedent, base=conditioned, base_antecedent=before, **more
    )
    serve()
    serve(("A9",), allow_stale=True)
    for before, stale in ((("A9",), False), (("A2",), True), ((), True)):
        with pytest.raises(StalePatchError, match="got a base conditioned on"):
            serve(("A2",), before, allow_stale=stale)
    for formed, options in ((removal, {}), (patch, {"base": chunk.kv})):
        with pytest.raises(PatchMismatchError, match=f"base {formed.metadata.base!r}; expected"):
            kvp.apply_patch(chunk, formed, 3, formed.metadata.antecedent, allow_stale=True, **options)
    correction = kvp.correction_patch(chunk, patch, target, 4, A)
    with pytest.raises(PatchMismatchError, match="base 'patched'; expected 'canonical'"):
        kvp.apply_patch(chunk, correction, 3, A)
    with pytest.raises(LayoutError, match="expected \\['k', 'v'\\]"):
        kvp.apply_patch(chunk, patch, 3, A, base=kv_of(LAYOUTS["mla"], 24))


def test_another_antecedent_is_stale_and_the_message_says_how(chunk):
    patch = form(chunk, [ONE, TWO])
    for accepted in (["A1", "A2"], [ONE, TWO], [ONE, "A2"], Antecedent((ONE, TWO)), iter(["A1", "A2"])):
        kvp.apply_patch(chunk, patch, 3, accepted)
    for words, antecedent in {
        r"the order \('A1', 'A2'\); expected \('A2', 'A1'\)": ["A2", "A1"],
        r"\('A1', 'A2'\); expected \('A1',\)": ["A1"],
        "got no antecedent": [],
        "'A2' with content 'two'; expected content 'three'": ["A1", Member("A2", "three")],
        f"'A2' with KV of a prefill there; expected {BARE}": ["A1", Member("A2", "two", BARE)],
    }.items():
        with pytest.raises(StalePatchError, match=words):
            kvp.apply_patch(chunk, patch, 3, antecedent)
        kvp.apply_patch(chunk, patch, 3, antecedent, allow_stale=True)


def test_a_patch_behind_approximate_kv_serves_behind_that_alone(chunk):
    """And what is made of the patch, which keeps its antecedent."""
    behind = Antecedent.of(Member("A1", "one", BARE))
    patch = form(chunk, behind)
    for derived in (patch, kvp.truncate(patch, 2), kvp.keep_layers(patch, (1, 2)), kvp.quantise(patch, "int8")):
        for antecedent in (["A1"], [Member("A1", None, OTHER)]):
            with pytest.raises(StalePatchError, match=f"'A1' with KV {BARE}; expected"):
                kvp.apply_patch(chunk, derived, 3, antecedent)
        kvp.Placed(chunk, derived, 3, [Member("A1", None, BARE)])
    correction = kvp.correction_patch(chunk, patch, conditioned_of(chunk, seed=2), 4, [Member("C", "three")])
    assert correction.metadata.base_antecedent == behind
    assert kvp.update_patch(patch, correction).metadata.antecedent == Antecedent.of(Member("C", "three"))
    base = conditioned_of(chunk, seed=1)
    removal = kvp.removal_patch(chunk, conditioned_of(chunk, seed=2), base, 4, ["B"], behind)
    with pytest.raises(StalePatchError, match=f"a base conditioned on 'A1' with KV {BARE}; expected"):
        kvp.apply_patch(chunk, removal, 0, ["B"], base=base, base_antecedent=["A1"], allow_stale=True)
    kvp.apply_patch(chunk, removal, 0, ["B"], base=base, base_antecedent=behind)


def test_one_start_per_chunk_and_not_one_per_layer(chunk, patch, unchecked):
    for served, start in ((None, (10, 500, 9000)), (patch, jnp.array([[10]]))):
        with pytest.raises(InputError, match=r"start of shape .*expected a scalar"):
            kvp.apply_patch(chunk, served, start, A)


def test_factors_fit_their_metadata(patch, unchecked):
    u, v = patch.factors["k"]
    dense = np.zeros((3, 24, 2, 16), np.float32)
    for factors, words in (((u[:1], v[:1]), r"expected \[3"), ((u[:, :1], v), "tokens"), (dense[..., :1], "16")):
        with pytest.raises(ShapeError, match=words):
            check_factors({**patch.factors, "k": factors}, patch.metadata)
    with pytest.raises(LayoutError, match="'q'"):
        check_factors({**patch.factors, "q": patch.factors["k"]}, patch.metadata)
    ragged = RaggedFactors(np.zeros((6, 24)), np.zeros((6, 32)), np.zeros((3, 4), np.int32))
    for value in ({"u": ragged.u[:5]}, {"rows": ragged.rows[:2]}, {"v": ragged.v[:, 1:]}):
        with pytest.raises(ShapeError, match="got"):
            check_factors({**patch.factors, "k": dataclasses.replace(ragged, **value)}, patch.metadata)
    for layers in ((0, 1, 7), (1, 0, 2)):
        with pytest.raises(InputError, match="layers"):
            check_factors(patch.factors, dataclasses.replace(patch.metadata, layers=layers))
    check_factors(patch.factors, patch.metadata)


def test_a_digest_tells_patches_apart_by_factors_and_metadata(chunk, patch):
    key = patch.metadata.chunk
    changes = {"layers": (0, 1), "orbit": True, "base": "patched", "corrects": "a", "basis": "b"}
    changes |= {"antecedent": Antecedent.of(ONE, TWO), "base_antecedent": Antecedent.of("A1")}
    others = [dataclasses.replace(patch.metadata, **{word: value}) for word, value in changes.items()]
    for word in ("id", "backbone", "content", "places", "lead", "encoding"):
        others.append(dataclasses.replace(patch.metadata, chunk=dataclasses.replace(key, **{word: "another"})))
    patches = [patch, *(kvp.Patch(patch.factors, metadata) for metadata in others), form(chunk, seed=5)]
    patches += [kvp.truncate(patch, 2), kvp.quantise(patch, jnp.bfloat16), patch.pad(32)]
    assert len({patch_digest(own) for own in patches}) == len(patches)
    again = kvp.Patch({name: tuple(map(np.asarray, own)) for name, own in patch.factors.items()}, patch.metadata)
    unmeasured = kvp.Patch(patch.factors, dataclasses.replace(patch.metadata, errors=None))
    assert patch_digest(again) == patch_digest(unmeasured) == patch_digest(patch)
