"""Data sets of text: facts that must be bound across chunks, and passages of continuous text.

They are kept apart: what a question needs from another chunk is lost by blind reuse, and the next tokens of a text
hardly depend on it. A chunk of facts is prefilled behind an instruction alone and reused behind other documents too.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax.errors import InputError

from ..harness.datasets import QuestionTable
from . import corpus
from .splices import Ids, TextBatch, encode, spliced, start_tokens

_WORDS = """\
Anna Tom Maria Peter Laura David Emma Robert Julia Paul Sarah Simon Alice Frank Helen James
doctor farmer teacher baker lawyer painter pilot nurse writer singer driver judge chef engineer
Oslo Paris Rome Berlin Madrid London Vienna Dublin Tokyo Boston Milan Prague Chicago Delhi
red blue green yellow black white brown grey
lamp drum chair clock bag cup kite coat bike car boat table hat ring
garden library kitchen office garage attic studio hall lab shop tower gym
"""
NAMES, JOBS, CITIES, COLOURS, THINGS, ROOMS = (line.split() for line in _WORDS.splitlines())
"""Names are of women and men by turns."""
INSTRUCTION = "Answer the question from the documents.\n"
KEYS = 5
"""Keys, rooms and people of a context of two hops."""


class FactContext(NamedTuple):
    """Documents and questions about them; words are single tokens, so that all contexts of a probe have one length.

    Attributes:
      front: text between the instruction and the chunk.
      chunk: the last document, which is reused.
      asked: (kind, prompt, answer) of each question.
    """

    front: str
    chunk: str
    asked: list[tuple[int, str, str]]


def draw_facts(rng: np.random.Generator, documents: int) -> FactContext:
    """Draws documents about people, and a question about each: where they live, what they do, or a thing's colour."""
    columns = [pick(rng, words, documents) for words in (NAMES, JOBS, CITIES, COLOURS, THINGS, ROOMS)]
    texts, asked = [], []
    for place, (name, job, city, colour, thing, room) in enumerate(zip(*columns, strict=True)):
        texts.append(
            f"Document about {name}. {name} is a {job} who lives in {city}. {name} has a {colour} {thing} and works in "
            f"the {room}. On Sundays {name} likes to walk by the river with an old friend.\n"
        )
        prompts = (
            (f"In which city does {name} live?\nAnswer: {name} lives in", city),
            (f"What work does {name} do?\nAnswer: {name} works as a", job),
            (f"What colour is the {thing} of {name}?\nAnswer: The {thing} of {name} has the colour", colour),
        )
        question, answer = prompts[rng.integers(len(prompts))]
        asked.append((int(place < documents - 1), f"Question: {question}", f" {answer}"))
    return FactContext("".join(texts[:-1]), texts[-1], asked)


def draw_two_hops(rng: np.random.Generator, documents: int) -> FactContext:
    """Draws keys that open rooms and people who have keys, and asks which room one of them can open.

    The second prompt names the key, so that one hop is left.
    """
    names, colours, rooms = (pick(rng, words, KEYS) for words in (NAMES, COLOURS, ROOMS))
    rules = [f"The {colour} key opens the {room}." for colour, room in zip(colours, rooms, strict=True)]
    owners = [f"{name} has the {colour} key." for name, colour in zip(names, colours, strict=True)]
    front = " ".join(rules[place] for place in rng.permutation(KEYS))
    chunk = " ".join(owners[place] for place in rng.permutation(KEYS))
    place = rng.integers(KEYS)
    question, answer = f"Question: Which room can {names[place]} open?\nAnswer: {names[place]}", f" {rooms[place]}"
    asked = [
        (0, f"{question} can open the", answer),
        (1, f"{question} has the {colours[place]} key, which opens the", answer),
    ]
    return FactContext(f"Document about keys. {front}\n", f"Document about people. {chunk}\n", asked)


def pick(rng: np.random.Generator, words: Sequence[str], count: int) -> list[str]:
    """Draws different words."""
    return [words[int(place)] for place in rng.permutation(len(words))[:count]]


class FactSet:
    """Contexts of a few short documents behind an instruction; see `harness.datasets.Dataset`.

    Args:
      draw: draws a context of so many documents.
      documents: of each probe.
    """

    def __init__(
        self,
        name: str,
        kinds: tuple[str, ...],
        draw: Callable[[np.random.Generator, int], FactContext],
        documents: dict[str, int],
    ):
        self.name, self.kinds, self.probes = name, kinds, tuple(documents)
        self._draw, self._documents = draw, documents

    def batch(self, backbone: Any, probe: str, number: int, size: int, seed: int) -> TextBatch:
        """Draws one batch of contexts; the same seed, number and place give the same words."""
        contexts = []
        for row in range(size):
            rng = np.random.default_rng([seed, *self.name.encode(), self._documents[probe], number, row])
            contexts.append(self._draw(rng, self._documents[probe]))

        lead = np.concatenate([start_tokens(backbone), encode(backbone, INSTRUCTION)])
        front = _stacked([encode(backbone, context.front) for context in contexts])
        chunk = _stacked([encode(backbone, context.chunk) for context in contexts])
        splice, reference = spliced(backbone, lead, front, chunk)

        prompts = [[encode(backbone, prompt) for _, prompt, _ in context.asked] for context in contexts]
        width = max(len(ids) for row in prompts for ids in row)
        padded = np.stack([_stacked([np.pad(ids, (0, width - len(ids))) for ids in row]) for row in prompts])
        last = np.array([[[len(ids) - 1] for ids in row] for row in prompts], np.int32)
        kind = np.array([[kind for kind, *_ in context.asked] for context in contexts])
        answer = np.array([[encode(backbone, word)[0] for *_, word in context.asked] for context in contexts])
        questions = QuestionTable(kind, np.ones(kind.shape, bool), answer)
        return TextBatch(backbone, splice, reference, number * 1000 + np.arange(size), questions, padded, last)


def _stacked(ids: Sequence[Ids]) -> np.ndarray:
    """Stacks token ids of one length.

    Raises:
      InputError: they differ in length: a word is several tokens of this tokenizer.
    """
    lengths = sorted({len(row) for row in ids})
    if len(lengths) > 1:
        raise InputError(
            f"facts: got documents of {lengths} tokens; expected a tokenizer of which each word is a token"
        )
    return np.stack(ids)


class PassageSet:
    """Passages of documents, of which the next tokens are read; see `harness.datasets.Dataset`.

    A batch is one document: its first passages, every second one behind the text before it and the others behind
    another document of the domain; domains by turns. Intervals resample documents.
    """

    name = "passages"
    kinds = ("next",)
    probes = ("mixed",)
    tokens, scored, passages, documents = 192, 32, 4, 24
    """Tokens of a passage and of the text in front of it, tokens read after it, passages of a document, and documents
    of a domain."""
    longest = 2272
    """Tokens kept of a document."""

    def batch(self, backbone: Any, probe: str, number: int, size: int, seed: int) -> TextBatch:
        """Cuts the passages of one document, at most four. Nothing is drawn: every seed has the same.

        Raises:
          InputError: more passages, or documents, than there are.
        """
        if size > self.passages:
            raise InputError(
                f"passages.batch: got {size}; expected at most {self.passages}, the passages of a document"
            )
        place, domain = divmod(number, len(corpus.SOURCES))
        documents = self._domain(backbone, list(corpus.SOURCES)[domain])
        if place >= len(documents):
            raise InputError(f"passages.n: got document {place} of a domain; expected fewer than {len(documents)}")

        ids, other, length = documents[place].ids, documents[(place + 1) % len(documents)].ids, self.tokens
        chunk = ids[: self.passages * length].reshape(self.passages, length)
        front = np.stack([other[:length] if row % 2 == 0 else chunk[row - 1] for row in range(size)])
        lead = start_tokens(backbone)
        splice, reference = spliced(backbone, lead, front, chunk[:size])

        following = [ids[(row + 1) * length : (row + 1) * length + self.scored + 1] for row in range(size)]
        # The last passage of a document may have no token after those that are read, so nothing is right there.
        answer = np.stack([np.pad(row, (0, self.scored + 1 - len(row)), constant_values=-1) for row in following])
        questions = QuestionTable(np.zeros((size, self.scored), int), np.ones((size, self.scored), bool), answer[:, 1:])
        at = np.broadcast_to(np.arange(self.scored, dtype=np.int32), (size, 1, self.scored))
        clusters = np.full(size, number)
        return TextBatch(backbone, splice, reference, clusters, questions, answer[:, None, : self.scored], at)

    def _domain(self, backbone: Any, domain: str) -> list[corpus.Document]:
        cached = _READ.setdefault(backbone, {})
        if domain not in cached:
            least = self.passages * self.tokens + self.scored
            cached[domain] = corpus.documents(backbone, domain, self.documents, least, self.longest)
        return cached[domain]


_READ: weakref.WeakKeyDictionary[Any, dict[str, list[corpus.Document]]] = weakref.WeakKeyDictionary()

FACTS = FactSet("facts", ("reused", "preceding"), draw_facts, {"pairs": 2, "triples": 3})
TWO_HOPS = FactSet("two_hops", ("unnamed", "named"), draw_two_hops, {"keys": 2})
PASSAGES = PassageSet()
