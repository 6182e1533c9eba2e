"""GUI-Odyssey and OSWorld-like trajectories: an object per episode, screenshots as files or inside it.

- GUI-Odyssey (Lu et al. 2024, arXiv 2406.08451; OpenGVLab/GUI-Odyssey, introduction.md): annotations/*.json with
  episode_id, device_info{…, h, w}, task_info{category, app, meta_task, task, instruction}, step_length, steps[{step,
  screenshot, action, info, ps, sam2_bbox, …}], screenshots in screenshots/; coordinates are thousandths. Answers are
  written as its data/format_converter.py writes them. Texts are action TEXT in files and TYPE in the introduction.
- OSWorld-like (the card of markov-ai/computer-use): task_id, domain, instruction, score, num_steps, and lists of one
  entry a step: actions, responses, screenshots (files, or bytes in Parquet), accessibility_trees.
"""

from typing import Any

from kvpatch_jax.errors import InputError

from ..data_files import DataFolder
from ..episodes import Episode, EpisodeStep, gone
from ..items import Piece
from ..records import Record, text_of
from .reader import Reader, each, has

_KEYS = {"KEY_HOME": "PRESS_HOME", "KEY_BACK": "PRESS_BACK", "KEY_APPSELECT": "PRESS_RECENT"}
_ODYSSEY_ACTIONS = (
    'Answer with one action: "CLICK: (x, y)", "LONG_PRESS: (x, y)" (thousandths of the screen), "SCROLL: UP" (or DOWN, '
    'LEFT, RIGHT), "TYPE: text", "COMPLETE", "IMPOSSIBLE", "PRESS_HOME", "PRESS_BACK" or "PRESS_RECENT".'
)


def _odyssey(record: Record, files: DataFolder) -> Episode:
    task = record.mapping("task_info")
    steps = record.list_of("steps")
    length = record.get("step_length")
    if not steps or (length is not None and length != len(steps)):
        raise InputError(f"step_length: got {length!r:.40} beside {len(steps)} steps; expected as many, at least one")

    made = []
    for number, step in enumerate(steps):
        field = f"steps[{number}]"
        if not isinstance(step, dict):
            raise InputError(f"{field}: got {step!r:.80}; expected an object")
        path = files.image(step.get("screenshot"), f"{field}.screenshot")
        box = step.get("sam2_bbox")
        numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(side, int | float) for side in box)
        if box and not numbers:
            raise InputError(f"{field}.sam2_bbox: got {box!r:.80}; expected [x1, y1, x2, y2]")
        made.append(
            EpisodeStep(
                screenshots=(Piece(path, f"step {number + 1}"),),
                response=_odyssey_action(step.get("action"), step.get("info"), field),
                left=gone(number + 1, files.options.keep),
                answer_format=",".join(map(str, box)) if numbers and box else "",
                where=f"{record.where} {field}",
            )
        )
    category = task.get("category")
    return Episode(
        id=record.name("episode_id"),
        goal=task.text("instruction"),
        steps=tuple(made),
        rule="gui_odyssey",
        kind=category if isinstance(category, str) else "",
        instruction=_ODYSSEY_ACTIONS,
    )


def _odyssey_action(action: Any, info: Any, field: str) -> str:
    """Writes an action as the release's training data does."""
    if action in ("COMPLETE", "INCOMPLETE"):
        return "COMPLETE" if action == "COMPLETE" else "IMPOSSIBLE"
    if action in ("TEXT", "TYPE"):
        return f"TYPE: {text_of(info, f'{field}.info')}"
    if action not in ("CLICK", "LONG_PRESS", "SCROLL"):
        raise InputError(
            f"{field}.action: got {action!r:.40}; expected CLICK, LONG_PRESS, SCROLL, TEXT, COMPLETE, INCOMPLETE"
        )
    if isinstance(info, str) and info in _KEYS and action != "SCROLL":
        return _KEYS[info]

    count = 2 if action == "SCROLL" else 1
    points = info if isinstance(info, list) and len(info) >= count else []
    whole = all(
        isinstance(point, list) and len(point) == 2 and all(type(side) in (int, float) for side in point)
        for point in points[:count]
    )
    if not points or not whole:
        raise InputError(f"{field}.info: got {info!r:.80}; expected {count} [x, y] in thousandths of the screen")
    if action != "SCROLL":
        return f"{action}: ({points[0][0]}, {points[0][1]})"
    across, down = points[1][0] - points[0][0], points[1][1] - points[0][1]
    if abs(across) > abs(down):
        return f"SCROLL: {'LEFT' if across < 0 else 'RIGHT'}"
    return f"SCROLL: {'UP' if down < 0 else 'DOWN'}"


def _osworld(record: Record, files: DataFolder) -> Episode:
    actions, screenshots = record.list_of("actions"), record.list_of("screenshots")
    if not actions or len(screenshots) not in (len(actions), len(actions) + 1):
        raise InputError(
            f"screenshots: got {len(screenshots)} beside {len(actions)} actions; expected as many, or one more"
        )
    steps = []
    for number, action in enumerate(actions):
        field = f"screenshots[{number}]"
        shot = screenshots[number]
        if isinstance(shot, dict) and isinstance(shot.get("bytes"), bytes):
            reload = record.reload
            content = files.stored(
                lambda reload=reload, number=number: reload()["screenshots"][number]["bytes"],
                field,
                record.where,
                shot["bytes"],
            )
        else:
            content = files.image(shot.get("path") if isinstance(shot, dict) else shot, field)
        steps.append(
            EpisodeStep(
                screenshots=(Piece(content, f"step {number + 1}"),),
                response=text_of(action, f"actions[{number}]"),
                left=gone(number + 1, files.options.keep),
                where=f"{record.where} actions[{number}]",
            )
        )
    domain = record.get("domain")
    return Episode(
        id=record.name("task_id"),
        goal=record.text("instruction"),
        steps=tuple(steps),
        rule="exact_match",
        kind=domain if isinstance(domain, str) else "",
        instruction="Answer with the next action as code.",
    )


GUI_ODYSSEY = Reader(
    name="gui_odyssey",
    fits=has("episode_id", "device_info", "task_info", "steps"),
    read=each(_odyssey),
    chunk_rule="A screenshot is a piece, and so is each action of the agent between them.",
    beside=("screenshots",),
    episodes=True,
)
OSWORLD = Reader(
    name="osworld",
    fits=has("task_id", "instruction", "actions", "screenshots"),
    read=each(_osworld),
    chunk_rule="A screenshot is a piece, and so is each action of the agent between them.",
    beside=("screenshots",),
    episodes=True,
)
