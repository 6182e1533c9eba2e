"""How many examples a property draws whose examples are dear: compiled programs, say."""

import hypothesis


def examples(count: int) -> hypothesis.settings:
    """Draws at most `count` examples by default, and forty times as many in the nightly profile."""
    return hypothesis.settings(max_examples=count * hypothesis.settings.default.max_examples // 25)
