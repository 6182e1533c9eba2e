"""Windows of made-up entries, for tests that need no backbone."""

import dataclasses

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.window import Costs, Entry, PatchNote, Window

COSTS = Costs("fingerprint", 2, 96, 32, 8, ForwardCosts((1000, 1000), (40, 40), (0, 0), 5000))
LEAD = Entry("system", None, 18, 18, "text")


def chunk(name: str, span: int = 10, free: bool = False) -> Entry:
    return Entry(name, f"content of {name}", 10, span, "chunk", free)


def window_of(*names: str, lead: bool = True, free: str = "", **options) -> Window:
    window = Window.empty(COSTS, **options)
    if lead:
        window, _ = window.append(LEAD)
    for name in names:
        window, _ = window.append(chunk(name, free=name in free))
    return window


def note_of(window: Window, id: str | None, chunk_id: str, **changes) -> PatchNote:
    note = PatchNote("digest", chunk_id, None, "canonical", window.target(id), None, False, 8, 100, 5)
    return dataclasses.replace(note, **changes)


def kinds(edits) -> list[str]:
    return [type(edit).__name__ for edit in edits]
