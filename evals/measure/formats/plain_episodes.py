"""Plain JSON Lines of one's own trajectories: an object per episode, its steps in order.

A record has `id`, `steps`, and `goal` or `system` (the text in front of all), or both. Also `instruction` (how the next
action is to be written), `rule` (a key of `scoring.RULES`; exact match without it) and `kind`.
A step has `images` (names of files; none, one or several), and `answer`, what the agent answered. Also `text` (an
observation that came with the images), `question` (without it the next action is asked for), `kind` and
`answer_format`. A step without `answer` is shown and not asked about.
"""

from typing import Any

from kvpatch_jax.errors import InputError

from ..data_files import DataFolder
from ..episodes import Episode, EpisodeStep, gone
from ..items import Piece
from ..records import Record
from ..scoring import RULES
from .reader import Reader, each

_KNOWN = frozenset(["id", "steps", "goal", "system", "instruction", "rule", "kind"])
_KNOWN_OF_STEP = frozenset(["images", "answer", "text", "question", "kind", "answer_format"])


def _fits(record: Record) -> bool:
    return {"id", "steps"} <= set(record.values) <= _KNOWN


def _optional(record: Record, field: str, without: str = "") -> str:
    return without if record.get(field) is None else record.text(field)


def _check_fields(values: Any, known: frozenset[str], field: str) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"{field}{unknown[0]}: got a field of this name; expected one of {', '.join(sorted(known))}")


def _episode(record: Record, files: DataFolder) -> Episode:
    _check_fields(record.values, _KNOWN, "")
    goal, system = _optional(record, "goal"), _optional(record, "system")
    if not goal and not system:
        raise InputError("goal: got neither goal nor system; expected one of them, which stands in front of all")
    rule = _optional(record, "rule", "exact_match")
    if rule not in RULES:
        raise InputError(f"rule: got {rule!r:.80}; expected one of {', '.join(sorted(RULES))}")
    if not record.list_of("steps"):
        raise InputError("steps: got an empty list; expected at least one step")

    steps, shown = list[EpisodeStep](), 0
    for number, values in enumerate(record.list_of("steps")):
        where = f"steps[{number}]"
        if not isinstance(values, dict):
            raise InputError(f"{where}: got {values!r:.80}; expected an object")
        _check_fields(values, _KNOWN_OF_STEP, f"{where}.")
        step = Record(values, f"{record.where} {where}", lambda: {})
        try:
            names = step.list_of("images") if step.get("images") is not None else []
            texts = [_optional(step, field) for field in ("answer", "text", "answer_format", "question", "kind")]
        except InputError as error:
            raise InputError(f"{where}.{error}") from error
        pieces = [
            Piece(files.image(name, f"{where}.images[{place}]"), f"screenshot {shown + place + 1}")
            for place, name in enumerate(names)
        ]
        shown += len(pieces)
        answer, text, answer_format, question, kind = texts
        left = gone(shown, files.options.keep)
        steps.append(EpisodeStep(tuple(pieces), answer, left, text, answer_format, step.where, question, kind))
    return Episode(
        id=record.name("id"),
        goal=goal,
        steps=tuple(steps),
        rule=rule,
        kind=_optional(record, "kind"),
        instruction=_optional(record, "instruction", "Answer with the next action."),
        system=system,
    )


READER = Reader(
    name="episodes",
    fits=_fits,
    read=each(_episode),
    chunk_rule="A screenshot is a piece, and so are a step's text and the agent's answer behind it.",
    episodes=True,
)
