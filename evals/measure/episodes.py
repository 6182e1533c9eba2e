"""Recorded episodes of agents: a goal, screenshots that come and leave, and what the agent answered to each."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from kvpatch_jax import Text

from .items import Item, Piece, Refusal


@dataclasses.dataclass(frozen=True)
class EpisodeStep:
    """One request of an agent.

    Attributes:
      screenshots: new in the prompt at this step: one, mostly.
      response: what the agent answered, as text; "" where the record does not say.
      left: numbers of the screenshots that are not in the prompt any more at this step, counted over the episode in
        the order in which they came.
      observation: text that came with the screenshots; "" without.
      answer_format: what the scoring rule needs besides, as in `Item`.
      where: file and line or record, for messages.
      question: what is asked at this step; "": what the next action is.
      kind: the category of this step; "": the episode's.
    """

    screenshots: tuple[Piece, ...]
    response: str
    left: tuple[int, ...]
    observation: str = ""
    answer_format: str = ""
    where: str = ""
    question: str = ""
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Episode:
    """What an agent did to reach a goal.

    Attributes:
      id: unique in the data set. goal: as the agent was told it. steps: in order.
      rule: name of the rule that an answer is scored by, a key of `scoring.RULES`.
      kind: the category that tables are divided by; "" without one.
      instruction: how the next action is to be written.
      system: text in front of all, such as a system prompt; "" without.
    """

    id: str
    goal: str
    steps: tuple[EpisodeStep, ...]
    rule: str
    kind: str
    instruction: str
    system: str = ""


@dataclasses.dataclass(frozen=True)
class EpisodeSet:
    """Episodes that were read; attributes as in `ItemSet`."""

    format: str
    source: Path
    episodes: Sequence[Episode]
    refusals: Sequence[Refusal]


def gone(count: int, keep: int | None) -> tuple[int, ...]:
    """Returns which of `count` screenshots have left where only the newest `keep` stay; None: none has."""
    return () if keep is None else tuple(range(max(0, count - keep)))


def question_of(episode: Episode, step: EpisodeStep) -> str:
    """Returns the question of a step: its own, or without one what the next action is."""
    return step.question or f"Goal: {episode.goal}\n{episode.instruction}\nNext action:"


def action_text(number: int, response: str) -> str:
    """Returns an answer as the prompts after it show it; numbers count from 1."""
    return f"Action {number}: {response}\n"


def step_items(episode: Episode) -> list[Item]:
    """Returns each step as an item: the prompt of that step, the question being the next action.

    The context is the system text, then what every step so far showed (screenshots that have not left) and answered.
    Steps whose answer is not recorded are no items.
    """
    items = []
    for number, step in enumerate(episode.steps):
        if not step.response:
            continue

        pieces = [Piece(Text(episode.system), "system")] if episode.system else []
        shown = 0
        for earlier, before in enumerate(episode.steps[: number + 1]):
            for screenshot in before.screenshots:
                if shown not in step.left:
                    pieces.append(screenshot)
                shown += 1
            if before.observation:
                pieces.append(Piece(Text(f"{before.observation}\n"), f"observation {earlier + 1}"))
            if earlier < number and before.response:
                pieces.append(Piece(Text(action_text(earlier + 1, before.response)), f"action {earlier + 1}"))

        items.append(
            Item(
                id=f"{episode.id}/{number}",
                cluster=episode.id,
                pieces=tuple(pieces),
                question=question_of(episode, step),
                answers=(step.response,),
                kind=step.kind or episode.kind,
                rule=episode.rule,
                answer_format=step.answer_format,
                where=step.where,
            )
        )
    return items


def canonical(value: object) -> str:
    """Writes a value as JSON in one form, as actions are compared."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
