"""Which stored patches serve a chunk: those of its antecedent, contents, identities, base, lead and encoding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, ChunkKey, Member, PatchMetadata, antecedent_of, identity, patch_digest
from kvpatch_jax.errors import InputError
from kvpatch_jax.patching import fit_basis, form_in_basis
from kvpatch_jax.store import ChunkStore, PatchKey

LAYOUT = kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16))
BLIND = identity("A", "bare")
BEHIND = [
    Antecedent((Member("A"),)),
    Antecedent((Member("A", "version one"),)),
    Antecedent((Member("A", "version two"),)),
    Antecedent((Member("A", "version one", BLIND),)),
]
"""Antecedents of one id."""


def chunk_of(id: str = "page", seed: int = 0, tokens: int = 9, **options: Any) -> kvp.Chunk:
    rng = np.random.default_rng(seed)
    kv = {name: rng.standard_normal((3, tokens, 2, 16)).astype(np.float32) for name in LAYOUT.names}
    return kvp.Chunk(kv, np.arange(tokens, dtype=np.float32), tokens, tokens, id, LAYOUT, "tiny", **options)


def patch_for(antecedent: Any = ("A",), seed: int = 0, rank: int = 2, **fields: Any) -> kvp.Patch:
    """A patch of the chunk "page" whose numbers say the seed."""
    factors = {}
    for channel in LAYOUT.channels:
        factors[channel.name] = jnp.full((3, 9, rank), seed + 1.0), jnp.ones((3, rank, channel.features))
    own = {name: fields.pop(name) for name in list(fields) if name in ("id", "content", "lead", "encoding")}
    chunk = ChunkKey(**{"id": "page", "backbone": "tiny", "layout": LAYOUT} | own)
    if fields.get("base_antecedent") is not None:
        fields["base_antecedent"] = antecedent_of(fields["base_antecedent"])
    return kvp.Patch(factors, PatchMetadata(chunk, antecedent_of(antecedent), (0, 1, 2), **fields))


def seeds(store: ChunkStore, antecedent: Any, **fields: Any) -> list[int]:
    patches = store.get_patches(PatchKey("page", "tiny", antecedent, **fields))
    return sorted(int(patch.factors["k"][0][0, 0, 0]) - 1 for patch in patches)  # pyright: ignore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore(tmp_path / "root") as store:
        yield store


@pytest.fixture
def filled(store: ChunkStore) -> ChunkStore:
    """A store of a patch behind each of `BEHIND`, with its place as its seed."""
    store.put_patches([patch_for(antecedent, seed) for seed, antecedent in enumerate(BEHIND)])
    return store


# ------------------------------------------------------------------------------------------------------- antecedents


def test_no_patch_serves_another_antecedent(filled):
    assert seeds(filled, BEHIND[1]) == [0, 1]  # plain ids say nothing of contents
    assert seeds(filled, BEHIND[2]) == [0, 2]
    assert seeds(filled, BEHIND[3]) == [3]
    assert seeds(filled, [Member("A", "version three")]) == [0]
    assert seeds(filled, [Member("A", None, BLIND)]) == [3]
    assert seeds(filled, [Member("A", "version two", BLIND)]) == []
    for antecedent in ((), ("B",), ("A", "B"), ("A", "A")):
        assert seeds(filled, antecedent) == []
    assert filled.get_patches(PatchKey("other", "tiny", ("A",))) == []
    assert filled.get_patches(PatchKey("page", "large", ("A",))) == []
    assert filled.patch_count("page", "tiny") == 4


def test_plain_ids_mean_the_stored_contents(filled):
    assert seeds(filled, ["A"]) == [0]  # two contents, and nothing says which
    filled.put(chunk_of("A", content="version two"))
    assert seeds(filled, ["A"]) == [0, 2]
    filled.put(chunk_of("A", content="version one", tokens=64), encoding="k4v4")
    assert seeds(filled, ["A"]) == [0]  # two again, in two encodings
    filled.put(chunk_of("A", content="version three"))
    filled.put(chunk_of("A", content="version three", tokens=64), encoding="k4v4")
    assert seeds(filled, ["A"]) == [0]
    assert seeds(filled, [chunk_of("A", content="version one")]) == [0, 1]


def test_the_base_counts_too(store):
    for seed, base in enumerate(BEHIND):
        fields = {"base": "conditioned", "base_antecedent": base}
        store.put_patches([patch_for(("B",), seed, **fields)])
    assert seeds(store, ("B",)) == []
    for seed, expected in ((1, [0, 1]), (2, [0, 2]), (3, [3])):
        assert seeds(store, ("B",), base="conditioned", base_antecedent=BEHIND[seed]) == expected


def test_an_orbit_patch_serves_every_order(store):
    members = [Member("A", "one"), Member("B", "two"), Member("B", "three")]
    store.put_patches([patch_for(sorted(members), 5, orbit=True), patch_for(members, 6)])
    assert seeds(store, members[::-1], orbit=True) == seeds(store, members, orbit=True) == [5]
    assert seeds(store, members) == [6]
    assert seeds(store, members[::-1]) == []
    assert seeds(store, ("A", "B", "B"), orbit=True) == []  # which of the contents of "B" is meant?


def test_lead_and_encoding_are_part_of_what_is_served(store):
    served: list[dict[str, Any]] = [{}, {"lead": "one"}, {"encoding": "k4v4g32"}]
    store.put_patches([patch_for(seed=seed, **fields) for seed, fields in enumerate(served)])
    for seed, fields in enumerate(served):
        assert seeds(store, ("A",), **fields) == [seed]
    assert seeds(store, ("A",), encoding="k4v4") == [2]
    for fields in ({"lead": "two"}, {"encoding": "k4v4g64"}):
        assert seeds(store, ("A",), **fields) == []


def test_patches_of_an_older_version_are_not_served(store):
    first, second = chunk_of(seed=1), chunk_of(seed=2)
    store.put_patches([patch_for(seed=seed, rank=seed, content=one.content) for seed, one in ((1, first), (2, second))])
    store.put_patches([patch_for(seed=3, rank=3)])
    assert seeds(store, ("A",)) == [1, 2, 3]  # nobody says which content is meant: whoever applies one checks
    store.put(first)
    assert seeds(store, ("A",)) == [1, 3]
    ack = store.put_async(second)
    assert seeds(store, ("A",)) == [2, 3]
    ack.result()
    assert seeds(store, ("A",)) == [2, 3]
    assert seeds(store, ("A",), content=first.content) == [1, 3]
    ranks = [patch.ranks["k"] for patch in store.get_patches(PatchKey("page", "tiny", ("A",)))]
    assert ranks == [3, 2]  # the largest first


def test_a_damaged_patch_or_canonical_says_nothing(filled):
    canonical = chunk_of("A", content="version two")
    filled.put(canonical)
    for name in (filled.names.canonical("tiny", "A"), filled.names.patch(patch_for(seed=0))):
        query = "SELECT file FROM objects WHERE name = ?"
        path = Path(filled.objects.root) / "data" / filled.objects.index.row(query, name)[0]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    filled.objects.memory.drop(filled.objects.tenant)
    assert seeds(filled, ["A"]) == []
    assert seeds(filled, BEHIND[1]) == [1]


@pytest.mark.usefixtures("unchecked")
def test_keys_of_other_types_are_refused():
    fields: dict[str, Any] = {
        "base": "raw",
        "orbit": 1,
        "lead": 3,
        "encoding": "k9v4",
    }
    for name, value in [*fields.items(), ("encoding", 4)]:
        with pytest.raises(InputError, match=f"served.{name}"):
            PatchKey("page", "tiny", ("A",), **{name: value})
    for arguments in (("page", "", ("A",)), (3, "tiny", ("A",)), ("page", "tiny", "A")):
        with pytest.raises(InputError):
            PatchKey(*arguments)  # pyright: ignore[reportArgumentType]
    assert "page" not in repr(PatchKey("page", "tiny", ("A",), base_antecedent=("B",)))


# ------------------------------------------------------------------------------------------------------------- bases


def in_basis(chunk: kvp.Chunk) -> tuple[Any, kvp.Patch]:
    conditioned = {name: value + np.float32(0.1) * value**2 for name, value in chunk.kv.items()}
    basis = fit_basis([(chunk, conditioned)], 3)
    return basis, form_in_basis(chunk, conditioned, basis, ("A",), 2)


def test_patches_share_a_basis_that_is_stored_once(store):
    chunk = chunk_of()
    basis, patch = in_basis(chunk)
    with pytest.raises(InputError, match="put_basis"):
        store.put_patches([patch])
    store.put_basis(basis)
    store.put_patches([patch, kvp.quantise(patch, "int8")])
    largest, smaller = store.get_patches(patch.metadata)
    assert patch_digest(largest) == patch_digest(patch)
    assert largest.metadata == smaller.metadata == patch.metadata
    assert getattr(store.get_basis(basis.digest, LAYOUT, "tiny"), "digest", None) == basis.digest
    assert store.get_basis(basis.digest, LAYOUT, "large") is None
    store.delete(f"basis {basis.digest} k", "tiny")
    assert store.get_patches(patch.metadata) == []


def test_a_basis_lives_as_long_as_its_patches(store):
    basis, patch = in_basis(chunk_of())
    query = "SELECT expires FROM objects WHERE kind = 'encoder'"

    def ends() -> set[Any]:
        return {end for (end,) in store.objects.index.rows(query)}

    store.put_basis(basis, ttl=100.0)
    store.put_patches([patch], ttl=50.0)
    (first,) = ends()
    store.put_patches([patch], ttl=1000.0)
    (second,) = ends()
    assert second >= first + 900
    store.put_basis(basis, ttl=10.0)
    assert ends() == {second}  # never a shorter life
    store.put_patch_async(patch).result()
    assert ends() == {None}
    store.put_basis(basis, ttl=10.0)
    assert ends() == {None}
