"""A lookup returns exactly the patches of this chunk's antecedent, contents, identities, base, lead and encoding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member, identity, patch_digest
from kvpatch_jax.errors import InputError
from kvpatch_jax.patching import fit_basis, form_in_basis
from kvpatch_jax.store import ChunkStore, PatchKey
from tests.store.store_cases import LAYOUT, MODEL, chunk_of, file_of, flip, patch_for

BLIND = identity("A", "bare")
BEHIND = [
    Antecedent((Member("A"),)),
    Antecedent((Member("A", "version one"),)),
    Antecedent((Member("A", "version two"),)),
    Antecedent((Member("A", "version one", BLIND),)),
]
"""Antecedents of one id."""


def seeds(store: ChunkStore, antecedent: Any, **fields: Any) -> list[int]:
    """Which patches are returned for the chunk "page", by their first number."""
    patches = store.get_patches(PatchKey("page", MODEL, antecedent, **fields))
    return sorted(int(patch.factors["k"][0][0, 0, 0]) for patch in patches)  # pyright: ignore


@pytest.fixture
def store(folder: Path) -> Iterator[ChunkStore]:
    with ChunkStore(folder / "root") as store:
        yield store


@pytest.fixture
def filled(store: ChunkStore) -> ChunkStore:
    """A store of a patch behind each of `BEHIND`, with its place as its seed."""
    store.put_patches([patch_for(antecedent, seed) for seed, antecedent in enumerate(BEHIND)])
    return store


def test_no_patch_serves_another_antecedent(filled: ChunkStore):
    assert seeds(filled, BEHIND[1]) == [0, 1]  # plain ids say nothing of contents
    assert seeds(filled, BEHIND[2]) == [0, 2]
    assert seeds(filled, BEHIND[3]) == [3]
    assert seeds(filled, [Member("A", "version three")]) == [0]
    assert seeds(filled, [Member("A", None, BLIND)]) == [3]
    assert seeds(filled, [Member("A", "version two", BLIND)]) == []
    for antecedent in ((), ("B",), ("A", "B"), ("A", "A")):
        assert seeds(filled, antecedent) == []
    assert filled.get_patches(PatchKey("other", MODEL, ("A",))) == []
    assert filled.get_patches(PatchKey("page", "large", ("A",))) == []
    assert filled.patch_count("page", MODEL) == 4
    assert (filled.patch_count("other", MODEL), filled.patch_count("page", "large")) == (0, 0)


def test_plain_ids_mean_the_stored_contents(filled: ChunkStore):
    assert seeds(filled, ["A"]) == [0]  # two contents, and nothing says which
    filled.put(chunk_of("A", content="version two"))
    assert seeds(filled, ["A"]) == [0, 2]
    filled.put(chunk_of("A", content="version one", tokens=40), encoding="k4v4")
    assert seeds(filled, ["A"]) == [0]  # two again, in two encodings
    filled.put(chunk_of("A", content="version three"))
    filled.put(chunk_of("A", content="version three", tokens=40), encoding="k4v4")
    assert seeds(filled, ["A"]) == [0]
    assert seeds(filled, [chunk_of("A", content="version one")]) == [0, 1]


def test_the_base_counts_too(store: ChunkStore):
    for seed, base in enumerate(BEHIND):
        store.put_patches([patch_for(("B",), seed, base="conditioned", base_antecedent=base)])
    assert seeds(store, ("B",)) == []
    for seed, expected in ((1, [0, 1]), (2, [0, 2]), (3, [3])):
        assert seeds(store, ("B",), base="conditioned", base_antecedent=BEHIND[seed]) == expected


def test_an_orbit_patch_serves_every_order(store: ChunkStore):
    members = [Member("A", "one"), Member("B", "two"), Member("B", "three")]
    store.put_patches([patch_for(sorted(members), 5, orbit=True), patch_for(members, 6)])
    assert seeds(store, members[::-1], orbit=True) == seeds(store, members, orbit=True) == [5]
    assert seeds(store, members) == [6]
    assert seeds(store, members[::-1]) == []
    assert seeds(store, ("A", "B", "B"), orbit=True) == []  # which of the contents of "B" is meant?
    fields: dict[str, Any] = {"orbit": True, "base": "conditioned"}
    store.put_patches([patch_for(("A",), 7, base_antecedent=members[1:], **fields)])
    assert seeds(store, ("A",), base_antecedent=members[1:], **fields) == [7]
    assert seeds(store, ("A",), base_antecedent=members[:0:-1], **fields) == []  # the base's order counts


def test_lead_and_encoding_are_part_of_what_is_served(store: ChunkStore):
    served: list[dict[str, Any]] = [{}, {"lead": "one"}, {"encoding": "k4v4g32"}]
    store.put_patches([patch_for(seed=seed, **fields) for seed, fields in enumerate(served)])
    for seed, fields in enumerate(served):
        assert seeds(store, ("A",), **fields) == [seed]
    assert seeds(store, ("A",), encoding="k4v4") == [2]
    for fields in ({"lead": "two"}, {"encoding": "k4v4g64"}):
        assert seeds(store, ("A",), **fields) == []


def test_patches_of_an_older_version_are_not_served(store: ChunkStore):
    first, second = chunk_of("page", content="one"), chunk_of("page", content="two")
    for seed, content in ((1, "one"), (2, "two")):
        store.put_patches([patch_for(seed=seed, rank=seed, content=content)])
    store.put_patches([patch_for(seed=3, rank=3)])
    assert seeds(store, ("A",)) == [1, 2, 3]  # nobody says which content is meant: whoever applies one checks
    store.put(first)
    assert seeds(store, ("A",)) == [1, 3]
    ack = store.put_async(second)
    assert seeds(store, ("A",)) == [2, 3]
    ack.result()
    assert seeds(store, ("A",)) == [2, 3]
    assert seeds(store, ("A",), content="one") == [1, 3]
    ranks = [patch.ranks["k"] for patch in store.get_patches(PatchKey("page", MODEL, ("A",)))]
    assert ranks == [3, 2]  # the largest first
    store.put(chunk_of("page", content="one", lead="a lead"))
    assert seeds(store, ("A",)) == [2, 3]
    store.delete("page", MODEL)
    assert seeds(store, ("A",)) == []


def test_a_damaged_patch_or_canonical_says_nothing(filled: ChunkStore):
    filled.put(chunk_of("A", content="version two"))
    for name in (filled.names.canonical(MODEL, "A"), filled.names.patch(patch_for(seed=0))):
        flip(file_of(filled.objects, name))
    with ChunkStore(filled.objects.root, memory=0) as store:
        filled.objects.memory.clear()
        assert seeds(store, ["A"]) == []
        assert seeds(store, BEHIND[1]) == [1]


def test_patches_share_a_basis_that_lives_as_long_as_they(store: ChunkStore):
    chunk = chunk_of("page")
    conditioned = {name: value + np.float32(0.1) * value**2 for name, value in chunk.kv.items()}
    basis = fit_basis([(chunk, conditioned)], 3)
    patch = form_in_basis(chunk, conditioned, basis, ("A",), 2)

    def ends() -> set[Any]:
        query = "SELECT expires FROM objects WHERE kind = 'encoder'"
        return {end for (end,) in store.objects.index.rows(query)}

    with pytest.raises(InputError, match="put_basis"):
        store.put_patches([patch])
    store.put_basis(basis, ttl=100.0)
    store.put_patches([patch], ttl=50.0)
    (first,) = ends()
    store.put_patches([patch, kvp.quantise(patch, "int8")], ttl=1000.0)
    (second,) = ends()
    assert second >= first + 900
    store.put_basis(basis, ttl=10.0)
    assert ends() == {second}  # never a shorter life
    store.put_patch_async(patch).result()
    assert ends() == {None}
    store.put_basis(basis, ttl=10.0)
    assert ends() == {None}

    largest, smaller = store.get_patches(patch.metadata)
    assert patch_digest(largest) == patch_digest(patch)
    assert largest.metadata == smaller.metadata == patch.metadata
    assert getattr(store.get_basis(basis.digest, LAYOUT, MODEL), "digest", None) == basis.digest
    assert store.get_basis(basis.digest, LAYOUT, "large") is None
    store.delete(f"basis {basis.digest} k", MODEL)
    assert store.get_patches(patch.metadata) == []
