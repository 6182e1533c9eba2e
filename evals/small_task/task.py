"""The small task: legends and pages as images, questions that need one hop or several.

A *legend* image has rows of three cells: a handwritten glyph, a solid swatch (its *fill* colour) and a striped swatch
(its *stripe* colour). A *page* image has rows of ten cells: a header with the row's tag, then nine glyphs, each inside
a thin frame whose colour is the cell's tag within its row. Tags are drawn, in random order, so that a cell is found by
looking; which row a cell belongs to is told by its height position alone. A glyph is a digit 0–7 in one of two inks.
Five glyphs of a context are defined by two legends: the later legend overrides the earlier one.

Everything here is NumPy; `sample_contexts` draws the meaning, `render` the pixels, `ask` the questions.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

LEGENDS, LEGEND_ROWS = 3, 7
ROWS, CELLS = 10, 9
DIGITS, INKS = 8, 2
GLYPHS = DIGITS * INKS
COLOURS = 8
ACTIVE_FILLS = 5
SINGLE_ON_PAGE, DOUBLE_ON_PAGE, ABSENT = 7, 5, 4
CLEAN_ROWS = 7
CELL_PIXELS, PATCH, MERGE, TEMPORAL = 10, 5, 2, 2
KINDS = ("page", "legend", "chain", "aggregate", "override")

PALETTE = np.array(
    [
        [225, 35, 35],
        [245, 140, 20],
        [240, 235, 50],
        [40, 185, 50],
        [30, 215, 220],
        [35, 70, 235],
        [145, 45, 200],
        [245, 110, 190],
        [250, 250, 250],
        [120, 75, 30],
    ],
    np.float32,
)
COLOUR_NAMES = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "white", "brown")


class TaskVocabulary:
    """Token ids of a task, by name. `names[id]` is the text of a token; a task adds groups of words to these."""

    def __init__(self) -> None:
        self.names = ["<pad>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<end>"]
        self.pad, self.vision_start, self.vision_end, self.image, self.video, self.end = range(6)

    def __len__(self) -> int:
        return len(self.names)

    def add(self, words: Sequence[str]) -> int:
        """Adds words; returns the id of the first."""
        self.names = [*self.names, *words]
        return len(self.names) - len(words)


class Vocabulary(TaskVocabulary):
    """Token ids of the small task; the shipped instances were trained with these."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = tuple(self.add([ask]) for ask in ("glyph?", "fill?", "stripe?", "most?"))
        self.ask_glyph, self.ask_fill, self.ask_stripe, self.ask_most = self.asks
        self.row = self.add([f"r{row}" for row in range(ROWS)])
        self.tag = self.add([f"t{tag}" for tag in range(CELLS)])
        self.glyph = self.add([f"{'ab'[glyph // DIGITS]}{glyph % DIGITS}" for glyph in range(GLYPHS)])
        self.fill = self.add([f"fill{colour}" for colour in range(COLOURS)])
        self.stripe = self.add([f"stripe{colour}" for colour in range(COLOURS)])
        self.cell = self.add([f"r{place // CELLS}t{place % CELLS}" for place in range(ROWS * CELLS)])


VOCABULARY = Vocabulary()


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The meaning of a batch of contexts (leading axis B everywhere).

    legend_glyph, legend_fill, legend_stripe: [B, legends, legend rows]. page_glyph: [B, rows, cells].
    row_tag: [B, rows], a permutation. cell_tag: [B, rows, cells], a permutation in each row.
    clean: [B, rows], rows without overridden glyphs. order: [B, legends], which legend stands first, second, third.
    ink_seed: [B], what the handwriting and the noise are drawn from.
    """

    legend_glyph: np.ndarray
    legend_fill: np.ndarray
    legend_stripe: np.ndarray
    page_glyph: np.ndarray
    row_tag: np.ndarray
    cell_tag: np.ndarray
    clean: np.ndarray
    order: np.ndarray
    ink_seed: np.ndarray

    def __len__(self) -> int:
        return len(self.page_glyph)

    def reordered(self, order: np.ndarray) -> "Contexts":
        """Gives the same images with the legends standing in another order ([legends] or [B, legends])."""
        return dataclasses.replace(self, order=np.broadcast_to(order, self.order.shape))


def sample_contexts(rng: np.random.Generator, count: int) -> Contexts:
    """Draws `count` contexts."""
    glyphs = rng.permuted(np.tile(np.arange(GLYPHS), (count, 1)), axis=1)
    single = glyphs[:, :SINGLE_ON_PAGE]
    double = glyphs[:, SINGLE_ON_PAGE : SINGLE_ON_PAGE + DOUBLE_ON_PAGE]
    legend_glyph = _deal_legends(rng, glyphs, double)
    fill, stripe = _draw_colours(rng, legend_glyph)
    fill_of = latest_colours(legend_glyph, fill, np.tile(np.arange(LEGENDS), (count, 1)))
    page, clean = _draw_page(rng, single, double, fill_of)
    return Contexts(
        legend_glyph=legend_glyph,
        legend_fill=fill,
        legend_stripe=stripe,
        page_glyph=page,
        row_tag=rng.permuted(np.tile(np.arange(ROWS), (count, 1)), axis=1),
        cell_tag=rng.permuted(np.tile(np.arange(CELLS), (count, ROWS, 1)), axis=2),
        clean=clean,
        order=np.tile(np.arange(LEGENDS), (count, 1)),
        ink_seed=rng.integers(0, 2**62, count),
    )


def recolour(contexts: Contexts, rng: np.random.Generator, count: int) -> Contexts:
    """Draws other colours (every fill and stripe) for `count` legends; glyphs and handwriting stay."""
    chosen = rng.permuted(np.tile(np.arange(LEGENDS) < count, (len(contexts), 1)), axis=1)[..., None]
    fill, stripe = (
        np.where(chosen, (colour + rng.integers(1, COLOURS, colour.shape)) % COLOURS, colour)
        for colour in (contexts.legend_fill, contexts.legend_stripe)
    )
    return dataclasses.replace(contexts, legend_fill=fill, legend_stripe=stripe)


def _deal_legends(rng: np.random.Generator, glyphs: np.ndarray, double: np.ndarray) -> np.ndarray:
    """Deals glyphs to the rows of legends: each doubly defined one to two different legends, every other to one."""
    table = np.empty((len(glyphs), LEGENDS, LEGEND_ROWS), np.int64)
    for index, (all_glyphs, twice) in enumerate(zip(glyphs, double, strict=True)):
        # Which legend leaves a doubly defined glyph out goes round, so that no pair of legends is favoured.
        slots: list[list[int]] = [[] for _ in range(LEGENDS)]
        for number, glyph in enumerate(twice):
            skipped = (number + index) % LEGENDS
            for legend in range(LEGENDS):
                if legend != skipped:
                    slots[legend].append(int(glyph))

        rest = list(np.delete(all_glyphs, np.s_[SINGLE_ON_PAGE : SINGLE_ON_PAGE + DOUBLE_ON_PAGE]))
        rng.shuffle(rest)
        for legend in range(LEGENDS):
            while len(slots[legend]) < LEGEND_ROWS:
                slots[legend].append(int(rest.pop()))
            table[index, legend] = rng.permutation(slots[legend])

    return table


def _draw_colours(rng: np.random.Generator, legend_glyph: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws fill (of five active colours) and stripe (of all) per definition; two definitions of a glyph differ."""
    count = len(legend_glyph)
    active = rng.permuted(np.tile(np.arange(COLOURS), (count, 1)), axis=1)[:, :ACTIVE_FILLS]
    fill = np.empty_like(legend_glyph)
    stripe = np.empty_like(legend_glyph)
    rows = np.arange(count)[:, None]
    # A second definition is the first one shifted by one colour or more, so that the two always differ.
    first_fill, second_shift = (rng.integers(least, ACTIVE_FILLS, (count, GLYPHS)) for least in (0, 1))
    first_stripe, stripe_shift = (rng.integers(least, COLOURS, (count, GLYPHS)) for least in (0, 1))

    seen = np.zeros((count, GLYPHS), np.int64)
    for legend in range(LEGENDS):
        glyph = legend_glyph[:, legend]
        again = seen[rows, glyph]
        fill[:, legend] = active[rows, (first_fill[rows, glyph] + again * second_shift[rows, glyph]) % ACTIVE_FILLS]
        stripe[:, legend] = (first_stripe[rows, glyph] + again * stripe_shift[rows, glyph]) % COLOURS
        seen[rows, glyph] += 1

    return fill, stripe


def latest_colours(legend_glyph: np.ndarray, colour: np.ndarray, order: np.ndarray, shown: np.ndarray | None = None):
    """Finds the colour of every glyph [B, glyphs] by the latest legend shown that defines it, -1 where none does."""
    rows = np.arange(len(legend_glyph))
    table = np.full((len(legend_glyph), GLYPHS), -1, np.int64)
    for place in range(order.shape[1]):
        which = order[:, place]
        glyph, value = legend_glyph[rows, which], colour[rows, which]
        if shown is not None:
            value = np.where(shown[rows, which][:, None], value, table[rows[:, None], glyph])
        table[rows[:, None], glyph] = value

    return table


def _draw_page(rng: np.random.Generator, single: np.ndarray, double: np.ndarray, fill_of: np.ndarray):
    """Draws page glyphs [B, rows, cells]; one fill of a clean row leads by two or more where a few draws make it so."""
    # Twelve draws of every row; the first whose leading fill is clear is taken, or the first of all.
    count, tries = len(single), 12
    clean = np.argsort(rng.random((count, ROWS)), axis=1) < CLEAN_ROWS
    rows = np.arange(count)[:, None, None, None]
    picks = rng.integers(0, SINGLE_ON_PAGE, (count, ROWS, tries, CELLS))
    glyph = single[rows, picks]
    twice = double[rows, rng.integers(0, DOUBLE_ON_PAGE, picks.shape)]
    glyph = np.where(~clean[:, :, None, None] & (rng.random(picks.shape) < 0.6), twice, glyph)

    _, lead = leading_colour(fill_of[rows, glyph])
    choice = np.argmax(lead >= 2, axis=2)
    return np.take_along_axis(glyph, choice[:, :, None, None], axis=2)[:, :, 0], clean


def leading_colour(colours: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the most frequent colour along the last axis, and its lead over the next (-1 entries do not count)."""
    counts = (colours[..., None] == np.arange(COLOURS)).sum(axis=-2)
    ranked = np.sort(counts, axis=-1)
    return counts.argmax(axis=-1), ranked[..., -1] - ranked[..., -2]


# ---------------------------------------------------------------------------------------------------- pixels


@functools.cache
def handwriting(split: str) -> list[np.ndarray]:
    """Loads digits 0–7 of scikit-learn's handwritten digits, one array [n, 8, 8] in 0…1 per class.

    "train" is four fifths of each class, "held_out" the last fifth (a fixed shuffle); evaluation uses "held_out".
    """
    from sklearn.datasets import load_digits

    flat, labels = load_digits(return_X_y=True)
    images = np.asarray(flat, np.float32).reshape(-1, 8, 8) / 16.0
    parts = []

    for digit in range(DIGITS):
        mine = images[labels == digit]
        mine = mine[np.random.default_rng(20260 + digit).permutation(len(mine))]
        edge = len(mine) * 4 // 5
        parts.append(mine[:edge] if split == "train" else mine[edge:])

    return parts


def _draw_glyphs(rng: np.random.Generator, glyph: np.ndarray, split: str) -> np.ndarray:
    """Draws one handwritten grey image [8, 8] per glyph: light on dark in the first ink, dark on light in the second.

    Training images are also mixed within their class and warped.
    """
    digit = (glyph % DIGITS).reshape(-1)
    first, second = np.empty((2, digit.size, 8, 8), np.float32)
    # Both are drawn for either split, so that what follows is the same.
    for images in (first, second):
        draws = rng.random(digit.size)
        for number, pool in enumerate(handwriting(split)):
            mine = digit == number
            images[mine] = pool[(draws[mine] * len(pool)).astype(np.int64)]

    if split == "train":
        share = np.float32(0.5) * rng.random((digit.size, 1, 1), np.float32)
        first = _warp(rng, first + share * (second - first))
    digits = first.reshape(*glyph.shape, 8, 8)
    light = (glyph // DIGITS == 0)[..., None, None]
    return np.where(light, 45.0 + 195.0 * digits, 205.0 - 180.0 * digits)


def _warp(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    """Returns images [n, 8, 8] under small random affine maps (rotation, stretch, shear, shift), bilinear."""
    count = len(images)

    # Where each pixel of the result is read from, its centre at the origin.
    matrix = np.eye(2, dtype=np.float32) + rng.normal(0.0, 0.1, (count, 2, 2)).astype(np.float32)
    shift = rng.uniform(-0.6, 0.6, (count, 2, 1)).astype(np.float32)
    grid = np.indices((8, 8), np.float32).reshape(2, -1) - 3.5
    place = np.clip(matrix @ grid + 3.5 + shift, -1.0, 8.0)

    # Four neighbours each, out of a frame of blank pixels.
    floor = np.floor(place).astype(np.int64)
    part = place - floor
    padded = np.pad(images, ((0, 0), (1, 2), (1, 2)))
    item = np.arange(count)[:, None]

    def corner(down, right):
        return padded[item, floor[:, 0] + 1 + down, floor[:, 1] + 1 + right]

    top = corner(0, 0) * (1 - part[:, 1]) + corner(0, 1) * part[:, 1]
    bottom = corner(1, 0) * (1 - part[:, 1]) + corner(1, 1) * part[:, 1]
    return (top * (1 - part[:, 0]) + bottom * part[:, 0]).reshape(count, 8, 8)


def render(
    contexts: Contexts, split: str = "held_out", canvas: tuple[int, int] = (LEGEND_ROWS, 3)
) -> tuple[np.ndarray, np.ndarray]:
    """Renders a batch: legends [B, legends, 70, 30, 3] in storage order and pages [B, 100, 100, 3], uint8.

    A larger `canvas` (cells) repeats each legend to the right and below until it fills an image of that size.
    The pixels of one context depend on its own meaning and `ink_seed` only, never on the batch around it.
    """
    square = (CELL_PIXELS, CELL_PIXELS, 3)

    # Cells are drawn apart, [..., rows, columns, 10, 10, 3], and put together at the end.
    legends = np.full((len(contexts), LEGENDS, LEGEND_ROWS, 3, *square), 110.0, np.float32)
    pages = np.empty((len(contexts), ROWS, CELLS + 1, *square), np.float32)
    legends[:, :, :, 1] = PALETTE[contexts.legend_fill][..., None, None, :]
    legends[:, :, :, 2] = PALETTE[contexts.legend_stripe][..., None, None, :]
    legends[:, :, :, 2, 1::2] = 15.0
    # A row is named by a checkered header: nothing else on the page is checkered, so a frame is never read as one.
    checker = (np.indices(square[:2]).sum(axis=0) % 2 == 0)[..., None]
    pages[:, :, 0] = np.where(checker, PALETTE[contexts.row_tag][..., None, None, :], 15.0)
    pages[:, :, 1:] = PALETTE[contexts.cell_tag][..., None, None, :]

    # Each context draws its ink and its noise by a generator of its own.
    for index, seed in enumerate(contexts.ink_seed):
        rng = np.random.default_rng(int(seed))
        for cells, glyph in (
            (legends[index, :, :, 0], contexts.legend_glyph),
            (pages[index, :, 1:], contexts.page_glyph),
        ):
            cells[..., 1:9, 1:9, :] = _draw_glyphs(rng, glyph[index], split)[..., None]
        for cells in (legends[index], pages[index]):
            cells += 10.0 * rng.standard_normal(cells.shape, np.float32)

    room = [(0, CELL_PIXELS * (size - own)) for size, own in zip(canvas, (LEGEND_ROWS, 3), strict=True)]
    return np.pad(tile(legends), [(0, 0), (0, 0), *room, (0, 0)], mode="wrap"), tile(pages)


def tile(cells: np.ndarray) -> np.ndarray:
    """Converts cells [..., rows, columns, 10, 10, 3] to images [..., rows·10, columns·10, 3], uint8."""
    *lead, rows, columns, height, width, channels = cells.shape
    image = np.moveaxis(cells, -3, -4).reshape(*lead, rows * height, columns * width, channels)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


# ------------------------------------------------------------------------------------------------- questions


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions about a batch of contexts, [B, Q] each.

    kind: index into KINDS. ask, argument, answer: token ids. row, cell: the page place asked about (-1 for none).
    valid: False for padding (a context with too few such questions).
    """

    kind: np.ndarray
    ask: np.ndarray
    argument: np.ndarray
    answer: np.ndarray
    row: np.ndarray
    cell: np.ndarray
    valid: np.ndarray


def ask(
    contexts: Contexts,
    rng: np.random.Generator,
    counts: dict[str, int],
    shown: np.ndarray | None = None,
) -> Questions:
    """Draws `counts[kind]` questions of each kind per context, answerable from the legends shown.

    Args:
      shown: bool [B, legends] by storage index (all when None); what no shown legend defines is not asked.
    """
    if shown is None:
        shown = np.ones((len(contexts), LEGENDS), bool)
    colours = [
        latest_colours(contexts.legend_glyph, colour, contexts.order, shown)
        for colour in (contexts.legend_fill, contexts.legend_stripe)
    ]
    # How many shown legends define each glyph, [B, glyphs].
    times = (shown[..., None, None] & (contexts.legend_glyph[..., None] == np.arange(GLYPHS))).sum(axis=(1, 2))

    makers = {
        "page": lambda n: _ask_page(contexts, rng, n),
        "legend": lambda n: _ask_legend(contexts, rng, n, colours, times),
        "chain": lambda n: _ask_cell(contexts, rng, n, colours, times == 1, "chain"),
        "aggregate": lambda n: _ask_most(contexts, rng, n, colours[0], times),
        "override": lambda n: _ask_cell(contexts, rng, n, colours, times > 1, "override"),
    }
    parts = [makers[kind](count) for kind, count in counts.items() if count]
    return Questions(*(np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True)))


def _choose(rng: np.random.Generator, allowed: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `count` distinct indices per row of `allowed` [B, n] (drawn among True), and whether each is allowed."""
    # What is not allowed sorts behind everything drawn, and is taken only where too little is allowed.
    picks = np.argsort(np.where(allowed, rng.random(allowed.shape), 2.0), axis=1)[:, :count]
    return picks, np.take_along_axis(allowed, picks, axis=1)


def _columns(kind: str, valid, ask_token, argument, answer, row, cell):
    def fill(x):
        return np.broadcast_to(x, valid.shape)

    return (*(fill(x) for x in (KINDS.index(kind), ask_token, argument, answer, row, cell)), valid)


def _cell_argument(contexts: Contexts, row: np.ndarray, cell: np.ndarray) -> np.ndarray:
    item = np.arange(len(contexts))[:, None]
    return VOCABULARY.cell + contexts.row_tag[item, row] * CELLS + contexts.cell_tag[item, row, cell]


def _ask_page(contexts: Contexts, rng: np.random.Generator, count: int):
    picks, valid = _choose(rng, np.ones((len(contexts), ROWS * CELLS), bool), count)
    row, cell = np.divmod(picks, CELLS)
    answer = VOCABULARY.glyph + contexts.page_glyph[np.arange(len(contexts))[:, None], row, cell]
    return _columns("page", valid, VOCABULARY.ask_glyph, _cell_argument(contexts, row, cell), answer, row, cell)


def _ask_legend(contexts: Contexts, rng: np.random.Generator, count: int, colours, times: np.ndarray):
    # A glyph that is on the page too could be answered from what the page absorbed, without the legend.
    on_page = (contexts.page_glyph[..., None] == np.arange(GLYPHS)).any(axis=(1, 2))
    glyph, valid = _choose(rng, ~on_page & (times == 1), count)
    ask_token, answer = _either_colour(rng, glyph, colours)
    return _columns("legend", valid, ask_token, VOCABULARY.glyph + glyph, answer, -1, -1)


def _ask_cell(contexts: Contexts, rng: np.random.Generator, count: int, colours, wanted: np.ndarray, kind: str):
    item = np.arange(len(contexts))[:, None]
    glyphs = contexts.page_glyph.reshape(len(contexts), -1)
    picks, valid = _choose(rng, wanted[item, glyphs], count)
    row, cell = np.divmod(picks, CELLS)
    ask_token, answer = _either_colour(rng, glyphs[item, picks], colours)
    return _columns(kind, valid, ask_token, _cell_argument(contexts, row, cell), answer, row, cell)


def _either_colour(rng: np.random.Generator, glyph: np.ndarray, colours) -> tuple[np.ndarray, np.ndarray]:
    item = np.arange(len(glyph))[:, None]
    fill = rng.random(glyph.shape) < 0.5
    ask_token = np.where(fill, VOCABULARY.ask_fill, VOCABULARY.ask_stripe)
    return ask_token, np.where(
        fill, VOCABULARY.fill + colours[0][item, glyph], VOCABULARY.stripe + colours[1][item, glyph]
    )


def _ask_most(contexts: Contexts, rng: np.random.Generator, count: int, fill_of: np.ndarray, times: np.ndarray):
    """Returns rows whose every glyph is defined exactly once, whose most frequent fill leads by two or more."""
    item = np.arange(len(contexts))[:, None]
    leader, lead = leading_colour(fill_of[item[..., None], contexts.page_glyph])
    defined = (times[item[..., None], contexts.page_glyph] == 1).all(axis=-1)
    row, valid = _choose(rng, contexts.clean & defined & (lead >= 2), count)
    argument = VOCABULARY.row + contexts.row_tag[item, row]
    answer = VOCABULARY.fill + leader[item, row]
    return _columns("aggregate", valid, VOCABULARY.ask_most, argument, answer, row, -1)
