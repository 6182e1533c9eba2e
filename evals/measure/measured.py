"""A context with its questions, measured: what every arm answers, how far it is from re-prefill, and what it costs.

Axis letters: n tokens of an answer, V vocabulary.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import InputError, KVPatchError
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.prompts import ChatFrame

from ..harness.frame import rounded
from ..harness.lines import KV, cut
from ..harness.methods import BLIND, REFERENCE, Arm
from ..harness.metrics import cost_shares
from ..harness.parts import Record
from .contexts import MeasuredContext, embedded, ids_of
from .items import Item, Piece, content_key
from .scoring import SCORERS

ARMS = (
    *(REFERENCE, BLIND, "patch.rank=8", "patch.rank=16", "patch.rank=32", "quantised.bits=4", "first_k.budget=0.15"),
    *("vlcache.budget=0.15", "cacheblend.budget=0.15", "infoflow.budget=0.15", "prophetkv.budget=0.15"),
)
"""Measured by default."""
STORED = ("patch", "quantised", "low_rank", "shadowkv", "cachegen", "gear", "block_differences")
"""Methods that keep a form of one chunk's KV in context: every piece is served by itself."""
QUESTIONS = 8
"""Questions of one part at most: a kill costs one part."""
QUESTION_STEP = 8
"""Questions choose tokens by as many of their last tokens as are a multiple of it, so that few lengths compile."""


class PlannedContext(NamedTuple):
    """One part: its key, pieces, and the items asked behind them."""

    key: str
    pieces: tuple[Piece, ...]
    items: tuple[Item, ...]


def contexts_of(items: Sequence[Item]) -> list[PlannedContext]:
    """Groups items by their contexts, in order of appearance."""
    groups = collections.defaultdict[tuple[str, ...], list[Item]](list)
    for item in items:
        groups[(item.cluster, *(content_key(piece.content) for piece in item.pieces))].append(item)
    planned: list[PlannedContext] = []
    for group in groups.values():
        for first in range(0, len(group), QUESTIONS):
            part = tuple(group[first : first + QUESTIONS])
            planned.append(PlannedContext(f"{len(planned)}: {part[0].id}", part[0].pieces, part))
    return planned


class Setup(NamedTuple):
    """What every part is measured with.

    Attributes:
      arms: the reference and blind reuse first. most: tokens of a prompt at most; None: any number.
      answer_tokens: of an answer at most; None: what the item's scorer says.
    """

    backbone: ModelBackbone
    frame: ChatFrame
    arms: Sequence[Arm]
    most: int | None = None
    answer_tokens: int | None = None


def measure_context(setup: Setup, planned: PlannedContext) -> Iterator[Record]:
    """Measures one context: a record for each of its items; of what cannot be measured, with the reason."""
    readers, records = list[tuple[Item, AnswerReader]](), dict[str, Record]()
    context = None
    for item in planned.items:
        try:
            context = context or MeasuredContext(setup.backbone, setup.frame, planned.pieces, setup.most)
            reader = AnswerReader(context, item, setup)
        except (KVPatchError, OSError) as error:
            records[item.id] = {"item": item.id, "where": item.where, "refused": " ".join(str(error).split())}
            continue
        readers.append((item, reader))
        described = {"item": item.id, "cluster": item.cluster, "kind": item.kind, "question": item.question}
        answers = list(reader.item.answers)
        records[item.id] = {**described, "answers": answers, "tokens": context.tokens, "arms": {}, "costs": {}}

    # One arm at a time serves all questions, so that one cache is in memory.
    for arm in setup.arms:
        served = None
        for item, reader in readers:
            record = records[item.id]
            try:
                if served is None or arm.by_question:
                    served = serve(reader.context, arm, reader.question)
                record["arms"][arm.name] = reader.read(served[0])
                record["costs"][arm.name] = {name: rounded(share) for name, share in served[1].items()}
            except KVPatchError as error:
                record["arms"][arm.name] = {"failed": str(error)}
    yield from records.values()


def serve(context: MeasuredContext, arm: Arm, question: Tokens) -> tuple[KV | None, dict[str, float]]:
    """Serves a context in an arm: its cache (None: re-prefill's), and its costs as shares of all pieces'.

    Raises:
      KVPatchError: as the method.
    """
    if arm.name == REFERENCE:
        return None, {"serving_flops": 1.0}
    backbone = context.backbone
    if arm.method not in STORED:
        splice = context.splice()
        if arm.by_question:
            length = question.embeddings.shape[1]
            skipped = length % QUESTION_STEP if length > QUESTION_STEP else 0
            splice = splice.replace(question=question.take(skipped, length))
        repaired = arm.repair(backbone, splice)
        return cut(repaired.cache, slice(context.tokens)), cost_shares(repaired, backbone, splice)

    served, costs = dict[int, KV](), collections.Counter[str]()
    for place in context.places:
        size, splice = context.line.pieces[place].size, context.piece_splice(place)
        # With nothing in front of it a piece is exact, and needs no stored form.
        fitting = _fitting(arm, backbone, splice.slots.shape[1]) if place else Arm(BLIND, BLIND)
        repaired = fitting.repair(backbone, splice)
        served[place] = cut(repaired.cache, slice(size))
        for name, share in cost_shares(repaired, backbone, splice).items():
            costs[name] += share * size / (context.tokens - context.first)  # pyright: ignore[reportArgumentType]
    return context.line.with_served(context.blind, served), dict(costs)


def _fitting(arm: Arm, backbone: ModelBackbone, tokens: int) -> Arm:
    """Lowers a rank to the highest that a short piece has."""
    highest = max(min(tokens, channel.features) for channel in backbone.layout.channels)
    if arm.settings.get("rank", 0) <= highest:
        return arm
    return dataclasses.replace(arm, settings={**arm.settings, "rank": highest})


class AnswerReader:
    """Asks one question over caches of one context.

    Attributes:
      item: with re-prefill's answer as the right one where the data has none.
      answer: ids of re-prefill's greedy answer, a stop token at its end included.
      question: its tokens, at their place behind the context.
    """

    def __init__(self, context: MeasuredContext, item: Item, setup: Setup):
        """Reads re-prefill's answer.

        Raises:
          InputError: context, question and answer are longer than the model serves.
        """
        self.context, self.steps = context, setup.answer_tokens or SCORERS[item.scorer].tokens
        ids = ids_of(context.backbone, context.frame.before, item.question, context.frame.behind)
        total = context.tokens + len(ids) + self.steps
        if setup.most is not None and total > setup.most:
            raise InputError(f"item: got {total} tokens with question and answer; expected at most {setup.most}")
        self.question, self.length = self._placed(ids), len(ids)
        self.answer = self._generated(context.reference)
        self.item = item if item.answers else item._replace(answers=(self._text(self.answer),), scorer="exact_match")
        self._forced = self._placed([*ids, *self.answer[:-1]])
        self._reference = self._logits(context.reference)

    def read(self, cache: KV | None) -> Record:
        """Asks the question over an arm's cache; None: re-prefill's.

        Returns:
          text: the answer. score. agrees: whether it is re-prefill's, token by token. kl: KL(re-prefill ‖ arm) in nats,
          the mean over the tokens of re-prefill's answer, each with those before it as input.
        """
        ids, count = self.answer, len(self.answer)
        divergence = np.zeros(count)
        if cache is not None:
            divergence, best = (np.asarray(value)[:count] for value in _compared(self._reference, self._logits(cache)))
            # Where every token of re-prefill's answer is the best one here too, greedy decoding writes the same.
            ids = self.answer if best.tolist() == list(self.answer) else self._generated(cache)
        text = self._text(ids)
        score = float(SCORERS[self.item.scorer].score(text, self.item))
        return {"text": text, "score": score, "agrees": ids == self.answer, "kl": rounded(float(divergence.mean()))}

    def _placed(self, ids: Sequence[int]) -> Tokens:
        prompt = {"input_ids": np.asarray([ids], np.int32)}
        return embedded(self.context.backbone, prompt).shift(np.int32(self.context.line.end))

    def _padded(self, tokens: Tokens) -> Tokens:
        return tokens.pad(Buckets().round_up(tokens.embeddings.shape[1]))

    def _generated(self, cache: KV) -> tuple[int, ...]:
        """Decodes greedily up to a stop token."""
        backbone, kv = self.context.backbone, jax.tree.map(jnp.asarray, cache)
        ids = backbone.generate(self._padded(self.question), self.steps, kv, lengths=[self.length])[0].tolist()
        stop = next((place for place, token in enumerate(ids) if token in backbone.stop_tokens), len(ids) - 1)
        return tuple(ids[: stop + 1])

    def _logits(self, cache: KV) -> Float[Array, "n V"]:
        """Reads the logits of re-prefill's answer; as many as an answer may have, the last repeated."""
        places = self.length - 1 + np.minimum(np.arange(self.steps), len(self.answer) - 1)
        rows: Int[np.ndarray, "1 n"] = places[None].astype(np.int32)
        return self.context.backbone.prefill(
            self._padded(self._forced), jax.tree.map(jnp.asarray, cache), logits=rows
        ).logits[0]

    def _text(self, ids: Sequence[int]) -> str:
        stops = self.context.backbone.stop_tokens
        return self.context.backbone.text([token for token in ids if token not in stops]).strip()


@jax.jit
def _compared(reference: Float[Array, "n V"], logits: Float[Array, "n V"]) -> tuple[Array, Array]:
    """Computes KL(reference ‖ this) in nats and the best token of each place."""
    expected, other = jax.nn.log_softmax(reference), jax.nn.log_softmax(logits)
    divergence = (jnp.exp(expected) * (expected - other)).sum(-1)
    return jnp.maximum(divergence, 0.0), logits.argmax(-1).astype(jnp.int32)
