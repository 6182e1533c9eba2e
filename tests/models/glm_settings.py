"""Settings of GLM-4V's two video processors, for the frames of `tests/goldens/glm4v/frames.npz`."""

import json
from pathlib import Path
from typing import Any

from kvpatch_jax.models.families.glm4v import VIDEO_SETTINGS
from tests.goldens.load import golden_arrays

GLM_FRAMES = golden_arrays("glm4v", "frames")
KINDS = {"old": "Glm4vVideoProcessor", "new": "Glm46VVideoProcessor"}
SETTINGS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
SETTINGS |= {"size": {"shortest_edge": 1024, "longest_edge": 1600}}
VIDEO_FILE = "video_preprocessor_config.json"


def glm_settings(directory: Path, kind: str) -> Any:
    """Writes the settings of one kind, and returns them as the family reads them."""
    (directory / VIDEO_FILE).write_text(json.dumps(SETTINGS | {"video_processor_type": KINDS[kind]}))
    return VIDEO_SETTINGS(directory)
