"""Plans on executors and stores: what they predict is what is executed."""
# pyright: reportArgumentType=false

import dataclasses
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.plan import DeviceCosts, Goal, PatchInventory, Rates, plan
from kvpatch_jax.window import PatchNote
from tests.kvpatch_jax.window_drill import Drill
from tests.kvpatch_jax.window_oracle import added


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

    for executor in drill.executors:
        executor.forget("c1")  # what the stock has in memory is given again
        executor.provide("c1", tokens=drill.tokens["c1"])
        blind.provide(executor)
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


class DictStore:
    """A store in memory."""

    def __init__(self):
        self.chunks, self.patches = {}, []

    def get(self, id: str, backbone: str, *, lead: str | None = None) -> kvp.Chunk | None:
        return self.chunks.get(id)

    def put(self, chunk: kvp.Chunk) -> None:
        self.chunks[chunk.id] = chunk

    def put_patches(self, patches: list[kvp.Patch]) -> None:
        self.patches += patches

    def get_patches(self, served: Any) -> list[kvp.Patch]:
        same = [each for each in self.patches if each.metadata.chunk == served.chunk]
        same = [each for each in same if each.metadata.orbit == served.orbit]
        return [each for each in same if each.metadata.behind.difference(served.behind, served.orbit) is None]


def test_patches_of_a_store_are_looked_up_and_fetched():
    """Orbit patches too, and what is fetched is counted as it was predicted."""
    drill = Drill("gqa", host=False, store=None)
    for id in ("c0", "c1", "c2", "c4"):
        drill.append(id)
    drill.evict("c4")
    store = DictStore()
    drill.paged.store = store
    made = drill.patch("c4")
    wanted = [piece.entry for piece in drill.window.pieces] + [drill.make("c4")]
    orbit = kvp.Patch(
        made.factors,
        dataclasses.replace(
            made.metadata,
            orbit=True,
            antecedent=made.metadata.behind.sorted().ids,
            members=made.metadata.behind.sorted().members,
        ),
    )
    stock = PatchInventory.of(store, drill.backbone)
    assert plan(drill.window, wanted, stored=stock, uncertified=True).chunks[-1].point == "prefill"
    store.put_patches([orbit])
    store.put(drill.chunks["c4"])
    quick = DeviceCosts("a desk", None, {"Prefill": Rates(1.0)})
    planned = plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick, executor=drill.paged)
    assert planned.chunks[-1].point == "orbit"
    assert planned.chunks[-1].patch == PatchNote.of(orbit).digest
    drill.paged.forget("c4")
    planned = plan(drill.window, wanted, stored=stock, uncertified=True, costs=quick, executor=drill.paged)
    planned.provide(drill.paged)
    place = len(drill.model.parts)
    drill.model.place("c4", drill.tokens["c4"], place, added(drill.chunks["c4"], orbit))
    drill.do((planned.window, planned.edits))
    assert [type(edit).__name__ for edit in planned.edits] == ["Fetch", "Fetch", "ApplyPatch"]


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
    for executor in drill.executors:
        planned.provide(executor)
    assert folded.patch is not None
    drill.model.place("c2", drill.tokens["c2"], 2, added(drill.chunks["c2"], folded.patch))
    drill.do((planned.window, planned.edits))
