"""What stands around a prompt's pieces and its question: the model's chat template, or nothing.

A prompt is the frame's front, the pieces of the context in order, and the question between the frame's texts. "chat" is
what the checkpoint's template makes of one message of a user; "plain" puts the question right behind the pieces, as a
model without a template (or one whose vocabulary is a task's own words) is asked.
"""

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from kvpatch_jax import Text, Video
from kvpatch_jax.errors import ConfigError, InputError, KVPatchError
from models import ModelBackbone

from .items import Item, ItemSet, Piece, Refusal, StoredImage

FRAMES = ("chat", "plain")


class PromptFrame(NamedTuple):
    """What stands around pieces and question.

    Attributes:
      name: one of `FRAMES`.
      front: token ids in front of the first piece; none: the first piece stands at position 0, where it is exact.
      before, behind: texts in front of the question and behind it.
      between: token ids behind an image that another piece follows; they belong to the image's piece.
    """

    name: str
    front: tuple[int, ...]
    before: str
    behind: str
    between: tuple[int, ...] = ()

    def question_ids(self, backbone: ModelBackbone, question: str) -> Int[np.ndarray, " n"]:
        """Returns the question's token ids with the texts around it.

        Raises:
          InputError: text that the tokenizer does not know.
        """
        return np.asarray(backbone.ids(self.before + question + self.behind), np.int32)


def frame_of(backbone: ModelBackbone, name: str, again: str) -> PromptFrame:
    """Returns the frame of this name for a model.

    Args:
      again: the command as it was given, which messages complete.

    Raises:
      InputError: no tokenizer; or for "chat" no chat template, or one that cannot be read as a frame.
    """
    if backbone.tokenizer is None:
        raise InputError(
            "--model: got a model without a tokenizer, which cannot be asked in words; expected one with its "
            "tokenizer.json. What reuse loses on it without words: python -m evals.certify --model=DIRECTORY "
            "--images=FOLDER"
        )
    if name == "plain":
        return PromptFrame(name, _own_start(backbone), "", "")

    try:
        frame = backbone.chat_frame()
    except (InputError, ConfigError) as error:
        raise InputError(
            f"--frame=chat: {error}. Without a template, pieces and question stand one behind the other: {again} "
            "--frame=plain"
        ) from error
    return PromptFrame(name, frame.front, frame.before, frame.behind, frame.between)


def _own_start(backbone: ModelBackbone) -> tuple[int, ...]:
    """Returns what the tokenizer itself puts in front of a text (a start token, mostly)."""
    # Any word will do: what stands around a text does not depend on it.
    for word in ("a", *backbone.tokenizer.get_vocab()):
        try:
            bare, whole = backbone.ids(word), np.asarray(backbone.prepare([Text(word)])["input_ids"])[0].tolist()
        except KVPatchError:
            continue
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start])
    return ()


def speakable(backbone: ModelBackbone, frame: PromptFrame, data: ItemSet) -> tuple[list[Item], list[Refusal]]:
    """Divides items into those that a model can be asked, and those that it cannot, each with the reason.

    Nothing is read but texts. Images that cannot be read are found when their item is measured.

    Raises:
      InputError: no item can be asked; the message says of what kind of model or with what command one can.
    """
    asked, refused = [], list[Refusal]()
    causes = collections.Counter[str]()
    for item in data.items:
        cause, reason = _unspeakable(backbone, frame, item)
        if reason:
            causes[cause] += 1
            refused.append(Refusal(item.where or item.id, reason))
        else:
            asked.append(item)
    if asked:
        return asked, refused

    source = str(data.source)
    if not data.items:
        first = f": {data.refusals[0].where}: {data.refusals[0].reason}" if data.refusals else ""
        raise InputError(f"--data: got {source}, of which no item can be read{first}")
    cause, count = causes.most_common(1)[0]
    advice = {
        "images": "a vision-language model: python -m evals.measure --model=VLM_DIRECTORY --data=" + source,
        "videos": "a model that takes videos, or the data as frames (images), which any vision-language model takes",
        "words": "a model whose vocabulary has the words of the data. What reuse loses on this one without them: "
        "python -m evals.certify --model=DIRECTORY --images=FOLDER; a shipped small model on its own task: python -m "
        "evals.run",
    }[cause]
    raise InputError(
        f"--data: got {source}, of whose {len(data.items)} items this model can be asked none ({count} for want of "
        f"{cause}; the first: {refused[0].reason}); expected {advice}"
    )


def _unspeakable(backbone: ModelBackbone, frame: PromptFrame, item: Item) -> tuple[str, str]:
    """Returns what a model lacks for an item and the whole reason; two empty texts where it lacks nothing."""
    family = backbone.family
    for piece in item.pieces:
        if isinstance(piece.content, Path | StoredImage) and family.vision is None:
            return "images", f"{piece.label} is an image, and {family.architecture} sees none"
        if isinstance(piece.content, Video) and family.video is None:
            return "videos", f"{piece.label} is a video, and {family.architecture} takes none"
    try:
        for text in texts_of(item.pieces):
            if not backbone.ids(text):
                return "words", "a piece of the context is an empty text"
        if not len(frame.question_ids(backbone, item.question)):
            return "words", "the question is empty"
    except InputError as error:
        return "words", str(error)
    return "", ""


def texts_of(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yields the texts among pieces."""
    for piece in pieces:
        if isinstance(piece.content, Text):
            yield str(piece.content)
