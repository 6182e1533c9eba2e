"""M-RoPE's positions by hand, and what is refused; `test_parity.py` holds every family's against transformers'."""

from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.models.inputs.positions import PositionRule, get_rope_positions

IMAGE, VIDEO, AUDIO, START, AUDIO_START = 301, 302, 305, 303, 306
OMNI = PositionRule(IMAGE, VIDEO, 2, 2, AUDIO, (START, AUDIO_START))


def test_an_image_moves_the_counter_by_its_longer_side():
    ids = np.array([1, 2, *[IMAGE] * 6, 3], np.int32)
    positions = get_rope_positions(ids, np.array([[1, 4, 6]]), None, None, OMNI)
    patches = [[2, 2 + row, 2 + column] for row in range(2) for column in range(3)]
    assert positions.tolist() == [[0] * 3, [1] * 3, *patches, [5] * 3]
    assert positions.dtype == np.int32


@pytest.mark.parametrize(("rule", "after"), [("max", 5), ("hf5", 2)])
def test_a_video_stands_at_its_seconds(rule, after):
    ids = np.array([1, *[VIDEO] * 3, 3], np.int32)
    how = PositionRule(IMAGE, VIDEO, 2, rate=3, video_rule=rule)
    positions = get_rope_positions(ids, None, np.array([[3, 2, 2]]), np.array([0.5]), how)
    assert positions[:, 0].tolist() == [0, 1, 2, 4, after]  # 0, 1.5 and 3 positions, truncated


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([AUDIO_START, AUDIO, AUDIO, 307], {"sounds": [3]}, "got 2 placeholders 305 from index 1; expected 3"),
        ([START, IMAGE], {"images": [[1, 3, 4]]}, "multiple of the merge size"),
        ([START, IMAGE], {"images": [[1, 4, 4]]}, "image: got 1 placeholders 301 from index 1; expected 4"),
        ([START, VIDEO, VIDEO], {"videos": [[2, 2, 2]], "seconds": [1e30]}, "expected positions below"),
    ],
)
def test_sizes_and_placeholders_must_match(ids, sizes, message):
    given: dict[str, Any] = {"images": None, "videos": None, "seconds": None, "sounds": []} | sizes
    arrays: dict[str, Any] = {
        name: value if value is None or name == "sounds" else np.array(value) for name, value in given.items()
    }
    with pytest.raises(InputError, match=message):
        get_rope_positions(np.array(ids, np.int32), rule=OMNI, **arrays)
