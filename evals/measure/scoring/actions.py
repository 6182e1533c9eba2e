"""Rules for the next action of an agent: its type, and where or what."""

import json
import math
import re
from typing import Any

from ..items import Item
from .anls import similarity

NEAR = 0.14
"""How far from the recorded point a tap counts, as a share of the screen (Android in the Wild; GUI-Odyssey)."""

_TYPED = re.compile(r"\s*([A-Z_]+)\s*(?::\s*(.*?))?\s*", re.DOTALL)
_POINT = re.compile(r"[(\[]?\s*(-?\d+(?:\.\d+)?)\s*,\s*(-?\d+(?:\.\d+)?)\s*[)\]]?")


def gui_odyssey(prediction: str, item: Item) -> float:
    """Scores an action as `action_matching` of GUI-Odyssey's GUIOdyssey_action_matching.py does.

    Actions are written as the release's training data writes them: "CLICK: (x, y)" and "LONG_PRESS: (x, y)" in
    thousandths of the screen, "SCROLL: UP", "TYPE: text", "COMPLETE", "IMPOSSIBLE", "PRESS_HOME", "PRESS_BACK",
    "PRESS_RECENT". The type must be the same. A point counts within .14 of the recorded one (shares of either side,
    Euclidean), or inside the box of the element that SAM 2 found, the item's answer_format ("x1,y1,x2,y2"); a direction
    if it is the same; a text if one contains the other or their similarity is at least .5. What cannot be read is 0.
    """
    said, right = _TYPED.fullmatch(prediction.strip()), _TYPED.fullmatch(item.answers[0])
    if said is None or right is None or said[1] != right[1]:
        return 0.0
    what, kind = (said[2] or "").strip(), right[1]
    recorded = (right[2] or "").strip()
    if kind in ("CLICK", "LONG_PRESS"):
        point, target = _POINT.fullmatch(what), _POINT.fullmatch(recorded)
        if point is None or target is None:
            return 0.0
        x, y = float(point[1]), float(point[2])
        box = [float(side) for side in item.answer_format.split(",")] if item.answer_format else None
        if box is not None and box[0] <= x <= box[2] and box[1] <= y <= box[3]:
            return 1.0
        return float(math.dist((x / 1000, y / 1000), (float(target[1]) / 1000, float(target[2]) / 1000)) <= NEAR)
    if kind == "SCROLL":
        return float(what.lower() == recorded.lower())
    if kind == "TYPE":
        return float(_same_text(what, recorded))
    return 1.0


def _same_text(said: str, right: str) -> bool:
    return right in said or said in right or similarity(right, said) >= 0.5


def android_control(prediction: str, item: Item) -> float:
    """Scores an action of AndroidControl, a JSON object with `action_type`.

    The type must be the same. A click or long press counts within .14 of the recorded point in shares of the screen's
    width and height (the item's answer_format, "1080x2400"), the distance of Android in the Wild's action matching; a
    scroll by its direction; texts and names of apps where they are equal without case, or one contains the other. Other
    actions by their type alone.

    Left out: Li et al. 2024 (arXiv 2406.03679) count a click inside the box of the target element, which takes the
    accessibility tree; and they count some actions as the same (`navigate_back` and a click on a back button).
    """
    said, right = _object(prediction), _object(item.answers[0])
    if said is None or right is None or said.get("action_type") != right.get("action_type"):
        return 0.0
    kind = right["action_type"]
    if kind in ("click", "long_press", "type") and not _near(said, right, item.answer_format):
        return 0.0
    if kind == "scroll":
        return float(_word(said, "direction") == _word(right, "direction"))
    field = {"open_app": "app_name", "input_text": "text", "type": "text"}.get(kind)
    if field is None:
        return 1.0
    one, other = _word(said, field), _word(right, field)
    return float(bool(one) == bool(other) and (one in other or other in one))


def _object(text: str) -> dict[str, Any] | None:
    """Reads the JSON object in a text, in a fence or not."""
    start, end = text.find("{"), text.rfind("}")
    try:
        value = json.loads(text[start : end + 1]) if start >= 0 else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _word(action: dict[str, Any], field: str) -> str:
    value = action.get(field)
    return value.strip().lower() if isinstance(value, str) else ""


def _numbers(action: dict[str, Any], fields: tuple[str, ...]) -> list[float] | None:
    values = [action.get(field) for field in fields]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values if value is not None]
    return None


def _near(said: dict[str, Any], right: dict[str, Any], screen: str) -> bool:
    point, target = _numbers(said, ("x", "y")), _numbers(right, ("x", "y"))
    if point is None or target is None:
        return False
    sides = [float(side) for side in screen.split("x")] if screen else [1000.0, 1000.0]
    return (
        math.dist(
            [p / s for p, s in zip(point, sides, strict=True)], [t / s for t, s in zip(target, sides, strict=True)]
        )
        <= NEAR
    )


def tool_call(prediction: str, item: Item) -> float:
    """Scores whether an agent calls the recorded tool with the recorded arguments; a rule of this library.

    Both are JSON objects with `name` and `arguments`. Arguments must be equal, numbers `x` and `y` within .14 of the
    recorded point in thousandths of the screen. An answer that is no call counts where the texts are the same without
    case and white space at the ends. No rule is published for these traces: they record what one agent did.
    """
    right = _object(item.answers[0])
    if right is None or "name" not in right:
        return float(prediction.strip().lower() == item.answers[0].strip().lower())
    said = _object(prediction)
    if said is None or said.get("name") != right["name"]:
        return 0.0
    one, other = said.get("arguments"), right.get("arguments")
    if not isinstance(one, dict) or not isinstance(other, dict):
        return float(one == other)
    point = ("x", "y")
    if _numbers(other, point) is not None:
        if not _near(one, other, ""):
            return 0.0
        one, other = ({key: value for key, value in call.items() if key not in point} for call in (one, other))
    return float(one == other)
