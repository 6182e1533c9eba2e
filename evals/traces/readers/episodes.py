"""Recorded episodes of agents: a goal, screenshots that come and leave, and what the agent answered to each."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from .items import Piece, Refusal


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
    """Episodes that were read; `refusals`: sessions that are left out."""

    format: str
    source: Path
    episodes: Sequence[Episode]
    refusals: Sequence[Refusal]


def question_of(episode: Episode, step: EpisodeStep) -> str:
    """Returns the question of a step: its own, or without one what the next action is."""
    return step.question or f"Goal: {episode.goal}\n{episode.instruction}\nNext action:"


def action_text(number: int, response: str) -> str:
    """Returns an answer as the prompts after it show it; numbers count from 1."""
    return f"Action {number}: {response}\n"


def canonical(value: object) -> str:
    """Writes a value as JSON in one form, as actions are compared."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
