"""What a reader of a format is, and what all of them share."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from kvpatch_jax import Text
from kvpatch_jax.errors import ImageError, InputError

from ..data_files import DataFolder
from ..episodes import Episode
from ..items import Item, Piece, Refusal
from ..records import Record
from ..text_pieces import split_text

Read = Callable[[Iterable[Record], DataFolder], Iterator[Item | Episode | Refusal]]


@dataclasses.dataclass(frozen=True)
class Reader:
    """A format that data sets are released in.

    Attributes:
      name: what `read(format=…)` calls it.
      fits: whether a record has this format's fields. Formats exclude each other.
      read: yields items, or the episodes of trajectories, and refusals.
      chunk_rule: one sentence: what makes a piece of a context.
      beside: folders, in the data's folder or beside it, where the release has its images or videos.
      episodes: whether `read` yields episodes.
    """

    name: str
    fits: Callable[[Record], bool]
    read: Read
    chunk_rule: str
    beside: tuple[str, ...] = ("images",)
    episodes: bool = False


def each(make: Callable[[Record, DataFolder], Item | Episode]) -> Read:
    """Returns the `read` of a format in which every record is an item, or an episode, of its own."""

    def read(records: Iterable[Record], files: DataFolder) -> Iterator[Item | Episode | Refusal]:
        for record in records:
            try:
                yield make(record, files)
            except (InputError, ImageError) as error:
                yield Refusal(record.where, str(error))

    return read


def has(*fields: str, lacks: tuple[str, ...] = ()) -> Callable[[Record], bool]:
    """Returns a test whether a record has all of some fields and none of others."""
    return lambda record: (
        all(field in record.values for field in fields) and not any(field in record.values for field in lacks)
    )


def text_pieces(text: str, label: str, files: DataFolder) -> list[Piece]:
    """Divides a text into pieces of at most the length that the options say."""
    parts = split_text(text, files.options.text_characters)
    return [
        Piece(Text(part), label if len(parts) == 1 else f"{label}, part {number}")
        for number, part in enumerate(parts, 1)
    ]


def with_options(question: str, options: tuple[str, ...]) -> str:
    """Writes a question with its options by letters."""
    return "\n".join([question, *(f"{letter_of(number)}. {option}" for number, option in enumerate(options))])


def instructed(question: str, instruction: str, files: DataFolder) -> str:
    """Returns a question with the instruction behind it that its evaluation writes, unless the options leave it out."""
    return f"{question}\n{instruction}" if files.options.instruct else question


def letter_of(number: int) -> str:
    """Returns the letter of an option, from 0 for A.

    Raises:
      InputError: there is no such letter.
    """
    if not 0 <= number < 26:
        raise InputError(f"answer: got option {number}; expected one of 0 to 25")
    return chr(ord("A") + number)
