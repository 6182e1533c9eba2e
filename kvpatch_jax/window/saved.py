"""Windows as JSON: written, digested, and read back with every number checked."""

import dataclasses
import hashlib
import json
from typing import Any

VERSION = 1


def body_of(window: Any) -> dict[str, Any]:
    """All that a window is, but what was joined, as JSON has it; what is derived is left out."""
    plain = ("lead", "lead_settled", "next_start", "promise", "gaps", "store", "branch", "origin", "clock")
    return {
        "costs": window.costs.to_dict(),
        "pieces": [_piece(piece) for piece in window.pieces],
        "evicted": [_piece(piece) for piece in window.evicted],
        **{word: getattr(window, word) for word in plain},
    }


def _piece(piece: Any) -> dict[str, Any]:
    return {
        "entry": dataclasses.asdict(piece.entry),
        "start": piece.start,
        "state": dataclasses.asdict(piece.state),
        "aside": None if piece.aside is None else dataclasses.asdict(piece.aside),
        "born": piece.born,
        "placed": piece.placed,
    }


def digest_of_window(window: Any) -> str:
    """Digests all that a window is, but what was joined: 32 hexadecimal digits."""
    text = json.dumps(body_of(window), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
