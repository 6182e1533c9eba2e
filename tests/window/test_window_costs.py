"""A run computes and moves what is new and nothing else, states its exact costs, and soon compiles nothing more."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import numpy as np
import pytest
from window_cases import BAR, Loop, patched

import kvpatch_jax as kvp
from kvpatch_jax.window import BARE, PREFILL, Action, Costs, PatchNote, total
from tests.shared.compilations import compilations
from tests.shared.memory_store import MemoryStore
from tests.shared.session_cases import PatchesAlone, image_of, settled, worded, words
from tests.shared.window_oracle import Watched, backbone_of, owners

NIGHTLY = pytest.mark.nightly


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


@pytest.mark.parametrize("name", ["hybrid", *(pytest.param(name, marks=NIGHTLY) for name in ("gemma3", "kimi"))])
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
    assert PatchNote.of(kvp.quantise(patch, "int8")).rank == 0, "no bound of whole patches is for it"


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


@pytest.mark.parametrize(
    "name", ["deepstack", "hybrid", *(pytest.param(name, marks=NIGHTLY) for name in ("mrope", "gemma3"))]
)
def test_asking_with_the_last_prefill_equals_asking_separately(name: str):
    watched = Watched(backbone_of(name))
    loop, other = Loop(name, backbone=watched.backbone), Loop(name)
    loop.append("c0", "c1")
    other.append("c0", "c1")
    # What slides, comes in and is asked: of one bucket and of two, cut to its length, behind text and image.
    for id, length, count in (("c2", 3, None), ("c3", 7, 2), ("c4", 21, 3)):
        window = loop.window.slide(1).append(loop.entry(id))
        question = loop.question(length)
        watched.forwards = 0
        logits, step = loop.executor.ask(window, question, count)
        assert watched.forwards == (2 if name == "hybrid" else 1)
        assert [action.kind for action in step if action.kind != "compose"][-2:] == ["prefill", "question"]
        costs, last = loop.backbone.forward_costs, window.pieces[-1].entry.tokens
        flops = costs.flops(last, window.tokens - last) + costs.flops(count or length, window.tokens)
        assert total(step, "prefill", "question")[2] == flops + watched.forwards * costs.logit

        other.run(other.window.slide(1).append(other.entry(id)))
        expected = np.asarray(other.executor.prefill(other.window, question, count).logits)
        assert logits.shape == expected.shape == (1, 1, expected.shape[-1])
        assert np.abs(np.asarray(logits) - expected).max() <= BAR * np.abs(expected).max()
        loop.window = window
        for name_, rows in loop.rows().items():
            assert np.abs(rows - other.rows()[name_]).max() <= BAR * np.abs(rows).max(), name_
        assert (owners(loop.executor) == loop.executor.slots.counts).all()
        assert loop.executor.slots.counts.sum() == window.tokens


@pytest.mark.parametrize("name", ["mrope", pytest.param("hybrid", marks=NIGHTLY)])
def test_nothing_compiles_after_the_tenth_step(name: str):
    """Of a session that sees images of four sizes (of two buckets), asks, brings back by patches, and forks."""
    backbone, store = worded(backbone_of(name)), PatchesAlone(MemoryStore())
    with kvp.Session(backbone, store, keep=3, lead=0, rank=4, reuse="patched", audit=0) as session:

        def step(number: int) -> None:
            height, width = ((56, 70), (84, 140), (42, 126), (98, 98))[number % 4]
            image = session.add(image_of(number, height, width), order_free=True)
            str(session.ask(words(5, 5 + number % 4), steps=3))
            settled(session)
            if number % 2:
                session.evict(image)
                session.recall(image)
                methods.add(session.window.pieces[-1].method)
            if number % 4 == 1:
                with session.fork() as fork:
                    fork.reorder(session.ids[-2:][::-1])
                    str(fork.ask(words(5, 8), steps=3))

        methods = set[str]()
        for number in range(10):
            step(number)
        for number in range(10, 18):
            with compilations() as compiled:
                step(number)
            assert not compiled, (number, compiled)
        assert methods >= {"patch"}
