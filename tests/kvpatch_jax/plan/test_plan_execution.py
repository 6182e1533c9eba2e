"""Plans on executors and stores: what they predict is what is executed, and the KV is where and what they say."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.plan import DeviceCosts, Goal, PatchInventory, Plan, Rates, plan
from kvpatch_jax.window import Entry, Executor, PatchFormer, StoredPrefills, Window
from tests.kvpatch_jax.plan.plan_cases import certificate, points
from tests.kvpatch_jax.window_oracle import Naive, added, expect_equal, span_of, tiny, tokens_of

SLOW = DeviceCosts("a desk", None, {"prefill": Rates(1.0)})
"""Forwards take so long that all else is quicker."""


class Loop:
    """Chunks c0, c1, … of one backbone, an executor, and what its pool must hold."""

    def __init__(self, name: str, store: kvp.ChunkStore | None = None):
        self.backbone = tiny(name)
        self.executor = Executor(self.backbone, 48, 8, "float32", store=store)
        self.window, self.naive = Window.empty(self.backbone), Naive(self.backbone)
        self.signed = certificate(
            {("stored", 4): [0.1] * 8, ("bare", 0): [0.2] * 8, ("near", 0): [0.2] * 8, ("update", 4): [0.1] * 8},
            backbone=self.backbone.fingerprint,
        )
        self.tokens: dict[str, Any] = {}
        self.chunks: dict[str, kvp.Chunk] = {}

    def entry(self, number: int) -> Entry:
        id = f"c{number}"
        if id not in self.tokens:
            tokens = self.tokens[id] = tokens_of(self.backbone, number, 5 + number % 3)
            kv = {name: np.asarray(value)[:, 0] for name, value in self.backbone.prefill(tokens).kv.items()}
            local, span = np.asarray(tokens.positions)[0], span_of(tokens)
            chunk = kvp.Chunk(
                kv, local, span, len(local), id, self.backbone.layout, self.backbone.fingerprint, content=id
            )
            self.chunks[id] = chunk
            self.executor.provide(id, tokens=tokens, content=id)
        return Entry.of(self.chunks[id], order_free=True, modality="text")

    def plan(self, *numbers: int, kl: float | None = None, **options: Any) -> Plan:
        options = {"stored": PatchInventory.of(None, self.backbone), "executor": self.executor} | options
        entries = [self.entry(number) for number in numbers]
        return plan(self.window, entries, Goal(kl=kl), certificate=self.signed, **options)

    def run(self, planned: Plan, restored: Any = None) -> None:
        """Runs a plan, and compares what it took and the KV of every piece with what both must be.

        Args:
          restored: KV of the stored prefill that the plan takes.
        """
        planned.provide(self.executor)
        assert self.executor.run(planned.window) == planned.step
        anew = {action.id for action in planned.step if action.kind not in ("rotate", "compose")}
        self.naive.remove(*(part.id for part in self.naive.parts if part.id in anew or part.id not in planned.window))
        for index, piece in enumerate(planned.window.pieces):
            kv, chunk = None, self.chunks[piece.id]
            if piece.method == "patch":
                kv = added(chunk, self.executor.sources[piece.id].patches[piece.source or ""][0])
            elif piece.method == "bare":
                kv = {name: np.asarray(value)[:, None] for name, value in chunk.kv.items()}
            elif piece.method == "restored":
                kv = restored
            if piece.id in anew:
                self.naive.place(piece.id, self.tokens[piece.id], index, kv)
        self.window = planned.window
        expect_equal(self.executor, self.window, self.naive, 2e-5)

    def conditioned(self, id: str) -> dict[str, np.ndarray]:
        """KV of a forward behind the window."""
        out = self.naive.run(self.tokens[id], self.window.next_start).kv
        return {name: np.asarray(value)[:, 0] for name, value in out.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "hybrid"])
def test_executed_plans_cost_what_they_predicted(name: str):
    """Prefilled, kept, recalled by a patch and bare, prefilled again in another order."""
    loop = Loop(name)
    loop.run(loop.plan(0, 1, 2, 3, 4))
    loop.run(loop.plan(0, 4))
    exact = loop.plan(0, 4, 1, 2, 5)
    assert points(exact) == ["leading", "survivor", "prefill", "prefill", "prefill"]
    assert exact.as_promised

    stock = PatchInventory.of(None, loop.backbone)
    patch = kvp.form_patch(loop.chunks["c1"], loop.conditioned("c1"), 4, loop.window.target())
    stock.add(patch, loop.chunks["c1"], loop.chunks["c2"])
    mixed = loop.plan(0, 4, 1, 2, 5, kl=0.2, stored=stock, costs=SLOW)
    assert points(mixed) == ["leading", "survivor", "stored", "bare", "prefill"]
    assert {action.kind for action in mixed.step} >= {"patch", "copy", "prefill"}
    loop.run(mixed)

    turned = loop.plan(0, 5, 1, 4)
    assert points(turned) == ["leading", "prefill", "prefill", "prefill"]
    loop.run(turned)
    assert loop.window.as_promised
    assert loop.plan(0, 5, 1, 4).step == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "hybrid"])
def test_what_a_store_has_is_fetched_as_predicted(name: str, tmp_path: Path):
    """A patch with its canonical, then from memory; stored prefills of this very history and of another."""
    with kvp.ChunkStore(tmp_path, tenant="plans") as store:
        loop = Loop(name, store)
        former = PatchFormer(loop.backbone, store, rank=4, prefill_bytes=1 << 30)
        former.watch(loop.executor)
        loop.run(loop.plan(0, 1, 2, 3))
        former.flush()
        assert not former.errors

        patches = PatchInventory.of(store, loop.backbone)
        for kinds in (["fetch", "fetch", "patch"], ["patch"]):
            loop.run(loop.plan(0, 1, 2))
            stored = loop.plan(0, 1, 2, 3, kl=0.15, stored=patches, costs=SLOW)
            assert points(stored) == ["leading", "leading", "leading", "stored"]
            assert [action.kind for action in stored.step] == kinds
            loop.run(stored)

        prefills = StoredPrefills(store, loop.backbone.fingerprint, loop.executor.dtype)
        inventory = PatchInventory.of(store, loop.backbone, prefills=prefills)
        loop.run(loop.plan(0, 1, 2))
        prefill = {name: value[:, None] for name, value in loop.conditioned("c3").items()}
        same = loop.plan(0, 1, 2, 3, stored=inventory, costs=SLOW)
        assert (points(same)[-1], same.as_promised) == ("restored", True)
        assert [action.kind for action in same.step] == ["fetch", "copy"]
        loop.run(same, prefill)

        loop.run(loop.plan(0, 2))
        near = loop.plan(0, 2, 3, kl=0.2, stored=inventory, costs=SLOW)
        assert points(near) == ["leading", "survivor", "near"]
        assert [action.kind for action in near.step] == ["fetch", "copy"]
        loop.run(near, prefill)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "hybrid"])
def test_whatever_is_planned_takes_what_was_predicted(name: str):
    """Random orders of chunks that leave, return and are patched, on a window and a fork of it."""
    loop, draw = Loop(name), random.Random(7)
    stock = PatchInventory.of(None, loop.backbone)
    loop.executor.run(first := loop.plan(0, 1, 2).window)
    windows, kinds = [first, first.fork("side")], set()
    loop.executor.run(windows[1])
    for _ in range(24):
        branch = draw.randrange(2)
        loop.window = windows[branch]
        numbers = draw.sample(range(1, 6), draw.randint(1, 4))
        for number in numbers:
            chunk = loop.entry(number)
            if chunk.id not in loop.window and draw.random() < 0.5:
                canonical = loop.chunks[chunk.id]
                doubled = {name: 2 * np.asarray(value) for name, value in canonical.kv.items()}
                stock.add(canonical, kvp.form_patch(canonical, doubled, 4, loop.window.target()))
        costs, kl = draw.choice([SLOW, None]), draw.choice([None, 0.15, 0.3])
        planned = loop.plan(0, *numbers, kl=kl, stored=stock, costs=costs, uncertified=draw.random() < 0.5)
        planned.provide(loop.executor)
        assert loop.executor.run(planned.window) == planned.step
        kinds |= {action.kind for action in planned.step}
        windows[branch] = planned.window
    assert kinds >= {"prefill", "rotate", "copy", "patch"}


@pytest.mark.slow
def test_an_updated_patch_is_valid_behind_the_changed_antecedent():
    loop = Loop("gqa")
    loop.run(loop.plan(0, 1))
    loop.entry(2)
    old = kvp.form_patch(loop.chunks["c2"], loop.conditioned("c2"), 4, loop.window.target())
    loop.run(loop.plan(0, 4))
    correction = kvp.correction_patch(loop.chunks["c2"], old, loop.conditioned("c2"), 4, loop.window.target())
    stock = PatchInventory.of(None, loop.backbone)
    stock.add(loop.chunks["c2"], old)
    assert points(loop.plan(0, 4, 2, kl=0.15, stored=stock, costs=SLOW))[-1] == "prefill"
    stock.fold(old, correction)
    planned = loop.plan(0, 4, 2, kl=0.15, stored=stock, costs=SLOW)
    assert points(planned)[-1] == "update"
    loop.run(planned)
