"""Plans on executors and stores: what they predict is what is executed."""
# pyright: reportArgumentType=false

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.plan import DeviceCosts, Goal, PatchInventory, Rates, plan
from tests.kvpatch_jax.window_drill import Drill
from tests.kvpatch_jax.window_oracle import added


@pytest.mark.slow
def test_executed_plans_cost_what_they_predicted():
    """Recalled by a patch, bare, by a forward; turned; a new one: against plain prefills, and the ledger."""
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2", "c3", "c4"):
        drill.append(id)
    drill.evict("c1", "c2", "c3")
    window, model = drill.window, drill.model
    stock = PatchInventory.of(None, drill.backbone)
    front = [piece.entry for piece in window.pieces]
    wanted = [*front, *(drill.make(id) for id in ("c1", "c2", "c5"))]

    exact = plan(window, wanted, stored=stock, executor=drill.paged)
    assert [chunk.point for chunk in exact.chunks] == ["leading", "survivor", "prefill", "prefill", "prefill"]
    assert exact.kl == 0.0
    patch = drill.patch("c1")
    stock.add(patch, drill.chunks["c1"], drill.chunks["c2"])
    quick = DeviceCosts("a desk", None, {"Prefill": Rates(1.0), "Recompute": Rates(1.0)})
    planned = plan(window, wanted, stored=stock, uncertified=True, costs=quick)
    assert [chunk.point for chunk in planned.chunks] == ["leading", "survivor", "stored", "prefill", "prefill"]
    assert planned.kl is None
    blind = plan(window, wanted, Goal(seconds=1.5), stored=stock, uncertified=True, costs=quick)
    assert [chunk.point for chunk in blind.chunks] == ["leading", "survivor", "stored", "bare", "prefill"]

    drill.paged.forget("c1")  # the stock provides again what it has in memory
    drill.paged.provide("c1", tokens=drill.tokens["c1"])
    blind.provide(drill.paged)
    place = len(model.parts)
    model.place("c1", drill.tokens["c1"], place, added(drill.chunks["c1"], patch))
    model.place(
        "c2", drill.tokens["c2"], place + 1, {k: np.asarray(v)[:, None] for k, v in drill.chunks["c2"].kv.items()}
    )
    model.place("c5", drill.tokens["c5"], place + 2)
    drill.do((blind.window, blind.edits))
    drill.ask()

    # The same window, in another order, with one that left and one that is served by a forward again.
    entries = {piece.id: piece.entry for piece in drill.window.pieces}
    order = [entries[id] for id in ("c0", "c5", "c1", "c4")]
    turned = plan(drill.window, order, stored=stock, executor=drill.paged)
    assert [chunk.point for chunk in turned.chunks] == ["leading", "prefill", "prefill", "prefill"]
    model.remove("c2")
    parts = {part.id: part for part in model.parts}
    model.parts = [parts["c0"]]
    model.close()
    for place, id in enumerate(("c5", "c1", "c4"), 1):
        model.place(id, drill.tokens[id], place)
    drill.do((turned.window, turned.edits))
    drill.ask()
    assert drill.window.as_promised


@pytest.mark.slow
def test_an_updated_patch_is_valid_behind_the_changed_antecedent():
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    old = drill.patch("c2")
    drill.evict("c2")
    drill.replace("c1", "c4")
    start = drill.window.next_start
    out = drill.model.run(drill.make("c2") and drill.tokens["c2"], start).kv
    conditioned = {name: np.asarray(value)[:, 0] for name, value in out.items()}
    correction = kvp.correction_patch(drill.chunks["c2"], old, conditioned, 4, drill.window.target())
    stock = PatchInventory.of(None, drill.backbone)
    stock.add(drill.chunks["c2"], old)
    wanted = [*(piece.entry for piece in drill.window.pieces), drill.make("c2")]
    quick = DeviceCosts("a desk", None, {"Prefill": Rates(1.0)})
    assert plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick).chunks[-1].point == "prefill"
    folded = stock.fold(old, correction)
    planned = plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick)
    assert planned.chunks[-1].point == "update"
    planned.provide(drill.paged)
    assert folded.patch is not None
    drill.model.place("c2", drill.tokens["c2"], 2, added(drill.chunks["c2"], folded.patch))
    drill.do((planned.window, planned.edits))
