"""Operations of windows give the order, labels and identities that their history says, also out of JSON, or refuse."""
# pyright: reportArgumentType=false

import collections
import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from window_cases import FINGERPRINT, chunk, note_of, patched, text, window_of
from window_programs import Pair

from kvpatch_jax.cache import text_digest
from kvpatch_jax.errors import PatchMismatchError, SessionError, StalePatchError
from kvpatch_jax.window import BARE, KEEP, LIMIT, Service, Window, from_json, to_json


@pytest.mark.parametrize(
    ("seeds", "steps"), [(range(1200), 14), pytest.param(range(2000, 6000), 80, marks=pytest.mark.nightly)]
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
    assert min(labels[label] for label in ("exact", "survivor", "approximate")) > 900, labels


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
    (lambda w: w.evict("X"), r"'X', which is not in the window; .*'t'"),
    (lambda w: w.evict("A"), "which is evicted"),
    (lambda w: w.slide(-1), "slide.keep: got -1"),
    (lambda w: w.append("X"), "got a str; expected an Entry"),
    (lambda w: w.fork("a/b"), "without a slash"),
    (lambda w: Window.empty(FINGERPRINT, promise="neither"), "'remember' or 'forget'"),
    (lambda w: w.append(chunk("X"), Service("patch")), "'patch' of 'X' with no patch"),
    (lambda w: w.append(chunk("X"), Service("bare", note_of(w, "X"))), "'bare' of 'X' with a patch"),
    (lambda w: w.append(chunk("X"), KEEP), "expected a piece of the window"),
    (lambda w: w.append(chunk("X"), Service("leading")), "expected nothing in front of it"),
    (lambda w: w.append(chunk("X"), Service("restored", likeness="near")), "with stored=None"),
    (lambda w: w.append(text("X"), BARE), "which is a text; expected it prefilled"),
    (lambda w: w.append(chunk("X", LIMIT - 1)), r"below 2\*\*30"),
    (lambda _: dataclasses.replace(text("X"), order_free=True), r"entry\.order_free: got"),
]


def test_refused_operations_say_what_is_expected_and_change_nothing(unchecked):
    window = window_of(*"ABC", "t").evict("A")
    copy = dataclasses.replace(window)
    for operation, words in REFUSED:
        with pytest.raises(SessionError, match=words) as refusal:
            operation(window)
        assert "expected" in str(refusal.value)
        assert window == copy


MADE = "0" * 32


def saved() -> Window:
    """A window with a piece of each method but "leading", a removal patch, evicted chunks, and a branch."""
    window = window_of(*"ABCD", "t", free="BC", promise="forget")
    removal = note_of(window.evict("A"), "D", "D", base="conditioned", base_antecedent=window.antecedent("D"))
    window = window.evict("A").serve({"D": patched(removal)}).serve({"B": BARE})
    window = window.serve({"C": patched(note_of(window, "C", "C"))})
    return window.append(chunk("E"), Service("restored", stored=MADE, likeness="near")).fork("x")


def document() -> dict[str, Any]:
    return json.loads(to_json(saved()))


def written(contents: dict[str, Any]) -> str:
    """A document of contents, with their digest."""
    return json.dumps(document() | {"window": contents, "digest": text_digest(json.dumps(contents, sort_keys=True))})


def test_a_window_is_read_back_as_it_was():
    for window in (saved(), window_of(lead=0), Window.empty("f" * 32, lead=3)):
        read = from_json(to_json(window), window.backbone)
        assert read == window
        assert [read.standing(id) for id in read.ids] == [window.standing(id) for id in window.ids]
        assert from_json(to_json(window).encode(), window.backbone) == window
    assert {piece.method for piece in saved().pieces} == {"prefill", "bare", "patch", "restored"}
    assert saved().piece("D").base is not None
    with pytest.raises(SessionError, match=f"of backbone '{'f' * 32}'; expected 'other'"):
        from_json(to_json(saved()), "other")


def test_damage_and_what_is_no_document_is_refused():
    for body in (
        *("", "null", "{}", "[" * 100_000, "9" * 5000, b"\xff", '"\\ud800"', '{"format": NaN}'),
        *('{"format": "kvpatch window 4"}', '{"format": "kvpatch window 5"}'),
        '{"format": "kvpatch window 5", "format": "kvpatch window 5"}',
    ):
        with pytest.raises(SessionError, match="expected"):
            from_json(body, "f" * 32)
    text = to_json(saved())
    assert '"lead": 1' in text
    with pytest.raises(SessionError, match="another digest"):
        from_json(text.replace('"lead": 1', '"lead": 2', 1), "f" * 32)


PIECE = ("pieces", 1)
ENTRY = (*PIECE, "entry")
HOSTILE: list[tuple[tuple[Any, ...], list[Any]]] = [
    (("pieces",), [None, {"a": 1}, [3], [{}]]),
    (("evicted",), [[3], [{"id": "A"}]]),
    (("lead",), [-1, True, 1.5, 2**70]),
    (("promise",), ["neither", []]),
    (("branch",), [3]),
    ((*PIECE, "start"), [-1, 18.0, 17, LIMIT]),
    ((*PIECE, "method"), ["keep", []]),
    ((*PIECE, "made"), ["x" * 32, MADE[:-1], 3, MADE + "\n"]),
    ((*PIECE, "seen"), [None, ["x"], [[MADE]]]),
    ((*PIECE, "ways"), ["bare", [["bare"]], [["bare", -1]], [["a", 1], ["a", 1]], [["b", 1], ["a", 1]], []]),
    ((*PIECE, "ways"), [[["a", index] for index in range(9)]]),
    ((*PIECE, "source"), [3]),
    ((*PIECE, "base"), [""]),
    ((*ENTRY, "id"), ["", None, "system", "\ud800"]),
    ((*ENTRY, "content"), [""]),
    ((*ENTRY, "tokens"), [0, True, LIMIT]),
    ((*ENTRY, "span"), [0, 11, LIMIT - 1]),
    ((*ENTRY, "kind"), ["text", "image"]),
    ((*ENTRY, "order_free"), [2]),
    ((*ENTRY, "modality"), [""]),
    ((*ENTRY, "more"), [1]),
    (("pieces", -1, "entry", "span"), [LIMIT - 52]),
]
"""Places of the contents, and values that a foreign program may write there."""


def test_hostile_contents_are_refused(unchecked):
    for path, values in HOSTILE:
        for value in values:
            contents = document()["window"]
            table: Any = contents
            for key in path[:-1]:
                table = table[key]
            table[path[-1]] = value
            with pytest.raises(SessionError, match="expected"):
                from_json(written(contents), "f" * 32)


def test_contents_that_contradict_each_other_are_refused():
    contents = document()["window"]
    evicted = contents["evicted"][0]
    changes: list[dict[str, Any]] = [
        {"pieces": contents["pieces"][1:]},
        {"evicted": [evicted, evicted]},
        {"evicted": [contents["pieces"][1]["entry"]]},
        {"evicted": [{**evicted, "kind": "text", "order_free": False}]},
        {"evicted": [{**evicted, "id": f"A{index}"} for index in range(513)]},
    ]
    for change in changes:
        with pytest.raises(SessionError, match="expected"):
            from_json(written(copy.deepcopy(contents) | change), "f" * 32)
    for name in contents:
        with pytest.raises(SessionError, match="expected"):
            from_json(written({key: value for key, value in contents.items() if key != name}), "f" * 32)
