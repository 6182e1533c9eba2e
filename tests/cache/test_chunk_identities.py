"""A chunk checks and copies what it is made of, and its identity is that of its numbers, its making and its front."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import copy
import dataclasses
import hashlib
import itertools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.cache import (
    UNKNOWN_WAYS,
    Antecedent,
    Chunk,
    Member,
    antecedent_of,
    contents_differ,
    decode_chunk,
    encode_chunk,
    examine,
    identity,
    likeness_keys,
    merged,
    prefilled,
    slides,
)
from kvpatch_jax.core import KVEncoding, KVLayout, PackedArray, Rope
from kvpatch_jax.errors import InputError, LayoutError, NotFiniteError, ShapeError
from tests.shared import transition_cases as hybrid
from tests.shared.operator_cases import LAYOUTS, chunk_of, kv_of, local_of
from tests.shared.window_oracle import backbone_of

PARTS = sorted(hybrid.PARTS)


def changed(value: Any, place: Any, number: Any = None) -> np.ndarray:
    """A copy with some numbers negated, or set."""
    other = np.array(value)
    other[place] = -other[place] if number is None else number
    return other


def spoilt(name: str) -> dict:
    return {channel: changed(value, (-1,) * 4, np.nan) for channel, value in kv_of(LAYOUTS[name], 24).items()}


def rotated(name: str) -> dict:
    return kvp.to_engine(LAYOUTS[name], kv_of(LAYOUTS[name], 24), np.arange(24), 3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv": lambda: kv_of(LAYOUTS["mla"], 24)}, LayoutError, "ckv"),
        ({"kv": lambda: spoilt("gqa")}, NotFiniteError, "'k'"),
        ({"kv": lambda: rotated("gqa")}, LayoutError, "phase-free"),
        ({"local": np.zeros(23, np.float32)}, InputError, "23"),
        ({"local": np.arange(24) + 2**24, "span": 2**25}, InputError, r"below 2\*\*24"),
        ({"local": np.full(24, np.nan, np.float32)}, InputError, "positions from nan"),
        ({"length": 25}, InputError, "25"),
        ({"span": 23}, InputError, "span 23; expected at least 24"),
        ({"lead": ""}, InputError, "lead ''"),
    ],
)
def test_chunks_of_invalid_parts_are_refused(unchecked, change, error, words):
    with pytest.raises(error, match=words):
        chunk_of("gqa", **{word: value() if callable(value) else value for word, value in change.items()})


def test_packed_kv_is_refused_without_its_encoding_or_with_damaged_scales(unchecked):
    chunk = encode_chunk(chunk_of("gqa"), "k4v4")
    broken = dataclasses.replace(chunk.kv["k"], scale=chunk.kv["k"].scale.at[0, 0, 0].set(jnp.nan))
    for error, words, change in (
        (NotFiniteError, "'k'", {"kv": {**chunk.kv, "k": broken}}),
        (InputError, "packed", {"encoding": None}),
    ):
        with pytest.raises(error, match=words):
            dataclasses.replace(chunk, **change)


def test_padding_is_of_zeros():
    chunk = chunk_of("blocked", tokens=10)
    wide = chunk.pad(16)
    assert (wide.tokens, wide.length, wide.span) == (16, 10, chunk.span)
    for channel in chunk.layout.names:
        np.testing.assert_array_equal(wide.kv[channel][:, :10], chunk.kv[channel])
        assert not wide.kv[channel][:, 10:].any()
    np.testing.assert_array_equal(wide.local[:10], chunk.local)
    assert chunk.nbytes == 10 * chunk.layout.bytes_per_token(jnp.float32)
    with pytest.raises(ShapeError, match="at least 10"):
        chunk.pad(9)


def test_arrays_that_change_later_change_no_chunk():
    layout = LAYOUTS["gqa"]
    kv = {name: np.array(value) for name, value in kv_of(layout, 24).items()}
    local, encoder = local_of(layout, 24), np.ones((4, 6), np.float32)
    view = local[:]
    view.flags.writeable = False  # whoever has what it is a view of can write all the same
    first, seen = kv["k"].copy(), chunk_of("gqa", local=view)
    chunk = chunk_of("gqa", kv=kv, local=local, encoder=encoder)
    kv["k"][:] = 0
    kv["v"] = kv["k"]
    local[:] = encoder[:] = 5
    np.testing.assert_array_equal(chunk.kv["k"], first)
    assert np.asarray(chunk.kv["v"]).any()
    assert (np.asarray(chunk.encoder) == 1).all()
    assert np.asarray(chunk.local)[-1] == np.asarray(seen.local)[-1] == 23
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(chunk.kv["k"])[:] = 1


# ----------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_any_one_number_makes_another_content(dtype):
    chunk, rng = chunk_of("gqa", dtype=dtype, length=20), np.random.default_rng(0)
    others = []
    for name in ("k", "v"):
        for _ in range(8):
            place = tuple(int(rng.integers(size)) for size in (3, 20, 2, 16))
            others.append({**chunk.kv, name: changed(chunk.kv[name], place)})
    host = {name: np.asarray(value) for name, value in chunk.kv.items()}
    others += [{name: np.flip(value, axis) for name, value in host.items()} for axis in (0, -1)]
    others += [{"k": host["v"], "v": host["k"]}, {n: v[:, np.r_[19:-1:-1, 20:24]] for n, v in host.items()}]
    contents = {dataclasses.replace(chunk, kv=kv).content for kv in others}
    assert len(contents | {chunk.content}) == len(others) + 1


def test_the_same_kv_is_the_same_content_wherever_it_lies():
    chunk = chunk_of("gqa", length=20)
    host = {name: np.asarray(value) for name, value in chunk.kv.items()}
    noise = {name: changed(value, (slice(None), slice(20, None)), 7) for name, value in host.items()}
    copies = [dataclasses.replace(chunk, kv=host), chunk.pad(32), dataclasses.replace(chunk.pad(32), span=30)]
    copies += [pickle.loads(pickle.dumps(chunk)), copy.deepcopy(chunk), dataclasses.replace(chunk, kv=noise)]
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.NamedSharding(mesh, jax.P("x"))
    copies.append(dataclasses.replace(chunk, kv={name: jax.device_put(value, place) for name, value in host.items()}))
    assert {own.content for own in copies} == {chunk.content}


def test_a_given_content_stays_and_costs_no_pass(monkeypatch):
    """And applying never computes one: what is not known is not asked for."""
    chunk = chunk_of("gqa", content="digest of the pixels")
    small = dataclasses.replace(chunk, kv={name: value.astype(jnp.bfloat16) for name, value in chunk.kv.items()})
    assert small.content == chunk.content == chunk.pad(32).content == "digest of the pixels"
    monkeypatch.setattr(hashlib, "blake2b", lambda *_, **__: pytest.fail("a digest of kv"))
    kvp.apply_patch(chunk, None, 3, ["A"])


def test_a_computed_content_outlives_encoding_in_every_copy():
    plain = chunk_of("gqa")
    chunk = encode_chunk(plain, "k2v2")
    for own in (chunk, decode_chunk(chunk)):
        assert dataclasses.replace(own).content == plain.content
    assert dataclasses.replace(chunk, content=None).content != plain.content


# ----------------------------------------------------------------------------------------------------- hybrid models


def test_padding_leaves_a_transition_and_its_content():
    chunk = hybrid.chunk_of(length=2, rows=jnp.bfloat16)
    assert chunk.nbytes == hybrid.LAYOUT.bytes_per_token() * chunk.tokens + hybrid.LAYOUT.transition_bytes()
    padded = chunk.pad(11)
    assert (padded.tokens, padded.length, padded.content) == (11, 2, chunk.content)
    assert all(padded.kv[name] is chunk.kv[name] for name in PARTS)
    # As computed from the arrays again, not only as carried over.
    assert dataclasses.replace(padded, kv=dict(padded.kv)).content == chunk.content
    batch = hybrid.chunk_of(batch=(2,))
    assert (batch.tokens, batch.batch) == (hybrid.TOKENS, 2)


def test_content_is_of_every_number_of_a_transition():
    """Of two tokens: fewer than any part has rows, so that a part that was masked by the length would go unseen."""
    chunk, kv = hybrid.chunk_of(length=2), hybrid.drawn()
    of = lambda name, value: dataclasses.replace(chunk, kv={**kv, name: value}, content=None).content
    for name in PARTS:
        for place in (0, -1):
            assert of(name, changed(kv[name], np.unravel_index(place % kv[name].size, kv[name].shape))) != chunk.content
        assert not examine(kv | {name: changed(kv[name], (-1,) * 4, np.nan)}, 2)[1]
    assert of("k", changed(kv["k"], (slice(None), slice(2, None)))) == chunk.content
    assert examine(kv, 2)[1]


def test_what_is_no_chunk_of_a_hybrid_layout_is_refused(unchecked):
    layout, kv, local = hybrid.LAYOUT, hybrid.drawn(), np.arange(hybrid.TOKENS, dtype=np.float32)
    packed = encode_chunk(hybrid.chunk_of(), "k4v4").kv
    without = {name: value for name, value in kv.items() if name != "tail"}
    cases: list[tuple[Any, ...]] = [
        (without, LayoutError, "got channels", {}),
        ({**packed, "v": kv["v"]}, InputError, r"expected \['k', 'v'\] packed", {"encoding": "k4v4g32"}),
    ]
    # A transition where rows are expected, a state of other heads, one row too few.
    for name, value in (("k", kv["state"]), ("state", kv["state"][:, :, :2]), ("tail", kv["tail"][:, 1:])):
        cases.append((kv | {name: value}, ShapeError, rf"\['{name}'\]: got shape", {}))
    cases.append((kv | {"tail": changed(kv["tail"], (-1,) * 4, np.inf)}, NotFiniteError, r"\['tail'\]: got 1", {}))
    for value, error, message, options in cases:
        fields = {"layout": layout, "backbone": "backbone", **options}
        with pytest.raises(error, match=message):
            Chunk(value, local, hybrid.TOKENS, hybrid.TOKENS, "page", **fields)
    with pytest.raises(LayoutError, match="with a transition to cut to tokens 1 to 3"):
        layout.between(kv, 1, 3)
    assert layout.of_layers(kv, (0, 2))["map"].shape[0] == 1


def test_few_bits_pack_the_rows_and_round_the_transition():
    chunk = hybrid.chunk_of(length=5)
    few = encode_chunk(chunk, "k4v4")
    assert (few.content, few.nbytes) == (chunk.content, KVEncoding.of("k4v4").nbytes(hybrid.LAYOUT, hybrid.TOKENS))
    layout = KVLayout.gqa(2, 2, 8, Rope(1e4, 8))
    rows = Chunk({name: chunk.kv[name] for name in "kv"}, chunk.local, 7, 5, "page", layout, "b")
    alone, placed = encode_chunk(rows, "k4v4"), kvp.apply_patch(few, start=3)
    for name, value in few.kv.items():
        assert isinstance(value, PackedArray) == (name not in PARTS)
        if name in PARTS:
            assert value.dtype == placed[name].dtype == jnp.bfloat16
            assert (np.abs(np.asarray(value, np.float32) - chunk.kv[name]) <= 2**-8 * np.abs(chunk.kv[name])).all()
            assert (np.asarray(placed[name]) == np.asarray(value)).all()
        else:
            assert (np.asarray(value) == np.asarray(alone.kv[name])).all()


# -------------------------------------------------------------------------------------------------------- identities


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


# ------------------------------------------------------------------------------------------------------------- leads


LEAD, OTHER_LEAD, UNIT = [[5, 6, 7, 8]], [[5, 6, 7, 9]], [[11, 12, 13]]


def near(found, wanted) -> bool:
    return all(np.allclose(found[name], wanted[name], atol=2e-5) for name in wanted)


def repeated(tokens: Tokens) -> Tokens:
    """Two equal rows of tokens."""
    return jax.tree.map(lambda part: np.repeat(np.asarray(part), 2, axis=0), tokens)


def test_a_canonical_behind_a_lead_is_what_one_prompt_of_both_holds():
    """And so is conditioned KV, in rows of a batch too; its positions count from its own start."""
    backbone, middle = backbone_of("mrope"), [21, 22]
    prompts = [backbone.embed(**backbone.prepare([ids])) for ids in (LEAD[0] + UNIT[0], LEAD[0] + middle + UNIT[0])]
    both, all_three = (jax.device_get(backbone.prefill(tokens).kv) for tokens in prompts)
    chunk, alone = kvp.make_chunk(backbone, UNIT, lead=LEAD), kvp.make_chunk(backbone, UNIT)
    assert near(chunk.kv, {name: value[:, 0, 4:] for name, value in both.items()})
    assert not near(chunk.kv, alone.kv)
    assert (np.asarray(chunk.local) == np.asarray(alone.local)).all()
    assert (chunk.span, chunk.length, alone.lead) == (alone.span, alone.length, None)

    wanted = {name: value[:, 0, 6:] for name, value in all_three.items()}
    tokens = [backbone.embed(**backbone.prepare([ids])) for ids in (LEAD[0], middle, UNIT[0])]
    found = kvp.conditioned(backbone, [[middle], UNIT], lead=LEAD)
    assert len(found) == 2
    assert near(found[1], wanted)
    rows = jax.device_get(kvp.conditioned(backbone, [repeated(own) for own in tokens[1:]], lead=tokens[0])[1])
    for row in range(2):
        assert near({name: value[:, row] for name, value in rows.items()}, wanted)


def test_the_lead_is_part_of_a_chunks_identity():
    backbone = backbone_of("mrope")
    alone, behind, other = (kvp.make_chunk(backbone, UNIT, lead=lead) for lead in (None, LEAD, OTHER_LEAD))
    for word in ("id", "content", "lead"):
        assert len({getattr(chunk, word) for chunk in (alone, behind, other)}) == 3
    tokens = backbone.embed(**backbone.prepare(LEAD))
    again = kvp.make_chunk(backbone, UNIT, lead=tokens)
    assert (again.id, again.lead) == (behind.id, behind.lead)
    assert behind.pad(9).lead == behind.lead
    with pytest.raises(ShapeError, match="lead: got 2 rows; expected one"):
        kvp.make_chunk(backbone, UNIT, lead=repeated(tokens))


def test_units_of_a_hybrid_have_the_transitions_of_their_own_tokens():
    """Composed, they are that of one prompt of all, and their rows are the prompt's."""
    model, ids = backbone_of("hybrid"), [[5, 6, 7], [11, 12, 13, 14, 15], [8, 9]]
    lead, first, second = ([unit] for unit in ids)
    front, behind = kvp.make_chunk(model, lead), kvp.make_chunk(model, first, lead=lead)
    units = [dict(front.kv), *kvp.conditioned(model, [first, second], lead=lead)]
    prompt = jax.device_get(model.prefill(model.embed(**model.prepare([[*ids[0], *ids[1], *ids[2]]]))).kv)
    rows = {name: np.concatenate([kv[name] for kv in units], axis=1) for name in "kv"}
    hybrid.close({name: prompt[name][:, 0] for name in "kv"}, rows, 1e-5)
    transition = hybrid.composed([{name: np.asarray(kv[name]) for name in PARTS} for kv in units], [3, 5, 2])
    hybrid.close({name: prompt[name][:, 0] for name in transition}, transition, 1e-5)
    assert (np.asarray(behind.kv["state"]) == np.asarray(units[1]["state"])).all()
    assert not np.allclose(kvp.make_chunk(model, first).kv["state"], behind.kv["state"])
