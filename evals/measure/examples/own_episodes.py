"""Trajectories of the sheets task: screens that come, leave and come back, and questions that need earlier ones.

An episode is a context of the task, seen as an agent sees screens. Its steps go round: a sheet, a second sheet, the
page. Later rounds bring one new sheet and one that has left, so that windows slide and recall; the page is the same
one each time. At a sheet is asked what a sheet shows; at the page, in two hops, which colours the sheets give a glyph's
cell. Asked are addresses that one sheet of the context has. Kinds say where that sheet is:

- *sheet in view*, *two hops in view*: among the newest `KEEP` screens, so that a window of so many shows it;
- *two hops, gone*: shown before those only. Whoever drops old screens cannot know, unless what is left remembers.

Goal and "Action 3: " have no words in a small model's vocabulary: the copy's tokenizer takes them for nothing, and the
answers alone stand between the screens. The lead is one token.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax.errors import InputError

from ...sheets_task.dataset import SHEETS_DATASET
from ...sheets_task.task import VOCABULARY, SheetsContexts, latest
from ..episodes import action_text
from ..exports import write_episodes
from .comparison import DATA, MODEL, copy_model
from .own_tasks import encoded

FORMAT, KEEP, ROUNDS = "episodes", 6, 6
"""The format's name; screens that a window is meant to have; rounds of three steps in an episode."""
NEW_ROUNDS = 2
"""Rounds at the beginning whose sheets are both new."""
SIZE = "16"
"""Of contexts: sheets of five entries."""
LEAD = "<end>"
SHEET, NEAR, GONE = "sheet in view", "two hops in view", "two hops, gone"


class Asked(NamedTuple):
    """What is asked at a step: its kind, question and answer."""

    kind: str
    question: str
    answer: str


def screens(rng: np.random.Generator) -> list[int]:
    """Draws the order of an episode's screens: numbers of sheets, and -1 for the page.

    A sheet comes back only where it is not among the newest `KEEP` screens.
    """
    order, fresh = list[int](), 0
    for round_ in range(ROUNDS):
        order.append(fresh)
        fresh += 1
        left = sorted({sheet for sheet in order if sheet >= 0} - set(order[-KEEP:]))
        if round_ < NEW_ROUNDS or not left:
            order.append(fresh)
            fresh += 1
        else:
            order.append(int(rng.choice(left)))
        order.append(-1)
    return order


def write(out: Path, model: str, seed: int, count: int) -> Path:
    """Writes `count` episodes and the model; returns the data's path.

    Raises:
      InputError: no such instance; a folder that holds another export.
    """
    path = SHEETS_DATASET.instances(model)[0]
    spec = SHEETS_DATASET.spec
    rng, size = np.random.default_rng([seed, count]), spec.sizes[SIZE]
    contexts = spec.sample(rng, count, size)
    images, chunks = [encoded(image) for image in spec.images(contexts)], size.sheets + 1

    episodes, longest = list[dict[str, Any]](), 3 * ROUNDS
    for number in range(count):
        own, steps = images[number * chunks : (number + 1) * chunks], []
        order = screens(rng)
        for step, screen in enumerate(order):
            asked = question(contexts, number, order[: step + 1], rng)
            entry = {"images": [own[screen]], "question": asked.question, "answer": asked.answer}
            steps.append(entry | {"kind": asked.kind})
        episodes.append({"id": f"{number}", "system": LEAD, "rule": "exact_match", "steps": steps})
    around = [action_text(number + 1, "").rstrip("\n") for number in range(longest)]
    copy_model(path, out / MODEL, around)
    return write_episodes(out / DATA, episodes)


def question(contexts: SheetsContexts, context: int, shown: list[int], rng: np.random.Generator) -> Asked:
    """Draws what is asked behind screens, of which the last was just shown.

    Raises:
      InputError: nothing can be asked.
    """
    fill, stripe, times = (table[context] for table in latest(contexts))
    entries, page = contexts.sheet_address[context], contexts.page_address[context]
    view = {sheet for sheet in shown[-KEEP:] if sheet >= 0}
    gone = {sheet for sheet in shown if sheet >= 0} - view

    def addresses(sheets: set[int]) -> list[int]:
        """Lists the addresses that one of these sheets has, and no other of the context."""
        return [int(own) for sheet in sorted(sheets) for own in entries[sheet] if times[own] == 1]

    if shown[-1] >= 0:
        kind, allowed = SHEET, addresses(view)
    else:
        on_page = set(page.tolist())
        choices = {NEAR: addresses(view), GONE: addresses(gone)}
        choices = {kind: [own for own in found if own in on_page] for kind, found in choices.items()}
        kinds = [kind for kind, found in choices.items() if found]
        if not kinds:
            raise InputError(f"episode {context}: got no address of the page; expected one to ask about")
        kind = kinds[int(rng.integers(len(kinds)))]
        allowed = choices[kind]
    address = int(rng.choice(allowed))
    if kind == SHEET:
        named = VOCABULARY.cell + address
    else:
        named = VOCABULARY.glyph + int(contexts.page_glyph[context][page == address][0])
    fills = VOCABULARY.ask_fill, VOCABULARY.fill, fill
    stripes = VOCABULARY.ask_stripe, VOCABULARY.stripe, stripe
    word, first, colour = fills if rng.random() < 0.5 else stripes
    names = VOCABULARY.names
    return Asked(kind, f"{names[word]} {names[named]}", names[first + int(colour[address])])
