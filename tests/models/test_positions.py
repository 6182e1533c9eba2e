"""Positions against transformers' get_rope_index, and the authors' video rule."""

import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.models.inputs.positions import (
    PositionConfig,
    VideoRule,
    get_rope_positions,
)
from tests.goldens.load import golden_arrays

CONFIG = PositionConfig(image_token_id=301, video_token_id=302, merge_size=2, tokens_per_second=2)
TABLES = golden_arrays("qwen2_5_vl", "positions")
MIXTURES = sorted({name.split(".")[0] for name in TABLES})


def mixture(name: str) -> dict[str, np.ndarray]:
    return {key.split(".")[1]: value for key, value in TABLES.items() if key.split(".")[0] == name}


def positions_of(case: dict[str, np.ndarray], rule: VideoRule) -> tuple[np.ndarray, int]:
    return get_rope_positions(case["input_ids"], case["images"], case["videos"], case["seconds"], CONFIG, rule)


@pytest.mark.parametrize("name", MIXTURES)
def test_hf5_rule_equals_transformers(name: str) -> None:
    case = mixture(name)
    positions, delta = positions_of(case, "hf5")
    assert np.array_equal(positions, case["positions"])
    assert delta == case["delta"]


@pytest.mark.parametrize("name", ["image", "images"])
def test_rules_agree_on_images(name: str) -> None:
    case = mixture(name)
    assert np.array_equal(positions_of(case, "max")[0], case["positions"])


@pytest.mark.parametrize("name", ["text", "one_image", "two_images", "video"])
def test_positions_of_the_golden_prompts(name: str) -> None:
    case = golden_arrays("qwen2_5_vl", name)
    images, videos, seconds = (case.get(key) for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"))
    positions, delta = get_rope_positions(case["input_ids"], images, videos, seconds, CONFIG)
    assert np.array_equal(positions, case["position_ids"])
    assert delta == positions.max() + 1 - len(positions)
    assert delta == case.get("rope_delta", delta)


def test_authors_rule_goes_on_after_the_time_axis() -> None:
    ids = np.array([303] + [302] * 60 + [304], np.int32)
    grid = np.array([[10, 4, 6]], np.int32)
    ends = {}
    for rule in ("max", "hf5"):
        positions, _ = get_rope_positions(ids, None, grid, np.array([1.0], np.float32), CONFIG, rule)
        assert positions[1:-1, 0].tolist() == np.repeat(1 + 2 * np.arange(10), 6).tolist()
        ends[rule] = positions[-1].tolist()
    assert ends == {"max": [20] * 3, "hf5": [4] * 3}


@pytest.mark.parametrize(
    ("ids", "images", "videos", "message"),
    [
        ([1, 301, 301], [], [], "pads for image 0; expected as many as the 0 image grids"),
        ([1, 301, 301], [(1, 4, 4)], [], "got 2 pad tokens 301 from index 1; expected 4"),
        ([1, 301, 1, 301, 301], [(1, 4, 4)], [], "got 1 pad tokens 301 from index 1; expected 4"),
        ([1, 2], [(1, 2, 2)], [], "image grids: got 1; expected 0"),
        ([302, 302], [], [(1, 2, 5)], "expected a positive multiple of the merge size 2"),
    ],
)
def test_pads_and_grids_must_match(ids: list, images: list, videos: list, message: str) -> None:
    first, second = (np.array(grid, np.int32).reshape(-1, 3) for grid in (images, videos))
    with pytest.raises(InputError, match=message):
        get_rope_positions(np.array(ids, np.int32), first, second, None, CONFIG)


@pytest.mark.usefixtures("unchecked")
def test_grids_rules_and_seconds_that_do_not_fit_are_refused() -> None:
    ids, grid = np.array([302], np.int32), np.array([[1, 2, 2]], np.int32)
    with pytest.raises(InputError, match="second_per_grid_ts: got 2 values"):
        get_rope_positions(ids, None, grid, np.ones(2, np.float32), CONFIG)
    with pytest.raises(InputError, match="video_rule: got 'other'"):
        get_rope_positions(ids, None, grid, None, CONFIG, "other")  # pyright: ignore[reportArgumentType]


def test_an_empty_prompt_has_no_positions() -> None:
    positions, delta = get_rope_positions(np.zeros(0, np.int32), None, None, None, CONFIG)
    assert (positions.shape, delta) == ((0, 3), 0)
