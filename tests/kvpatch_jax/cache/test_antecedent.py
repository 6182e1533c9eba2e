"""What an antecedent is, when two of them are the same, and what a refusal says of the difference."""
# pyright: reportArgumentType=false

import dataclasses
import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operator_cases import chunk_of, conditioned_of

import kvpatch_jax as kvp
from kvpatch_jax.cache import EXACT, Antecedent, Member, antecedent_of
from kvpatch_jax.errors import InputError, PatchMismatchError, StalePatchError

BARE = "bare:" + "0" * 32
STATES = [EXACT, BARE, "bare:" + "1" * 32, "patched:" + "0" * 32]
TEXTS = st.sampled_from(["A", "B", "content", "member", "exact", "A\0B", ""]) | st.text("ab\0é", max_size=3)
LISTS = st.tuples(
    st.lists(st.tuples(TEXTS, st.none() | TEXTS.filter(bool), st.just(EXACT)), max_size=3),
    st.lists(st.tuples(TEXTS, st.none() | TEXTS.filter(bool), st.sampled_from(STATES[1:])), max_size=2),
)
"""Some members that are exact, then perhaps some that are not."""


def made(lists: tuple[list, list]) -> Antecedent:
    return Antecedent(tuple(Member(*fields) for part in lists for fields in part))


@settings(max_examples=150, deadline=None)
@given(LISTS, LISTS)
def test_digests_are_equal_where_the_lists_are(one: tuple, two: tuple):
    first, second = made(one), made(two)
    assert (first.digest == second.digest) == (first.members == second.members)
    assert (first == second) == (first.members == second.members)
    assert len(first.digest) == 32


@settings(max_examples=100, deadline=None)
@given(LISTS, st.integers(0, 4))
def test_small_changes_are_told(lists: tuple, place: int):
    antecedent = made(lists)
    assume(place < len(antecedent.members))
    before, member, behind = antecedent.members[:place], antecedent.members[place], antecedent.members[place + 1 :]
    changed = [(), (member, member), (member._replace(id=member.id + "x"),)]
    changed += [(member._replace(content=(member.content or "") + "x"),)]
    if place + 1 == len(antecedent.members):
        changed += [(member._replace(state=BARE[:-1] + "7"),)]
    for instead in changed:
        assert Antecedent((*before, *instead, *behind)).digest != antecedent.digest


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from([None, "x", "y"])), max_size=4), st.randoms())
def test_sets_agree_where_some_order_of_them_does(pairs: list, random):
    """Against trying all orders, which is what one patch for every order means."""
    first = [Member(*pair) for pair in pairs]
    second = [member._replace(content=random.choice([member.content, None, "x"])) for member in first]
    random.shuffle(second)
    found = Antecedent(tuple(first)).difference(Antecedent(tuple(second)), orbit=True) is None
    agree = lambda one, two: one.id == two.id and (None in (one.content, two.content) or one.content == two.content)
    wanted = any(all(map(agree, first, order)) for order in itertools.permutations(second))
    assert found == wanted
    assert (Antecedent(tuple(first)).difference(Antecedent(tuple(second))) is None) == all(map(agree, first, second))


def test_what_stands_in_front_is_given_in_many_ways():
    chunk = chunk_of("gqa", id="A", content="c")
    assert Antecedent.of("A").members == (Member("A", None, "exact"),)
    assert Antecedent.of(chunk, "B").members == (Member("A", "c"), Member("B"))
    assert antecedent_of([chunk]) == antecedent_of([Member("A", "c")]) == Antecedent.of(chunk)
    assert Antecedent.of("A").plain
    assert Antecedent.of("A").exact
    assert not Antecedent.of(chunk).plain
    assert not Antecedent.of(Member("A", None, BARE)).exact
    assert Antecedent().difference(Antecedent()) is None


def test_what_is_no_antecedent_is_refused(unchecked: None):
    chunk = chunk_of("gqa", id="A")
    for given_ in ("A", chunk, Member("A"), 3, None, [3], [None], [chunk.kv], [("A", None, "exact")], b"A"):
        with pytest.raises(InputError, match=r"antecedent.*expected"):
            antecedent_of(given_)
    for member in (Member(3), Member("A", ""), Member("A", 3), Member("A", None, "blind"), Member("A", None, "Bare:0")):
        with pytest.raises(InputError, match=r"antecedent.*expected"):
            Antecedent((member,))
    with pytest.raises(InputError, match=r"'B' served 'exact' behind 'A' served 'bare:0+'; expected"):
        Antecedent.of(Member("A", None, BARE), "B")
    with pytest.raises(InputError, match="all 'exact', or none"):
        Antecedent.of("A", Member("B", None, BARE)).sorted()


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_refusal_says_what_differs():
    chunk = chunk_of("gqa")
    behind = [Member("A", "one"), Member("B", "two")]
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, behind)
    for wanted in (["A", "B"], behind, [Member("A", "one"), "B"], Antecedent(tuple(behind))):
        kvp.apply_patch(kvp.Placed(chunk, patch, 3, wanted))
    refused = {
        r"the order \('A', 'B'\); expected \('B', 'A'\)": ["B", "A"],
        r"\('A', 'B'\); expected \('A', 'C'\)": ["A", "C"],
        r"\('A', 'B'\); expected \('A',\)": ["A"],
        r"'B' with content 'two'; expected content 'three'": ["A", Member("B", "three")],
        r"'B' as it was served 'exact'; expected it served 'bare:0+'": ["A", Member("B", "two", BARE)],
    }
    for words, wanted in refused.items():
        with pytest.raises(StalePatchError, match=f"formed behind {words}"):
            kvp.apply_patch(kvp.Placed(chunk, patch, 3, wanted))
        kvp.apply_patch(kvp.Placed(chunk, patch, 3, wanted, allow_stale=True))


def test_a_patch_behind_blind_chunks_is_not_the_one_behind_true_ones():
    chunk = chunk_of("gqa")
    blind = kvp.form_patch(chunk, conditioned_of(chunk), 4, [Member("A", None, BARE)])
    assert "not served exactly" in repr(blind)
    for wanted in (["A"], [Member("A", None, STATES[2])]):
        with pytest.raises(StalePatchError, match="as it was served 'bare:"):
            kvp.apply_patch(kvp.Placed(chunk, blind, 3, wanted))
    kvp.apply_patch(kvp.Placed(chunk, blind, 3, [Member("A", "any", BARE)]))


def test_smaller_forms_keep_what_they_were_formed_behind():
    chunk = chunk_of("gqa")
    behind = Antecedent.of(Member("A", "one", BARE))
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, behind)
    small = [kvp.truncate(patch, 2), kvp.keep_layers(patch, (1, 2)), patch.pad(32)]
    small += [kvp.quantise(patch, dtype) for dtype in ("int8", "float8_e4m3fn", "bfloat16")]
    assert all(each.metadata.behind == behind for each in small)
    correction = kvp.correction_patch(chunk, patch, conditioned_of(chunk, seed=2), 4, [Member("C", "three")])
    assert correction.metadata.base_behind == behind
    assert kvp.update_patch(patch, correction).metadata.behind == Antecedent.of(Member("C", "three"))


def test_a_removal_patch_says_how_its_base_was_served():
    chunk = chunk_of("gqa")
    base, target = conditioned_of(chunk, seed=1), conditioned_of(chunk, seed=2)
    kept = [Member("A", "one", BARE), Member("B", "two", STATES[3])]
    patch = kvp.removal_patch(chunk, target, base, 4, ["B"], kept)
    apply = lambda base_antecedent, **more: kvp.apply_patch(
        kvp.Placed(chunk, patch, 0, ["B"], base=base, base_antecedent=base_antecedent, **more)
    )
    apply(kept)
    for wrong, words in ((["A", "B"], "'A' as it was served"), (kept[::-1], "the order")):
        for allow in (False, True):
            with pytest.raises(StalePatchError, match=rf"got a base conditioned on {words}.*expected"):
                apply(wrong, allow_stale=allow)


def test_metadata_agrees_with_itself():
    chunk = chunk_of("gqa")
    metadata = kvp.form_patch(chunk, conditioned_of(chunk), 4, [Member("A", "one")]).metadata
    assert metadata.antecedent == ("A",)
    with pytest.raises(InputError, match=r"members of the ids \('A',\); expected \('B',\)"):
        dataclasses.replace(metadata, antecedent=("B",))
    plain = dataclasses.replace(metadata, members=(Member("A"),))
    assert plain.members is None
    assert plain == dataclasses.replace(metadata, members=None)


# ----------------------------------------------------------------------------------------------------------- orbits


def test_an_orbit_is_of_one_set():
    chunk = chunk_of("gqa")
    one, two = Member("A", "one"), Member("B", "two")
    acc = kvp.accumulate(None, conditioned_of(chunk, seed=1), chunk, [one, two])
    for wrong in ([one], ["A", "B"], [one, two._replace(content="three")], [one, two._replace(state=BARE)][1:]):
        with pytest.raises(PatchMismatchError, match=r"antecedent .*expected an ordering of"):
            kvp.accumulate(acc, conditioned_of(chunk, seed=2), chunk, wrong)
    patch = kvp.orbit_patch(kvp.accumulate(acc, conditioned_of(chunk, seed=2), chunk, [two, one]), 4)
    assert patch.metadata.behind == Antecedent.of(one, two)
    for wanted in ([two, one], ["B", "A"], [one, "B"]):
        kvp.apply_patch(kvp.Placed(chunk, patch, 0, wanted))
    for wanted, words in (
        ([two], r"any ordering of \('A', 'B'\); expected \('B',\)"),
        ([two._replace(content="x"), one], r"'B' with content \['two'\]; expected content \['x'\]"),
        ([one, two._replace(state=BARE)], "'B' as it was served"),
    ):
        with pytest.raises(StalePatchError, match=words):
            kvp.apply_patch(kvp.Placed(chunk, patch, 0, wanted))
