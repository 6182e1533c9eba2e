"""Texts of several passages and what is asked behind them, on real words.

*codes*: passages of different documents; four of them tell a code, one is asked for. *people*: one passage names who is
what, a later one what she and he own; who owns a thing needs both. *prose*: one document, whose next tokens are read.
"""

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kvpatch_jax.cache import Text
from kvpatch_jax.errors import InputError

from ..pretrained.behaviour import draw_question
from ..pretrained.plan import TASKS as QUESTION_TASKS
from ..texts import corpus as texts
from .plan import InfoFlowPlan
from .splits import Parts, fixed_parts, passage_parts

CODES, PEOPLE, PROSE = "codes", "people", "prose"
TASKS = (CODES, PEOPLE, PROSE)
INDEPENDENT = (CODES, PEOPLE)
"""Tasks whose passages have no order of their own, so that they may be reordered (section 4.3)."""
SEPARATOR = "\n\n"
LEAST_PASSAGE = 24
"""Tokens; shorter paragraphs are joined with the next one."""
Ids = Int[np.ndarray, " _"]


class TextContext(NamedTuple):
    """A context and what is asked behind it.

    Attributes:
      ids: of the context [T].
      passages: its passages.
      asked: the prompt [Q].
      behind: what follows the prompt [A], padded so that both have one length in all contexts; no method reads it.
      scored: its first so many tokens count.
      choices: first tokens of the right answer and of what it could be confused with; (): all tokens must be right.
    """

    ids: Ids
    passages: Parts
    asked: Ids
    behind: Ids
    scored: int
    choices: tuple[int, ...] = ()

    def split(self, name: str, plan: InfoFlowPlan) -> Parts:
        """Returns the chunks of a split by its name."""
        return self.passages if name == "passages" else fixed_parts(len(self.ids), -(-len(self.ids) // plan.passages))


def draw_context(backbone: Any, plan: InfoFlowPlan, task: str, number: int) -> TextContext:
    """Draws a context of a task; the same number gives the same one.

    Raises:
      InputError: an unknown task, or too few texts.
    """
    if task not in TASKS:
        raise InputError(f"task: got {task!r}; expected one of {', '.join(TASKS)}")
    rng = np.random.default_rng([plan.seed, TASKS.index(task), number])
    if task == PROSE:
        return _prose(_paragraphs(backbone, plan, number, plan.context + plan.asked + plan.follow), plan)

    question = draw_question(QUESTION_TASKS[1] if task == CODES else "coreference", rng)
    encode = functools.partial(_encode, backbone)
    if task == CODES:
        told = [f"{sentence}." for sentence in question.front.rstrip(".").split(". ")]
    else:
        told = [question.front, question.chunk]
    # Each in a passage of its own, in their order.
    places = np.sort(rng.permutation(plan.passages)[: len(told)])
    facts = dict(zip(places.tolist(), told, strict=True))

    pieces = []
    for place, size in enumerate(_sizes(rng, plan)):
        paragraphs = _paragraphs(backbone, plan, number * plan.passages + place, size)
        fact = encode(facts[place] + SEPARATOR) if place in facts else np.zeros(0, np.int32)
        filler = np.concatenate(paragraphs)[: size - len(fact)]
        # A fact begins or ends its passage.
        pieces.append(np.concatenate([fact, filler] if rng.random() < 0.5 else [filler, fact]))

    # The prompt is the question and nothing more: tokens are scored by all that it attends to.
    asked = encode(SEPARATOR + question.asked.strip())[-plan.asked :]
    answer = encode(question.answer)[: plan.follow]
    behind = np.pad(answer, (0, plan.asked + plan.follow - len(asked) - len(answer)))
    choices = tuple(int(encode(word)[0]) for word in (question.answer, *question.others)) if question.others else ()
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return TextContext(np.concatenate(pieces), passage_parts(ends), asked, behind, len(answer), choices)


def _sizes(rng: np.random.Generator, plan: InfoFlowPlan) -> list[int]:
    """Draws sizes of passages, 3/5 to 7/5 of their mean, that sum to the context."""
    mean = plan.context // plan.passages
    while True:
        sizes = rng.integers(3 * mean // 5, 7 * mean // 5 + 1, plan.passages - 1).tolist()
        last = plan.context - sum(sizes)
        if 3 * mean // 5 <= last <= 7 * mean // 5:
            return [*sizes, last]


def _prose(paragraphs: list[Ids], plan: InfoFlowPlan) -> TextContext:
    """Makes a context of one document's paragraphs, cut at the context's size; its next tokens are prompt and text."""
    whole = np.concatenate(paragraphs)
    ends = [end for end in itertools.accumulate(map(len, paragraphs)) if end < plan.context]
    parts = passage_parts([*ends, plan.context], least=max(LEAST_PASSAGE, plan.context // plan.passages * 3 // 5))
    asked, behind = whole[plan.context : plan.context + plan.asked], whole[plan.context + plan.asked :][: plan.follow]
    return TextContext(whole[: plan.context], parts, asked, behind, plan.follow)


def _encode(backbone: Any, text: str) -> Ids:
    return np.asarray(backbone.prepare([Text(text)])["input_ids"])[0].astype(np.int32)


def _paragraphs(backbone: Any, plan: InfoFlowPlan, number: int, tokens: int) -> list[Ids]:
    """Returns a document's first paragraphs that have so many tokens together; each number has its own document."""
    found, total = [], 0
    documents = _documents(plan.context + plan.asked + plan.follow)
    for paragraph in documents[number % len(documents)]:
        ids = _encode(backbone, paragraph + SEPARATOR)
        found.append(ids)
        total += len(ids)
        if total >= tokens:
            return found
    raise InputError(f"text: got {total} tokens of document {number}; expected at least {tokens}")


@functools.cache
def _documents(tokens: int) -> list[list[str]]:
    """Lists the paragraphs of the texts of prose that surely have so many tokens: six characters each."""
    found = []
    for _, text in texts.SOURCES["prose"]():
        text = text.strip()[: 16 * tokens]
        paragraphs = [part.strip() for part in text.split(SEPARATOR)]
        paragraphs = [part for part in paragraphs if part]
        if len(text) >= 6 * tokens and len(paragraphs) >= 3:
            found.append(paragraphs)
    return found
