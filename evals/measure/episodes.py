"""Recorded episodes of agents: every step a question, behind what the agent saw and did before it."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

from .items import Item, Piece
from .media import MediaFolder
from .records import filled, lookup


@dataclasses.dataclass(frozen=True)
class Steps:
    """Where an episode has its steps. Texts are templates: of the record's columns, `text` of a step's.

    Attributes:
      rows: a column with a list of objects, a step each.
      goal: what the agent was to do. system: text in front of all. instruction: how the next action is to be written.
      images: a step's column of new screenshots. text: that came with them.
      answer: a step's column of what the agent did, as text or object; a step without is shown and not asked about.
    """

    rows: str = "steps"
    goal: str = "{goal}"
    system: str = "{system}"
    instruction: str = "{instruction}"
    images: str = "images"
    text: str = "{text}"
    answer: str = "answer"


def step_items(
    episode: Item, values: Mapping[str, Any], steps: Steps, media: MediaFolder, keep: int | None
) -> list[Item]:
    """Makes an item of every step: the next action, behind what was shown and answered up to there.

    The context is the system text, then of each step its screenshots, its text, and the agent's action.

    Args:
      episode: an item with the episode's id, kind and scorer. keep: screenshots that stay, the newest; None: all.

    Raises:
      InputError, ImageError: a field that is missing or wrong; the message begins with its name.
    """
    rows = lookup(values, steps.rows)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(f"{steps.rows}: got {rows!r:.80}; expected a list of objects, at least one")
    goal, system = filled(steps.goal, values), filled(steps.system, values)
    if goal is None and system is None:
        raise InputError("goal: got neither goal nor system; expected one of them, which stands in front of all")
    instruction = filled(steps.instruction, values) or "Answer with the next action."
    question = f"{f'Goal: {goal}\n' if goal else ''}{instruction}\nNext action:"

    items, history = list[Item](), [Piece(Text(system), "system")] if system else []
    shown = 0
    for number, row in enumerate(rows):
        field = f"{steps.rows}[{number}]"
        for path in media.read(lookup(row, steps.images) or [], f"{field}.{steps.images}"):
            shown += 1
            history.append(Piece(path, f"screenshot {shown}"))
        text, response = filled(steps.text, row), action_text(lookup(row, steps.answer), f"{field}.{steps.answer}")
        if text:
            history.append(Piece(Text(f"{text}\n"), f"observation {number + 1}"))
        if response:
            gone = {f"screenshot {place}" for place in range(1, 1 + (0 if keep is None else shown - keep))}
            items.append(
                episode._replace(
                    id=f"{episode.id}/{number}",
                    cluster=episode.id,
                    pieces=tuple(piece for piece in history if piece.label not in gone),
                    question=question,
                    answers=(response,),
                    where=f"{episode.where} {field}",
                )
            )
            history.append(Piece(Text(f"Action {number + 1}: {response}\n"), f"action {number + 1}"))
    return items


def action_text(value: Any, field: str) -> str:
    """Writes a step's answer: a text as it is, an object as JSON in one form."""
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{field}: got {value!r:.80}; expected a text or an object")
    return value or ""
