"""AndroidControl: episodes on Android devices (Li et al. 2024, arXiv 2406.03679; google-research/android_control).

TFRecord files with gzip. Fields by its README: episode_id, goal, screenshots (PNG), accessibility_trees,
screenshot_widths, screenshot_heights, actions (JSON with action_type, one fewer than screenshots: performed between
them), step_instructions. Answers are the actions' JSON. Left out: accessibility trees, the last screenshot (no action
follows it) and step instructions (questions are asked from the goal).
"""

from collections.abc import Iterator
from typing import Any

from kvpatch_jax.errors import ImageError, InputError
from kvpatch_jax.utils.strict_json import loads

from ..data_files import DataFolder
from ..episodes import Episode, EpisodeStep, canonical, gone
from ..items import Piece, Refusal
from ..stored_bytes import StoredBytes
from ..tfrecord import ExampleRecord, examples
from .reader import Reader

_ACTIONS = (
    'Answer with one action as JSON: {"action_type": "click", "x": …, "y": …}; also long_press, scroll (direction), '
    "open_app (app_name), input_text (text), navigate_home, navigate_back, wait."
)
_FIELDS = ("goal", "screenshots", "actions")


def read_episodes(source: StoredBytes, files: DataFolder) -> Iterator[Episode | Refusal]:
    """Reads the episodes of one file; a damaged record ends it with a refusal."""
    try:
        for record in examples(source):
            try:
                yield _episode(record, source, files)
            except (InputError, ImageError) as error:
                yield Refusal(f"{source.name}[{record.number}]", str(error))
    except InputError as error:
        yield Refusal(source.name, str(error))


def _episode(record: ExampleRecord, source: StoredBytes, files: DataFolder) -> Episode:
    for field in _FIELDS:
        if not record.spans.get(field):
            raise InputError(f"{field}: got no such field; expected bytes")
    identity = record.integers.get("episode_id")
    if not identity:
        raise InputError("episode_id: got no such field; expected an integer")
    shots, actions = record.spans["screenshots"], record.spans["actions"]
    if len(shots) != len(actions) + 1:
        raise InputError(f"actions: got {len(actions)} beside {len(shots)} screenshots; expected one fewer")
    sizes = [record.integers.get(field, []) for field in ("screenshot_widths", "screenshot_heights")]
    if any(len(sides) != len(shots) or min(sides) < 1 for sides in sizes):
        raise InputError(
            f"screenshot_widths: got {sizes!r:.80}; expected a positive width and height for each screenshot"
        )

    where = f"{source.name}[{record.number}]"
    steps = []
    for number, span in enumerate(actions):
        field = f"actions[{number}]"
        shot = files.stored(lambda at=shots[number]: source.read(*at), f"screenshots[{number}]", where)
        steps.append(
            EpisodeStep(
                screenshots=(Piece(shot, f"step {number + 1}"),),
                response=canonical(_action(source.read(*span), field)),
                left=gone(number + 1, files.options.keep),
                answer_format=f"{sizes[0][number]}x{sizes[1][number]}",
                where=f"{where} {field}",
            )
        )
    try:
        goal = source.read(*record.spans["goal"][0]).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"goal: got {error}; expected UTF-8") from error
    return Episode(str(identity[0]), goal, tuple(steps), "android_control", "", _ACTIONS)


def _action(content: bytes, field: str) -> dict[str, Any]:
    try:
        action = loads(content.decode())
    except ValueError as error:
        raise InputError(f"{field}: got {content[:60]!r} ({error}); expected JSON") from error
    if not isinstance(action, dict) or not isinstance(action.get("action_type"), str):
        raise InputError(f"{field}: got {action!r:.80}; expected an object with action_type")
    return action


def is_android_control(source: StoredBytes) -> bool:
    """Tells whether a file begins with a TFRecord whose Example has AndroidControl's fields."""
    try:
        first = next(examples(source), None)
    except InputError:
        return False
    return first is not None and all(field in first.spans for field in _FIELDS)


READER = Reader(
    name="android_control",
    fits=lambda record: False,  # told by the file: it has no records of JSON
    read=lambda records, files: iter(()),
    chunk_rule="A screenshot is a piece, and so is each action of the agent between them.",
    episodes=True,
)
