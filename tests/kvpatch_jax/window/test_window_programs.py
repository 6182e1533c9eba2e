"""How many programs a loop compiles: none after warming up, however many lengths its chunks have."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import jax.numpy as jnp
import numpy as np
import pytest
from window_oracle import tiny

from kvpatch_jax.errors import InputError
from kvpatch_jax.window import Costs, Entry, PagedExecutor, PatchFormer, Window
from tests.compilations import compilations

LENGTHS = (9, 10, 11, 12, 13, 14, 15, 16, 17, 18)
"""Buckets of 16 and of 32."""


class MemoryStore:
    """A store in memory."""

    def __init__(self):
        self.chunks, self.patches = {}, {}

    def get(self, id, backbone):
        return self.chunks.get(id)

    def put(self, chunk):
        self.chunks[chunk.id] = chunk

    def get_patches(self, served):
        return [self.patches[served.chunk]] if served.chunk in self.patches else []

    def put_patches(self, patches):
        self.patches |= {patch.metadata.chunk: patch for patch in patches}


def embedded(backbone, length: int):
    return backbone.embed_padded(np.arange(3, 3 + length)[None])[0]


def loop(executor: PagedExecutor, lengths, shelf: MemoryStore, prefix: str = "") -> None:
    """Slides, appends, asks; brings what left back by the patch that its prefill gave."""
    backbone, window = executor.backbone, Window.empty(Costs.of(executor.backbone, jnp.float32))
    with PatchFormer(backbone, shelf, 4) as former:
        former.watch(executor)
        for step, length in enumerate(lengths):
            id = f"{prefix}{step}"
            window, slid = window.slide(2)
            window, placed = window.append(Entry(id, f"content {id}", length, length))
            executor.provide(id, tokens=embedded(backbone, length), length=length, content=f"content {id}")
            executor.run(window, (*slid, *placed))
            former.flush()
            question = embedded(backbone, 3 + step % 5)
            executor.prefill(window, question, 3 + step % 5)
            executor.generate(window, question, 2 + step % 3, 3 + step % 5)
            if window.evicted and step % 2:
                gone = window.evicted[-1].entry.id
                window, recalled = window.recall(gone, "patch", shelf.patches[gone], allow_stale=True)
                executor.run(window, recalled)
        assert not former.errors
    executor.formers.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "hybrid"])
def test_ten_lengths_compile_what_their_buckets_do(name: str):
    backbone = tiny(name)
    lengths = [length for pair in zip(LENGTHS[:5], reversed(LENGTHS[5:]), strict=True) for length in pair]
    executor = PagedExecutor(backbone, 24, 8, jnp.float32, store=MemoryStore())
    executor.warm_up([16, 32], [4, 8], keys=6 * 16, ranks=(4,), steps=4)
    before = executor.ledger
    # Forming, storing and digesting patches are not the executor's: chunks of each bucket show what they compile.
    loop(executor, (16, 17) * 4, executor.store, "first ")
    executor.release("")
    assert before.total.launches == 0
    with compilations() as compiled:
        loop(executor, lengths, executor.store)
    assert not compiled
    with pytest.raises(InputError, match="expected 0 to 192"):
        executor.warm_up([4], keys=193)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "hybrid"])
def test_asking_compiles_nothing_after_warm_up(name: str):
    backbone = tiny(name)
    executor, window = PagedExecutor(backbone, 24, 8, jnp.float32), Window.empty(Costs.of(backbone, jnp.float32))
    executor.warm_up([16, 32], [4, 8], keys=6 * 16, ask=True)
    given = {length: embedded(backbone, length) for length in (*LENGTHS, *range(3, 8))}
    with compilations() as compiled:
        for step, length in enumerate(LENGTHS * 2):
            window, slid = window.slide(2)
            window, placed = window.append(Entry(str(step), None, length, length))
            executor.provide(str(step), tokens=given[length], length=length)
            executor.ask(window, (*slid, *placed), given[3 + step % 5], 3 + step % 5)
    assert not compiled


@pytest.mark.slow
def test_lengths_of_one_bucket_share_programs_without_warming_up():
    """Ten lengths compile what two of them do."""
    counts = []
    for lengths in ((16, 18) * 5, LENGTHS):
        executor = PagedExecutor(tiny("gqa"), 24, 8, jnp.float32, store=MemoryStore())
        with compilations() as compiled:
            loop(executor, lengths, executor.store)
        counts.append(len(compiled))
    assert counts[1] <= counts[0] + 4, counts  # contexts of other sums fall into other buckets
