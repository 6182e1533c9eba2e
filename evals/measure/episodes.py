"""Recorded episodes of agents: every step a question, behind what the agent saw and did before it."""

import json
from collections.abc import Mapping
from typing import Any

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

from .items import Item, Piece
from .media import MediaFolder
from .records import filled


def step_items(episode: Item, values: Mapping[str, Any], media: MediaFolder, keep: int | None) -> list[Item]:
    """Makes an item of every step: the next action, behind what was shown and answered up to there.

    The context is the system text, then of each step its screenshots, its text, and the agent's action.

    Args:
      episode: an item with the episode's id, kind and scorer.
      values: goal, system, instruction, and steps with images, text and answer; a step without an answer is shown and
        not asked about. keep: screenshots that stay, the newest; None: all.

    Raises:
      InputError: a field that is missing or wrong; the message begins with its name.
    """
    rows = values.get("steps")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise InputError(f"steps: got {rows!r:.80}; expected a list of objects, at least one")
    goal, system = filled("{goal}", values), filled("{system}", values)
    if goal is None and system is None:
        raise InputError("goal: got neither goal nor system; expected one of them, which stands in front of all")
    instruction = filled("{instruction}", values) or "Answer with the next action."
    question = f"{f'Goal: {goal}\n' if goal else ''}{instruction}\nNext action:"

    items, history = list[Item](), [Piece(Text(system), "system")] if system else []
    shown = 0
    for number, row in enumerate(rows):
        field = f"steps[{number}]"
        for path in media.read(row.get("images") or [], f"{field}.images"):
            shown += 1
            history.append(Piece(path, f"screenshot {shown}"))
        text, response = filled("{text}", row), action_text(row.get("answer"), f"{field}.answer")
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
