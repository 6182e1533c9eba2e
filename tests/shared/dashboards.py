"""What every dashboard of the project keeps to."""

import json
import re
from typing import Any


def check_panels(dashboard: dict[str, Any]) -> None:
    """Asserts that panels have names and places of their own, and use the variables that there are."""
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not covered & cells
        assert at["x"] + at["w"] <= 24
        cells |= covered
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(panels))) == variables
