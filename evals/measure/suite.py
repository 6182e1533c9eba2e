"""A measurement as a data set of parts: each context with its questions, kept in a file of JSON lines when it is done.

What cannot be measured (an image that is broken, a context that is too long) is a record with its reason, and one line
on the terminal; the rest goes on.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpatch_jax.errors import InputError, KVPatchError
from models import ModelBackbone

from ..datasets import RecordedDataset
from ..harness.parts import PlannedPart
from . import scoring
from .answers import AnswerReader, ArmAnswer
from .arms import MeasureArm, context_shares
from .contexts import MeasuredContext
from .frame import PromptFrame
from .items import Item, ItemSet
from .plan import PlannedContext, WorkEstimate
from .rows import rows_of

Record = dict[str, Any]
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")
DIGITS = 6
"""Significant digits of numbers in the file of parts."""


@dataclasses.dataclass(frozen=True)
class MeasureSetup:
    """What every part is measured with.

    Attributes:
      backbone, frame: what is asked, and how.
      arms: that serve.
      most: tokens of a whole prompt at most; None: any number.
      answer_tokens: of an answer at most, or "rule": what the item's rule says, or "answer": as many as the longest
        right answer has, for models that know no end of an answer.
    """

    backbone: ModelBackbone
    frame: PromptFrame
    arms: Sequence[MeasureArm]
    most: int | None
    answer_tokens: int | str = "rule"

    def steps(self, item: Item) -> int:
        """Returns the tokens of an item's answer at most."""
        if isinstance(self.answer_tokens, int):
            return self.answer_tokens
        if self.answer_tokens == "answer":
            return max(len(self.backbone.ids(answer)) for answer in item.answers)
        return scoring.RULES[item.rule].tokens


def dataset(
    measurement: MeasureSetup,
    data: ItemSet,
    contexts: Sequence[PlannedContext],
    estimated: WorkEstimate,
    settings: Mapping[str, Any],
) -> RecordedDataset:
    """Describes the parts of a measurement and all that they depend on.

    Args:
      contexts: all parts. estimated: what each takes.
      settings: what else the parts depend on, "model" among it.
    """
    planned = []
    for context, tokens in zip(contexts, estimated.tokens, strict=True):
        measure = functools.partial(_measure, measurement, context)
        planned.append(PlannedPart(context.name, measure, tokens))
    config = {
        **settings,
        "fingerprint": measurement.backbone.fingerprint,
        "data": data.source.name,
        "format": data.format,
        "digest": data.digest,
        "chunks": data.chunk_rule,
        "arms": [arm.name for arm in measurement.arms],
        "frame": measurement.frame.name,
        "answer_tokens": measurement.answer_tokens,
        "max_tokens": measurement.most,
        "parts": len(contexts),
    }
    return RecordedDataset(config, planned, functools.partial(rows_of, model=settings["model"]), PACKAGES)


def _measure(measurement: MeasureSetup, context: PlannedContext, _: Any) -> Iterator[Record]:
    return records_of(measurement, context)


def records_of(measurement: MeasureSetup, planned: PlannedContext) -> Iterator[Record]:
    """Measures one context: a record for each of its items."""
    try:
        context = MeasuredContext(measurement.backbone, measurement.frame, planned.pieces, measurement.most)
    except (KVPatchError, OSError) as error:
        for item in planned.items:
            yield _refused(item, error)
        return

    # One arm at a time serves all questions, so that one cache is in memory.
    readers, records = list[tuple[Item, AnswerReader]](), dict[str, Record]()
    for item in planned.items:
        try:
            readers.append((item, _reader(measurement, context, item)))
            records[item.id] = _described(item, context, readers[-1][1])
        except KVPatchError as error:
            records[item.id] = _refused(item, error)

    for arm in measurement.arms:
        served = None
        for item, reader in readers:
            record = records[item.id]
            try:
                if served is None or arm.asks:
                    served = arm.serve(context, reader.tokens)
                answer = reader.read(served.cache)
            except KVPatchError as error:
                record["arms"][arm.name] = {"failed": f"{error}"}
                continue
            record["arms"][arm.name] = _scored(item, reader, answer)
            record["costs"][arm.name] = _rounded(context_shares(context, served.costs))

    yield from records.values()


def _reader(measurement: MeasureSetup, context: MeasuredContext, item: Item) -> AnswerReader:
    """Reads re-prefill's answer to an item.

    Raises:
      InputError: context, question and answer are longer than the model serves.
    """
    question = measurement.frame.question_ids(measurement.backbone, item.question)
    steps = measurement.steps(item)
    whole = context.tokens + len(question) + steps
    if measurement.most is not None and whole > measurement.most:
        raise InputError(
            f"item: got {whole} tokens with question and answer; expected at most {measurement.most}, which the model "
            "serves"
        )
    return AnswerReader(context, question, steps)


def _described(item: Item, context: MeasuredContext, reader: AnswerReader) -> Record:
    return {
        "item": item.id,
        "cluster": item.cluster,
        "kind": item.kind,
        "rule": item.rule,
        "where": item.where,
        "question": item.question,
        "answers": list(item.answers),
        "pieces": [[piece.label, piece.length] for piece in context.pieces],
        "tokens": context.tokens,
        "question_tokens": len(reader.question),
        "arms": {},
        "costs": {},
    }


def _scored(item: Item, reader: AnswerReader, answer: ArmAnswer) -> Record:
    said = reader.text(answer.ids)
    return {
        "said": said,
        "score": float(scoring.RULES[item.rule].score(said, item)),
        "agrees": answer.ids == reader.answer,
        "first_agrees": answer.first == reader.answer[0],
        **_rounded({"kl_first": answer.kl_first, "kl": answer.kl}),
    }


def _rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.{DIGITS}g}") for name, value in numbers.items()}


def _refused(item: Item, error: Exception) -> Record:
    where, reason = item.where or item.id, " ".join(str(error).split())
    print(f"left out: {where}: {reason}", flush=True)
    return {"item": item.id, "cluster": item.cluster, "kind": item.kind, "where": where, "refused": reason}
