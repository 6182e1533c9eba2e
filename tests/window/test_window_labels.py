"""Operations of windows give the order, starts, labels and identities that their history says, or refuse."""
# pyright: reportArgumentType=false

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from window_cases import FINGERPRINT, chunk, note_of, patched, text, window_of
from window_programs import Pair

from kvpatch_jax.errors import InputError, PatchMismatchError, SessionError, StalePatchError
from kvpatch_jax.window import BARE, KEEP, LIMIT, PREFILL, Entry, Service, Window


@pytest.mark.parametrize(
    ("seeds", "steps"), [(range(3000), 14), pytest.param(range(3000, 7000), 80, marks=pytest.mark.nightly)]
)
def test_random_programs_are_labelled_as_their_terms_say(unchecked, seeds: range, steps: int):
    # Checks of shapes, of which there are none here, would take most of the time.
    labels = collections.Counter[str]()
    for seed in seeds:
        pair, log = Pair(seed), []
        for _ in range(pair.random.randint(3, steps)):
            log.append(pair.step())
            try:
                labels.update(pair.check())
            except AssertionError as error:
                error.add_note(f"seed {seed}: {', '.join(log)}\n{pair.window}\n{pair.symbols.labels()}")
                raise
    assert min(labels[label] for label in ("exact", "survivor", "approximate")) > 2_400, labels


def test_a_prefill_behind_an_approximate_piece_is_approximate_where_the_window_promises_that_piece():
    """In a window that forgets, a stored prefill may be as promised and have seen another KV than what is in front."""
    chunks = {name: Entry(name, f"content {name}", 5, 5) for name in "ABCDE"}
    other = Window.empty(FINGERPRINT).append(chunks["A"]).append(chunks["C"]).append(chunks["D"])
    window = Window.empty(FINGERPRINT, promise="forget")
    for name in "ABC":
        window = window.append(chunks[name])
    window = window.evict("B").append(chunks["D"], Service("restored", stored=other.piece("D").made))
    assert [window.fidelity(id) for id in window.ids] == ["exact", "survivor", "approximate"]
    assert not window.standing("D").ways
    window = window.append(chunks["E"]).evict("C")
    assert window.fidelity("E") == "approximate"


def test_an_arrangement_is_what_single_operations_come_to():
    window = window_of(*"ABCD", free="BCD").evict("A")
    entries = [chunk("D", free=True), chunk("A"), chunk("X"), chunk("B", free=True)]
    arranged = window.arranged([text("system", 18), *entries], {"D": BARE, "X": BARE})
    single = window.evict("C").reorder(["D", "B"]).serve({"D": BARE})
    single = single.insert(chunk("X"), "B", BARE).recall("A", before="X")
    assert arranged.ids == single.ids == ("system", "D", "A", "X", "B")
    assert [piece.made for piece in arranged.pieces] == [piece.made for piece in single.pieces]
    assert arranged.gone == ("C",)
    # An entry may come in anew.
    entries = [piece.entry for piece in window.pieces]
    assert window.arranged(entries) == window
    assert window.arranged(entries, {"C": KEEP}, renewed=["B"]).piece("B").made != window.piece("B").made


def test_five_hundred_and_twelve_evicted_chunks_can_be_recalled(unchecked):
    window = window_of()
    for first in range(0, 600, 100):
        window = window.arranged([text("system", 18), *(chunk(f"c{first + index}") for index in range(100))])
    window = window.slide(0)
    assert window.gone == tuple(f"c{index}" for index in range(600 - 512, 600))
    assert window.recall("c88").ids == ("system", "c88")
    assert window.append(chunk("c87")).ids == ("system", "c87")


def test_the_lead_neither_leaves_nor_moves():
    window = window_of("A", "B", lead=2, free="AB")
    assert window.slide(0).ids == ("system", "A")
    for refused in (
        lambda: window.evict("A"),
        lambda: window.replace("A", chunk("X")),
        lambda: window.insert(chunk("X"), before="A"),
        lambda: window.reorder(["B", "A"]),
        lambda: window.arranged([piece.entry for piece in window.pieces[1:]]),
    ):
        with pytest.raises(SessionError, match=r"expected \('system', 'A'\), which are pinned there"):
            refused()
    # It may be served otherwise, where it is; and a chunk that is not order-free may be named where it stays.
    assert window.serve({"A": BARE}).ids == window.reorder(["system", "A", "B"]).ids == window.ids


def test_a_window_without_a_lead_says_when_the_sink_has_left():
    window = Window.empty(FINGERPRINT, lead=0)
    for name in "ABC":
        window = window.append(chunk(name))
    left = window.evict("A")
    assert [window.sink_left, left.sink_left, left.recall("A", before="B").sink_left] == [False, True, False]
    assert [left.fidelity(id) for id in left.ids] == ["survivor", "survivor"]


@pytest.mark.usefixtures("unchecked")
def test_services_that_do_not_fit_a_piece_are_refused():
    window = window_of("A", "t")
    note = note_of(window, "B")
    for service, words in (
        ("bare", "'bare' of 'B'; expected a Service"),
        (Service("patch"), "'patch' of 'B' with no patch"),
        (Service("bare", note), "'bare' of 'B' with a patch"),
        (Service("other"), "'other' of 'B'"),
        (KEEP, "expected a piece of the window"),
        (Service("leading"), "expected nothing in front of it"),
        (Service("bare", stored="0" * 32), "with stored="),
        (Service("restored", likeness="near"), "with stored=None"),
    ):
        with pytest.raises(SessionError, match=words):
            window.append(chunk("B"), service)
    for service in (BARE, Service("leading"), Service("restored"), patched(note)):
        with pytest.raises(SessionError, match="which is a text; expected it prefilled"):
            window.append(text("t2"), service)
        with pytest.raises(SessionError, match="which is a text; expected it prefilled"):
            window.serve({"t": service})
    with pytest.raises(SessionError, match="that it comes in"):
        Window.empty(FINGERPRINT).append(chunk("A")).serve({"A": Service("leading")})


def test_a_canonical_or_stored_prefill_in_the_place_of_a_forward_has_its_identity():
    empty = Window.empty(FINGERPRINT)
    prefilled = empty.append(chunk("A")).append(chunk("B"))
    restored = empty.append(chunk("A"), Service("leading")).append(chunk("B"), Service("restored"))
    assert [piece.made for piece in restored.pieces] == [piece.made for piece in prefilled.pieces]
    assert [restored.fidelity(id) for id in "AB"] == ["exact", "exact"]
    assert prefilled.piece("B").made == empty.append(chunk("A")).prefilled(chunk("B"))


def test_a_patch_serves_behind_the_very_kv_that_it_was_formed_behind():
    window = window_of("A")
    bare = window.serve({"A": BARE})
    # Behind a bare chunk the promise is that chunk's prefill, so the same patch belongs to both.
    for place in (window, bare):
        served = place.append(chunk("N"), patched(note_of(window, "N")))
        assert (served.fidelity("N"), served.standing("N").ways) == ("approximate", (("stored", 8),))
    blind = note_of(window, "N", antecedent=bare.antecedent())
    for place in (window, bare):
        with pytest.raises(StalePatchError, match="patch of chunk 'N': got one formed behind"):
            place.append(chunk("N"), patched(blind))
        assert place.append(chunk("N"), patched(blind, stale=True)).standing("N").ways == (("", 0),)
    # Its bound holds behind all that is promised; a window that forgets does not promise what the patch has seen.
    for promise, ways in (("remember", (("stored", 8),)), ("forget", (("", 0),))):
        place = window_of(*"AB", promise=promise)
        left = place.append(chunk("N"), patched(note_of(place, "N"))).evict("B")
        assert left.standing("N").ways == ways
    for wrong in (note_of(window, "M"), note_of(window, "N", content="another")):
        with pytest.raises(PatchMismatchError, match=r"patch of chunk 'N'.*expected 'content of N'"):
            window.append(chunk("N"), patched(wrong, stale=True))


def test_an_orbit_patch_serves_in_any_order():
    window = window_of(*"ABC", free="ABC", promise="forget")
    orbit = note_of(window, "C", "C", antecedent=window.antecedent("C").sorted(), orbit=True)
    moved = window.reorder(["B", "A", "C"]).serve({"C": patched(orbit)})
    assert moved.standing("C").ways == (("orbit", 8),)
    with pytest.raises(StalePatchError, match="any ordering of"):
        window.reorder(["C", "A", "B"]).serve({"C": patched(orbit)})


def test_a_removal_patch_needs_the_kv_that_the_window_holds():
    window = window_of(*"AB", promise="forget")
    left = window.evict("A")
    removal = note_of(left, "B", "B", base="conditioned", base_antecedent=window.antecedent("B"))
    served = left.serve({"B": patched(removal)})
    assert (served.piece("B").base, served.fidelity("B")) == (window.piece("B").made, "approximate")
    with pytest.raises(StalePatchError, match=r"a base of KV \w+; expected \w+, which the window holds"):
        left.serve({"B": patched(dataclasses.replace(removal, base_antecedent=left.antecedent("B")))})
    with pytest.raises(PatchMismatchError, match="base 'conditioned'; expected 'canonical' of what comes in"):
        left.append(chunk("N"), patched(dataclasses.replace(removal, chunk="N", content=None)))


REFUSED: list[tuple[Callable[[Window], Any], str]] = [
    (lambda w: w.recall("X"), r"'X', which is unknown; .* \('A',\)"),
    (lambda w: w.recall("B"), "'B', which is in the window"),
    (lambda w: w.evict("t").recall("t"), "unknown"),
    (lambda w: w.reorder(["C", "B"]), "'C' moved"),
    (lambda w: w.reorder(["B", "B"]), r"\('B', 'B'\); expected each once"),
    (lambda w: w.append(chunk("B")), "'B', which is in the window"),
    (lambda w: w.append(chunk("A")), "`recall`"),
    (lambda w: w.arranged([*(piece.entry for piece in w.pieces), chunk("A", span=4)]), "evicted as"),
    (lambda w: w.arranged([w.pieces[0].entry, chunk("X"), chunk("X")]), "'X' twice"),
    (lambda w: w.evict("B", "B"), "expected each once"),
    (lambda w: w.evict("X"), r"'X', which is not in the window; .*'t'"),
    (lambda w: w.evict("A"), "which is evicted"),
    (lambda w: w.evict(["B"]), "which is not in the window"),
    (lambda w: w.slide(-1), "slide.keep: got -1"),
    (lambda w: w.slide(True), "slide.keep: got True"),
    (lambda w: w.append("X"), "got a str; expected an Entry"),
    (lambda w: w.serve({"X": PREFILL}), "'X', which is not in the window"),
    (lambda w: w.fork(""), "fork.name: got ''"),
    (lambda w: w.fork("a/b"), "without a slash"),
    (lambda w: w.renamed("/x"), "without a slash"),
    (lambda w: Window.empty(FINGERPRINT, promise="neither"), "'remember' or 'forget'"),
    (lambda w: Window.empty(FINGERPRINT, lead=-1), "window.lead: got -1"),
    (lambda w: w.append(chunk("X", LIMIT - 1)), r"below 2\*\*30"),
]


def test_refused_operations_say_what_is_expected_and_change_nothing(unchecked):
    window = window_of(*"ABC", "t").evict("A")
    copy = dataclasses.replace(window)
    for operation, words in REFUSED:
        with pytest.raises(SessionError, match=words) as refusal:
            operation(window)
        assert "expected" in str(refusal.value)
        assert window == copy


def test_refused_entries_name_the_field(unchecked):
    for fields in (
        *({"id": ""}, {"id": 3}, {"content": ""}, {"kind": "image"}, {"kind": "text", "order_free": True}),
        *({"tokens": 0}, {"tokens": True}, {"span": -1}, {"span": 2.5}, {"span": LIMIT}, {"modality": ""}),
    ):
        with pytest.raises(SessionError, match=rf"entry\.({'|'.join(fields)}): got .*expected"):
            dataclasses.replace(chunk("A"), **fields)
    with pytest.raises(InputError):
        chunk("\ud800")
