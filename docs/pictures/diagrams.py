"""Draws the diagrams of the site: `python docs/pictures/diagrams.py` writes the SVG files beside it.

All are 390 units wide, so that they are legible on a phone.
"""

import math
from pathlib import Path

INK, SOFT, PAPER, GREY = "#1f2933", "#5b6673", "#ffffff", "#e6eaee"
BLUE, AMBER, GREEN, VIOLET = "#2b6cb0", "#b7791f", "#2f855a", "#6b46c1"
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
WIDTH = 390


def text(x, y, words, size=14, colour=INK, anchor="start", weight="normal") -> str:
    style = f'font-family="{FONT}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {style}>{words}</text>'


def box(x, y, width, height, stroke=SOFT, fill=PAPER, radius=5, dash="") -> str:
    look = f'fill="{fill}" stroke="{stroke}" stroke-width="1.6"' + (f' stroke-dasharray="{dash}"' if dash else "")
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" {look}/>'


def line(x1, y1, x2, y2, colour=SOFT, width=1.5) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def arrow(x1, x2, y) -> str:
    """Draws an arrow to the right."""
    head = f"M{x2 - 7},{y - 5} L{x2},{y} L{x2 - 7},{y + 5}"
    return line(x1, y, x2, y, SOFT) + f'<path d="{head}" fill="none" stroke="{SOFT}" stroke-width="1.5"/>'


def dials(x, y, colour, start=None, count=4, radius=9) -> list[str]:
    """Draws keys as dials: the hand is the rotary phase, `start` degrees at first and 24 more for each next one."""
    parts = []
    for index in range(count):
        angle = 0.0 if start is None else math.radians(start + 24 * index)
        centre = x + (2 * radius + 5) * index
        tip = (centre + (radius - 2) * math.sin(angle), y - (radius - 2) * math.cos(angle))
        circle = f'<circle cx="{centre}" cy="{y}" r="{radius}" fill="{PAPER}" stroke="{colour}" stroke-width="1.8"/>'
        parts += [circle, line(centre, y, *tip, colour, 2)]
    return parts


def page(height, parts, title) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">'
    background = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>'
    return "\n".join([opening, background, *parts, "</svg>\n"])


def stage(y, number, title, words) -> list[str]:
    return [text(14, y, f"{number}  {title}", 17, INK, weight="bold"), text(14, y + 21, words, 14, SOFT)]


def patch() -> str:
    """Draws what becomes of a chunk B: prefilled alone, its deficit after A, the patch, and where both are used."""
    parts = [
        *stage(28, 1, "Prefilled alone", "the canonical: KV of B whose keys are not rotated"),
        box(14, 62, 126, 38, GREEN),
        text(24, 87, "B", 18, GREEN, weight="bold"),
        *dials(54, 81, GREEN),
        *stage(138, 2, "Deficit", "what B absorbed by attending to A, computed once"),
        box(14, 172, 60, 38, SOFT, GREY),
        text(44, 197, "A", 18, SOFT, "middle", "bold"),
        box(74, 172, 70, 38, AMBER),
        text(109, 197, "B after A", 14, AMBER, "middle"),
        text(163, 198, "−", 22, INK, "middle"),
        box(182, 172, 66, 38, GREEN),
        text(215, 197, "B alone", 14, GREEN, "middle"),
        text(267, 198, "=", 22, INK, "middle"),
        box(286, 172, 66, 38, AMBER, "#fbf1de"),
        text(319, 198, "Δ", 18, AMBER, "middle", "bold"),
        *stage(248, 3, "Patch", "Δ has low rank: a few directions hold most of it"),
        box(14, 282, 66, 38, AMBER, "#fbf1de"),
        text(47, 308, "Δ", 18, AMBER, "middle", "bold"),
        text(99, 308, "≈", 22, INK, "middle"),
        box(118, 282, 12, 38, AMBER, AMBER, 2),
        text(142, 308, "×", 18, INK, "middle"),
        box(154, 295, 66, 12, AMBER, AMBER, 2),
        text(234, 306, "stored beside", 14, SOFT),
        text(234, 323, "the canonical", 14, SOFT),
        *stage(358, 4, "Moved", "canonical + patch, rotated to any position:"),
        text(14, 397, "no forward pass", 14, SOFT),
    ]
    for y, start, others in ((412, 48, ("A",)), (466, 160, ("…", "A"))):
        x = 14
        for name in others:
            parts += [box(x, y, 60, 38, SOFT, GREY), text(x + 30, y + 25, name, 18, SOFT, "middle", "bold")]
            x += 60
        parts += [box(x, y, 126, 38, BLUE), text(x + 10, y + 25, "B", 18, BLUE, weight="bold")]
        parts += [*dials(x + 40, y + 19, BLUE, start), line(x, y + 38, x, y + 46, BLUE)]
        parts.append(text(x + 134, y + 25, f"at position {'p' if others == ('A',) else 'q'}", 14, BLUE))
    parts.append(text(14, 538, "dial: the rotary phase of a key. Values carry none.", 14, SOFT))
    return page(554, parts, "A chunk prefilled alone, its deficit after another chunk, its patch, and the chunk moved")


STEPS = (
    ("add 1", "1", ()),
    ("add 2", "12", ()),
    ("add 3", "123", ()),
    ("add 4", "234", ("1",)),
    ("add 5", "345", ("2",)),
    ("recall 1", "451", ("3",)),
)
"""What is done to a window of three images behind a pinned text, the images that it then holds, and what has left."""
LOOKS = {
    "computed": (AMBER, AMBER, PAPER),
    "rotated": (BLUE, PAPER, BLUE),
    "recalled": (VIOLET, VIOLET, PAPER),
    "kept": (SOFT, GREY, SOFT),
}
"""How an image is drawn by how its KV came there: stroke, fill, colour of the text."""


def window(x, y, images, states) -> list[str]:
    """Draws a pinned text and images, each by how its KV came there."""
    parts = [box(x, y, 22, 34, SOFT, GREY), text(x + 11, y + 23, "T", 15, SOFT, "middle")]
    for place, (image, state) in enumerate(zip(images, states, strict=True)):
        stroke, fill, colour = LOOKS[state]
        left = x + 27 + 39 * place
        parts += [box(left, y, 34, 34, stroke, fill), text(left + 17, y + 23, image, 17, colour, "middle", "bold")]
    return parts


def timeline() -> str:
    """Draws six steps of a window: what a session computes, rotates and recalls, beside what a prefix cache does."""
    parts = [text(90, 24, "session", 16, INK, weight="bold"), text(243, 24, "prefix cache", 16, INK, weight="bold")]
    places, seen, prefixes = dict[str, int](), set[str](), {""}
    session_total, cache_total = 0, 0
    for row, (step, images, left) in enumerate(STEPS):
        y = 40 + 46 * row
        session, cache = [], []
        for place, image in enumerate(images):
            moved = "kept" if places.get(image) == place else "rotated"
            session.append(moved if image in places else "recalled" if image in seen else "computed")
            cache.append("kept" if images[: place + 1] in prefixes else "computed")
        prefixes |= {images[: place + 1] for place in range(len(images))}
        places, seen = {image: place for place, image in enumerate(images)}, seen | set(images)
        session_total += session.count("computed")
        cache_total += cache.count("computed")
        parts += [text(10, y + 15, step, 14, INK, weight="bold"), *window(90, y, images, session)]
        parts += window(243, y, images, cache)
        if left:
            parts.append(text(10, y + 32, f"{left[0]} leaves", 14, SOFT))
    y = 40 + 46 * len(STEPS) + 14
    parts += [
        line(10, y - 12, WIDTH - 10, y - 12),
        text(10, y + 14, "in all", 14, INK, weight="bold"),
        text(90, y + 14, f"{session_total} + 1 recalled", 16, INK),
        text(243, y + 14, f"{cache_total} computed", 16, INK),
    ]
    meanings = (
        ("computed", "one forward over its tokens"),
        ("rotated", "moved to its new position, no forward"),
        ("recalled", "one forward, or from the store"),
        ("kept", "stays where it is; T: the pinned text"),
    )
    for row, (state, meaning) in enumerate(meanings):
        stroke, fill, _ = LOOKS[state]
        top = y + 32 + 25 * row
        parts += [box(10, top, 16, 16, stroke, fill, 3), text(34, top + 13, f"{state}: {meaning}", 14, INK)]
    title = "Six steps of an agent's window: what a session computes, rotates and recalls, beside a prefix cache"
    return page(y + 32 + 25 * len(meanings) + 6, parts, title)


PIECES = (("A", GREEN, 0), ("B", BLUE, 80), ("C", AMBER, 160))
"""Three chunks of a window, each with its colour and the phase at which its first key stands."""


def transitions() -> str:
    """Draws what each kind of layer does with chunks: rows that rotate and stand side by side, maps that compose."""
    parts = [
        text(14, 28, "Attention layers", 17, INK, weight="bold"),
        text(14, 49, "rows per token: each is rotated to its position", 14, SOFT),
        text(14, 136, "Linear-attention layers", 17, INK, weight="bold"),
        text(14, 157, "one map per chunk, without a position: composed", 14, SOFT),
        box(14, 170, 48, 46, SOFT, GREY),
        text(38, 198, "S = 0", 14, SOFT, "middle"),
    ]
    for place, (name, colour, phase) in enumerate(PIECES):
        x = 14 + 122 * place
        parts += [box(x, 62, 117, 38, colour), text(x + 10, 87, name, 17, colour, weight="bold")]
        parts += dials(x + 40, 81, colour, phase, count=3)
        x = 82 + 100 * place
        parts += [arrow(x - 18, x - 2, 193), box(x, 170, 80, 46, colour)]
        parts += [text(x + 40, 189, name, 17, colour, "middle", "bold")]
        parts += [text(x + 40, 208, "M·S + B", 14, colour, "middle")]
    parts += [
        arrow(362, 380, 193),
        text(14, 246, "Another order, or a chunk less:", 14, INK),
        text(14, 265, "the same maps, composed again.", 14, INK),
        text(14, 290, "What a chunk absorbed is still missing:", 14, INK),
        text(14, 309, "a patch, of rows, map and state.", 14, INK),
    ]
    return page(324, parts, "Rows of chunks rotate to their places; transitions of chunks compose in their order")


if __name__ == "__main__":
    for draw in (patch, timeline, transitions):
        Path(__file__).with_name(f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
