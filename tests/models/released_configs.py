"""Fields of the `config.json` of released checkpoints that our readers need, by Hugging Face repository.

Published counts cover every parameter of the file, the tower included. Fields and counts are what is publicly known of
these releases; not every file was read from its own repository, and a total that fits is the evidence that the fields
are right. No weights of these were loaded.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Released(NamedTuple):
    """A released checkpoint: `config.json`, and the published billions of parameters (None: not known)."""

    config: dict[str, Any]
    published: float | None


_FILE = Path(__file__).with_name("released_configs.json")
RELEASED = {name: Released(**fields) for name, fields in json.loads(_FILE.read_text(encoding="utf-8")).items()}
