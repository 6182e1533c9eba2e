"""KV has one identity where its content, making and front are the same, and another wherever one of them differs."""
# pyright: reportArgumentType=false

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from kvpatch_jax.errors import InputError
from tests.shared.operator_cases import chunk_of

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
    assert all(list(own) == ["mean", "near"] for own in keys)
    assert len({key for own in keys for key in own.values()}) == 8


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
    for value in ("A", chunk, Member("A"), None, {"A"}, [3], [chunk.kv], [("A", None, None)]):
        with pytest.raises(InputError, match=r"antecedent.*expected"):
            antecedent_of(value)
    for member in (Member(3), Member("A", ""), Member("A", None, "bare")):
        with pytest.raises(InputError, match=r"antecedent.*expected"):
            Antecedent.of(member)
    with pytest.raises(InputError, match=r"'B' prefilled behind 'A', which is not exact; expected"):
        Antecedent.of(Member("A", None, BARE), "B")
    with pytest.raises(InputError, match="all exact, or none"):
        Antecedent.of("A", Member("B", None, BARE)).sorted()
