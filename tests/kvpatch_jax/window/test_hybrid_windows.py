"""Windows of a hybrid model (Qwen3.5): every edit, against plain prefills and a fold of transitions by definition."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import pytest
from window_drill import Drill


@pytest.mark.parametrize("host", [True])
def test_every_edit_equals_a_prefill_over_contiguous_contexts(host: bool):
    drill = Drill("hybrid", host=host)
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    assert [piece.fidelity for piece in drill.window.pieces] == ["exact"] * 3
    drill.ask()
    drill.reorder(["c2", "c1"])
    drill.evict("c1")
    drill.recall("c1", "prefill")
    drill.patch_in_place("c1")
    drill.bare("c2")
    drill.condition("c2")
    drill.recompute("c2", 1)
    drill.fork("x")
    drill.slide(2)
    drill.append("c3")
    drill.compact()
    drill.ask()
    drill.join()
    drill.ask()
