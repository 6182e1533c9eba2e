"""HotpotQA and MuSiQue: questions over several paragraphs of text.

HotpotQA (Yang et al. 2018; hotpotqa/hotpot's README): a JSON list with _id, question, answer, supporting_facts, context
([title, [sentence, …]] each), type, level. The hub's Parquet has id, and context{title, sentences} as two lists.
MuSiQue (Trivedi et al. 2022; StonyBrookNLP/musique, evaluate_v1.0.py): JSON Lines with id, question, answer,
answer_aliases, answerable, paragraphs [{idx, title, paragraph_text, is_supporting}], question_decomposition.
"""

from typing import Any

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

from ..data_files import DataFolder
from ..items import Item, Piece
from ..records import Record, text_of
from .reader import Reader, each, has, instructed

_INSTRUCTION = "Answer the question using a single word or phrase."


def _hotpot(record: Record, files: DataFolder) -> Item:
    context = record["context"]
    if isinstance(context, dict) and isinstance(context.get("title"), list):
        titles, sentences = context["title"], context.get("sentences")
        if not isinstance(sentences, list) or len(sentences) != len(titles):
            raise InputError(
                f"context.sentences: got {sentences!r:.80}; expected a list for each of {len(titles)} titles"
            )
        context = list(zip(titles, sentences, strict=True))
    if not isinstance(context, list) or not context:
        raise InputError(f"context: got {context!r:.80}; expected a list of [title, sentences]")

    pieces = []
    for number, paragraph in enumerate(context):
        name = f"context[{number}]"
        if not isinstance(paragraph, list | tuple) or len(paragraph) != 2 or not isinstance(paragraph[1], list):
            raise InputError(f"{name}: got {paragraph!r:.80}; expected [title, sentences]")
        if not all(isinstance(sentence, str) for sentence in paragraph[1]):
            raise InputError(f"{name}: got sentences {paragraph[1]!r:.80}; expected texts")
        title = text_of(paragraph[0], f"{name}[0]")
        pieces.append(_paragraph(title, "".join(paragraph[1]), number))

    answer = record.text("answer")
    kind = record.get("type")
    return _item(record, files, "_id" if "_id" in record.values else "id", pieces, (answer,), kind, "hotpotqa_em")


def _musique(record: Record, files: DataFolder) -> Item:
    pieces = []
    for number, paragraph in enumerate(record.list_of("paragraphs")):
        if not isinstance(paragraph, dict):
            raise InputError(f"paragraphs[{number}]: got {paragraph!r:.80}; expected an object")
        title = text_of(paragraph.get("title"), f"paragraphs[{number}].title")
        text = text_of(paragraph.get("paragraph_text"), f"paragraphs[{number}].paragraph_text")
        pieces.append(_paragraph(title, text, number))

    # MuSiQue-Full has the same questions without the paragraph that answers them; their score is of pairs.
    if record.get("answerable") is False:
        raise InputError("answerable: got false; expected questions of MuSiQue-Ans, whose paragraphs answer them")
    aliases = record.texts("answer_aliases") if record.get("answer_aliases") else ()
    identity = record.name("id")
    hops = identity[:4] if identity[:1].isdigit() and identity[1:4] == "hop" else ""
    return _item(record, files, "id", pieces, (record.text("answer"), *aliases), hops, "squad_em")


def _paragraph(title: str, text: str, number: int) -> Piece:
    return Piece(Text(f"{title}\n{text.strip()}\n\n"), f"paragraph {number + 1}")


def _item(
    record: Record,
    files: DataFolder,
    id_field: str,
    pieces: list[Piece],
    answers: tuple[str, ...],
    kind: Any,
    rule: str,
) -> Item:
    return Item(
        id=record.name(id_field),
        cluster=record.name(id_field),
        pieces=tuple(pieces),
        question=instructed(record.text("question"), _INSTRUCTION, files),
        answers=answers,
        kind=kind if isinstance(kind, str) else "",
        rule=rule,
        where=record.where,
    )


HOTPOTQA = Reader(
    name="hotpotqa",
    fits=has("question", "answer", "context", "supporting_facts"),
    read=each(_hotpot),
    chunk_rule="A paragraph with its title is a piece.",
)
MUSIQUE = Reader(
    name="musique",
    fits=has("id", "question", "answer", "paragraphs"),
    read=each(_musique),
    chunk_rule="A paragraph with its title is a piece.",
)
