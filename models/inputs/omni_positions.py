"""Three-dimensional positions of Qwen2.5-Omni and Qwen3-Omni (TMRoPE): the time axis counts seconds.

Text and audio advance all three axes together; an audio token is one position. A video's patches stand at their
seconds on the time axis, so that they line up with its audio, whose tokens are mixed among them. Qwen2.5-Omni truncates
these times to whole positions (25 a second); Qwen3-Omni (13 a second) does not, and what follows a video then has
fractional positions too.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int, Int32

from kvpatch_jax.errors import InputError

from .positions import grid_positions, time_steps


@dataclasses.dataclass(frozen=True)
class OmniPositionConfig:
    """What positions depend on.

    Attributes:
      image_token, video_token, audio_token: ids of the placeholders.
      vision_start_token, audio_start_token: ids before them; both, in this order, before a video with its audio.
      merge: patches per merged token along height and along width.
      rate: positions per second.
      fractional: Qwen3-Omni's rule. Else times are truncated, and the two tokens before a video with its audio share a
        position, as do the two behind it.
    """

    image_token: int
    video_token: int
    audio_token: int
    vision_start_token: int
    audio_start_token: int
    merge: int
    rate: int | float
    fractional: bool


def get_omni_positions(
    input_ids: Int[np.ndarray, " T"],
    images: Int[np.ndarray, "images 3"],
    videos: Int[np.ndarray, "videos 3"],
    seconds: Float[np.ndarray, " videos"],
    audio: list[int],
    config: OmniPositionConfig,
) -> tuple[Int32[np.ndarray, "T 3"] | Float32[np.ndarray, "T 3"], float]:
    """Returns positions of a prompt, as transformers' `get_rope_index` counts them, to the bit.

    Args:
      input_ids: one prompt without padding; placeholders are counted off against the sizes in order.
      images, videos: (time, height, width) of each, in patches before merging.
      seconds: per temporal patch of each video.
      audio: tokens of each audio, those of videos among them.

    Returns:
      Positions [T, 3] (time, height, width), int32, or float32 where they may be fractional; and rope_delta: the
      largest position + 1 − T.

    Raises:
      InputError: placeholders that do not match the sizes, or a grid that is not a multiple of the merge size.
    """
    number = np.float32 if config.fractional else np.int64
    pads = (config.image_token, config.video_token, config.audio_token)
    left: dict[str, list[Any]] = {
        "image": [(grid, 1.0) for grid in images.tolist()],
        "video": list(zip(videos.tolist(), np.asarray(seconds, np.float32), strict=True)),
        "audio": list(audio),
    }

    def take(kind: str, at: int) -> np.ndarray:
        """Returns the positions of the next image, video or audio, from 0."""
        if not left[kind]:
            raise InputError(f"prompt: got placeholders for {kind} at index {at}; expected no more than sizes of them")
        size = left[kind].pop(0)
        if kind == "audio":
            return np.repeat(np.arange(size, dtype=number)[:, None], 3, axis=1)
        grid, each = size
        times = time_steps(grid[0], each, config.rate, number=number)
        return grid_positions(tuple(grid), config.merge, times, number)

    positions, cursor, place, joint = np.zeros((len(input_ids), 3), number), 0, number(0), False
    while cursor < len(input_ids):
        token = int(input_ids[cursor])
        if token not in pads:
            # Text up to the next placeholder.
            more = np.flatnonzero(np.isin(input_ids[cursor:], pads))
            stop = cursor + int(more[0]) if more.size else len(input_ids)
            steps = np.arange(stop - cursor, dtype=number)
            marks = input_ids[stop - 2 : stop].tolist() if stop - cursor > 1 else []
            opens = marks == [config.vision_start_token, config.audio_start_token]
            if not config.fractional:
                # The two tokens behind a video with its audio share a position, then those before the next.
                steps[1:] -= joint
                steps[-1:] -= opens and stop < len(input_ids)
            joint = opens
            positions[cursor:stop] = (steps + place)[:, None]
        else:
            kinds = ("video", "audio") if joint else (("image", "video", "audio")[pads.index(token)],)
            parts = [take(kind, cursor) for kind in kinds]
            stop = cursor + sum(map(len, parts))
            run = input_ids[cursor:stop]
            for kind, part in zip(kinds, parts, strict=True):
                pad = pads[("image", "video", "audio").index(kind)]
                found = np.flatnonzero(run == pad)
                if len(found) != len(part):
                    raise InputError(
                        f"{kind}: got {len(found)} placeholders {pad} from index {cursor}; expected {len(part)}"
                    )
                positions[cursor + found] = part + place
        # A run's last token is its farthest; beside it audio may leave rows of a video ahead, as in transformers.
        place, cursor = positions[stop - 1].max() + number(1), stop

    for kind, sizes in left.items():
        if sizes:
            raise InputError(f"{kind}: got sizes of {len(sizes)} more; expected as many as the prompt has places for")
    delta = float(positions.max(initial=-1)) + 1 - len(input_ids)
    return positions.astype(np.float32 if config.fractional else np.int32), delta
