"""Draws the diagrams of the site: `python docs/pictures/diagrams.py` writes the SVG files beside it."""

import math
from pathlib import Path

INK, SOFT, PAPER = "#1f2933", "#6b7785", "#ffffff"
BLUE, AMBER, GREEN, RED, GREY = "#2b6cb0", "#b7791f", "#2f855a", "#c53030", "#eef1f4"
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace"


def text(x, y, said, size=14, colour=INK, anchor="start", weight="normal", mono=False) -> str:
    family = MONO if mono else FONT
    style = f'font-family="{family}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {style}>{said}</text>'


def box(x, y, width, height, stroke=SOFT, fill=PAPER, radius=8, dash="") -> str:
    look = f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"' + (f' stroke-dasharray="{dash}"' if dash else "")
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" {look}/>'


def arrow(points, colour=SOFT, dash="") -> str:
    path = "M" + " L".join(f"{x},{y}" for x, y in points)
    look = f'stroke="{colour}" stroke-width="1.8" fill="none" marker-end="url(#head-{colour[1:]})"'
    return f'<path d="{path}" {look}' + (f' stroke-dasharray="{dash}"' if dash else "") + "/>"


def page(width, height, parts, title) -> str:
    heads = "".join(
        f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{colour}"/></marker>'
        for colour in (SOFT, BLUE, AMBER, GREEN, RED)
    )
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    background = f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>'
    return "\n".join([opening, f"<defs>{heads}</defs>", background, *parts, "</svg>\n"])


def tokens(x, y, first, colour) -> list[str]:
    """Draws five tokens: keys as dials whose hand is the phase (`first`, then 24° more each), values as squares."""
    parts = [text(x, y + 5, "k", 15, SOFT, mono=True), text(x, y + 43, "v", 15, SOFT, mono=True)]
    for index in range(5):
        centre = x + 36 + 40 * index
        angle = 0.0 if first is None else math.radians(first + 24 * index)
        tip = (centre + 12 * math.sin(angle), y - 12 * math.cos(angle))
        parts += [
            f'<circle cx="{centre}" cy="{y}" r="14" fill="{PAPER}" stroke="{colour}" stroke-width="2"/>',
            f'<line x1="{centre}" y1="{y}" x2="{tip[0]:.1f}" y2="{tip[1]:.1f}" stroke="{colour}" stroke-width="2.5"/>',
            f'<rect x="{centre - 11}" y="{y + 27}" width="22" height="22" rx="3" fill="{GREY}" stroke="{SOFT}"/>',
        ]
    return parts


def frame(y, name, what, first, colour) -> list[str]:
    heading = [text(150, y + 26, name, 17, colour, weight="bold"), text(150, y + 47, what, 15, SOFT)]
    return [box(134, y, 302, 140, colour), *heading, *tokens(152, y + 80, first, colour)]


def frames() -> str:
    """Draws the frames from top to bottom: phase-free, and what is made of it."""
    rows = (308, 508, 708)
    parts = [
        box(24, 20, 412, 236, GREEN),
        text(40, 46, "phase-free", 17, GREEN, weight="bold"),
        text(40, 67, "no position: stored and patched", 15, SOFT),
        *tokens(42, 100, None, GREEN),
        text(40, 182, "patch: a pair per layer and channel", 15, SOFT),
        f'<rect x="52" y="194" width="14" height="50" rx="2" fill="{AMBER}"/>',
        f'<rect x="74" y="194" width="120" height="14" rx="2" fill="{AMBER}"/>',
        text(74, 234, "+ u v", 17, AMBER, weight="bold", mono=True),
        text(136, 234, "low rank m", 15, SOFT),
        *frame(rows[0], "local", "as if the chunk started at 0", 0, SOFT),
        *frame(rows[1], "engine, start 30", "what an attention kernel reads", 70, BLUE),
        *frame(rows[2], "engine, start 64", "the same patch, another place", 205, BLUE),
        text(134, rows[0] - 12, "to_local", 15, SOFT, mono=True),
        text(134, rows[1] - 30, "to_engine: rotation, blind reuse", 15, BLUE),
        text(134, rows[1] - 10, "apply_patch: R(p) · (canonical + u v)", 15, BLUE),
        text(134, rows[2] - 12, "apply_patch, at another start", 15, BLUE),
        arrow([(370, rows[1] + 142), (370, rows[2] - 4)], SOFT, "5 4"),
        text(378, rows[2] - 32, "relocate", 15, SOFT, mono=True),
        arrow([(133, rows[1] + 112), (108, rows[1] + 112), (108, 260)], SOFT, "5 4"),
        text(6, 0, "to_phase_free", 15, SOFT, mono=True).replace(
            "<text ", f'<text transform="translate(100 {rows[1] + 56}) rotate(-90)" '
        ),
        *(arrow([(60, 258), (60, y + 70), (130, y + 70)], SOFT if y == rows[0] else BLUE) for y in rows),
        text(24, 882, "dial: the rotary phase of a cached key", 15, SOFT),
        text(24, 904, "square: a value, which carries no phase", 15, SOFT),
        text(24, 926, "nothing here runs the model", 15, SOFT),
    ]
    return page(460, 946, parts, "The three frames of a chunk, and what turns one into another")


def station(x, y, title, lines, colour, width=200, height=80) -> list[str]:
    shown = [text(x + 12, y + 48 + 20 * index, line, 15, SOFT) for index, line in enumerate(lines)]
    return [box(x, y, width, height, colour), text(x + 12, y + 25, title, 16, colour, weight="bold"), *shown]


def store_paths() -> str:
    """Draws a put on the left and a get on the right, from top to bottom, and what becomes of a get that fails."""
    put = [
        ("put(chunk)", ["header, leaves,", "a checksum of each"], INK),
        ("encrypt", ["only with a key:", "AES-GCM"], INK),
        ("write a file", ["of a random name,", "never changed again"], GREEN),
        ("sync", ["the file, then", "its folder"], GREEN),
        ("one transaction", ["evict, replace, name", "it; sync the log"], GREEN),
        ("acknowledge", ["unlink what left;", "a remote store later"], GREEN),
    ]
    get = [
        ("get(id)", ["the name is a digest,", "keyed by tenant"], INK),
        ("memory", ["if the index still", "has this very write"], BLUE),
        ("disk", ["opened without", "following a link"], BLUE),
        ("verify", ["header, leaves, name;", "then decrypt"], BLUE),
        ("chunk", ["position-free, bit", "for bit as put"], BLUE),
    ]
    step, parts = 106, [text(14, 30, "put", 19, GREEN, weight="bold"), text(242, 30, "get", 19, BLUE, weight="bold")]
    for column, x, colour in ((put, 14, GREEN), (get, 242, BLUE)):
        for row, (title, lines, stroke) in enumerate(column):
            y = 44 + step * row
            parts += station(x, y, title, lines, stroke)
            if row:
                parts.append(arrow([(x + 100, y - step + 80), (x + 100, y - 3)], colour))
    held = [(442, 44 + step + 40), (456, 44 + step + 40), (456, 44 + 4 * step + 40), (445, 44 + 4 * step + 40)]
    parts += [
        arrow(held, BLUE),
        *station(
            14, 710, "nothing good on the disk", ["the remote store is asked; the disk keeps its copy"], SOFT, 428, 62
        ),
        *station(14, 782, "does not verify", ["looked at again, counted, and a miss"], RED, 428, 62),
        *station(14, 854, "a miss", ["None: compute the chunk again, and put it"], RED, 428, 62),
        arrow([(400, 44 + 4 * step + 84), (400, 706)], SOFT, "5 4"),
        text(254, 632, "when a step fails:", 15, SOFT),
    ]
    return page(468, 930, parts, "What a put and a get pass through in the store")


STEPS = (
    ("add 1", [("1", "prefilled")], None),
    ("add 2", [("1", "pinned"), ("2", "prefilled")], None),
    ("add 3", [("1", "pinned"), ("2", "stays"), ("3", "prefilled")], None),
    ("add 4", [("1", "pinned"), ("3", "rotated"), ("4", "prefilled")], "2"),
    ("recall 2", [("1", "pinned"), ("4", "rotated"), ("2", "recalled")], "3"),
)
"""A window of a pinned chunk and two more: what is done, what it then holds and how each came there, what left."""
SLIDE_COLOURS = {"prefilled": AMBER, "pinned": GREEN, "stays": SOFT, "rotated": BLUE, "recalled": "#6b46c1"}
MEANINGS = (
    ("prefilled", "one forward, over its tokens only"),
    ("rotated", "keys rotated to the new position, no forward"),
    ("pinned", "never leaves: the attention sink"),
    ("recalled", "canonical + patch, or one forward"),
)


def slide() -> str:
    """Draws a window that slides, a row for each step."""
    parts, height = [text(150, 34, "positions →", 17, SOFT), text(516, 34, "evicted", 17, SOFT)], 78
    for row, (step, held, left) in enumerate(STEPS):
        y = 52 + height * row
        parts.append(text(14, y + 37, step, 19, INK, weight="bold"))
        for place, (name, how) in enumerate(held):
            x, colour = 124 + 122 * place, SLIDE_COLOURS[how]
            parts += [box(x, y, 112, 60, colour, GREY if how == "stays" else PAPER)]
            parts += [
                text(x + 56, y + 27, name, 21, colour, "middle", "bold"),
                text(x + 56, y + 49, how, 17, colour, "middle"),
            ]
        if left is not None:
            parts += [box(516, y, 74, 60, SOFT, PAPER, dash="5 4"), text(553, y + 38, left, 21, SOFT, "middle")]
    for row, (how, meaning) in enumerate(MEANINGS):
        y = 52 + height * len(STEPS) + 20 + 29 * row
        parts += [text(14, y, how, 17, SLIDE_COLOURS[how], weight="bold"), text(124, y, meaning, 17, INK)]
    title = (
        "A window slides: one chunk is pinned, one evicted, one rotated, one prefilled, and the evicted one recalled"
    )
    return page(604, 52 + height * len(STEPS) + 24 + 29 * len(MEANINGS), parts, title)


PIECES = (("A", GREEN, 0), ("B", BLUE, 80), ("C", AMBER, 160))
"""Three chunks of a window, each with its colour and the phase at which its first key stands."""


def transitions() -> str:
    """Draws what each kind of layer does with chunks: rows that rotate and stand side by side, maps that compose."""
    parts = [
        text(14, 32, "attention layers", 19, INK, weight="bold"),
        text(14, 56, "rows per token: rotate each to its place, then side by side", 16, SOFT),
    ]
    for place, (name, colour, phase) in enumerate(PIECES):
        x = 14 + 192 * place
        parts += [box(x, 72, 182, 74, colour), text(x + 12, 102, name, 20, colour, weight="bold")]
        for token in range(3):
            centre, angle = x + 60 + 42 * token, math.radians(phase + 24 * token)
            tip = (centre + 13 * math.sin(angle), 108 - 13 * math.cos(angle))
            parts += [
                f'<circle cx="{centre}" cy="108" r="16" fill="{PAPER}" stroke="{colour}" stroke-width="2"/>',
                f'<line x1="{centre}" y1="108" x2="{tip[0]:.1f}" y2="{tip[1]:.1f}" stroke="{colour}" '
                'stroke-width="2.5"/>',
            ]
    parts += [
        text(14, 196, "linear-attention layers", 19, INK, weight="bold"),
        text(14, 220, "one map per chunk, without a position: compose them in order", 16, SOFT),
        box(14, 240, 60, 74, SOFT, GREY),
        text(44, 283, "S = 0", 16, SOFT, "middle", mono=True),
    ]
    for place, (name, colour, _) in enumerate(PIECES):
        x = 104 + 156 * place
        parts += [
            arrow([(x - 28, 277), (x - 3, 277)], SOFT),
            box(x, 240, 126, 74, colour),
            text(x + 63, 270, name, 20, colour, "middle", "bold"),
            text(x + 63, 298, "map·S + state", 14, colour, "middle", mono=True),
        ]
    parts += [
        arrow([(104 + 2 * 156 + 128, 277), (576, 277)], SOFT),
        text(14, 354, "another order, or without A: the same maps, composed again", 16, INK),
        text(14, 380, "what B absorbed from A is missing: a patch of rows, map and state", 16, INK),
    ]
    return page(590, 398, parts, "Rows of chunks rotate to their places; transitions of chunks compose in their order")


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "frames.svg").write_text(frames(), encoding="utf-8")
    (folder / "slide.svg").write_text(slide(), encoding="utf-8")
    (folder / "transitions.svg").write_text(transitions(), encoding="utf-8")
    (folder / "store_paths.svg").write_text(store_paths(), encoding="utf-8")
