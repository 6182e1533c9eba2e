"""Windows as JSON: read back as they were; damage, another backbone and hostile contents are WindowErrors."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from window_cases import chunk, note_of, patched, window_of

from kvpatch_jax.cache import text_digest
from kvpatch_jax.errors import SessionError
from kvpatch_jax.window import BARE, LIMIT, Service, Window, from_json, to_json

MADE = "0" * 32
OTHER = "1" * 32


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


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "null", "[]", "3", "{}", "[" * 100_000, "9" * 5000, b"\xff", '"\\ud800"', "NaN"),
        *('{"format": NaN}', '{"format": "kvpatch window 4"}', '{"format": "kvpatch window 5"}'),
        *('{"format": "kvpatch window 5", "window": 3}', '{"format": "kvpatch window 5", "window": []}'),
        '{"format": "kvpatch window 5", "format": "kvpatch window 5"}',
        '{"format": "kvpatch window 5", "window": {}, "digest": "0"}',
    ],
)
def test_what_is_no_document_is_refused(body):
    with pytest.raises(SessionError, match="expected"):
        from_json(body, "f" * 32)


def test_damage_is_found():
    text = to_json(saved())
    for old, new in (('"start": 18', '"start": 19'), ('"lead": 1', '"lead": 2'), ('"branch": "/x"', '"branch": "/y"')):
        assert old in text
        with pytest.raises(SessionError, match="another digest"):
            from_json(text.replace(old, new, 1), "f" * 32)


def at(*path: Any) -> Callable[[dict[str, Any], Any], None]:
    """Sets a value of the contents."""

    def change(contents: dict[str, Any], value: Any) -> None:
        table: Any = contents
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value

    return change


HOSTILE: list[tuple[Callable[[dict[str, Any], Any], None], Any]] = [
    *((at("pieces"), value) for value in (None, 3, "pieces", {"a": 1}, [[]], [3], [None], [{}])),
    *((at("evicted"), value) for value in (None, [3], [{}], [{"id": "A"}], {"a": 1})),
    *((at("lead"), value) for value in (-1, True, 1.5, "1", None, 2**70)),
    *((at("promise"), value) for value in ("neither", None, [])),
    *((at("branch"), value) for value in (3, None, [])),
    *((at("pieces", 1, "start"), value) for value in (-1, True, 18.0, 17, LIMIT, None)),
    *((at("pieces", 1, "method"), value) for value in ("keep", "prefill ", None, [])),
    *((at("pieces", 1, "made"), value) for value in ("", "x" * 32, MADE[:-1], 3, None, MADE + "\n")),
    *((at("pieces", 1, "seen"), value) for value in (None, 3, [3], ["x"], MADE, [[MADE]])),
    *((at("pieces", 1, "ways"), value) for value in (None, "bare", [["bare"]], [["bare", -1]], [["a", 1], ["a", 1]])),
    *((at("pieces", 1, "ways"), value) for value in ([["b", 1], ["a", 1]], [["a", index] for index in range(9)], [])),
    *((at("pieces", 1, "source"), value) for value in (3, [])),
    *((at("pieces", 1, "base"), value) for value in ("", 3)),
    *((at("pieces", 1, "entry"), value) for value in (None, 3, [], {})),
    *((at("pieces", 1, "entry", "id"), value) for value in ("", None, "system", "\ud800", 3)),
    *((at("pieces", 1, "entry", "content"), value) for value in ("", 3)),
    *((at("pieces", 1, "entry", "tokens"), value) for value in (0, -1, True, 1.5, LIMIT, 2**70)),
    *((at("pieces", 1, "entry", "span"), value) for value in (0, 11, LIMIT - 1)),
    *((at("pieces", 1, "entry", "kind"), value) for value in ("text", "image", None)),
    *((at("pieces", 1, "entry", "order_free"), value) for value in (2, None, "yes")),
    *((at("pieces", 1, "entry", "modality"), value) for value in ("", 3)),
    (at("more"), 1),
    (at("pieces", 1, "more"), 1),
    (at("pieces", 1, "entry", "more"), 1),
    (at("pieces", -1, "entry", "span"), LIMIT - 52),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_contents_are_refused(unchecked, number):
    change, value = HOSTILE[number]
    contents = document()["window"]
    change(contents, value)
    with pytest.raises(SessionError, match="expected"):
        from_json(written(contents), "f" * 32)


def test_contents_that_contradict_each_other_are_refused():
    contents = document()["window"]
    evicted = contents["evicted"][0]
    changes: list[dict[str, Any]] = [
        {"pieces": contents["pieces"][1:]},
        {"pieces": [*contents["pieces"], contents["pieces"][-1]]},
        {"evicted": [evicted, evicted]},
        {"evicted": [contents["pieces"][1]["entry"]]},
        {"evicted": [{**evicted, "kind": "text", "order_free": False}]},
        {"evicted": [{**evicted, "id": f"A{index}"} for index in range(513)]},
        {key: value for key, value in contents.items() if key != "pieces"} | {"backbone": 3},
    ]
    for change in changes:
        with pytest.raises(SessionError, match="expected"):
            from_json(written(copy.deepcopy(contents) | change), "f" * 32)
    for name in contents:
        with pytest.raises(SessionError, match="expected"):
            from_json(written({key: value for key, value in contents.items() if key != name}), "f" * 32)
