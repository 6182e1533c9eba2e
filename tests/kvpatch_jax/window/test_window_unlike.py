"""A window whose layers are of two kinds (Gemma 3's): every edit, against plain prefills over contiguous contexts.

The keys of the layers that slide turn by another rope than those of the others, in channels of their own.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import numpy as np
import pytest
from window_drill import Drill


@pytest.mark.parametrize("name", ["unlike", pytest.param("shared", marks=pytest.mark.slow)])
def test_every_edit_equals_a_prefill_over_contiguous_contexts(name: str):
    drill = Drill(name)
    layout = drill.backbone.layout
    assert [layout.layers_of(name) for name in layout.names] == [(1,), (1,), (0, 2), (0, 2)]
    assert layout.rope_of("k") != layout.rope_of("k_local")
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    drill.reorder(["c2", "c1"])
    drill.evict("c1")
    drill.recall("c1", "prefill")
    drill.patch_in_place("c1")
    drill.bare("c2")
    drill.recompute("c2", 1)
    drill.slide(2)
    drill.append("c3")
    drill.compact()
    drill.ask()


def test_only_keys_that_turn_are_moved_each_by_its_own_rope():
    """A slide rotates the survivors' keys; their values keep every bit."""
    drill = Drill("unlike")
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    held = [piece.slots for piece in drill.paged.books.ordered("")][2]

    def rows() -> dict[str, np.ndarray]:
        pool = drill.paged.pool.vectors.engine
        return {name: np.asarray(v).reshape(len(v), -1, *v.shape[3:])[:, held] for name, v in pool.items()}

    was = rows()
    drill.evict("c1")
    now = rows()
    moved = {name: not np.array_equal(was[name], now[name]) for name in was}
    assert moved == {"k": True, "v": False, "k_local": True, "v_local": False}
