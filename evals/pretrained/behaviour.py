"""Questions over two chunks, of which the second is reused: copying, retrieval, coreference.

One hop each: two-hop questions are beyond a model of this size. Chunks are padded to one length with text of the
domains. Answers of several tokens are read with the right tokens as input: an answer is right where each of its tokens
is the model's best, which is the same as writing it greedily.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvpatch_jax.cache import Text
from kvpatch_jax.core import AnyArray

from ..texts.corpus import Document
from .arms import PassageArms
from .passages import Passages, placed
from .plan import TASKS, SuitePlan

Record = dict[str, Any]
WOMEN = ("Anna", "Maria", "Laura", "Emma", "Julia", "Sarah", "Alice", "Helen")
MEN = ("Tom", "Peter", "David", "Robert", "Paul", "Simon", "Frank", "James")
JOBS = ("doctor", "farmer", "teacher", "baker", "lawyer", "painter", "pilot", "nurse")
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")
THINGS = ("lamp", "drum", "chair", "clock", "bag", "cup", "kite", "coat")
PLACES = ("garden", "library", "kitchen", "cellar", "office", "garage", "attic", "studio")
COPIED = 16
"""Tokens of a copy's continuation; the first of them is part of the question."""
WIDTH = 24
"""Tokens that question and answer are padded to, so that all tasks are one program."""


class TextQuestion(NamedTuple):
    """A question about two texts.

    Attributes:
      front, chunk: the antecedent and the reused chunk.
      asked, answer: the question's words and its answer.
      others: answers that it could be confused with.
    """

    front: str
    chunk: str
    asked: str
    answer: str
    others: tuple[str, ...] = ()


class QuestionItem(NamedTuple):
    """A question's tokens.

    Attributes:
      front, chunk: the antecedent and the reused chunk.
      behind: question and answer, padded.
      answer: the first and the last of the answer's tokens in `behind`, the last excluded.
      choices: the first tokens of the answer and of those it could be confused with; none for other tasks.
    """

    front: Int[np.ndarray, " A"]
    chunk: Int[np.ndarray, " T"]
    behind: Int[np.ndarray, " n"]
    answer: tuple[int, int]
    choices: tuple[int, ...]


def draw_question(task: str, rng: np.random.Generator) -> TextQuestion:
    """Draws one question of a task (all but copying)."""

    def pick(words: tuple[str, ...], count: int) -> list[str]:
        return [words[place] for place in rng.permutation(len(words))[:count]]

    if task == "coreference":
        woman, man = pick(WOMEN, 1)[0], pick(MEN, 1)[0]
        jobs, colours, things = pick(JOBS, 2), pick(COLOURS, 2), pick(THINGS, 2)
        people = [f"{woman} is a {jobs[0]}.", f"{man} is a {jobs[1]}."]
        front = " ".join(people if rng.random() < 0.5 else people[::-1])
        chunk = f"She has a {colours[0]} {things[0]}. He has a {colours[1]} {things[1]}."
        hers = rng.random() < 0.5
        place = 0 if hers else 1
        asked = f" The {colours[place]} {things[place]} belongs to"
        return TextQuestion(front, chunk, asked, f" {woman if hers else man}", (f" {man if hers else woman}",))

    places, codes = pick(PLACES, 4), rng.integers(1000, 9999, 4)
    facts = " ".join(f"The code of the {place} is {code}." for place, code in zip(places, codes, strict=True))
    which = int(rng.integers(4))
    asked, answer = f" The code of the {places[which]} is", f" {codes[which]}"
    in_front = task == TASKS[1]
    return TextQuestion(facts if in_front else "", "" if in_front else facts, asked, answer)


def document_tokens(plan: SuitePlan) -> int:
    """Counts the tokens of a document that a plan needs: its passages and what is read, or what fills two chunks."""
    return max(plan.passages * plan.chunk + plan.scored, 2 * plan.facts + COPIED)


def items(backbone: Any, plan: SuitePlan, task: str, number: int, documents: Sequence[Document]) -> list[QuestionItem]:
    """Draws a batch of a task's items; the same number gives the same items."""
    rng = np.random.default_rng([TASKS.index(task), number])
    drawn = []
    for row in range(plan.batch):
        document = documents[(number * plan.batch + row) % len(documents)]
        if task == "copy":
            item = _copy_item(plan, document)
        else:
            item = _item_of(backbone, plan, draw_question(task, rng), document)
        # Padding follows the answer and is not read.
        drawn.append(item._replace(behind=np.pad(item.behind, (0, WIDTH - len(item.behind)))))
    return drawn


def _copy_item(plan: SuitePlan, document: Document) -> QuestionItem:
    """Makes a chunk that repeats its antecedent from its beginning to near its middle; the answer continues it."""
    size, half = plan.facts, plan.facts // 2
    front = document.ids[:size]
    # The chunk is filled up in front with text of the document's that nothing repeats.
    chunk = np.concatenate([document.ids[size : size + size - half + COPIED], front[: half - COPIED]])
    return QuestionItem(front, chunk, front[half - COPIED : half], (1, COPIED), ())


def _item_of(backbone: Any, plan: SuitePlan, question: TextQuestion, document: Document) -> QuestionItem:
    """Reads a question as tokens; its two texts are padded in front with the document's."""

    def tokens(text: str) -> Int[np.ndarray, " n"]:
        return np.asarray(backbone.prepare([Text(text)])["input_ids"])[0].astype(np.int32)

    asked = tokens(question.asked)
    behind = np.concatenate([asked, tokens(question.answer)])
    # Names are told apart by their first tokens.
    choices = tuple(int(tokens(word)[0]) for word in (question.answer, *question.others)) if question.others else ()

    chunks = []
    for place, text in enumerate((question.front, question.chunk)):
        ids = tokens(text) if text else np.zeros(0, np.int32)
        filler = document.ids[place * plan.facts : (place + 1) * plan.facts]
        chunks.append(np.concatenate([filler[: plan.facts - len(ids)], ids[: plan.facts]]))
    return QuestionItem(chunks[0], chunks[1], behind, (len(asked), len(behind)), choices)


def measure(
    backbone: Any,
    plan: SuitePlan,
    task: str,
    number: int,
    documents: Sequence[Document],
    by_layer: Sequence[float] | None = None,
) -> Iterator[Record]:
    """Asks a batch of a task's items with every arm: a record per item and arm."""
    drawn = items(backbone, plan, task, number, documents)
    front, chunk, behind = stack_items(drawn)
    fronts, alone = (backbone.prefill(placed(backbone.embed(ids), 0)).kv for ids in (front, chunk))
    of = Passages(backbone, fronts, alone, chunk, behind)
    yield from read_answers(of, drawn, number * plan.batch, by_layer)


def stack_items(drawn: Sequence[QuestionItem]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stacks the items' antecedents, chunks and questions."""
    fronts, chunks, behind, _, _ = zip(*drawn, strict=True)
    return np.stack(fronts), np.stack(chunks), np.stack(behind)


def read_answers(
    of: Passages, drawn: Sequence[QuestionItem], first: int, by_layer: Sequence[float] | None = None
) -> Iterator[Record]:
    """Reads the items' answers with every arm: a record per item and arm, items counted from `first`."""
    answers = {"re-prefill": of.logits}
    for arm in PassageArms(of, by_layer).core():
        answers[arm.name] = of.read(arm.cache)
    for arm, logits in answers.items():
        for row, item in enumerate(drawn):
            yield {"row": first + row, "arm": arm, **score_answer(item, of.logits[row], logits[row])}


def score_answer(
    item: QuestionItem, reference: Float[AnyArray, "n V"], logits: Float[AnyArray, "n V"]
) -> dict[str, float]:
    """Scores an answer: whether it is right, the share of right tokens, whether it equals re-prefill's, KL in nats."""
    # A token's logits name the token after it.
    first, stop = item.answer
    rows, expected = (np.asarray(values)[first - 1 : stop - 1] for values in (logits, reference))
    best, answer = rows.argmax(-1), item.behind[first:stop]

    # On the host, because answers differ in length: on the device every length would be a program.
    found, true = (values - values.max(-1, keepdims=True) for values in (rows, expected))
    found, true = (values - np.log(np.exp(values).sum(-1, keepdims=True)) for values in (found, true))
    scores = {
        "right": float((best == answer).all()),
        "tokens": float((best == answer).mean()),
        "agrees": float((best == expected.argmax(-1)).all()),
        "kl": float((np.exp(true) * (true - found)).sum(-1).mean()),
    }
    if item.choices:
        scores["chosen"] = float(rows[0][list(item.choices)].argmax() == 0)
    return scores
