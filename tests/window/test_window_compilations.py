"""A loop with buckets compiles nothing once it is under way, however many sizes its images have."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import backbone_of

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.window import Entry, Executor, PatchFormer, PatchNote, Service, Window
from tests.shared.compilations import compilations
from tests.shared.memory_store import MemoryStore

SIZES = [(4, 5), (6, 10), (3, 9), (7, 7), (5, 5), (5, 10), (6, 5), (4, 12), (4, 6), (6, 6)]
"""Ten sizes of images in patches along both sides, of two buckets."""
WINDOW = 4


class Camera:
    """A loop that sees an image each step, asks about it, and brings back what left by the patch of its prefill."""

    def __init__(self, name: str):
        self.backbone, self.store = backbone_of(name), MemoryStore()
        self.executor = Executor(self.backbone, 96, 8, jnp.bfloat16, store=self.store)
        self.former = PatchFormer(self.backbone, self.store, 4)
        self.former.watch(self.executor)
        self.window = Window.empty(self.backbone)
        self.append("text", *self.embedded([5, 6, 7, 8, 9]), "text")

    def embedded(self, ids: list[int]) -> tuple[Tokens, int]:
        return self.backbone.embed_padded(np.array([ids], np.int32))

    def append(self, id: str, tokens: Tokens, length: int, kind: Any = "chunk") -> None:
        self.executor.provide(id, tokens=tokens, length=length, content=f"content of {id}")
        span = int(np.asarray(tokens.positions)[0, :length].max()) + 1
        self.window = self.window.append(Entry(id, f"content of {id}", length, span, kind, kind == "chunk"))

    def step(self, number: int) -> None:
        """Sees an image and asks; every other step recalls, every fourth reorders in a fork."""
        height, width = SIZES[number % len(SIZES)]
        pixels = np.random.default_rng(number).integers(0, 255, (14 * height, 14 * width, 3), np.uint8)
        self.window = self.window.slide(WINDOW - 1)
        self.append(f"image {number}", *self.backbone.embed_padded(**self.backbone.prepare([pixels])))
        question, count = self.embedded(list(range(5, 10 + number % 4)))
        self.executor.ask(self.window, question, count)
        self.former.flush()
        assert not self.former.errors
        self.executor.generate(self.window, question, 3, count)
        if number % 2 and self.window.gone:
            id = self.window.gone[-1]
            patch = next(patch for patch in self.store.patches if patch.metadata.chunk.id == id)
            self.window = self.window.recall(id, Service("patch", PatchNote.of(patch), allow_stale=True))
            self.executor.provide(id, patch=patch)
            self.executor.run(self.window)
        if number % 4 == 1:
            fork = self.window.reorder([self.window.ids[-1], *self.window.ids[1:-1]]).fork(str(number))
            self.executor.ask(fork, question, count)
            self.executor.release(fork.branch)


@pytest.mark.parametrize("name", ["mrope", pytest.param("hybrid", marks=pytest.mark.nightly)])
def test_nothing_compiles_after_the_tenth_step(name: str):
    camera = Camera(name)
    for number in range(10):
        camera.step(number)
    for number in range(10, 50):
        with compilations() as compiled:
            camera.step(number)
        assert not compiled, (number, compiled)
    camera.former.close()
    assert camera.former.done.patches > 40
