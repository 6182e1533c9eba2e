"""Recorded episodes of agents: every step a question, behind what the agent saw and did before it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError

from .items import Item, Piece
from .media import MediaFolder
from .records import filled, lookup


@dataclasses.dataclass(frozen=True)
class Steps:
    """Where an episode has its steps. Texts are templates of a step's columns; the first three of the record's.

    Attributes:
      goal: what the agent was to do. system: text in front of all. screen: "{width}x{height}" of points of actions;
        without it they are thousandths.
      rows: a column with a list of objects, a step each; or columns: names of lists that run beside each other, by the
        names that a step has them by.
      images: a step's new screenshots. text: that came with them. answer: what the agent did, as text, object or JSON;
        a step without is shown and not asked about. detail: a column with what GUI-Odyssey's actions are done with.
      question: asked at a step; without it the next action. instruction: how that is to be written; "": as the
        record's column of this name says.
      kind: of a step.
    """

    goal: str = "{goal}"
    system: str = "{system}"
    screen: str = ""
    rows: str = ""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    images: str = "images"
    text: str = "{text}"
    answer: str = "answer"
    detail: str = ""
    question: str = "{question}"
    instruction: str = ""
    kind: str = "{kind}"


def step_items(
    episode: Item, values: Mapping[str, Any], steps: Steps, media: MediaFolder, keep: int | None
) -> list[Item]:
    """Makes an item of every step: its question, behind what was shown and answered up to there.

    The context is the system text, then of each step its screenshots, its text, and the agent's action.

    Args:
      episode: an item with the episode's id, kind and scorer. keep: screenshots that stay, the newest; None: all.

    Raises:
      InputError, ImageError: a field that is missing or wrong; the message begins with its name.
    """
    rows = _rows(values, steps)
    goal, system = filled(steps.goal, values), filled(steps.system, values)
    if goal is None and system is None:
        raise InputError("goal: got neither goal nor system; expected one of them, which stands in front of all")
    instruction = steps.instruction or filled("{instruction}", values) or "Answer with the next action."
    asked = f"Goal: {goal}\n{instruction}\nNext action:" if goal else f"{instruction}\nNext action:"

    items, history = list[Item](), [Piece(Text(system), "system")] if system else []
    shown = 0
    for number, row in enumerate(rows):
        field = f"steps[{number}]"
        for content in media.read(lookup(row, steps.images) or [], f"{field}.{steps.images}"):
            shown += 1
            history.append(Piece(content, f"screenshot {shown}"))
        text, response = filled(steps.text, row), action_text(row, steps, field)
        if text:
            history.append(Piece(Text(f"{text}\n"), f"observation {number + 1}"))
        if response:
            gone = {f"screenshot {place}" for place in range(1, 1 + (0 if keep is None else shown - keep))}
            items.append(
                episode._replace(
                    id=f"{episode.id}/{number}",
                    cluster=episode.id,
                    pieces=tuple(piece for piece in history if piece.label not in gone),
                    question=filled(steps.question, row) or asked,
                    answers=(response,),
                    kind=filled(steps.kind, row) or episode.kind,
                    screen=filled(steps.screen, values) or "",
                    where=f"{episode.where} {field}",
                )
            )
            history.append(Piece(Text(f"Action {number + 1}: {response}\n"), f"action {number + 1}"))
    return items


def _rows(values: Mapping[str, Any], steps: Steps) -> Sequence[Mapping[str, Any]]:
    """Returns the steps as objects; lists beside each other are as long as the answers, or one longer."""
    if steps.rows:
        rows = lookup(values, steps.rows)
        if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
            raise InputError(f"{steps.rows}: got {rows!r:.80}; expected a list of objects, at least one")
        return rows
    lists = {name: lookup(values, column) for name, column in steps.columns.items()}
    count = len(lists[steps.answer]) if isinstance(lists[steps.answer], list) else 0
    for name, column in steps.columns.items():
        if not isinstance(lists[name], list) or len(lists[name]) not in (count, count + 1) or not count:
            raise InputError(f"{column}: got {lists[name]!r:.80} beside {count} actions; expected as many, or one more")
    return [{name: column[number] for name, column in lists.items()} for number in range(count)]


def action_text(row: Mapping[str, Any], steps: Steps, field: str) -> str:
    """Returns a step's answer: a text, an object as JSON in one form, or an action of GUI-Odyssey as an object."""
    value = lookup(row, steps.answer)
    if steps.detail:
        value = _odyssey(value, lookup(row, steps.detail), f"{field}.{steps.detail}")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{field}.{steps.answer}: got {value!r:.60} ({error}); expected JSON") from error
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{field}.{steps.answer}: got {value!r:.80}; expected a text or an object")
    return value or ""


def _odyssey(action: Any, detail: Any, field: str) -> dict[str, Any]:
    """Makes an object of a GUI-Odyssey action, whose points are thousandths of the screen."""
    kind = {"TEXT": "type", "INCOMPLETE": "impossible"}.get(str(action), str(action).lower())
    if kind in ("complete", "impossible"):
        return {"action_type": kind}
    if isinstance(detail, str):
        # Keys of the system are clicks with a name.
        return {"action_type": kind, "text": detail} if kind == "type" else {"action_type": detail.lower()}
    points = detail if isinstance(detail, list) else []
    numbers = [side for point in points if isinstance(point, list) for side in point if type(side) in (int, float)]
    if len(numbers) < (4 if kind == "scroll" else 2):
        raise InputError(f"{field}: got {detail!r:.80}; expected points [x, y] in thousandths of the screen")
    if kind != "scroll":
        return {"action_type": kind, "x": numbers[0], "y": numbers[1]}
    across, down = numbers[2] - numbers[0], numbers[3] - numbers[1]
    sideways = "left" if across < 0 else "right"
    return {"action_type": kind, "direction": sideways if abs(across) > abs(down) else "up" if down < 0 else "down"}
