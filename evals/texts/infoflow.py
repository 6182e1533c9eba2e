"""Prompts of several chunks and what is asked behind them: do the tokens that the question chooses repair more?

*codes*: passages of different documents; four of them tell a code, one is asked for. *people*: one passage names who is
what, a later one what she and he own; who owns a thing needs both. *prose*: one document, whose next tokens are read.
Source: InfoFlow KV (arXiv 2603.05353), whose splits, methods and positions these are.
"""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax import to_engine
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import SplicedCache, reordered_by_question

from ..harness.datasets import QuestionTable
from . import corpus
from .dataset import COLOURS, JOBS, NAMES, THINGS, pick
from .splices import Ids, TextAnswers, TextBatch, encode, placed

Parts = tuple[tuple[int, int], ...]
"""(first, one past the last) token of each chunk, ascending, without gaps."""
TASKS = ("codes", "people", "prose")
CONTEXT, PASSAGES, ASKED, FOLLOW = 320, 5, 16, 16
"""Tokens of a context, its passages, tokens of the prompt at most, and tokens that are read behind it."""
LEAST = CONTEXT // PASSAGES * 3 // 5
"""Tokens of a passage at least; shorter paragraphs are joined with the next one."""
SHARE = 0.15
"""Of each chunk's tokens, by whose scores chunks are reordered."""
SEPARATOR = "\n\n"
PLACES = ["garden", "library", "kitchen", "cellar", "office", "garage", "attic", "studio"]


class PromptContext(NamedTuple):
    """A context and what is asked behind it.

    Attributes:
      ids: of the context [T].
      passages: its passages.
      asked: the prompt [Q].
      behind: what follows the prompt, padded so that both have one length in all contexts; no method reads it.
      scored: its first so many tokens count.
      choices: first tokens of the right answer and of what it could be confused with; (): all tokens must be right.
    """

    ids: Ids
    passages: Parts
    asked: Ids
    behind: Ids
    scored: int
    choices: tuple[int, ...] = ()


def draw_prompt(backbone: Any, task: str, number: int, seed: int) -> PromptContext:
    """Draws a context of a task; the same number gives the same one.

    Raises:
      InputError: too few texts.
    """
    rng = np.random.default_rng([seed, TASKS.index(task), number])
    if task == "prose":
        return _prose(_paragraphs(backbone, number, CONTEXT + ASKED + FOLLOW))

    sentences, question, answer, other = _draw_codes(rng) if task == "codes" else _draw_people(rng)
    # Each in a passage of its own, in their order.
    places = np.sort(rng.permutation(PASSAGES)[: len(sentences)])
    facts = dict(zip(places.tolist(), sentences, strict=True))
    pieces = []
    for place, size in enumerate(_draw_sizes(rng)):
        paragraphs = _paragraphs(backbone, number * PASSAGES + place, size)
        fact = encode(backbone, facts[place] + SEPARATOR) if place in facts else np.zeros(0, np.int32)
        filler = np.concatenate(paragraphs)[: size - len(fact)]
        # A fact begins or ends its passage.
        pieces.append(np.concatenate([fact, filler] if rng.random() < 0.5 else [filler, fact]))

    # The prompt is the question and nothing more: tokens are scored by all that it attends to.
    asked = encode(backbone, SEPARATOR + question)[-ASKED:]
    right = encode(backbone, answer)[:FOLLOW]
    behind = np.pad(right, (0, ASKED + FOLLOW - len(asked) - len(right)))
    choices = tuple(int(encode(backbone, word)[0]) for word in (answer, other)) if other else ()
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return PromptContext(np.concatenate(pieces), passage_parts(ends), asked, behind, len(right), choices)


def _draw_codes(rng: np.random.Generator) -> tuple[list[str], str, str, str]:
    """Draws sentences, question, answer and nothing that it could be confused with."""
    places, codes = pick(rng, PLACES, 4), rng.integers(1000, 9999, 4)
    sentences = [f"The code of the {place} is {code}." for place, code in zip(places, codes, strict=True)]
    place = int(rng.integers(4))
    return sentences, f"The code of the {places[place]} is", f" {codes[place]}", ""


def _draw_people(rng: np.random.Generator) -> tuple[list[str], str, str, str]:
    """Draws sentences, question, answer and the other name."""
    woman, man = pick(rng, NAMES[::2], 1)[0], pick(rng, NAMES[1::2], 1)[0]
    jobs, colours, things = (pick(rng, words[:8], 2) for words in (JOBS, COLOURS, THINGS))
    people = [f"{woman} is a {jobs[0]}.", f"{man} is a {jobs[1]}."]
    introduction = " ".join(people if rng.random() < 0.5 else people[::-1])
    things_of = f"She has a {colours[0]} {things[0]}. He has a {colours[1]} {things[1]}."
    hers = rng.random() < 0.5
    place = 0 if hers else 1
    names = (f" {woman}", f" {man}") if hers else (f" {man}", f" {woman}")
    return [introduction, things_of], f"The {colours[place]} {things[place]} belongs to", *names


def _draw_sizes(rng: np.random.Generator) -> list[int]:
    """Draws sizes of passages, 3/5 to 7/5 of their mean, that sum to the context."""
    mean = CONTEXT // PASSAGES
    while True:
        sizes = rng.integers(3 * mean // 5, 7 * mean // 5 + 1, PASSAGES - 1).tolist()
        last = CONTEXT - sum(sizes)
        if 3 * mean // 5 <= last <= 7 * mean // 5:
            return [*sizes, last]


def _prose(paragraphs: list[Ids]) -> PromptContext:
    """Makes a context of one document's paragraphs, cut at the context's size; its next tokens are prompt and text."""
    ids = np.concatenate(paragraphs)
    ends = [end for end in itertools.accumulate(map(len, paragraphs)) if end < CONTEXT]
    asked, behind = ids[CONTEXT : CONTEXT + ASKED], ids[CONTEXT + ASKED :][:FOLLOW]
    return PromptContext(ids[:CONTEXT], passage_parts([*ends, CONTEXT], LEAST), asked, behind, FOLLOW)


def _paragraphs(backbone: Any, number: int, tokens: int) -> list[Ids]:
    """Returns a document's first paragraphs that have so many tokens together; each number has its own document."""
    documents, paragraphs, total = _documents(CONTEXT + ASKED + FOLLOW), [], 0
    for paragraph in documents[number % len(documents)]:
        paragraphs.append(encode(backbone, paragraph + SEPARATOR))
        total += len(paragraphs[-1])
        if total >= tokens:
            return paragraphs
    raise InputError(f"text: got {total} tokens of document {number}; expected at least {tokens}")


@functools.cache
def _documents(tokens: int) -> list[list[str]]:
    """Lists the paragraphs of the texts of prose that surely have so many tokens: six characters each."""
    documents = []
    for _, text in corpus.SOURCES["prose"]():
        text = text.strip()[: 16 * tokens]
        paragraphs = [part.strip() for part in text.split(SEPARATOR) if part.strip()]
        if len(text) >= 6 * tokens and len(paragraphs) >= 3:
            documents.append(paragraphs)
    return documents


# ---------------------------------------------------------------------------------------------------------- splits


def fixed_parts(tokens: int, size: int) -> Parts:
    """Cuts tokens into chunks of one size; the last one may be shorter."""
    return tuple((first, min(first + size, tokens)) for first in range(0, tokens, size))


def passage_parts(ends: Sequence[int], least: int = 1) -> Parts:
    """Cuts a context where passages end; passages of fewer than `least` tokens are joined to the one behind them.

    Args:
      ends: one past the last token of each passage, ascending; the last one ends the context.
    """
    cuts = [0]
    for end in ends:
        if end - cuts[-1] >= least:
            cuts.append(end)
    # What is left behind the last cut belongs to the chunk in front of it.
    if cuts[-1] != ends[-1]:
        cuts = [*cuts[: max(1, len(cuts) - 1)], ends[-1]]
    return tuple(itertools.pairwise(cuts))


def local_positions(parts: Parts) -> Int[np.ndarray, " T"]:
    """Counts each token's position from its chunk's start."""
    return np.concatenate([np.arange(last - first, dtype=np.int32) for first, last in parts])


def block_mask(parts: Parts) -> Bool[np.ndarray, "T T"]:
    """Makes the mask in which each chunk sees itself alone, causally: one forward prefills all chunks."""
    owner = np.repeat(np.arange(len(parts)), [last - first for first, last in parts])
    return (owner[:, None] == owner) & np.tri(len(owner), dtype=bool)


def splice_parts(backbone: Any, ids: Ids, parts: Parts, asked: Ids) -> SplicedCache:
    """Prefills every chunk of a context alone, from its own start, and splices all where they stand; one row."""
    count = len(ids)
    tokens = placed(backbone.embed(np.concatenate([ids, asked])[None]), 0)
    context = tokens.take(0, count)
    alone = context._replace(positions=local_positions(parts)[None])
    kv = backbone.prefill(alone, mask=jnp.asarray(block_mask(parts)[None, None])).kv
    cache = dict(to_engine(backbone.layout, kv, context.positions, 0))
    slots = jnp.arange(count, dtype=jnp.int32)[None]
    return SplicedCache(context, cache, slots, question=tokens.take(count, count + len(asked)), chunks=parts)


# --------------------------------------------------------------------------------------------------------- data set


class SpanAnswers:
    """Answers of several tokens, as one each: KL is the mean over the tokens that count, in nats.

    Args:
      log_probabilities: [1,A,V].
      context: says which tokens count, and which answers there are to choose from.
    """

    def __init__(self, log_probabilities: Float[Array, "1 A V"], context: PromptContext):
        self.tokens = TextAnswers(log_probabilities[:, : context.scored])
        if context.choices:
            likely = np.asarray(log_probabilities[0, 0, jnp.asarray(context.choices)])
            answer = context.choices[int(likely.argmax())]
        else:
            answer = answer_number(self.tokens.predicted[0])
        self.predicted = np.array([[answer]])

    def divergence_from(self, reference: "SpanAnswers") -> Float[np.ndarray, "1 1"]:
        """Computes the mean KL(reference ‖ this) of the tokens that count."""
        return self.tokens.divergence_from(reference.tokens).mean(axis=1, keepdims=True)


def answer_number(ids: Int[np.ndarray, " A"]) -> int:
    """Makes one number of an answer's tokens, so that answers compare as one token does."""
    return int.from_bytes(hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=6).digest(), "big")


class InfoFlowSet:
    """Contexts of several chunks, one at a time, tasks by turns; see `harness.datasets.Dataset`.

    Probes: chunks end where *passages* do; all have one *fixed* size and cut through sentences; passages are
    *reordered* by the question, which only those can be that have no order of their own. The reference is always a
    prefill of the whole context in its own order.
    """

    name = "infoflow"
    kinds = TASKS
    probes = ("passages", "fixed", "reordered")

    def batch(self, backbone: Any, probe: str, number: int, size: int, seed: int) -> TextBatch:
        """Draws one context and prefills its chunks.

        Raises:
          InputError: more than one context, whose chunks would differ in length.
        """
        if size != 1:
            raise InputError(f"infoflow.batch: got {size} contexts at once; expected 1")
        tasks = TASKS[:2] if probe == "reordered" else TASKS
        task = tasks[number % len(tasks)]
        context = draw_prompt(backbone, task, number // len(tasks), seed)
        parts = fixed_parts(CONTEXT, -(-CONTEXT // PASSAGES)) if probe == "fixed" else context.passages
        splice = splice_parts(backbone, context.ids, parts, context.asked)
        if probe == "reordered" and len(parts) > 1:
            splice = reordered_by_question(backbone, splice, share=SHARE)

        prefilled = backbone.prefill(placed(backbone.embed(context.ids[None]), 0)).kv
        reference = dict(to_engine(backbone.layout, prefilled, np.arange(CONTEXT, dtype=np.int32), 0))
        first = len(context.asked) - 1
        at = np.arange(first, first + FOLLOW, dtype=np.int32)
        prompts = np.concatenate([context.asked, context.behind])[None, None]
        answer = context.choices[0] if context.choices else answer_number(context.behind[: context.scored])
        questions = QuestionTable(np.array([[TASKS.index(task)]]), np.ones((1, 1), bool), np.array([[answer]]))
        answers = functools.partial(SpanAnswers, context=context)
        clusters = np.array([number])
        length = len(context.asked)
        return TextBatch(
            backbone, splice, reference, clusters, questions, prompts, at[None, None], length, answers=answers
        )


INFOFLOW = InfoFlowSet()
