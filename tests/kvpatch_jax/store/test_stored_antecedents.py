"""Patches of one chunk behind one id: other contents and other ways of serving it are other patches."""

import pytest
from store_cases import BACKBONE, chunk_of, patch_of
from store_child import BEHIND
from store_processes import processes, wait_until

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, AntecedentLike, Member, patch_digest
from kvpatch_jax.errors import StalePatchError
from kvpatch_jax.store import ChunkStore, PatchKey
from kvpatch_jax.store.format.naming import ObjectNames

NAMES = ObjectNames("one", b"s" * 32)
BLIND = "bare:" + "0" * 32
EXACT_ONE, EXACT_TWO, BLIND_ONE = BEHIND[1], BEHIND[2], BEHIND[3]


@pytest.fixture
def store(tmp_path):
    with ChunkStore(tmp_path / "root") as own:
        yield own


def seeds(store: ChunkStore, antecedent: AntecedentLike, **more) -> set[int]:
    """Which of the patches of `filled` are served."""
    found = store.get_patches(PatchKey("page", BACKBONE, antecedent, **more))
    drawn = {patch_digest(patch_of(chunk_of("page"), each, seed=seed)): seed for seed, each in enumerate(BEHIND)}
    return {drawn[patch_digest(patch)] for patch in found}


@pytest.fixture
def filled(store):
    store.put_patches([patch_of(chunk_of("page"), each, seed=seed) for seed, each in enumerate(BEHIND)])
    return store


# ------------------------------------------------------------------------------------------------------- names


def test_each_antecedent_has_a_name():
    patches = [patch_of(chunk_of("page"), each) for each in BEHIND]
    assert len({NAMES.patch(patch).path for patch in patches}) == len(BEHIND)
    removals = [
        patch_of(chunk_of("page"), ("A",), base="conditioned", base_antecedent=("A",), base_members=each.members)
        for each in BEHIND
    ]
    assert len({NAMES.patch(patch).path for patch in removals + patches}) == 2 * len(BEHIND)
    orbits = [
        patch_of(chunk_of("page"), [Member("A", "one"), Member("B", "two")][::step], orbit=True) for step in (1, -1)
    ]
    assert len({NAMES.patch(patch).path for patch in orbits}) == 1


# ------------------------------------------------------------------------------------------------------ serving


def test_no_patch_is_served_for_another_antecedent(filled):
    for place, each in enumerate(BEHIND):
        ours = {place} | ({0} if place in (1, 2) else set())  # plain ids say nothing of contents
        if place:
            assert seeds(filled, each) == ours
    assert seeds(filled, [Member("A", "version three")]) == {0}
    assert seeds(filled, [Member("A", None, BLIND)]) == {3}
    assert seeds(filled, [Member("A", "version two", BLIND)]) == set()


def test_plain_ids_refer_to_the_stored_contents(filled):
    assert seeds(filled, ["A"]) == {0}  # two contents, and nothing says which
    filled.put(chunk_of("A", content="version two"))
    assert seeds(filled, ["A"]) == {0, 2}
    filled.put(chunk_of("A", content="version three"))
    assert seeds(filled, ["A"]) == {0}
    assert seeds(filled, [chunk_of("A", content="version one")]) == {0, 1}


def test_the_base_counts_too(store):
    def removal(base: Antecedent, seed: int) -> kvp.Patch:
        more = {"base": "conditioned", "base_antecedent": base.ids, "base_members": base.members}
        return patch_of(chunk_of("page"), ("B",), seed=seed, **more)

    store.put_patches([removal(each, seed) for seed, each in enumerate(BEHIND)])
    for place, each in enumerate(BEHIND[1:], 1):
        found = store.get_patches(PatchKey("page", BACKBONE, ("B",), base="conditioned", base_antecedent=each))
        assert {patch.metadata.base_behind for patch in found} == {BEHIND[place]} | (
            {BEHIND[0]} if place in (1, 2) else set()
        )


def test_stored_patches_are_refused_for_other_contents(filled):
    page = chunk_of("page")
    (blind,) = filled.get_patches(PatchKey("page", BACKBONE, BLIND_ONE))
    with pytest.raises(StalePatchError, match=r"'A' as it was served 'bare:0+'; expected it served 'exact'"):
        kvp.apply_patch(kvp.Placed(page, blind, 0, ["A"]))
    kvp.apply_patch(kvp.Placed(page, blind, 0, BLIND_ONE))


def test_two_processes_share_a_store_and_no_patch(tmp_path):
    """One forms behind the true chunk, others behind it blind, behind another version, behind its plain id."""
    running = [processes().start("form", tmp_path / "root", worker, steps=4) for worker in range(len(BEHIND))]
    wait_until(lambda: not any(process.alive for process in running))
    assert [process.error for process in running] == [""] * len(running)
    for worker, process in enumerate(running):
        said = [line.split() for line in process.spoken.splitlines()]
        assert len(said) == 4
        assert all(right == "True" for _, right in said)
        if worker:
            assert all(int(count) >= 1 for count, _ in said)
    with ChunkStore(tmp_path / "root") as store:
        assert len([entry for entry in store.disk.scan() if entry.part.startswith("p.")]) == len(BEHIND)
        assert seeds(store, EXACT_ONE) == {0, 1}
        assert seeds(store, BLIND_ONE) == {3}


# ------------------------------------------------------------------------------------------------------- headers
