"""What a window calls exact is what a prefill of it computes; what it does not call so is not, on tiny backbones."""

import jax
import numpy as np
import pytest
from window_drill import BAR, Drill
from window_oracle import tokens_of

import kvpatch_jax as kvp
from kvpatch_jax.plan import PatchInventory, plan


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
def test_kv_prefilled_behind_an_approximate_piece_stays_approximate():
    """Two windows of the same pieces: in one of them those that had not seen c4 were run again before c3 came."""
    served, true = (Drill("gqa") for _ in range(2))
    for drill in (served, true):
        for id in ("c0", "c1", "c2"):
            drill.append(id)
        drill.insert("c4", "c1")
        if drill is true:
            drill.recompute("c1")
            drill.recompute("c2")
        drill.append("c3")
        for id in ("c4", "c1", "c2"):
            drill.evict(id)
    question = tokens_of(served.backbone, 9, 3)
    logits = [drill.paged.prefill(drill.window, question).logits[0, 0] for drill in (true, served)]
    logs = [np.asarray(jax.nn.log_softmax(each)) for each in logits]
    lost = float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())
    assert lost > 1e-4
    assert [drill.window.fidelity("c3") for drill in (true, served)] == ["survivor", "approximate"]
    assert [drill.window.as_promised for drill in (true, served)] == [True, False]
    entries = [piece.entry for piece in served.window.pieces]
    stock = PatchInventory(served.backbone.fingerprint)
    assert plan(served.window, entries, stored=stock, uncertified=True).kl is None
    assert [chunk.point for chunk in plan(served.window, entries, stored=stock).chunks] == ["leading", "prefill"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mla", "mrope", "window", "experts", "unlike"])
def test_exact_pieces_equal_a_prefill_of_the_window(name):
    drill = Drill(name)
    for id in ("c0", "c1", "c2", "c3"):
        drill.append(id)
    check(drill, "eeee")
    drill.reorder(["c2", "c1"])
    check(drill, "esaa")
    drill.reorder(["c1", "c2"])
    check(drill, "eeee")
    drill.evict("c1")
    check(drill, "ess")
    drill.recompute("c2")
    check(drill, "eea")
    drill.recall("c1", "prefill")
    check(drill, "eeaa")
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
