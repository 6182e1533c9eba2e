"""What an executor says that it did: costs from the layout and `forward_costs`, of what moved and nothing else."""
# pyright: reportArgumentType=false

import threading

import numpy as np
import pytest
from window_cases import Loop, patched

import kvpatch_jax as kvp
from kvpatch_jax.window import BARE, PREFILL, Action, Costs, PatchFormer, PatchNote, total
from tests.shared.memory_store import MemoryStore

KINDS = ["gqa", "kimi", "gemma3", "hybrid"]


class Sizes:
    """Bytes and numbers per token, read off the arrays of a pool."""

    def __init__(self, loop: Loop):
        pools, layout = loop.executor.pools, loop.backbone.layout
        size = {name: len(value) * value.shape[3] * layout.channel(name).width for name, value in pools.engine.items()}
        rotary = {
            name: len(value) * value.shape[3] * layout.channel(name).rotary for name, value in pools.source.items()
        }
        self.kv, self.turning = 4 * sum(size.values()), 4 * sum(size[name] for name in pools.source)
        self.rotary, self.state = sum(rotary.values()), 0
        if layout.parts:
            kv = loop.backbone.prefill(loop.question(), lengths=np.array([3], np.int32)).kv
            self.state = sum(kv[channel.name].nbytes for channel in layout.parts)


@pytest.mark.parametrize("name", KINDS)
def test_steps_state_what_was_computed_and_moved(name: str):
    loop = Loop(name)
    sizes, forward = Sizes(loop), loop.backbone.forward_costs

    def prefill(id: str, behind: int) -> Action:
        tokens = loop.window.piece(id).entry.tokens
        states = sizes.state * (2 if behind else 1)
        flops = forward.flops(tokens, behind) + forward.logit
        return Action("prefill", id, tokens, sizes.kv * (tokens + behind) + states, flops)

    def rotate(id: str) -> Action:
        tokens = loop.window.piece(id).entry.tokens
        return Action("rotate", id, tokens, 2 * sizes.turning * tokens, 3 * sizes.rotary * tokens)

    def done(step: tuple[Action, ...]) -> list[Action]:
        return [action for action in step if action.kind != "compose"]

    step = loop.append("c0", "c1", "c2", "c3")
    counts = [loop.window.piece(id).entry.tokens for id in loop.window.ids]
    assert done(step) == [prefill(f"c{index}", sum(counts[:index])) for index in range(4)]
    assert loop.run(loop.window) == ()
    assert done(loop.run(loop.window.evict("c3"))) == []
    assert done(loop.run(loop.window.evict("c1"))) == [rotate("c2")]
    assert done(loop.run(loop.window.serve({"c2": PREFILL}))) == [prefill("c2", counts[0])]
    assert done(loop.run(loop.window.recall("c1"))) == [prefill("c1", counts[0] + counts[2])]
    assert done(loop.run(loop.window.reorder(["c1", "c2"]))) == [rotate("c1"), rotate("c2")]

    # The same bytes for a canonical, whatever it is served with.
    loop.executor.provide("c1", chunk=loop.canonical("c1"))
    tokens, moved = counts[1], sizes.kv * counts[1] * 2 + 2 * sizes.state
    copy = Action("copy", "c1", tokens, moved, 3 * sizes.rotary * tokens)
    assert done(loop.run(loop.window.serve({"c1": BARE}))) == [copy]
    question = loop.question()
    _, step = loop.executor.ask(loop.window, question)
    behind = sum(counts[:3])
    flops = forward.flops(3, behind) + forward.logit
    assert done(step) == [Action("question", "", 3, sizes.kv * behind + sizes.state, flops)]
    bytes_, flops_ = moved + sizes.kv * behind + sizes.state, copy.flops + flops
    assert total((copy, *step), "copy", "question") == (tokens + 3, bytes_, flops_)


def test_a_patch_costs_its_factors_beside_the_pass():
    loop = Loop()
    loop.append("c0", "c5")
    chunk = loop.canonical("c2")
    patch = kvp.form_patch(chunk, loop.conditioned("c2"), 2, loop.window.target())
    note, sizes = PatchNote.of(patch), Sizes(loop)
    layout = loop.backbone.layout
    features = sum(layout.depth(channel.name) * channel.features for channel in layout.channels)
    assert (note.rank, note.nbytes, note.flops) == (2, patch.nbytes, 2 * 2 * features)
    loop.executor.provide("c2", chunk=chunk, patch=patch)
    (action,) = loop.append("c2", service=patched(note))
    nbytes, flops = 2 * sizes.kv * 8 + note.nbytes, (3 * sizes.rotary + note.flops) * 8
    assert action == Action("patch", "c2", 8, nbytes, flops)
    for worse in (kvp.keep_layers(patch, [1]), kvp.quantise(patch, "int8")):
        assert PatchNote.of(worse).rank == 0, "no bound of whole patches is for it"


def test_a_hybrid_composes_one_transition_more_for_one_piece_more():
    loop, composed = Loop("hybrid"), list[int]()
    sizes = Sizes(loop)
    flops = Costs.of(loop.backbone, np.float32).composing
    for id in ("c0", "c1", "c2", "c3"):
        _, step = loop.executor.ask(window := loop.window.append(loop.entry(id)), loop.question())
        loop.window = window
        composed += [action.flops // flops for action in step if action.kind == "compose"]
        assert all(action.bytes % sizes.state == 0 for action in step if action.kind == "compose")
    # c0 alone composes nothing; afterwards each window is the last one with a piece behind it.
    assert composed == [0, 1, 1, 1]
    _, step = loop.executor.ask(loop.window, loop.question())
    assert [action.kind for action in step] == ["question"]
    loop.executor.release("")
    assert loop.executor.state_bytes == 4 * sizes.state
    loop.executor.renew()
    assert loop.executor.state_bytes == 0


def test_four_threads_read_counters_while_runs_go_on():
    loop, done, errors, reads = Loop("hybrid"), threading.Event(), list[BaseException](), [0] * 4
    executor, size = loop.executor, 4 * loop.backbone.layout.transition_numbers
    former = PatchFormer(loop.backbone, MemoryStore(), None)
    former.watch(executor)

    def read(number: int) -> None:
        try:
            while not done.is_set():
                assert executor.state_bytes % size == 0
                assert executor.sources.canonical_bytes >= 0
                assert executor.slots.counts.max() <= 3
                assert former.done.canonicals <= 4
                for residents in executor.branches.values():
                    assert all(len(resident.slots) == len(resident.local) for resident in residents.values())
                reads[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for index in range(12):
        window, entry = loop.window.slide(2), loop.entry(f"c{index % 4}")
        executor.provide(entry.id, chunk=loop.canonical(entry.id))
        if entry.id not in window:
            window = window.recall(entry.id, BARE) if entry.id in window.gone else window.append(entry)
        loop.window = window
        executor.ask(loop.window, loop.question())
        fork = loop.window.fork("x")
        executor.run(fork)
        executor.release(fork.branch)
    done.set()
    for thread in threads:
        thread.join()
    former.close()
    assert not errors
    assert min(reads) > 5
