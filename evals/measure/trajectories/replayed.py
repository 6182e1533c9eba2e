"""One episode through every way of showing an agent's window, step by step: the question is what the next action is.

The window is a session's: the lead (the system text, or without one the goal), the newest `keep` screenshots, and the
texts behind them; texts leave with the screenshot that they follow. Re-prefill and the prefix cache show the same.
"Drop old screenshots" shows the newest `keep` screenshots among all texts, "never drop" everything, both behind a
prefix cache. Blind reuse and patches, where they are asked for, show the window too: each piece as it was prefilled
alone, moved to its place. A template's tokens between images stand behind every screenshot, since their places may not
change.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvpatch_jax import Session, Text
from kvpatch_jax.errors import ImageError, InputError, KVPatchError
from kvpatch_jax.session.logit_comparison import compared, served_logits
from kvpatch_jax.session.session_input import embedded, read_input
from models import ModelBackbone

from .. import scoring
from ..data_files import ReadOptions
from ..episodes import Episode, action_text, question_of, step_items
from ..frame import PromptFrame
from ..items import Item, Piece, StoredImage
from .prompts import StepAnswer, StepPiece, StepReader, image_piece, text_piece
from .reused import ReusedWindow

SESSION, REFERENCE, PREFIX, DROP, NEVER = "session", "re-prefill", "prefix cache", "drop old screenshots", "never drop"
WAYS = (REFERENCE, PREFIX, SESSION, DROP, NEVER)
"""Ways of every replay."""
BLIND = "blind"
LARGEST_IMAGE = ReadOptions.most_image_bytes
DIGITS = 6
"""Significant digits of numbers in the file of parts."""

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class EpisodeReplay:
    """What every episode is replayed with.

    Attributes:
      backbone, frame: what is asked, and how.
      keep: screenshots that stay.
      most: tokens of a prompt at most; None: any number.
      answer_tokens: of an answer at most; None: as the rule of the episode says.
      blind: whether windows are also served blind. ranks: of patches that they are also served with.
    """

    backbone: ModelBackbone
    frame: PromptFrame
    keep: int
    most: int | None = None
    answer_tokens: int | None = None
    blind: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def reused(self) -> dict[str, int | None]:
        """The ways of serving pieces that were prefilled alone, each with the rank of its patches."""
        patched: dict[str, int | None] = {f"patch, rank {rank}": rank for rank in self.ranks}
        return ({BLIND: None} if self.blind else {}) | patched

    def records(self, episode: Episode) -> Iterator[Record]:
        """Yields a record for each step and way; one with "refused" where the episode cannot go on, and ends there."""
        items = {int(item.id.rpartition("/")[2]): item for item in step_items(episode)}
        number = 0
        try:
            steps = self.answer_tokens or scoring.RULES[episode.rule].tokens
            with _Window(self, episode) as window:
                for number, step in enumerate(episode.steps):
                    for screenshot in step.screenshots:
                        window.show(screenshot)
                    if step.observation:
                        window.say(f"{step.observation}\n")
                    if number in items:
                        answers = window.ask(question_of(episode, step), steps)
                        for way in (*WAYS, *self.reused):
                            yield self._record(episode, number, items[number], way, answers)
                    if step.response:
                        window.say(action_text(number + 1, step.response))
        except (KVPatchError, OSError) as error:
            where = episode.steps[number].where or f"{episode.id}/{number}"
            reason = " ".join(str(error).split())
            print(f"left out from step {number + 1} on: {where}: {reason}", flush=True)
            yield {"episode": episode.id, "step": number, "where": where, "refused": reason}

    def _record(
        self, episode: Episode, number: int, item: Item, way: str, answers: dict[str, StepAnswer | str]
    ) -> Record:
        """Describes what one way answered at a step."""
        record = {"episode": episode.id, "step": number, "kind": item.kind, "where": item.where, "way": way}
        answer, reference = answers[way], answers[REFERENCE]
        if isinstance(answer, str) or isinstance(reference, str):
            return record | {"failed": str(answer)}
        stops = self.backbone.stop_tokens
        said = self.backbone.text([token for token in answer.ids if token not in stops]).strip()
        kl, _ = compared(reference.first[None], answer.first[None])
        return record | {
            "expected": item.answers[0],
            "said": said,
            "score": float(scoring.RULES[item.rule].score(said, item)),
            "kl_first": float(f"{float(kl[0]):.{DIGITS}g}"),
            "agrees": answer.ids == reference.ids,
            "tokens": answer.tokens,
        }


class _Window:
    """One episode's window in every way. Use as a context manager, which closes its session."""

    def __init__(self, replay: EpisodeReplay, episode: Episode):
        """Opens the session, which shows its lead."""
        self._replay, backbone = replay, replay.backbone
        lead = episode.system or f"Goal: {episode.goal}\n"
        first = text_piece(backbone, [*replay.frame.front, *backbone.ids(lead)])
        self._history: list[tuple[StepPiece, bool]] = [(first, False)]
        self._readers = {way: StepReader(backbone, way != REFERENCE, replay.most) for way in WAYS if way != SESSION}
        self._session = Session(backbone, keep=replay.keep, lead=[*first.items], largest_image=LARGEST_IMAGE)
        self._reused = ReusedWindow(backbone)
        # What the session's names stand for.
        self._named = dict.fromkeys(self._session.ids, first)
        self._counted = 0

    def __enter__(self) -> "_Window":
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def show(self, screenshot: Piece) -> None:
        """Shows a screenshot; in a session, one that left is recalled.

        Raises:
          InputError, ImageError, OSError: it cannot be read.
        """
        backbone, between = self._replay.backbone, list(self._replay.frame.between)
        image = _encoded(screenshot)
        read = read_input(backbone, [image, between] if between else image, LARGEST_IMAGE)
        self._add(image_piece(backbone, list(read.items), read.content), screenshot=True)

    def say(self, text: str) -> None:
        """Appends a text. Raises InputError for one that the tokenizer does not know."""
        self._add(text_piece(self._replay.backbone, self._replay.backbone.ids(text)), screenshot=False)

    def _add(self, piece: StepPiece, screenshot: bool) -> None:
        [*items] = piece.items
        name = self._session.add(items if len(items) > 1 else items[0])
        self._named[name] = piece
        self._history.append((piece, screenshot))

    def ask(self, question: str, steps: int) -> dict[str, StepAnswer | str]:
        """Asks in every way. A way that shows more than the window, and more than the model serves, says why not.

        Raises:
          InputError: the window itself is more than the model serves.
        """
        replay, asked = self._replay, self._replay.frame.question_ids(self._replay.backbone, question).tolist()
        shown = [self._named[name] for name in self._session.ids]
        prompts = {REFERENCE: shown, PREFIX: shown, DROP: self._dropped(), NEVER: [own for own, _ in self._history]}
        last, answers = text_piece(replay.backbone, asked), dict[str, StepAnswer | str]()
        for way, pieces in prompts.items():
            try:
                answers[way] = self._readers[way].answer([*pieces, last], steps)
            except InputError as error:
                if way in (REFERENCE, PREFIX):
                    raise
                answers[way] = str(error)
        reference = answers[REFERENCE]
        assert isinstance(reference, StepAnswer)
        for way, rank in replay.reused.items():
            answers[way] = self._reused.answer([*shown, last], reference.kv, rank, steps)
        return answers | {SESSION: self._served(asked, steps)}

    def _served(self, asked: Sequence[int], steps: int) -> StepAnswer:
        """Asks the session."""
        session, backbone = self._session, self._replay.backbone
        computed = session.stats().tokens
        ids = session.ask(list(asked), steps=steps).ids
        question = embedded(backbone, [list(asked)])
        first: Float[np.ndarray, "1 V"] = served_logits(session.runtime, session.window, question, question.length, 1)
        tokens, self._counted = computed - self._counted + len(asked), computed
        return StepAnswer(ids, first[0], tokens, {})

    def _dropped(self) -> list[StepPiece]:
        """Returns the newest `keep` screenshots among all texts."""
        places = [place for place, (_, screenshot) in enumerate(self._history) if screenshot]
        left = set(places[: -self._replay.keep])
        return [piece for place, (piece, _) in enumerate(self._history) if place not in left]


def _encoded(screenshot: Piece) -> bytes | Path:
    """Returns an image's bytes or file."""
    content = screenshot.content
    if isinstance(content, StoredImage):
        return content.read()
    if isinstance(content, Path) and not isinstance(content, Text):
        return content
    raise ImageError(f"screenshot: got {screenshot.label!r:.80} of another kind; expected an image")
