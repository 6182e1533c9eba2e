"""Episodes drawn by a seed: an agent that walks over the screens of an app, or opens some of a few in any order.

An app is a context of the task (`evals.task`): seven settings screens that give icons a value and a unit, and the page
that shows the icons. Of 20 steps three change nothing, so that the next screenshot is the same one; about six show the
page, the others a settings screen. Sizes are those of real agents, whatever the small models read.
"""

import numpy as np

import kvpatch_jax as kvp

from ..task.contexts import DOCUMENTS, SIZES, Contexts, sample
from ..task.drawing import images_of
from ..task.questions import ask
from ..task.vocabulary import CODE_NAMES, vocabulary
from .episodes import (
    LINE_TOKENS,
    PLACEHOLDER_TOKENS,
    REPLY_TOKENS,
    SCREENSHOT_TOKENS,
    SYSTEM_TOKENS,
    Episode,
    Round,
    Shown,
)

SIZE = SIZES["8"]
UNCHANGED, PAGE = 0.15, 0.3
"""Shares of steps after which the screen is the same, and that lead to the page."""
OPENED, SCREENS = (3, 5), 6
"""Screens that a round opens, at least and at most, and of how many."""
ASKED = {"chain": 2, "sheet": 1, "page": 1}
"""Questions of a round, by kind."""
LEAD = "value unit letter digit"
"""The system text, in words that the small models know."""


def drawn_episode(kind: str, name: str, seed: int, steps: int, *, contents: bool = True) -> Episode:
    """Draws an episode.

    Args:
      kind: "walk" or "opened". name: of the episode. steps: rounds.
      contents: whether to draw images and questions; without them only sizes are known.
    """
    rng = np.random.default_rng([seed, len(kind)])
    screens = walk(rng, steps) if kind == "walk" else opened(rng, steps)
    context = sample(rng, 1, SIZE)
    context.document[:] = DOCUMENTS.index("screen")
    images = images_of(context) if contents else [None] * (SIZE.sheets + 1)
    clicks = [CODE_NAMES[code] for code in rng.choice(context.page_code[0], steps)]

    def text(words: str, size: int) -> Shown:
        return Shown(words, size, kvp.Text(words))

    rounds = []
    for shown, click in zip(screens, clicks, strict=True):
        pictures = tuple(Shown(f"{name}, screen {screen}", SCREENSHOT_TOKENS, images[screen]) for screen in shown)
        reply, line = text(click, REPLY_TOKENS), text(click, LINE_TOKENS)
        rounds.append(Round(pictures, None, reply, line, asked(context, rng) if contents else ()))
    system, goal = text(LEAD, SYSTEM_TOKENS), text("most A", REPLY_TOKENS)
    return Episode(name, system, goal, tuple(rounds), text("values", PLACEHOLDER_TOKENS))


def walk(rng: np.random.Generator, steps: int) -> list[list[int]]:
    """Draws the screen of each step; the last number is the page."""
    screens = [int(rng.integers(SIZE.sheets))]
    while len(screens) < steps:
        draw = rng.random()
        if draw < UNCHANGED:
            screens.append(screens[-1])
        else:
            screens.append(SIZE.sheets if draw < UNCHANGED + PAGE else int(rng.integers(SIZE.sheets)))
    return [[screen] for screen in screens]


def opened(rng: np.random.Generator, steps: int) -> list[list[int]]:
    """Draws the screens that each step opens, in an order of its own; the page is always among the six."""
    among = [*range(SCREENS - 1), SIZE.sheets]
    counts = rng.integers(OPENED[0], OPENED[1] + 1, steps)
    return [rng.permutation(among)[:count].tolist() for count in counts]


def asked(context: Contexts, rng: np.random.Generator) -> tuple[str, ...]:
    """Draws questions about an app, in words; a window may lack what they need."""
    words, questions = vocabulary().names, ask(context, rng, ASKED)
    return tuple(" ".join(words[token] for token in questions.ids[0, columns]) for columns in questions.columns())
