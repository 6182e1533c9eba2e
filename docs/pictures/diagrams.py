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
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">'
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


def frame(x, y, name, what, first, colour, height=140) -> list[str]:
    heading = [text(x + 16, y + 26, name, 16, colour, weight="bold"), text(x + 16, y + 46, what, 13, SOFT)]
    return [box(x, y, 262, height, colour), *heading, *tokens(x + 18, y + 80, first, colour)]


def frames() -> str:
    right = 646
    parts = [
        *frame(24, 154, "phase-free", "no position: stored and patched", None, GREEN, 236),
        text(40, 314, "patch: a pair per layer and channel", 13, SOFT),
        f'<rect x="52" y="326" width="14" height="50" rx="2" fill="{AMBER}"/>',
        f'<rect x="74" y="326" width="120" height="14" rx="2" fill="{AMBER}"/>',
        text(74, 364, "+ u v", 16, AMBER, weight="bold", mono=True),
        text(130, 364, "thin: rank m", 13, SOFT),
        *frame(right, 24, "local", "as if the chunk stood at 0", 0, SOFT),
        *frame(right, 202, "engine, start 30", "what an attention kernel reads", 70, BLUE),
        *frame(right, 380, "engine, start 64", "the same patch, another place", 205, BLUE),
        arrow([(286, 205), (400, 94), (right - 4, 94)], SOFT),
        text(410, 84, "to_local", 14, SOFT, mono=True),
        arrow([(286, 262), (right - 4, 262)], BLUE),
        text(300, 238, "to_engine", 14, BLUE, mono=True),
        text(392, 238, "the rotation alone: blind reuse", 13, SOFT),
        text(300, 254, "apply_patch", 14, BLUE, mono=True),
        text(408, 254, "R(p) · (canonical + u v)", 13, SOFT),
        arrow([(right, 300), (290, 300)], SOFT, "5 4"),
        text(300, 320, "to_phase_free", 14, SOFT, mono=True),
        arrow([(286, 345), (400, 450), (right - 4, 450)], BLUE),
        text(410, 442, "apply_patch", 14, BLUE, mono=True),
        text(510, 442, "another start", 13, SOFT),
        arrow([(right + 131, 342), (right + 131, 377)], SOFT, "5 4"),
        text(right + 141, 365, "relocate", 14, SOFT, mono=True),
        text(24, 470, "dial: the rotary phase of a cached key", 13, SOFT),
        text(24, 490, "square: a value, which carries no phase", 13, SOFT),
        text(24, 510, "nothing here runs the model", 13, SOFT),
    ]
    return page(932, 544, parts, "The three frames of a chunk, and what turns one into another")


def station(x, y, width, title, lines, colour) -> list[str]:
    shown = [text(x + 10, y + 44 + 17 * index, line, 12, SOFT) for index, line in enumerate(lines)]
    return [box(x, y, width, 74, colour), text(x + 10, y + 22, title, 14.5, colour, weight="bold"), *shown]


def store_paths() -> str:
    put = [
        ("put(chunk)", ["header, leaves,", "a checksum of each"], INK),
        ("encrypt", ["only with a key:", "AES-GCM, leaf by leaf"], INK),
        ("make room", ["evict where a budget", "would be exceeded"], INK),
        ("write aside", ["tmp/, many small", "objects in one group"], GREEN),
        ("name it", ["sync, rename, sync", "the directory"], GREEN),
        ("acknowledge", ["copies in memory go;", "a remote store has it"], GREEN),
    ]
    get = [
        ("get(id)", ["the name is a digest,", "keyed by tenant"], INK),
        ("memory", ["if the disk still has", "this very version"], BLUE),
        ("disk", ["opened without", "following a link"], BLUE),
        ("verify", ["header, leaves, name;", "then decrypt"], BLUE),
        ("chunk", ["position-free, bit", "for bit as put"], BLUE),
    ]
    step, width = 182, 160
    parts = [text(24, 34, "put", 18, GREEN, weight="bold"), text(24, 192, "get", 18, BLUE, weight="bold")]
    for row, y, colour in ((put, 48, GREEN), (get, 206, BLUE)):
        for index, (title, lines, stroke) in enumerate(row):
            left = 24 + step * index
            parts += station(left, y, width, title, lines, stroke)
            if index:
                parts.append(arrow([(left - step + width, y + 37), (left - 3, y + 37)], colour))
    centre = lambda index: 24 + step * index + width // 2
    end = lambda index: 24 + step * index + width
    parts += [
        arrow([(centre(1), 206), (centre(1), 174), (centre(4), 174), (centre(4), 203)], BLUE),
        text(centre(1) + 12, 167, "held: it was verified when it was read", 12.5, SOFT),
        *station(24 + step * 2, 344, width, "remote store", ["asked where the disk", "has nothing good"], SOFT),
        arrow([(centre(2), 280), (centre(2), 341)], SOFT, "5 4"),
        arrow([(end(2), 372), (centre(3) - 30, 372), (centre(3) - 30, 283)], SOFT, "5 4"),
        text(end(2) + 8, 391, "the disk keeps it", 12.5, SOFT),
        *station(24 + step * 4, 344, width, "quarantine", ["what does not verify,", "with the reason"], RED),
        arrow([(centre(3) + 40, 280), (centre(3) + 40, 381), (24 + step * 4 - 3, 381)], RED),
        *station(24 + step * 5, 344, width, "a miss", ["None: compute it", "again, and put it"], RED),
        arrow([(end(4), 381), (24 + step * 5 - 3, 381)], RED),
        arrow([(centre(2), 418), (centre(2), 446), (centre(5), 446), (centre(5), 421)], SOFT, "5 4"),
        text(centre(3) - 40, 439, "nowhere, or no answer in time", 12.5, SOFT),
    ]
    return page(1118, 470, parts, "What a put and a get pass through in the store")


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


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "frames.svg").write_text(frames(), encoding="utf-8")
    (folder / "slide.svg").write_text(slide(), encoding="utf-8")
    (folder / "store_paths.svg").write_text(store_paths(), encoding="utf-8")
