"""Plans on executors and stores: the KV is where and what they say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.plan import DeviceCosts, Goal, Inventory, Plan, Rates, plan
from kvpatch_jax.window import Entry, Executor, PatchFormer, Window
from tests.plan.plan_cases import certificate, points, within
from tests.shared.window_oracle import Naive, added, expect_equal, span_of, tiny, tokens_of

SLOW = DeviceCosts("a desk", None, {"prefill": Rates(1.0)})
"""Forwards take so long that all else is quicker."""


class Loop:
    """Chunks c0, c1, … of one backbone, an executor, and what its pool must hold."""

    def __init__(self, name: str, store: kvp.ChunkStore):
        self.backbone, self.store = tiny(name), store
        self.executor = Executor(self.backbone, 48, 8, "float32", store=store)
        self.window, self.naive = Window.empty(self.backbone), Naive(self.backbone)
        losses = {("stored", 4): [0.1] * 8, ("bare", 0): [0.2] * 8, ("near", 0): [0.2] * 8}
        self.signed = certificate(losses, backbone=self.backbone.fingerprint)
        self.tokens: dict[str, Any] = {}
        self.chunks: dict[str, kvp.Chunk] = {}

    def entry(self, number: int) -> Entry:
        id = f"c{number}"
        if id not in self.tokens:
            tokens = self.tokens[id] = tokens_of(self.backbone, number, 5 + number % 3)
            kv = {name: np.asarray(value)[:, 0] for name, value in self.backbone.prefill(tokens).kv.items()}
            local, facts = np.asarray(tokens.positions)[0], (self.backbone.layout, self.backbone.fingerprint)
            self.chunks[id] = kvp.Chunk(kv, local, span_of(tokens), len(local), id, *facts, content=id)
            self.executor.provide(id, tokens=tokens, content=id)
        return Entry.of(self.chunks[id], order_free=True, modality="text")

    def plan(self, *numbers: int, goal: Goal | None = None, **options: Any) -> Plan:
        stock = Inventory.of(self.store, self.backbone, prefills=self.executor.sources.prefills)
        options = {"stored": stock, "prices": self.executor.costs, "certificate": self.signed} | options
        return plan(self.window, [self.entry(number) for number in numbers], goal, **options)

    def run(self, planned: Plan, restored: Any = None) -> None:
        """Runs a plan, and compares the KV of every piece with what it must be.

        Args:
          restored: KV of the stored prefill that the plan takes.
        """
        step = self.executor.run(planned.window)
        anew = {action.id for action in step if action.kind not in ("rotate", "compose")}
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


@pytest.fixture(params=["gqa", "hybrid"])
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loop]:
    with kvp.ChunkStore(tmp_path) as store:
        yield Loop(request.param, store)


@pytest.mark.nightly
def test_executed_plans_bring_the_kv_that_they_name(loop: Loop):
    """Prefilled, kept, recalled by a patch and bare, prefilled again in another order."""
    loop.run(loop.plan(0, 1, 2, 3, 4))
    loop.run(loop.plan(0, 4))
    exact = loop.plan(0, 4, 1, 2, 5)
    assert points(exact) == ["leading", "survivor", "prefill", "prefill", "prefill"]
    assert exact.as_promised

    loop.store.put_patches([kvp.form_patch(loop.chunks["c1"], loop.conditioned("c1"), 4, loop.window.target())])
    for id in ("c1", "c2"):
        loop.store.put(loop.chunks[id])
    mixed = loop.plan(0, 4, 1, 2, 5, goal=within(0.2), costs=SLOW)
    assert points(mixed) == ["leading", "survivor", "stored", "bare", "prefill"]
    loop.run(mixed)

    turned = loop.plan(0, 5, 1, 4)
    assert points(turned) == ["leading", "prefill", "prefill", "prefill"]
    loop.run(turned)
    assert loop.window.as_promised
    assert loop.plan(0, 5, 1, 4).window == loop.window


@pytest.mark.nightly
def test_what_traffic_left_serves_by_its_point(loop: Loop):
    """A stored prefill of this very history, and of another one."""
    former = PatchFormer(loop.backbone, loop.store, rank=0, prefill_bytes=1 << 30)
    former.watch(loop.executor)
    loop.run(loop.plan(0, 1, 2, 3))
    former.flush()
    assert not former.errors

    loop.run(loop.plan(0, 1, 2))
    prefill = {name: value[:, None] for name, value in loop.conditioned("c3").items()}
    same = loop.plan(0, 1, 2, 3)
    assert (points(same)[-1], same.as_promised) == ("restored", True)
    loop.run(same, prefill)

    loop.run(loop.plan(0, 2))
    near = loop.plan(0, 2, 3, goal=within(0.2), costs=SLOW)
    assert points(near) == ["leading", "survivor", "near"]
    loop.run(near, prefill)
