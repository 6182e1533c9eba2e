"""What a window calls exact is what a prefill of it computes; what it does not call so is not, on tiny backbones."""

import numpy as np
import pytest
from window_drill import BAR, Drill

import kvpatch_jax as kvp


def distances(drill: Drill) -> list[float]:
    """How far each piece's KV is from a prefill of the whole window, over the largest value of its channel."""
    parts = drill.model.parts
    whole = kvp.conditioned(drill.backbone, [part.tokens for part in parts])
    found = []
    for part, true in zip(parts, whole, strict=True):
        apart = [np.abs(part.kv[name] - np.asarray(value)).max() / np.abs(value).max() for name, value in true.items()]
        found.append(float(max(apart)))
    return found


def check(drill: Drill, expected: str) -> None:
    """Fidelities, by first letter, and that they are true. One behind what is not exact may be so by itself."""
    window = drill.window
    assert "".join(piece.fidelity[0] for piece in window.pieces) == expected
    found = distances(drill)
    assert all(far <= BAR for far, word in zip(found, expected, strict=True) if word == "e"), found
    first = len(expected) - len(expected.lstrip("e"))
    assert first == len(expected) or found[first] > 30 * BAR, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mla", "mrope", "window", "experts"])
def test_what_is_called_exact_is_a_prefill_of_the_window(name):
    drill = Drill(name, host=False)
    for id in ("c0", "c1", "c2", "c3"):
        drill.append(id)
    check(drill, "eeee")
    drill.bare("c1")
    check(drill, "eass")
    drill.condition("c1")
    drill.reorder(["c2", "c1"])
    check(drill, "esaa")
    drill.reorder(["c1", "c2"])
    check(drill, "eeee")
    drill.evict("c1")
    check(drill, "ess")
    drill.recompute("c2")
    check(drill, "ees")
    drill.recall("c1", "prefill")
    check(drill, "eess")
    drill.recompute("c3")
    drill.recompute("c1")
    check(drill, "eeee")
    drill.insert("c4", "c3")
    check(drill, "eeeaa")
    drill.evict("c4")
    check(drill, "eeee")
    drill.patch_in_place("c2")
    check(drill, "eass")
    drill.slide(1)
    check(drill, "es")
