"""Questions about pages: MMLongBench-Doc, SlideVQA, MP-DocVQA and DocVQA, each with all pages that the record has.

- MMLongBench-Doc (Ma et al. 2024; mayubo2333/MMLongBench-Doc): data/samples.json, a list with doc_id (a PDF in
  documents/), doc_type, question, answer, evidence_pages and evidence_sources (lists as text), answer_format. lmms-eval
  shows only the evidence pages; here all are shown.
- SlideVQA (Tanaka et al. 2023; nttmdlab-nlp/SlideVQA): JSON Lines with deck_name, deck_url, image_urls, qa_id,
  question, answer, arithmetic_expression, evidence_pages, reasoning_type, answer_type, slides in
  images/<split>/<deck_name>/; the hub's Parquet has page_1 … page_20 in place of image_urls.
- MP-DocVQA (Tito et al. 2023): {"data": […]} with questionId, question, doc_id, page_ids, answers, answer_page_idx,
  data_split, pages images/<page id>.jpg; the hub's Parquet (lmms-lab/MP-DocVQA) has image_1 … image_20, and page_ids
  and answers as Python writes lists.
- DocVQA (Mathew et al. 2021): {"data": […]} with questionId, question, question_types, image, docId,
  ucsf_document_id, ucsf_document_page_no, answers, data_split; the hub's Parquet has image as bytes.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kvpatch_jax.errors import ImageError, InputError

from ..data_files import DataFolder
from ..items import Item, Piece, Refusal
from ..pages import DocumentPages
from ..records import Record
from .reader import Reader, each, has, instructed

_SHORT = "Answer the question using a single word or phrase."
_FORMATS = ("Str", "Int", "Float", "List", "None")


def _mmlongbench(records: Iterable[Record], files: DataFolder) -> Iterator[Item | Refusal]:
    documents = DocumentPages(files, "doc_id")
    for number, record in enumerate(records):
        try:
            # Questions have no ids: a place in the file is one.
            yield _mmlongbench_item(record, documents, number)
        except (InputError, ImageError) as error:
            yield Refusal(record.where, str(error))


def _mmlongbench_item(record: Record, documents: DocumentPages, number: int) -> Item:
    answer_format = record.text("answer_format")
    if answer_format not in _FORMATS:
        raise InputError(f"answer_format: got {answer_format!r:.40}; expected Str, Int, Float, List or None")
    answer = record["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | list):
        raise InputError(f"answer: got {answer!r:.80}; expected a text or a number")
    if answer_format == "Int":
        try:
            int(str(answer))
        except ValueError as error:
            raise InputError(f"answer: got {answer!r:.80}; expected an integer, as answer_format says") from error
    pages = documents.pages(record.text("doc_id"))
    _listed(record["evidence_pages"], "evidence_pages")

    kind = record.get("doc_type")
    return Item(
        id=f"{record.text('doc_id')}#{number}",
        cluster=record.text("doc_id"),
        pieces=pages,
        question=instructed(record.text("question"), 'Give a short answer, or "Not answerable".', documents.files),
        answers=(answer if isinstance(answer, str) else repr(answer),),
        kind=kind if isinstance(kind, str) else "",
        rule="mmlongbench_doc",
        answer_format=answer_format,
        where=record.where,
    )


def _slidevqa(records: Iterable[Record], files: DataFolder) -> Iterator[Item | Refusal]:
    decks = DocumentPages(files, "deck_name")
    for record in records:
        try:
            columns = _numbered(record, "page")
            pages = _column_pages(record, columns, files) if columns else decks.pages(record.text("deck_name"))
            kind = record.get("reasoning_type")
            yield Item(
                id=record.name("qa_id"),
                cluster=record.text("deck_name"),
                pieces=pages,
                question=instructed(record.text("question"), _SHORT, files),
                answers=(record.name("answer"),),
                kind=kind if isinstance(kind, str) else "",
                rule="slidevqa_em",
                where=record.where,
            )
        except (InputError, ImageError) as error:
            yield Refusal(record.where, str(error))


def _mp_docvqa(record: Record, files: DataFolder) -> Item:
    identities = _listed(record["page_ids"], "page_ids")
    columns = _numbered(record, "image")
    if columns:
        pages = _column_pages(record, columns, files)
    else:
        paths = [_page_file(page, f"page_ids[{number}]", files) for number, page in enumerate(identities)]
        pages = tuple(Piece(path, f"page {number}") for number, path in enumerate(paths, 1))
    if len(pages) != len(identities):
        raise InputError(f"page_ids: got {len(identities)} ids beside {len(pages)} pages; expected as many")
    return Item(
        id=record.name("questionId"),
        cluster=record.name("doc_id"),
        pieces=pages,
        question=instructed(record.text("question"), _SHORT, files),
        answers=_answers(record),
        kind="",
        rule="anls",
        where=record.where,
    )


def _page_file(page: Any, field: str, files: DataFolder) -> Any:
    if not isinstance(page, str):
        raise InputError(f"{field}: got {page!r:.80}; expected a page's id")
    try:
        return files.image(f"{page}.jpg", field)
    except InputError:
        return files.image(f"{page}.png", field)


def _docvqa(record: Record, files: DataFolder) -> Item:
    kinds = record.get("question_types")
    return Item(
        id=record.name("questionId"),
        cluster=record.name("docId"),
        pieces=(Piece(files.image_of(record, "image"), "page 1"),),
        question=instructed(record.text("question"), _SHORT, files),
        answers=_answers(record),
        kind=kinds[0] if isinstance(kinds, list) and kinds and isinstance(kinds[0], str) else "",
        rule="anls",
        where=record.where,
    )


def _answers(record: Record) -> tuple[str, ...]:
    answers = _listed(record["answers"], "answers")
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise InputError(f"answers: got {answers!r:.80}; expected texts, at least one (test splits have none)")
    return tuple(answers)


def _listed(value: Any, field: str) -> list[Any]:
    """Returns a list, also one written as text."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise InputError(f"{field}: got {value!r:.80}; expected a list") from error
    if not isinstance(value, list):
        raise InputError(f"{field}: got {value!r:.80}; expected a list")
    return value


def _numbered(record: Record, stem: str) -> list[str]:
    """Lists the columns `stem`_1, `stem`_2, … of a record, in order."""
    numbers = [re.fullmatch(rf"{stem}_(\d+)", field) for field in record.values]
    found = sorted(int(match[1]) for match in numbers if match is not None)
    return [f"{stem}_{number}" for number in found]


def _column_pages(record: Record, columns: list[str], files: DataFolder) -> tuple[Piece, ...]:
    return tuple(Piece(files.image_of(record, column), f"page {number}") for number, column in enumerate(columns, 1))


_PAGES = "A page is a piece."
MMLONGBENCH_DOC = Reader(
    name="mmlongbench_doc",
    fits=has("doc_id", "question", "answer", "evidence_pages", "answer_format"),
    read=_mmlongbench,
    chunk_rule=_PAGES,
    beside=("documents", "images"),
)
SLIDEVQA = Reader(
    name="slidevqa",
    fits=has("deck_name", "qa_id", "question", "answer", "evidence_pages"),
    read=_slidevqa,
    chunk_rule="A slide is a piece.",
    beside=("images", "images/test", "images/dev", "images/train"),
)
MP_DOCVQA = Reader(
    name="mp_docvqa",
    fits=has("questionId", "question", "page_ids", "answers", "doc_id"),
    read=each(_mp_docvqa),
    chunk_rule=_PAGES,
)
DOCVQA = Reader(
    name="docvqa",
    fits=has("questionId", "question", "image", "answers", "docId", lacks=("page_ids",)),
    read=each(_docvqa),
    chunk_rule="The page is the piece.",
)
