"""What arms answered to a batch of questions, as records that a file of parts can hold, and the items made of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .results_table import ProbeItems

if TYPE_CHECKING:
    from ..datasets import AskedQuestions, ScoredAnswers

Record = dict[str, Any]
DIGITS = 4
"""Significant digits of an answer's KL in a record."""


def answer_records(
    head: Record,
    asked: "AskedQuestions",
    clusters: np.ndarray,
    answers: "Mapping[str, ScoredAnswers]",
    reference: str,
) -> Iterator[Record]:
    """Yields a record per arm, the reference first, which also says what was asked.

    Args:
      head: what each record begins with.
      asked: the questions, [B, Q]; their right answer is 1.
      clusters: each context's number, [B].
      answers: by arm, the reference among them.
    """
    keep = asked.valid
    of_question = {"kind": asked.kind[keep], "cluster": np.broadcast_to(clusters[:, None], keep.shape)[keep]}
    for arm in (reference, *(name for name in answers if name != reference)):
        kl = answers[arm].divergence_from(answers[reference])[keep]
        record = {**head, "arm": arm}
        if arm == reference:
            record |= {name: values.tolist() for name, values in of_question.items()}
        record["predicted"] = answers[arm].predicted[keep].tolist()
        yield {**record, "kl": [float(f"{value:.{DIGITS}g}") for value in kl]}


def items_from(
    records: Sequence[Mapping[str, Any]], label: str, reference: str, blind: str, kinds: Sequence[str]
) -> ProbeItems:
    """Collects the records of all batches of one probe.

    Args:
      label: the probe's name in rows.
      kinds: names of the kinds of question, by number.
    """
    items = ProbeItems(label, reference, blind)
    items.kinds = tuple(kinds)
    for record in records:
        if record["arm"] == reference:
            items.asked["kind"].append(np.asarray(record["kind"], int))
            items.asked["cluster"].append(np.asarray(record["cluster"], int))
            items.asked["answer"].append(np.ones(len(record["kind"]), int))
        items.predicted.setdefault(record["arm"], []).append(np.asarray(record["predicted"], int))
        items.divergence.setdefault(record["arm"], []).append(np.asarray(record["kl"], float))
    return items
