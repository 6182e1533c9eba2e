"""Plain JSON Lines of one's own: images, texts, question, answer.

A record has `question`, `answer` (a text, a number, or a list of texts that count as right), and `images` (names of
files) or `texts`, or both: images come first. For another order, `pieces` in their place: [{"image": name} or
{"text": text}].
Also `id` (the line's number without it), `cluster`, `kind`, `options` (the answer is then a letter), `rule` (a key of
`scoring.RULES`; exact match without it, the letter with options) and `answer_format`.
"""

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

from ..data_files import DataFolder
from ..items import Item, Piece
from ..records import Record, text_of
from ..scoring import RULES
from .reader import Reader, each, instructed, letter_of, with_options

_KNOWN = frozenset(
    ["id", "cluster", "kind", "images", "texts", "pieces", "question", "answer", "options", "rule", "answer_format"]
)


def _fits(record: Record) -> bool:
    return {"question", "answer"} <= set(record.values) <= _KNOWN and bool(
        {"images", "texts", "pieces"} & set(record.values)
    )


def _item(record: Record, files: DataFolder) -> Item:
    unknown = sorted(set(record.values) - _KNOWN)
    if unknown:
        raise InputError(f"{unknown[0]}: got a field of this name; expected one of {', '.join(sorted(_KNOWN))}")
    pieces = _pieces(record, files)
    if not pieces:
        raise InputError("images: got no images and no texts; expected at least one")

    options = record.texts("options") if record.get("options") else ()
    answers = _answers(record)
    letters = tuple(letter_of(number) for number in range(len(options)))
    if options and not set(answers) <= set(letters):
        raise InputError(f"answer: got {answers!r:.80}; expected one of the letters {', '.join(letters)}")

    rule = record.text("rule") if record.get("rule") is not None else ("option_letter" if options else "exact_match")
    if rule not in RULES:
        raise InputError(f"rule: got {rule!r:.80}; expected one of {', '.join(sorted(RULES))}")
    question = record.text("question")
    if options:
        question = instructed(with_options(question, options), "Answer with the option's letter.", files)
    identity = record.name("id") if record.get("id") is not None else record.where
    return Item(
        id=identity,
        cluster=record.name("cluster") if record.get("cluster") is not None else identity,
        pieces=tuple(pieces),
        question=question,
        answers=answers,
        kind=record.text("kind") if record.get("kind") else "",
        rule=rule,
        options=options,
        answer_format=record.text("answer_format") if record.get("answer_format") else "",
        where=record.where,
    )


def _pieces(record: Record, files: DataFolder) -> list[Piece]:
    pieces = []
    for number, name in enumerate(record.list_of("images") if record.get("images") is not None else ()):
        pieces.append(Piece(files.image(name, f"images[{number}]"), f"image {number + 1}"))
    for number, text in enumerate(record.list_of("texts") if record.get("texts") is not None else ()):
        pieces.append(Piece(Text(text_of(text, f"texts[{number}]")), f"text {number + 1}"))
    if record.get("pieces") is None:
        return pieces

    if pieces:
        raise InputError("pieces: got pieces beside images or texts; expected one of them")
    for number, piece in enumerate(record.list_of("pieces")):
        field = f"pieces[{number}]"
        if not isinstance(piece, dict) or set(piece) not in ({"image"}, {"text"}):
            raise InputError(f"{field}: got {piece!r:.80}; expected an object with image or text")
        if "image" in piece:
            pieces.append(Piece(files.image(piece["image"], f"{field}.image"), f"image {number + 1}"))
        else:
            pieces.append(Piece(Text(text_of(piece["text"], f"{field}.text")), f"text {number + 1}"))
    return pieces


def _answers(record: Record) -> tuple[str, ...]:
    answer = record["answer"]
    if isinstance(answer, list):
        return record.texts("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return (str(answer),)
    return (record.text("answer"),)


READER = Reader(
    name="jsonl",
    fits=_fits,
    read=each(_item),
    chunk_rule="Every image and every text of a record is a piece, images first.",
)
