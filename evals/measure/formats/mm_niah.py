"""MM-NIAH: needles in long documents of texts and images (Wang et al. 2024, arXiv 2406.07230; OpenGVLab/MM-NIAH).

Six JSON Lines files, `{retrieval,counting,reasoning}-{text,image}.jsonl` in `annotations/`, images in `images/`. Fields
by the repository's README: id, images_list, context and question (images as `<image>`), answer (str, int or list),
meta{placed_depth, context_length, context_length_text, context_length_image, num_images, needles, choices,
choices_image_path}. The prompt is that of its `get_input`: options by letters and one line of instruction.
"""

import json
from typing import Any

from kvpatch_jax.errors import InputError

from ..data_files import DataFolder
from ..items import Item, Piece
from ..records import Record, text_of
from .reader import Reader, each, has, instructed, letter_of, text_pieces

_IMAGE = "<image>"
_CHOICE = "Answer with the option's letter from the given choices directly."
_SHORT = "Answer the question using a single word or phrase."


def _item(record: Record, files: DataFolder) -> Item:
    context, question, meta = record["context"], record.text("question"), record.mapping("meta")
    if not isinstance(context, str):
        raise InputError(f"context: got {context!r:.80}; expected a text")
    images = record.list_of("images_list")
    marks = context.count(_IMAGE) + question.count(_IMAGE)
    if marks != len(images):
        raise InputError(f"images_list: got {len(images)} images; expected {marks}, as <image> is written")

    pieces: list[Piece] = []
    parts = context.split(_IMAGE)
    for number, part in enumerate(parts):
        pieces += text_pieces(part, f"text {number + 1}", files)
        if number + 1 < len(parts):
            name = f"images_list[{number}]"
            pieces.append(Piece(files.image(images[number], name), f"image {number + 1}"))

    # Images of the question and of the options stand in front of it, in order, since a question is a text.
    shown = images[len(parts) - 1 :]
    for number, image in enumerate(shown, len(parts)):
        pieces.append(Piece(files.image(image, f"images_list[{number - 1}]"), f"image {number}"))
    for number in range(len(shown)):
        question = question.replace(_IMAGE, f"(image {len(parts) + number})", 1)

    options, pictures = meta.get("choices"), meta.get("choices_image_path")
    written: tuple[str, ...] = ()
    if options and pictures:
        raise InputError("meta.choices: got options as texts and as images; expected one of them")
    if options:
        written = meta.texts("choices")
    elif pictures:
        for number, picture in enumerate(meta.list_of("choices_image_path")):
            path = files.image(picture, f"meta.choices_image_path[{number}]")
            pieces.append(Piece(path, f"option {letter_of(number)}"))
        written = tuple(f"(image of option {letter_of(number)})" for number in range(len(pictures)))
    lines = [question, *(f"{letter_of(number)}. {option}" for number, option in enumerate(written))]

    stem = record.where.rsplit(":", 1)[0].rsplit("/", 1)[-1].removesuffix(".jsonl")
    answer, answer_format = _answer(record["answer"], len(written), stem.startswith("counting"))
    return Item(
        id=f"{stem}/{record.name('id')}",
        cluster=f"{stem}/{record.name('id')}",
        pieces=tuple(pieces),
        question=instructed("\n".join(lines), _CHOICE if written else _SHORT, files),
        answers=(answer,),
        kind=stem,
        rule="mm_niah",
        options=written,
        answer_format=answer_format,
        where=record.where,
    )


def _answer(answer: Any, options: int, counting: bool) -> tuple[str, str]:
    """Returns the answer as text and which of MM-NIAH's three rules scores it."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < options:
            raise InputError(f"answer: got option {answer}; expected one of {options} options, counted from 0")
        return letter_of(answer), "choice"
    if counting and isinstance(answer, str):
        # As the published script does: lists of counts may be written as texts.
        try:
            answer = json.loads(answer)
        except ValueError as error:
            raise InputError(f"answer: got {answer!r:.80} ({error}); expected a list of counts") from error
    if isinstance(answer, list):
        if not answer or not all(isinstance(count, int | float) for count in answer):
            raise InputError(f"answer: got {answer!r:.80}; expected a list of counts")
        return json.dumps(answer), "list"
    return text_of(answer, "answer"), "text"


READER = Reader(
    name="mm_niah",
    fits=has("id", "images_list", "context", "question", "answer", "meta"),
    read=each(_item),
    chunk_rule="Every image is a piece; the text between two images is divided at paragraphs, lines and sentences.",
)
