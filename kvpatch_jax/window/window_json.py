"""Windows as JSON, every value checked where it is read: files may come from anyone."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from ..cache import MOST_WAYS, text_digest
from ..errors import InputError, SessionError
from ..utils import strict_json
from .entry import LIMIT, Entry, is_count
from .window import MOST_GONE, Method, Piece, Window

FORMAT = "kvpatch window 5"
_IDENTITY = re.compile("[0-9a-f]{32}")


def to_json(window: Window) -> str:
    """Writes a window as JSON, with a digest that reveals damage."""
    body = {field.name: getattr(window, field.name) for field in dataclasses.fields(window)}
    body["pieces"] = [piece._replace(entry=vars(piece.entry))._asdict() for piece in window.pieces]  # pyright: ignore
    body["evicted"] = [vars(entry) for entry in window.evicted]
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"format": FORMAT, "digest": text_digest(text), "window": body})


def from_json(text: str | bytes, backbone: str) -> Window:
    """Reads what `to_json` wrote, for the backbone of this fingerprint. The contents are checked, but not their author.

    Raises:
      SessionError: another format or backbone, damage, or pieces that form no window.
    """
    try:
        saved = strict_json.loads(text)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            found = saved.get("format") if isinstance(saved, dict) else saved
            raise SessionError(f"window: got format {found!r:.80}; expected {FORMAT!r}")
        body = dict(saved["window"])
        if body.keys() != {field.name for field in dataclasses.fields(Window)}:
            raise SessionError(f"window: got fields {sorted(body)!s:.120}; expected those of a window")
        if text_digest(json.dumps(body, sort_keys=True)) != saved["digest"]:
            raise SessionError("window: got contents of another digest; expected those that were written")
        if body["backbone"] != backbone:
            raise SessionError(f"window: got one of backbone {body['backbone']!r:.80}; expected {backbone!r}")
        pieces = tuple(_piece(fields) for fields in body["pieces"])
        evicted = tuple(Entry(**fields) for fields in body["evicted"])
        branch = body["branch"]
        window = Window.empty(backbone, lead=body["lead"], promise=body["promise"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, SessionError):
            raise
        shown = f"{type(error).__name__} {error!s:.120}"
        raise SessionError(f"window: got {shown}; expected the JSON of a window") from None

    end, ids = 0, [entry.id for entry in (*(piece.entry for piece in pieces), *evicted)]
    for piece in pieces:
        if piece.start != end:
            raise SessionError(f"window: got {piece.id!r:.80} at {piece.start}; expected it at {end}")
        end = piece.end
    if end >= LIMIT or len(evicted) > MOST_GONE:
        raise SessionError(
            f"window: got positions to {end}, {len(evicted)} evicted; expected less than 2**30, at most {MOST_GONE}"
        )
    if len(set(ids)) != len(ids) or any(entry.kind != "chunk" for entry in evicted):
        raise SessionError("window: got pieces of one id, or an evicted text; expected distinct ids")
    if not isinstance(branch, str):
        raise SessionError(f"window.branch: got {branch!r:.80}; expected a name")
    return dataclasses.replace(window, pieces=pieces, evicted=evicted, branch=branch)


def _piece(fields: Mapping[str, Any]) -> Piece:
    """Returns a piece, refusing values that no piece has."""
    table = {**fields, "entry": Entry(**fields["entry"]), "seen": tuple(fields["seen"])}
    table["ways"] = tuple((str(point), rank) for point, rank in fields["ways"])
    piece = Piece(**table)
    identities = [piece.made, *piece.seen, *([piece.base] if piece.base is not None else [])]
    # A text is a forward's; a bare or patched chunk is approximate.
    kinds = get_args(Method) if piece.entry.kind == "chunk" else ("prefill",)
    valid = (
        piece.method in kinds
        and is_count(piece.start, 0)
        and all(isinstance(own, str) and _IDENTITY.fullmatch(own) for own in identities)
        and (piece.source is None or isinstance(piece.source, str))
        and len(piece.ways) <= MOST_WAYS
        and list(piece.ways) == sorted(set(piece.ways))
        and all(is_count(rank, 0, 2**40) for _, rank in piece.ways)
        and bool(piece.ways or piece.method not in ("bare", "patch"))
    )
    if not valid:
        raise InputError(f"piece {piece!s:.120} that no window has")
    return piece
