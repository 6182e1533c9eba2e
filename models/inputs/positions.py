"""Three-dimensional positions (time, height, width) of Qwen2.5-VL's M-RoPE, counted on the host with NumPy.

Text advances all three axes together. An image of h×w merged patches at place p has time p, height p + row and
width p + column, and the text after it goes on at p + max(h, w): an image moves the counter by its largest extent, not
by its number of tokens. Where a video's following text goes differs by version, see `get_rope_positions`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Int32

from kvpatch_jax.core import POSITION_LIMIT
from kvpatch_jax.errors import InputError

VideoRule = Literal["max", "hf5"]
Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class PositionConfig:
    """What positions depend on.

    Attributes:
      image_token_id: id of the image pad token.
      video_token_id: id of the video pad token.
      merge_size: patches per merged token along height and along width.
      tokens_per_second: positions on the time axis per second of video.
    """

    image_token_id: int = 151655
    video_token_id: int = 151656
    merge_size: int = 2
    tokens_per_second: int | float = 4


def get_rope_positions(
    input_ids: Int[np.ndarray, " T"],
    image_grid_thw: Int[np.ndarray, "images 3"] | None,
    video_grid_thw: Int[np.ndarray, "videos 3"] | None,
    second_per_grid_ts: Float[np.ndarray, " videos"] | None,
    config: PositionConfig,
    video_rule: VideoRule = "max",
) -> tuple[Int32[np.ndarray, "T 3"], int]:
    """Returns positions of a prompt, as transformers' `get_rope_index` counts them.

    Args:
      input_ids: one prompt without padding; pads are counted off against the grids in order.
      image_grid_thw: (time, height, width) of each image, in patches before merging.
      video_grid_thw: the same for each video.
      second_per_grid_ts: seconds per temporal patch of each video; None means 1.
      config: token ids, merge size, tokens per second.
      video_rule: where text after a video goes on. "max": one past the largest position of any axis (the authors' code
        and transformers ≤ 5.2). "hf5": max(h, w) past the video's start (transformers ≥ 5.3), which a long video's time
        axis overtakes. Images are alike under both.

    Returns:
      Positions int32 [T, 3] (time, height, width), and rope_delta: the largest position + 1 − T, so that the token at
      index i ≥ T decodes at i + rope_delta on every axis.

    Raises:
      InputError: pads and grids do not match, or a grid is not a multiple of the merge size.
    """
    if video_rule not in ("max", "hf5"):
        raise InputError(f"video_rule: got {video_rule!r}; expected 'max' or 'hf5'")

    images, videos = _rows(image_grid_thw), _rows(video_grid_thw)
    seconds = np.ones(len(videos), np.float32) if second_per_grid_ts is None else second_per_grid_ts
    if len(seconds) != len(videos):
        raise InputError(f"second_per_grid_ts: got {len(seconds)} values; expected one per video ({len(videos)})")
    each_second = iter(np.asarray(seconds, np.float32))
    pieces, place = [np.zeros((0, 3), np.int32)], 0

    for kind, part in _segments(input_ids, images, videos, config):
        if isinstance(part, int):
            pieces.append(_text(part) + place)
            place += part
            continue

        second = float(next(each_second)) if kind == "video" else None
        steps = time_steps(part[0], second, config.tokens_per_second, video_rule)
        block = grid_positions(part, config.merge_size, steps)
        pieces.append(block + place)
        place += _extent(block, part, config.merge_size, kind == "video" and video_rule == "max")

    positions = np.concatenate(pieces).astype(np.int32)
    return positions, int(positions.max(initial=-1)) + 1 - len(input_ids)


def _rows(grids: np.ndarray | None) -> list[Grid]:
    return [] if grids is None else [(int(t), int(h), int(w)) for t, h, w in np.asarray(grids).tolist()]


def _segments(
    input_ids: np.ndarray, images: list[Grid], videos: list[Grid], config: PositionConfig
) -> Iterator[tuple[str, int | Grid]]:
    """Yields the prompt in order: ("text", tokens), ("image", grid), ("video", grid); pads are held against the
    grids.
    """
    kinds = {config.image_token_id: ("image", images), config.video_token_id: ("video", videos)}
    used = dict.fromkeys(kinds, 0)
    pads = np.append(np.flatnonzero(np.isin(input_ids, list(kinds))), len(input_ids))
    cursor = 0

    while cursor < len(input_ids):
        text = int(pads[np.searchsorted(pads, cursor)]) - cursor
        if text:
            yield "text", text
            cursor += text
            continue

        token = int(input_ids[cursor])
        kind, grids = kinds[token]
        if used[token] == len(grids):
            raise InputError(
                f"prompt: got pads for {kind} {used[token]}; expected as many as the {len(grids)} {kind} grids"
            )

        # The pads of a grid stand side by side. The −1 below is no token, so that a run cut short is counted too.
        grid = grids[used[token]]
        count = grid[0] * grid[1] * grid[2] // config.merge_size**2
        run = input_ids[cursor : cursor + count]
        if len(run) < count or not np.all(run == token):
            found = int(np.argmax(np.append(run, -1) != token))
            raise InputError(f"grid {grid}: got {found} pad tokens {token} from index {cursor}; expected {count}")
        yield kind, grid
        # A grid below one merged patch has no pads, and is refused by who counts it: here the walk only has to end.
        used[token], cursor = used[token] + 1, cursor + max(count, 1)

    for token, (kind, grids) in kinds.items():
        if used[token] != len(grids):
            raise InputError(f"{kind} grids: got {len(grids)}; expected {used[token]}, for which the prompt has pads")


def grid_positions(grid: Grid, merge: int, steps: np.ndarray, number: type = np.int32) -> np.ndarray:
    """Returns positions [t·h·w, 3] of merged patches in raster order, from 0, of this type.

    Raises:
      InputError: a grid that is not a positive multiple of the merge size.
    """
    height, width = grid[1:]
    if min(grid) <= 0 or height % merge or width % merge:
        raise InputError(f"grid: got {grid}; expected a positive multiple of the merge size {merge}")
    axes = np.meshgrid(steps, np.arange(height // merge), np.arange(width // merge), indexing="ij")
    return np.stack(axes, axis=-1).reshape(-1, 3).astype(number)


def time_steps(
    count: int,
    seconds: float | np.floating | None,
    rate: int | float,
    video_rule: VideoRule = "max",
    number: type = np.int32,
) -> np.ndarray:
    """Returns the time of each temporal patch, counted from the first, as numbers of this type; without seconds 0, 1,
    2, …

    Raises:
      InputError: times that are no positions.
    """
    if seconds is None:
        return np.arange(count)
    # Rounded in float32 as torch does, in the order in which each version multiplies; then truncated.
    with np.errstate(over="ignore", invalid="ignore"):
        steps, second, each = np.arange(count, dtype=np.float32), np.float32(seconds), np.float32(rate)
        times = steps * second * each if video_rule == "max" else steps * (each * second)
    if not (np.abs(times) < POSITION_LIMIT).all():
        raise InputError(
            f"video: got {count} steps of {float(seconds):g} seconds at {rate} positions per second; expected "
            f"positions below {POSITION_LIMIT}"
        )
    return times.astype(number)


def _extent(block: np.ndarray, grid: Grid, merge: int, by_time: bool) -> int:
    """Returns how far a grid moves the counter: by the larger of its sides, or by its time axis too."""
    return int(block.max()) + 1 if by_time else max(grid[1:]) // merge


def _text(length: int) -> np.ndarray:
    return np.repeat(np.arange(length, dtype=np.int32)[:, None], 3, axis=1)
