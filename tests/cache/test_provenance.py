"""Identities of KV, what they tell of windows, and antecedents: when two are the same, and what a refusal says."""
# pyright: reportArgumentType=false

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.cache import (
    UNKNOWN_WAYS,
    Antecedent,
    Member,
    antecedent_of,
    contents_differ,
    identity,
    likeness_keys,
    merged,
    prefilled,
    slides,
)
from kvpatch_jax.errors import InputError, PatchMismatchError, StalePatchError
from tests.shared.operator_cases import chunk_of, conditioned_of

BARE, OTHER = identity("A", "bare"), identity("A", "patch 3fa")
ONE, TWO = Member("A", "one"), Member("B", "two")
TEXTS = st.sampled_from(["A", "B", "prefill", "A\0B", ""]) | st.text("ab\0é/", max_size=3)
KV, KNOWN = st.sampled_from(prefilled("ABC")), st.none() | TEXTS.filter(bool)
CONTENTS = st.sampled_from([None, "x", "y"])
FIELDS = st.tuples(
    st.lists(st.tuples(TEXTS, KNOWN), max_size=3), st.lists(st.tuples(TEXTS, KNOWN, KV), max_size=2)
).map(lambda parts: [*parts[0], *parts[1]])
"""Fields of some members that are exact, then perhaps of some that are not."""


@given(*[st.tuples(TEXTS, st.sampled_from(["prefill", "bare"]), st.lists(KV, max_size=3).map(tuple))] * 2)
def test_kv_is_identical_where_content_method_and_front_are(first: tuple, second: tuple):
    identities = [identity(*first), identity(*second)]
    assert (identities[0] == identities[1]) == (first == second)
    assert all(len(digest) == 32 and set(digest) <= set("0123456789abcdef") for digest in identities)


def test_a_prefill_depends_on_all_that_precedes_it():
    exact = prefilled("ABC")
    assert exact == (identity("A"), identity("B", front=exact[:1]), identity("C", front=exact[:2]))
    assert prefilled("BC", exact[:1]) == exact
    assert prefilled("ABD")[:2] == exact[:2]
    assert len({*exact, *prefilled("BAC"), *prefilled("BC", (BARE,))}) == 3 + 3 + 3


@given(st.lists(KV, max_size=5), st.lists(KV, max_size=4))
def test_slides_count_what_has_left_of_what_was_seen(seen: list, front: list):
    possible = set(itertools.combinations(seen, len(front)))
    assert slides(tuple(seen), tuple(front)) == (len(seen) - len(front) if tuple(front) in possible else None)


def test_likeness_keys_depend_on_the_lead_and_the_nearest_chunk():
    places = [(prefilled("A"), "C"), (prefilled("A"), "D"), (prefilled("B"), "C"), ((), "C")]
    keys = [likeness_keys(*place) for place in places]
    assert all(list(each) == ["mean", "near"] for each in keys)
    assert len({key for each in keys for key in each.values()}) == 8


def test_ways_are_merged_until_nothing_is_known():
    first, second, many = (("bare", 0), ("stored", 4)), (("near", 0),), tuple(("survivor", count) for count in range(8))
    assert merged(first, second) == merged(second, first) == (("bare", 0), ("near", 0), ("stored", 4))
    assert (merged(first, ()), merged((), first), merged(many[:4], many[4:])) == (first, first, many)
    assert all(merged(*pair) == UNKNOWN_WAYS for pair in ((first, UNKNOWN_WAYS), (UNKNOWN_WAYS, first), (many, first)))


@given(FIELDS, FIELDS)
def test_digests_are_equal_where_the_members_are(first: list, second: list):
    one, two = (Antecedent(tuple(Member(*fields) for fields in each)) for each in (first, second))
    assert (one.digest == two.digest) == (one.members == two.members) == (one == two)


def test_an_antecedent_has_the_identities_of_its_members():
    chunk = chunk_of("gqa", id="A", content="one")
    assert antecedent_of([chunk, "B"]) == Antecedent.of(chunk, "B") == Antecedent((ONE, Member("B")))
    assert Antecedent.of(chunk, "B").identities == prefilled(["one", "B"])
    assert Antecedent.of("A", Member("B", None, BARE)).identities == (identity("A"), BARE)
    assert Antecedent.of(ONE).exact
    assert not Antecedent.of(Member("A", None, BARE)).exact
    chunks, exact = [("A", "one"), ("B", "two"), ("C", None)], prefilled(["one", "two", "C"])
    assert Antecedent.at(chunks, exact) == Antecedent.of(ONE, TWO, "C")
    patched = Antecedent.at(chunks, (exact[0], OTHER, exact[2]))
    assert patched.members == (ONE, Member("B", "two", OTHER), Member("C", None, exact[2]))
    assert patched.identities == (exact[0], OTHER, exact[2])


@given(st.lists(st.tuples(st.sampled_from("AB"), CONTENTS, CONTENTS), max_size=4), st.randoms())
def test_sets_agree_where_some_order_of_them_does(pairs: list, random):
    """Against trying all orders, which is what one patch for every order means."""
    first = [Member(id, content) for id, content, _ in pairs]
    second = [Member(id, content) for id, _, content in pairs]
    random.shuffle(second)

    def agrees(order: tuple[Member, ...]) -> bool:
        met = zip(first, order, strict=True)
        return all(a.id == b.id and not contents_differ(a.content, b.content) for a, b in met)

    one, two = Antecedent(tuple(first)), Antecedent(tuple(second))
    assert (one.difference(two, orbit=True) is None) == any(map(agrees, itertools.permutations(second)))
    assert (one.difference(two) is None) == agrees(tuple(second))


def test_what_is_no_antecedent_is_refused(unchecked: None):
    chunk = chunk_of("gqa", id="A")
    for value in (
        "A",
        chunk,
        Member("A"),
        3,
        None,
        [3],
        [None],
        [chunk.kv],
        [("A", None, None)],
        b"A",
        {"A"},
        {"A": 1},
    ):
        with pytest.raises(InputError, match=r"antecedent.*expected"):
            antecedent_of(value)
    for member in (Member(3), Member("A", ""), Member("A", 3), Member("A", None, "bare"), Member("A", None, BARE * 2)):
        with pytest.raises(InputError, match=r"antecedent.*expected"):
            Antecedent.of(member)
    with pytest.raises(InputError, match=r"'B' prefilled behind 'A', which is not exact; expected"):
        Antecedent.of(Member("A", None, BARE), "B")
    with pytest.raises(InputError, match="all exact, or none"):
        Antecedent.of("A", Member("B", None, BARE)).sorted()


def test_a_refusal_says_what_differs():
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, [ONE, TWO])
    for accepted in (["A", "B"], [ONE, TWO], [ONE, "B"], Antecedent((ONE, TWO))):
        kvp.apply_patch(chunk, patch, 3, accepted)
    refused = {
        r"the order \('A', 'B'\); expected \('B', 'A'\)": ["B", "A"],
        r"\('A', 'B'\); expected \('A',\)": ["A"],
        r"'B' with content 'two'; expected content 'three'": ["A", Member("B", "three")],
        rf"'B' with KV of a prefill there; expected {BARE}": ["A", Member("B", "two", BARE)],
    }
    for words, antecedent in refused.items():
        with pytest.raises(StalePatchError, match=f"formed behind {words}"):
            kvp.apply_patch(chunk, patch, 3, antecedent)
        kvp.apply_patch(chunk, patch, 3, antecedent, allow_stale=True)


def test_a_patch_behind_approximate_kv_serves_behind_that_alone():
    """And what is made of the patch, which keeps its antecedent."""
    chunk, behind = chunk_of("gqa"), Antecedent.of(Member("A", "one", BARE))
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, behind)
    assert "not exact" in repr(patch)
    for derived in (patch, kvp.truncate(patch, 2), kvp.keep_layers(patch, (1, 2)), kvp.quantise(patch, "int8")):
        for antecedent in (["A"], [Member("A", None, OTHER)]):
            with pytest.raises(StalePatchError, match=f"'A' with KV {BARE}; expected"):
                kvp.apply_patch(chunk, derived, 3, antecedent)
        kvp.apply_patch(chunk, derived, 3, [Member("A", None, BARE)])
    correction = kvp.correction_patch(chunk, patch, conditioned_of(chunk, seed=2), 4, [Member("C", "three")])
    assert correction.metadata.base_antecedent == behind
    assert kvp.update_patch(patch, correction).metadata.antecedent == Antecedent.of(Member("C", "three"))
    base = conditioned_of(chunk, seed=1)
    removal = kvp.removal_patch(chunk, conditioned_of(chunk, seed=2), base, 4, ["B"], behind)
    with pytest.raises(StalePatchError, match=f"a base conditioned on 'A' with KV {BARE}; expected that of a prefill"):
        kvp.apply_patch(chunk, removal, 0, ["B"], base=base, base_antecedent=["A"], allow_stale=True)
    kvp.apply_patch(chunk, removal, 0, ["B"], base=base, base_antecedent=behind)


def test_an_orbit_is_of_one_set():
    chunk = chunk_of("gqa")
    sums = kvp.accumulate(None, conditioned_of(chunk, seed=1), chunk, [ONE, TWO])
    for wrong in ([ONE], ["A", "B"], [ONE, Member("B", "three")]):
        with pytest.raises(PatchMismatchError, match=r"antecedent .*expected .*, in any order"):
            kvp.accumulate(sums, conditioned_of(chunk, seed=2), chunk, wrong)
    patch = kvp.orbit_patch(kvp.accumulate(sums, conditioned_of(chunk, seed=2), chunk, [TWO, ONE]), 4)
    for antecedent in ([TWO, ONE], ["B", "A"], [ONE, "B"]):
        kvp.apply_patch(chunk, patch, 0, antecedent)
    for antecedent in ([TWO], [Member("B", "x"), ONE], [ONE, TWO._replace(identity=BARE)]):
        with pytest.raises(StalePatchError, match="formed behind any ordering of"):
            kvp.apply_patch(chunk, patch, 0, antecedent)
