"""Contexts as synthesised sound: a chord of four tones for every cell, 40 ms each, one cell after another.

A chord is a row mark, a column mark and either fill and stripe (an entry) or shape and ink (a cell of the page), each
kind of attribute in tones of its own. An audio encoder makes one token of 40 ms.
"""

import itertools

import numpy as np
from jaxtyping import Float, Int

from kvpatch_jax import Audio

from ..sheets_task.task import COLOURS, COLUMN_MARKS, INKS, ROW_MARKS, SHAPES, SheetsContexts

RATE = 16_000
CELL_SECONDS = 0.04
CELL_SAMPLES = round(RATE * CELL_SECONDS)
LOWEST, STEP = 300.0, 120.0
"""Hertz of the first tone, and from each to the next: the spectrum of 25 ms tells them apart."""
LOUDNESS, NOISE = 0.2, 0.01
COUNTS = {
    "row": ROW_MARKS,
    "column": COLUMN_MARKS,
    "fill": COLOURS,
    "stripe": COLOURS,
    "shape": SHAPES,
    "ink": INKS,
}
"""How many tones each attribute has, lowest first."""
FIRST = dict(zip(COUNTS, itertools.accumulate(COUNTS.values(), initial=0), strict=False))
"""The first tone of each attribute."""


def hertz(tone: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Returns the frequencies of tones by number."""
    return LOWEST + STEP * tone


def synthesise(contexts: SheetsContexts) -> list[Audio]:
    """Makes every context's sheets as sounds in their order, then its page's: B · chunks sounds.

    The samples of one context depend on its own meaning and `ink_seed` only, never on the batch around it.
    """
    sheets = _tones(contexts.sheet_address, fill=contexts.sheet_fill, stripe=contexts.sheet_stripe)
    glyph = contexts.page_glyph
    pages = _tones(contexts.page_address, shape=glyph % SHAPES, ink=glyph // SHAPES)
    sounds = []
    for index, seed in enumerate(contexts.ink_seed):
        rng = np.random.default_rng(int(seed))
        sounds += [Audio(_wave(tones, rng), rate=RATE) for tones in (*sheets[index], pages[index])]
    return sounds


def _tones(address: Int[np.ndarray, "*n"], **others: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n 4"]:
    """Numbers the four tones of every cell."""
    attributes = {"row": address // COLUMN_MARKS, "column": address % COLUMN_MARKS, **others}
    return np.stack([FIRST[name] + number for name, number in attributes.items()], axis=-1)


def _wave(tones: Int[np.ndarray, "cells 4"], rng: np.random.Generator) -> Float[np.ndarray, " samples"]:
    """Plays cells one after another, every tone in a phase of its own."""
    seconds = np.arange(CELL_SAMPLES) / RATE
    phases = rng.uniform(0, 2 * np.pi, (*tones.shape, 1))
    cells = np.sin(2 * np.pi * hertz(tones)[..., None] * seconds + phases).sum(axis=1)
    wave = LOUDNESS * cells.reshape(-1)
    return (wave + NOISE * rng.standard_normal(wave.shape)).astype(np.float32)
