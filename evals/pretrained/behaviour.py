"""Questions over two chunks, of which the second is reused: copying, retrieval, coreference.

One hop each: two-hop questions are beyond a model of this size. Chunks are filled up to one length with text of the
domains. Answers of several tokens are read with the right ones in front: an answer counts as right where every one of
its tokens is the model's best, which is the same as writing it greedily.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvpatch_jax.cache import Text
from kvpatch_jax.core import AnyArray

from .arms import Arms
from .passages import Passages, placed
from .plan import TASKS, SuitePlan
from .texts import Document

Record = dict[str, Any]
WOMEN = ("Anna", "Maria", "Laura", "Emma", "Julia", "Sarah", "Alice", "Helen")
MEN = ("Tom", "Peter", "David", "Robert", "Paul", "Simon", "Frank", "James")
JOBS = ("doctor", "farmer", "teacher", "baker", "lawyer", "painter", "pilot", "nurse")
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")
THINGS = ("lamp", "drum", "chair", "clock", "bag", "cup", "kite", "coat")
PLACES = ("garden", "library", "kitchen", "cellar", "office", "garage", "attic", "studio")
COPIED = 16
"""Tokens that a copy goes on for, the first of them given."""
WIDTH = 24
"""Tokens that question and answer are padded to, so that all tasks are one program."""


class Question(NamedTuple):
    """What stands in front, the reused chunk, how the question goes, its answer, and answers that it is chosen from."""

    front: str
    chunk: str
    asked: str
    answer: str
    others: tuple[str, ...] = ()


class Item(NamedTuple):
    """A question's tokens. behind: question and answer, padded; answer: where its tokens stand in there."""

    front: Int[np.ndarray, " A"]
    chunk: Int[np.ndarray, " T"]
    behind: Int[np.ndarray, " n"]
    answer: tuple[int, int]
    choices: tuple[int, ...]


def questions(task: str, rng: np.random.Generator) -> Question:
    """Draws one question of a task (all but copying)."""
    pick = lambda words, count: [words[place] for place in rng.permutation(len(words))[:count]]
    if task == "coreference":
        woman, man = pick(WOMEN, 1)[0], pick(MEN, 1)[0]
        jobs, colours, things = pick(JOBS, 2), pick(COLOURS, 2), pick(THINGS, 2)
        people = [f"{woman} is a {jobs[0]}.", f"{man} is a {jobs[1]}."]
        front = " ".join(people if rng.random() < 0.5 else people[::-1])
        chunk = f"She has a {colours[0]} {things[0]}. He has a {colours[1]} {things[1]}."
        hers = rng.random() < 0.5
        place = 0 if hers else 1
        asked = f" The {colours[place]} {things[place]} belongs to"
        return Question(front, chunk, asked, f" {woman if hers else man}", (f" {man if hers else woman}",))
    places, codes = pick(PLACES, 4), rng.integers(1000, 9999, 4)
    facts = " ".join(f"The code of the {place} is {code}." for place, code in zip(places, codes, strict=True))
    which = int(rng.integers(4))
    asked, answer = f" The code of the {places[which]} is", f" {codes[which]}"
    return Question(facts, "", asked, answer) if task == TASKS[1] else Question("", facts, asked, answer)


def items(backbone: Any, plan: SuitePlan, task: str, number: int, documents: list[Document]) -> list[Item]:
    """Draws a batch of a task's items; the same number gives the same items."""
    rng = np.random.default_rng([TASKS.index(task), number])
    found = []
    for row in range(plan.batch):
        document = documents[(number * plan.batch + row) % len(documents)]
        if task == "copy":
            found.append(_copy(plan, document))
        else:
            found.append(_asked(backbone, plan, questions(task, rng), document))
    # Padding stands behind the answer and is not read.
    return [item._replace(behind=np.pad(item.behind, (0, WIDTH - len(item.behind)))) for item in found]


def _copy(plan: SuitePlan, document: Document) -> Item:
    """A chunk that repeats what stands in front of it from its middle on, and has to be gone on with."""
    size = plan.facts
    front = document.ids[:size]
    half = size // 2
    chunk = np.concatenate([document.ids[size : size + size - half + COPIED], front[: half - COPIED]])
    behind = front[half - COPIED : half]
    return Item(front, chunk, behind, (1, COPIED), ())


def _asked(backbone: Any, plan: SuitePlan, question: Question, document: Document) -> Item:
    tokens = lambda text: np.asarray(backbone.prepare([Text(text)])["input_ids"])[0].astype(np.int32)
    asked = tokens(question.asked)
    behind = np.concatenate([asked, tokens(question.answer)])
    choices = tuple(int(tokens(word)[0]) for word in (question.answer, *question.others)) if question.others else ()
    chunks = []
    for place, text in enumerate((question.front, question.chunk)):
        own = tokens(text) if text else np.zeros(0, np.int32)
        filler = document.ids[place * plan.facts : (place + 1) * plan.facts]
        chunks.append(np.concatenate([filler[: plan.facts - len(own)], own[: plan.facts]]))
    return Item(chunks[0], chunks[1], behind, (len(asked), len(behind)), choices)


def measured(
    backbone: Any,
    plan: SuitePlan,
    task: str,
    number: int,
    documents: list[Document],
    by_layer: Sequence[float] | None = None,
) -> Iterator[Record]:
    """Asks a batch of a task's items in every way: a record per item and arm."""
    drawn = items(backbone, plan, task, number, documents)
    stack = lambda name: np.stack([getattr(item, name) for item in drawn])
    alone = lambda ids: backbone.prefill(placed(backbone.embed(ids), 0)).kv
    of = Passages(backbone, alone(stack("front")), alone(stack("chunk")), stack("chunk"), stack("behind"))
    yield from answered(of, drawn, number * plan.batch, by_layer)


def answered(
    of: Passages, drawn: Sequence[Item], first: int, by_layer: Sequence[float] | None = None
) -> Iterator[Record]:
    """Reads the items' answers in every way: a record per item and arm, items counted from `first`."""
    arms = Arms(of, by_layer)
    read = {"re-prefill": of.logits}
    for arm in arms.core():
        read[arm.name] = arm.logits if arm.logits is not None else of.read(arm.cache)
    for arm, logits in read.items():
        for row, item in enumerate(drawn):
            yield {"row": first + row, "arm": arm, **_said(item, of.logits[row], logits[row])}


def _said(item: Item, reference: Float[AnyArray, "n V"], logits: Float[AnyArray, "n V"]) -> dict[str, float]:
    """Of one item's answer: whether it is right, how many of its tokens are, whether it is what re-prefill says, KL."""
    first, stop = item.answer
    rows, answer = np.asarray(logits)[first - 1 : stop - 1], item.behind[first:stop]
    true = np.asarray(reference)[first - 1 : stop - 1]
    best = rows.argmax(-1)
    found = {
        "right": float((best == answer).all()),
        "tokens": float((best == answer).mean()),
        "agrees": float((best == true.argmax(-1)).all()),
        "kl": _divergence(true, rows),
    }
    if item.choices:
        found["chosen"] = float(rows[0][list(item.choices)].argmax() == 0)
    return found


def _divergence(reference: Float[np.ndarray, "n V"], logits: Float[np.ndarray, "n V"]) -> float:
    """KL(reference‖logits) in nats, the mean over tokens; on the host, for answers differ in length."""
    true, own = (values - values.max(-1, keepdims=True) for values in (reference, logits))
    true, own = (values - np.log(np.exp(values).sum(-1, keepdims=True)) for values in (true, own))
    return float((np.exp(true) * (true - own)).sum(-1).mean())
