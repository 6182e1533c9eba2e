"""How DeepSeek-OCR-2 puts an image together (its tiles, then the view of the whole, then a separator), and DeepSeek-VL2
(the view, a separator, then the tiles).

A prompt's features are rows of two arrays, views [n,E,D] and tiles [t,F,D]; a plan says for each placeholder which row
it takes, or which learned vector.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from kvpatch_jax.errors import InputError

from ..inputs.pictures import COUNTS, GRIDS, TILES
from .image_family import check_placeholders

NEWLINE, SEPARATOR = 1, 2
"""In the plan's "kinds": learned vectors; 0 is a feature."""


def place_view(
    view: int, tile: int, grid: tuple[int, int], newline: bool, view_first: bool = False
) -> Int32[np.ndarray, "4 E"]:
    """Returns one image's tokens: of each the view (0), the tile in raster order, the place in either, and the kind;
    -1 for a view or tile that it is not of.

    Args:
      view, tile: features along a side of them. grid: rows and columns of tiles, (0, 0) for none.
      newline: a learned vector stands behind each row of features.
      view_first: view, separator, tiles; else tiles, view, separator.
    """
    rows, columns = grid
    parts = []
    for inner, outer, number in ((tile, (rows, columns), 1), (view, (1, 1), 0)):
        if not outer[0]:
            continue
        shape = (outer[0], inner, outer[1], inner)
        numbers = np.arange(outer[0] * outer[1]).reshape(outer[0], 1, outer[1], 1)
        places = np.arange(inner**2).reshape(1, inner, 1, inner)
        table = np.full((4, outer[0] * inner, outer[1] * inner), -1)
        table[number] = np.broadcast_to(numbers, shape).reshape(table.shape[1:])
        table[2], table[3] = np.broadcast_to(places, shape).reshape(table.shape[1:]), 0
        if newline:
            ends = np.array([-1, -1, 0, NEWLINE])[:, None, None]
            table = np.concatenate([table, np.broadcast_to(ends, (4, table.shape[1], 1))], axis=2)
        parts.append(table.reshape(4, -1))
    parts.append(np.array([[-1], [-1], [0], [SEPARATOR]]))
    if view_first:
        *tiles, whole, end = parts
        parts = [whole, end, *tiles]
    return np.concatenate(parts, axis=1).astype(np.int32)


def grids_of(arrays: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns rows and columns of each image's tiles; of tiles that are only counted, one column of them.

    Raises:
      InputError: neither, or what are no numbers of tiles.
    """
    grids, counts = arrays.get(GRIDS), arrays.get(COUNTS)
    if grids is None and counts is not None:
        counts = np.asarray(counts).reshape(-1)
        grids = np.stack([counts, np.minimum(counts, 1)], axis=1)
    if grids is None or np.ndim(grids) != 2 or np.shape(grids)[1] != 2 or np.min(grids, initial=0) < 0:
        raise InputError(f"{GRIDS} or {COUNTS}: got {grids!r:.80}; expected how many tiles each image has")
    return [(int(rows), int(columns)) for rows, columns in np.asarray(grids)]


def view_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns the placeholders of one image."""
    sides = _sides(config, arrays)
    return [config.image_token] * place_view(*sides, grids_of(arrays)[index], config.newline, config.view_first).shape[
        1
    ]


def view_plan(config: Any, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, Any] | None:
    """Plans views and tiles; the tiles' pixels go along."""
    views, tiles = arrays.get("pixel_values"), arrays.get(TILES)
    if views is None:
        return None
    grids = grids_of(arrays)
    count = sum(rows * columns for rows, columns in grids)
    for name, pixels, number in (("pixel_values", views, len(grids)), (TILES, tiles, count)):
        shape = np.shape(pixels) if pixels is not None else None
        expected = (number, config.vision.channels, "S", "S")
        fits = shape is None if not number else shape is not None and len(shape) == 4 and shape[2] == shape[3]
        if not fits or (shape is not None and shape[:2] != expected[:2]):
            raise InputError(f"{name}: got shape {shape}; expected {expected if number else None}")

    sides, parts, first = _sides(config, arrays), [], 0
    for number, (rows, columns) in enumerate(grids):
        own = place_view(*sides, (rows, columns), config.newline, config.view_first)
        own[0] = np.where(own[0] < 0, len(grids), number)
        own[1] = np.where(own[1] < 0, count, own[1] + first)
        parts.append(own)
        first += rows * columns

    views_of, tiles_of, places, kinds = np.concatenate(parts, axis=1).astype(np.int32)
    check_placeholders(input_ids, (config.image_token,), places.size, views, np.shape(views))
    plan = {"views": views_of, "places": places, "kinds": kinds}
    return plan if not count else plan | {"tiles": tiles_of, TILES: tiles}


def view_fills(config: Any) -> dict[str, int | str]:
    """Returns the plan's tables of views and of tiles."""
    return {"views": 1, "tiles": TILES}


def pack_views(
    views: Float[Array, "n E D"],
    tiles: Float[Array, "t F D"] | None,
    learned: Mapping[int, Array],
    plan: Mapping[str, Array],
) -> Float[Array, "1 T D"]:
    """Returns features in the plan's order with the learned vectors, by kind, among them."""
    packed = jnp.zeros((len(plan["kinds"]), views.shape[-1]), views.dtype)
    for rows, name in ((views, "views"), (tiles, "tiles")):
        if rows is not None:
            # A view or tile that a token is not of is one past the last.
            number = plan[name] * rows.shape[1] + jnp.where(plan[name] < len(rows), plan["places"], 0)
            packed += jnp.take(rows.reshape(-1, rows.shape[-1]), number, axis=0, mode="fill", fill_value=0)
    for kind, vector in learned.items():
        packed = jnp.where(plan["kinds"][:, None] == kind, vector.astype(packed.dtype), packed)
    return packed[None]


def _sides(config: Any, arrays: Mapping[str, Any]) -> tuple[int, int]:
    """Returns features along a side of a view and of a tile."""
    tiles = arrays.get(TILES)
    view = config.side_of(np.shape(arrays["pixel_values"])[-2], "pixel_values")
    return view, 0 if tiles is None else config.side_of(np.shape(tiles)[-2], TILES)
