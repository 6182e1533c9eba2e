"""How many examples a property draws whose examples are dear: compiled programs, say."""

from typing import Any

import hypothesis


def examples(count: int) -> hypothesis.settings:
    """Draws at most `count` examples by default, and forty times as many in the nightly profile."""
    profile: Any = hypothesis.settings.default
    return hypothesis.settings(max_examples=count * profile.max_examples // 25)
