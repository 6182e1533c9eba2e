"""Three-dimensional positions (time, height, width) of M-RoPE and TMRoPE, counted on the host with NumPy.

Text and sounds advance all three axes together, a sound by one for each token. An image of h×w merged patches at place
p has time p, height p + row and width p + column, and the text after it goes on at p + max(h, w): an image moves the
counter by its largest extent, not by its number of tokens. A video's patches stand at their seconds on the time axis,
so that in the Omni families they line up with its sound, whose tokens are mixed among them. Qwen3-Omni alone does not
truncate these times to whole positions: what follows a video then has fractional positions too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int, Int32

from kvpatch_jax.core import POSITION_LIMIT
from kvpatch_jax.errors import InputError

VideoRule = Literal["max", "hf5"]
_KINDS = ("image", "video", "audio")


@dataclasses.dataclass(frozen=True)
class PositionRule:
    """What positions depend on.

    Attributes:
      image_token, video_token, audio_token: ids of the placeholders.
      merge: patches per merged token along height and along width.
      rate: positions per second of video.
      opening: ids of the two tokens before a video with its sound, which are a vision start and a sound start.
      fractional: Qwen3-Omni's rule. Else times are truncated, and the two tokens before a video with its sound share a
        position, as do the two behind it.
      video_rule: where text after a video goes on. "max": one past the largest position of any axis (the authors' code
        and transformers ≤ 5.2). "hf5": max(h, w) past the video's start (transformers ≥ 5.3), which a long video's time
        axis overtakes.
    """

    image_token: int
    video_token: int
    merge: int
    rate: int | float = 1
    audio_token: int | None = None
    opening: tuple[int, int] | None = None
    fractional: bool = False
    video_rule: VideoRule = "max"


def get_rope_positions(
    input_ids: Int[np.ndarray, " T"],
    images: Int[np.ndarray, "images 3"] | None,
    videos: Int[np.ndarray, "videos 3"] | None,
    seconds: Float[np.ndarray, " seconds"] | None,
    rule: PositionRule,
    sounds: Sequence[int] = (),
) -> Int32[np.ndarray, "T 3"] | Float32[np.ndarray, "T 3"]:
    """Returns positions of a prompt (time, height, width), as transformers' `get_rope_index` counts them, to the bit.

    Args:
      input_ids: one prompt without padding; placeholders are counted off against the sizes in order.
      images, videos: (time, height, width) of each, in patches before merging.
      seconds: per temporal patch of each video; None means 1.
      sounds: tokens of each, those of videos among them.

    Returns:
      int32, or float32 where they may be fractional.

    Raises:
      InputError: placeholders that do not match the sizes, a grid that is not a multiple of the merge size, or times
        that are no positions.
    """
    number = np.float32 if rule.fractional else np.int64
    grids = [[] if table is None else np.asarray(table).tolist() for table in (images, videos)]
    times = np.ones(len(grids[1]), np.float32) if seconds is None else np.asarray(seconds, np.float32)
    if len(times) != len(grids[1]):
        raise InputError(f"second_per_grid_ts: got {len(times)} values; expected one per video ({len(grids[1])})")
    pads = (rule.image_token, rule.video_token, rule.audio_token)
    left: dict[str, list[Any]] = {
        "image": [(grid, None) for grid in grids[0]],
        "video": list(zip(grids[1], times, strict=True)),
        "audio": list(sounds),
    }

    def take(kind: str, at: int) -> tuple[np.ndarray, int | None]:
        """Returns the positions of the next image, video or sound, from 0, and how far it moves the counter, or None
        where that is by its last token.
        """
        if not left[kind]:
            raise InputError(f"prompt: got placeholders for {kind} at index {at}; expected no more than sizes of them")
        size = left[kind].pop(0)
        if kind == "audio":
            return np.repeat(np.arange(size, dtype=number)[:, None], 3, axis=1), None
        (count, height, width), second = size
        if min(count, height, width) <= 0 or height % rule.merge or width % rule.merge:
            raise InputError(f"grid: got {size[0]}; expected a positive multiple of the merge size {rule.merge}")
        sides = (np.arange(height // rule.merge), np.arange(width // rule.merge))
        block = np.stack(np.meshgrid(_times(count, second, rule), *sides, indexing="ij"), axis=-1)
        moves = max(map(len, sides)) if kind == "image" or rule.video_rule == "hf5" else None
        return block.reshape(-1, 3).astype(number), moves

    positions, cursor, place, joint = np.zeros((len(input_ids), 3), number), 0, number(0), False
    while cursor < len(input_ids):
        token, moves = int(input_ids[cursor]), None
        if token not in pads:
            # Text up to the next placeholder.
            more = np.flatnonzero(np.isin(input_ids[cursor:], [pad for pad in pads if pad is not None]))
            stop = cursor + int(more[0]) if more.size else len(input_ids)
            steps = np.arange(stop - cursor, dtype=number)
            opens = stop - cursor > 1 and tuple(input_ids[stop - 2 : stop].tolist()) == rule.opening
            if not rule.fractional:
                # The two tokens behind a video with its sound share a position, then those before the next.
                steps[1:] -= joint
                steps[-1:] -= opens and stop < len(input_ids)
            joint = opens
            positions[cursor:stop] = (steps + place)[:, None]
        else:
            kinds = ("video", "audio") if joint else (_KINDS[pads.index(token)],)
            parts = [take(kind, cursor) for kind in kinds]
            stop = cursor + sum(len(part) for part, _ in parts)
            run = input_ids[cursor:stop]
            for kind, (part, _) in zip(kinds, parts, strict=True):
                pad = pads[_KINDS.index(kind)]
                found = np.flatnonzero(run == pad)
                if len(found) != len(part):
                    raise InputError(
                        f"{kind}: got {len(found)} placeholders {pad} from index {cursor}; expected {len(part)}"
                    )
                positions[cursor + found] = part + place
            moves = None if joint else parts[0][1]
        # A run's last token is its farthest; beside it a sound may leave rows of a video ahead, as in transformers.
        place, cursor = positions[stop - 1].max() + number(1) if moves is None else place + number(moves), stop

    for kind, sizes in left.items():
        if sizes:
            raise InputError(f"{kind}: got sizes of {len(sizes)} more; expected as many as the prompt has places for")
    return positions.astype(np.float32 if rule.fractional else np.int32)


def _times(count: int, second: np.float32 | None, rule: PositionRule) -> np.ndarray:
    """Returns the time of each temporal patch, counted from the first; without seconds 0, 1, 2, …"""
    if second is None:
        return np.arange(count)
    # Rounded in float32 as torch does, in the order in which each version multiplies; then truncated.
    with np.errstate(over="ignore", invalid="ignore"):
        steps, rate = np.arange(count, dtype=np.float32), np.float32(rule.rate)
        times = steps * second * rate if rule.video_rule == "max" else steps * (rate * second)
    if not (np.abs(times) < POSITION_LIMIT).all():
        raise InputError(
            f"video: got {count} steps of {float(second):g} seconds at {rule.rate} positions per second; expected "
            f"positions below {POSITION_LIMIT}"
        )
    return times if rule.fractional else times.astype(np.int64)
