"""The recipe of a training: every choice that is written beside the weights."""

import dataclasses
from typing import Any

import numpy as np

READING = {"page": 8, "sheet": 4, "chain": 4, "override": 1}
"""What the first steps ask: most of all what the page alone tells, so that reading is learnt first."""
TINY = {"page": 4, "sheet": 4, "chain": 10, "override": 2}
"""What is asked of a page of four cells, where a letter has one or two."""
ASKED = {"page": 4, "sheet": 4, "chain": 16, "override": 3, "aggregate": 6, "list": 1}


def _choice(default: Any, about: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": about})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every choice of a training, with what it means; `python -m evals.train --help` lists them."""

    backbone: str = _choice("qwen2_5_vl", "architecture: qwen2_5_vl, qwen2_5_vl_mha, qwen3_vl or kimi_vl")
    seed: int = _choice(0, "of the initial parameters and of every batch")
    steps: int = _choice(3200, "optimiser steps; the cosine schedule ends there")
    batch: int = _choice(8, "contexts per step")
    learning_rate: float = _choice(1.5e-3, "peak learning rate")
    warmup: int = _choice(60, "steps of linear warm-up")
    window: float = _choice(0.5, "share of page questions that see only the page; 0 trains the control without it")
    reading: int = _choice(400, "steps at first that ask most of all what the page alone tells")
    plain: int = _choice(500, "step until which all documents look alike")
    varied: int = _choice(1100, "step from which they vary in full")
    tiny: int = _choice(1500, "steps with pages of four cells to begin with")
    small: int = _choice(500, "steps with pages of sixteen cells after those")
    # Looking up one cell gains little by a distribution.
    proportions: int = _choice(2700, "steps at first in which an aggregate question asks how often each value is there")
    longer: int = _choice(2800, "step from which every second batch has 7 or 15 sheets in place of 3")

    def asked(self, step: int) -> dict[str, int]:
        """Returns how many questions of each kind a step packs behind each context."""
        if step >= self.tiny:
            return ASKED
        return READING if step < self.reading else TINY

    def variety(self, step: int) -> float:
        """Returns how unlike one another the documents of a step look."""
        return float(np.clip((step - self.plain) / max(self.varied - self.plain, 1), 0, 1))

    def size(self, step: int) -> str:
        """Returns which of `SIZES` the contexts of a step have."""
        if step < self.tiny:
            return "tiny"
        if step < self.tiny + self.small:
            return "small"
        if step < self.longer or step % 2 == 0:
            return "4"
        return "8" if step % 4 == 1 else "16"
