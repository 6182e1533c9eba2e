"""Pages of text as images before a pretrained decoder: a page behind a page, in every way of reuse.

The machinery is that of `evals.pretrained`: what is reused is a page's KV. Every page is also read as tokens, the
decoder's own embeddings of the same pieces, which says what the tower loses.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvpatch_jax.backbone import Tokens

from ..pretrained import behaviour
from ..pretrained.passages import Passages, placed, scores
from ..pretrained.plan import DOMAINS, FULL, QUICK, TASKS, Part, SuitePlan
from ..pretrained.rows import rows_of
from ..pretrained.text import agreement, continued, everything
from ..pretrained.texts import Document
from ..results import intervals
from ..results.rows import Row, measured_row
from . import fonts
from .pages import Style
from .tower import Reader

Record = dict[str, Any]
PLAN = dataclasses.replace(FULL, documents=3, wide=0, long=(), windows=0, slides=0, greedy=16, items=16)
LOOK = dataclasses.replace(QUICK, items=2)
PAGE_FACES = ("DejaVuSansMono", "STIXGeneral", "DejaVuSans", "DejaVuSerif")
"""Unseen faces that come with matplotlib; pages take turns."""
TASKS_READ = TASKS[:3]


def parts(plan: SuitePlan) -> list[Part]:
    """Lists what is measured: documents, then batches of questions, kinds interleaved."""
    found = [
        Part("text", domain, number, (number + 0.5) / plan.documents, 0)
        for number in range(plan.documents)
        for domain in DOMAINS
    ]
    batches = -(-plan.items // plan.batch)
    found += [
        Part("behaviour", task, number, (number + 0.5) / batches, 0) for number in range(batches) for task in TASKS_READ
    ]
    return sorted(found, key=lambda part: (part.share, part.kind != "text", part.of))


def styles(first: int, count: int) -> list[Style]:
    """Black on white, in unseen faces by turns."""
    faces = {path.stem: path for files in fonts.find(fonts.UNSEEN, every=False).values() for path in files}
    return [Style(str(faces[PAGE_FACES[(first + place) % len(PAGE_FACES)]])) for place in range(count)]


def records_of(
    reader: Reader, plan: SuitePlan, documents: Mapping[str, Sequence[Document]], part: Part
) -> Iterator[Record]:
    """Measures one part."""
    if part.kind == "text":
        own = documents[part.of]
        yield from compared(reader, plan, own[part.number], own[(part.number + 1) % len(own)], part.number)
    else:
        every = [document for own in documents.values() for document in own]
        yield from asked(reader, plan, part.of, part.number, every)


def compared(reader: Reader, plan: SuitePlan, document: Document, other: Document, number: int) -> Iterator[Record]:
    """A document's pages: every second one behind the page before it, the others behind another document's."""
    size, count = plan.chunk, plan.passages
    ids = document.ids[: count * size].reshape(count, size)
    behind = np.stack([document.ids[(place + 1) * size : (place + 1) * size + plan.scored] for place in range(count)])
    every = np.concatenate([ids, other.ids[None, :size]])
    in_front = np.array([count if place % 2 == 0 else place - 1 for place in range(count)])
    pages = reader.pages(every, styles(number, count + 1))
    image, tokens = (_behind_each_other(reader, read, in_front, every, behind) for read in (pages, reader.texts(every)))

    names = [{"passage": place, "antecedent": "far" if place % 2 == 0 else "near"} for place in range(count)]
    about = lambda row: {"document": document.name, "domain": document.domain, "length": size, **names[row]}
    for row, record in everything(image, False, plan.greedy):
        yield {**about(row), **record}

    read = {
        "image": image.logits,
        "image, blind": image.read(image.serve()),
        "tokens, blind": tokens.read(tokens.serve()),
    }
    for arm, logits in read.items():
        for row, numbers in enumerate(scores(tokens.logits, logits, tokens.ids)):
            yield {**about(row), "as": arm, **numbers}
    for row, numbers in enumerate(tokens.scored(tokens.logits)):
        yield {**about(row), "as": "tokens", **numbers}
    said = continued(tokens, tokens.cache(tokens.turned(tokens.conditioned, tokens.start)), plan.greedy)
    whole = image.cache(image.turned(image.conditioned, image.start))
    for row, record in agreement(image, "image", whole, said):
        agreed = {name: value for name, value in record.items() if name != "arm"}
        yield {**about(row), "as": "image", **agreed}


def _behind_each_other(
    reader: Reader,
    read: Tokens,
    in_front: Int[np.ndarray, " B"],
    ids: Int[np.ndarray, "S T"],
    behind: Int[np.ndarray, "B n"],
) -> Passages:
    """The first pages, each behind the one that `in_front` says, and the text that is read behind them."""
    model, count = reader.model, len(behind)
    alone = model.prefill(placed(read, 0)).kv
    front = {name: value[:, in_front] for name, value in alone.items()}
    canonical = {name: value[:, :count] for name, value in alone.items()}
    own = read._replace(embeddings=read.embeddings[:count], positions=read.positions[:count])
    text = joined_tokens(own, model.embed(behind))
    return Passages(model, front, canonical, reader.with_end(ids[:count]), behind, text)


def joined_tokens(first: Tokens, second: Tokens) -> Tokens:
    """Tokens behind tokens; their positions are placed later."""
    embeddings = jnp.concatenate([first.embeddings, second.embeddings], axis=1)
    return placed(Tokens(embeddings, np.zeros(embeddings.shape[:2], np.int32), None), 0)


def asked(reader: Reader, plan: SuitePlan, task: str, number: int, documents: Sequence[Document]) -> Iterator[Record]:
    """Questions over two pages of which the second is reused, as images in every way, and as tokens."""
    drawn: Any = behaviour.items(reader, plan, task, number, list(documents))
    stack = lambda name: np.stack([getattr(item, name) for item in drawn])
    both = np.concatenate([stack("chunk"), stack("front")])
    in_front = len(drawn) + np.arange(len(drawn))
    for kind, read in (("image", reader.pages(both, styles(number, len(both)))), ("tokens", reader.texts(both))):
        of = _behind_each_other(reader, read, in_front, both, stack("behind"))
        for record in behaviour.answered(of, drawn, number * plan.batch):
            if kind == "image" or record["arm"] == "re-prefill":
                yield {**record, "arm": record["arm"] if kind == "image" else "as tokens"}


def rows(kept: Sequence[Mapping[str, Any]], model: str) -> list[Row]:
    """Rows of the arms as `evals.pretrained` makes them, and of images against tokens."""
    split = [{**part, "records": [record for record in part["records"] if "as" not in record]} for part in kept]
    made = rows_of(split, model)
    compared = [record for part in kept for record in part["records"] if "as" in record]
    for arm in dict.fromkeys(record["as"] for record in compared):
        for metric in ("kl", "flips", "loss", "greedy_tokens", "greedy_all"):
            own = [record for record in compared if record["as"] == arm and metric in record]
            if own:
                cluster = np.array([record["document"] for record in own])
                interval = intervals.mean(np.array([record[metric] for record in own]), cluster)
                made.append(measured_row("as tokens", model, arm, metric, interval))
    return made
