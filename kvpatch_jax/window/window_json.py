"""Windows as JSON: written, digested, and read with every value checked, because files may come from anyone."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from ..backbone import ForwardCosts
from ..cache import brief
from ..errors import KVPatchError, WindowError
from ..utils import strict_json
from .costs import Costs
from .entry import (
    LIMIT,
    MOST_WAYS,
    Entry,
    PatchBase,
    PieceState,
    PlacedPiece,
    StateKind,
    Way,
    Ways,
    short_digest,
)
from .fidelity import linked

FORMAT = "kvpatch window"
VERSION = 4

_HEX = re.compile("[0-9a-f]{32}")
_PLAIN = ("lead", "lead_settled", "promise", "branch", "clock")


def body_of(window: Any) -> dict[str, Any]:
    """Returns all fields of a window as JSON has them, without what is derived."""
    body: dict[str, Any] = {"costs": window.costs.to_dict()}
    for word in ("pieces", "evicted"):
        body[word] = []
        for piece in getattr(window, word):
            saved = {"entry": _fields(piece.entry), "start": piece.start, "state": _fields(piece.state)}
            body[word].append({**saved, "born": piece.born, "placed": piece.placed})

    return body | {word: getattr(window, word) for word in _PLAIN}


def _fields(container: Entry | PieceState) -> dict[str, Any]:
    return {field.name: getattr(container, field.name) for field in dataclasses.fields(container)}


def digest_of_body(body: Mapping[str, Any]) -> str:
    """Returns the digest of what `body_of` returns, 32 hexadecimal digits."""
    # Of the canonical form, so that white space and the order of keys do not matter.
    return short_digest(json.dumps(body, sort_keys=True, separators=(",", ":")))


def write(window: Any) -> str:
    """Returns a window as JSON, with a digest that reveals damage."""
    saved = {"format": FORMAT, "version": VERSION, "digest": window.digest}
    return json.dumps({**saved, "window": body_of(window)})


def read(text: str | bytes, backbone: str) -> dict[str, Any]:
    """Returns the fields of a window that `write` wrote.

    Raises:
      WindowError: no such JSON, another version or backbone, damage, or pieces that form no window.
    """
    # The frame: format, version, backbone, digest.
    saved = _parsed(text)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise WindowError(f"window: got JSON of {_kind_of(saved)}; expected what Window.to_json returns")

    version = saved.get("version")
    if version != VERSION:
        raise WindowError(f"window: got version {version!r:.80}; expected {VERSION}")

    _table(saved, "window", ("format", "version", "digest", "window"))
    body = _table(saved["window"], "window", ("costs", "pieces", "evicted", *_PLAIN))
    costs = _costs(body["costs"])
    if costs.backbone != backbone:
        raise WindowError(f"window: got one saved for backbone {costs.backbone!r:.80}; expected {backbone!r}")

    digest = digest_of_body(body)
    if digest != saved["digest"]:
        raise WindowError(f"window: got contents of digest {digest}; expected {saved['digest']!r:.80}")

    # The contents, first each value by itself, then how they fit together.
    fields: dict[str, Any] = {word: body[word] for word in _PLAIN} | {"costs": costs}
    _check_plain(fields)
    pieces, evicted = (_pieces(body[word], word, fields["clock"]) for word in ("pieces", "evicted"))
    _check_places(fields, pieces)
    ids = [piece.entry.id for piece in (*pieces, *evicted)]
    if len(set(ids)) != len(ids):
        raise WindowError("window: got pieces of one id; expected distinct ids")

    # Fidelity is derived, never read.
    pieces = linked(costs.backbone, pieces, 0, fields["promise"] == "forget")

    return fields | {"pieces": pieces, "evicted": tuple(evicted)}


def _parsed(text: Any) -> Any:
    if not isinstance(text, str | bytes):
        raise WindowError(f"window: got a {type(text).__name__}; expected JSON")

    # Every number of a window is an integer; a float would not compare equal to what was written.
    def whole(number: str) -> Any:
        raise WindowError(f"window: got number {number:.80}; expected integers")

    try:
        return strict_json.loads(text, parse_float=whole)
    except WindowError:
        raise
    except ValueError as error:
        raise WindowError(f"window: got invalid JSON: {error!s:.120}; expected what Window.to_json returns") from None


def _check_plain(fields: dict[str, Any]) -> None:
    """Refuses fields of wrong types, or that contradict one another."""
    for word in ("lead", "clock"):
        _number(fields[word], word)

    branch = fields["branch"]
    checks = {
        "lead_settled": isinstance(fields["lead_settled"], bool),
        "promise": fields["promise"] in ("remember", "forget"),
        "branch": isinstance(branch, str) and all(branch.split("/")[1:]),
    }
    for word, right in checks.items():
        if not right:
            raise WindowError(f"window.{word}: got {fields[word]!r:.80}; expected what Window.to_json returns")


def _check_places(fields: dict[str, Any], pieces: list[PlacedPiece]) -> None:
    """Refuses pieces that are not right behind one another, and an invalid lead."""
    end = 0
    for piece in pieces:
        if piece.start != end:
            raise WindowError(f"window: got {brief(piece.entry.id)!r} at {piece.start}; expected it at {end}")
        end = piece.end

    # A lead that is still open has taken in every piece, and no chunk has come yet.
    open_lead = fields["lead"] == len(pieces) and all(piece.entry.kind == "text" for piece in pieces)
    if not fields["lead_settled"] and not open_lead:
        raise WindowError(f"window.lead: got {fields['lead']}, not settled; expected all pieces, and texts")


def _pieces(value: Any, what: str, clock: int) -> list[PlacedPiece]:
    if not isinstance(value, list):
        raise WindowError(f"window.{what}: got {_kind_of(value)}; expected a list")

    pieces = []
    for saved in value:
        table = _table(saved, what, ("entry", "start", "state", "born", "placed"))

        entry, state = _built(Entry, table["entry"]), _state(table["state"])

        # Only evicted chunks are "evicted"; a text is prefilled or gone.
        kinds = ("evicted",) if what == "evicted" else ("bare", "patched", "conditioned")
        text = entry.kind == "text" and (what == "evicted" or state.kind != "conditioned")
        if state.kind not in kinds or text:
            found = f"{state.kind!r} of {entry.kind} {brief(entry.id)!r}"
            raise WindowError(f"window.{what}: got {found}; expected one of {kinds}")

        # No step of a piece lies in the future.
        start, born = _number(table["start"], "start"), _number(table["born"], "born", clock)
        placed = _number(table["placed"], "placed", clock)
        pieces.append(PlacedPiece(entry, start, state, None, born, placed))

    return pieces


def _state(value: Any) -> PieceState:
    table = dict(_table(value, "state", [field.name for field in dataclasses.fields(PieceState)]))
    table["ways"] = _ways(table["ways"])
    state = _built(PieceState, table)

    # Fields that only some kinds have. What left may have been patched, and keeps what it was made behind.
    kind, gone = state.kind, state.kind == "evicted"
    known = kind in get_args(StateKind) and state.base in get_args(PatchBase)
    made = _is_digest(state.behind) or (state.behind == "" and kind in ("bare", "evicted"))
    source = state.patch is None or (kind == "conditioned" and bool(state.ways) and _is_digest(state.patch))
    patched = isinstance(state.patch, str) if kind == "patched" else source or gone
    approximate = kind in ("conditioned", "evicted") or bool(state.ways)
    if not (known and made and patched and approximate):
        raise WindowError(f"window: got {state!r:.200}; expected a state that pieces can have")

    for word in ("rank", "patch_bytes", "patch_flops", "transition_flops"):
        _number(getattr(state, word), word, 2**62)
    return state


def _ways(value: Any) -> Ways:
    """Returns the ways of a state; they are distinct and sorted, and of points that somebody may have invented."""
    ways: list[Way] = []
    for pair in value if isinstance(value, list) and len(value) <= MOST_WAYS else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise WindowError(f"window.ways: got {value!r:.80}; expected at most {MOST_WAYS} pairs of point and rank")
        ways.append((pair[0], _number(pair[1], "ways", 2**62)))
    if ways != sorted(set(ways)):
        raise WindowError(f"window.ways: got {value!r:.80}; expected them distinct and sorted")
    return tuple(ways)


def _costs(value: Any) -> Costs:
    table = dict(_table(value, "costs", [field.name for field in dataclasses.fields(Costs)]))
    forward = dict(_table(table.pop("forward"), "costs", ForwardCosts._fields))
    if not isinstance(table["backbone"], str):
        raise WindowError(f"window.backbone: got {table['backbone']!r:.80}; expected a fingerprint")

    for word in ("layers", "kv_bytes", "turning_bytes", "rotary", "transition_bytes", "composing"):
        _number(table[word], word, 2**62)
    _number(forward["logit"], "logit", 2**62)

    # One number for each layer.
    for word in ("token", "pair", "window"):
        if not isinstance(forward[word], list) or len(forward[word]) != table["layers"] or not forward[word]:
            raise WindowError(f"window.costs: got {forward[word]!r:.80} by layer; expected {table['layers']} of them")
        forward[word] = tuple(_number(number, word, 2**62) for number in forward[word])

    return Costs(forward=ForwardCosts(**forward), **table)


def _built[T](container: Callable[..., T], value: Any) -> T:
    """Makes a container from a table that has all of its fields and no other."""
    table = _table(value, container.__name__, [field.name for field in dataclasses.fields(container)])  # pyright: ignore

    # Containers check themselves; here whatever they refuse is a bad window.
    try:
        return container(**table)
    except KVPatchError as error:
        raise WindowError(str(error)) from None


def _table(value: Any, what: str, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WindowError(f"window.{what}: got {_kind_of(value)}; expected a table")
    if set(value) != set(names):
        found = sorted(set(value) ^ set(names))
        raise WindowError(f"window.{what}: got {found!s:.80} missing or unknown; expected {', '.join(names)}")
    return value


def _number(value: Any, what: str, top: int = LIMIT) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= top:
        # Printing a huge integer takes time quadratic in its digits.
        large = isinstance(value, int) and abs(value) >= 2**62
        found = f"of {value.bit_length()} bits" if large else f"{value!r:.80}"
        raise WindowError(f"window.{what}: got a number {found}; expected 0 to {top}")
    return value


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


def _kind_of(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
