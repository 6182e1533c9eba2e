"""What windows say of their KV is true: exact pieces equal one prefill of the prompt, survivors the banded model."""

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import BAR, Loop, distance, same

import kvpatch_jax as kvp
from kvpatch_jax.window import PREFILL, Window

LAYOUTS = ["mrope", "kimi", "deepstack", "gemma3", "hybrid"]
"""GQA with positions of three axes; MLA; image features in several layers; layers of two kinds; linear attention."""


def kv_at(loop: Loop, window: Window, kv: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Phase-free KV of a window's tokens as a pool has it, by piece."""
    begin, rows = 0, dict[str, dict[str, np.ndarray]]()
    names = [channel.name for channel in loop.backbone.layout.token_channels]
    for piece in window.pieces:
        end = begin + piece.entry.tokens
        part = {name: np.asarray(value)[:, 0] for name, value in kv.items()}
        part |= {name: part[name][:, begin:end] for name in names}
        local = np.asarray(loop.tokens[piece.id].positions)[0]
        placed = kvp.to_engine(loop.backbone.layout, part, local, piece.start)
        rows[piece.id] = {name: np.asarray(placed[name]) for name in names}
        begin = end
    return rows


def check(loop: Loop, words: str, window: Window | None = None) -> None:
    """Checks the first letters of fidelities, and that they are true.

    Exact pieces equal a prefill of the whole window, and the first other piece does not. If all are exact, so is what
    a question reads, states of linear layers among it.
    """
    window = loop.window if window is None else window
    assert "".join(window.fidelity(id)[0] for id in window.ids) == words
    kv = loop.backbone.prefill(loop.prompt(*window.ids)).kv
    expected = kv_at(loop, window, kv)
    distances = [distance(loop.rows_of(id, window), expected[id]) for id in window.ids]
    exact = words.count("e")
    # The scan of a linear layer rounds otherwise in a prompt of another length.
    bar = 1e-4 if loop.backbone.layout.parts else BAR
    assert max(distances[:exact]) <= bar, distances
    if exact < len(words):
        assert distances[exact] > 30 * BAR, distances
        return
    logits = np.asarray(loop.backbone.prefill(loop.prompt(*window.ids, question=True)).logits)
    assert np.abs(loop.logits(window) - logits).max() <= bar * np.abs(logits).max()


@pytest.mark.parametrize("name", LAYOUTS)
def test_exact_pieces_equal_one_prefill_of_the_prompt(name: str):
    loop = Loop(name)
    loop.append("c0", "c1", "c2", "c3")
    check(loop, "eeee")
    loop.run(loop.window.reorder(["c2", "c1"]))
    check(loop, "esaa")
    loop.run(loop.window.reorder(["c1", "c2"]))
    check(loop, "eeee")

    # A fork goes its own way; its parent stays as it is.
    fork = loop.window.fork("x").slide(1)
    loop.executor.run(fork)
    check(loop, "es", fork)
    fork = fork.serve({"c3": PREFILL})
    loop.executor.run(fork)
    check(loop, "ee", fork)
    check(loop, "eeee")
    loop.executor.release(fork.branch)

    loop.run(loop.window.evict("c1"))
    check(loop, "ess")
    loop.run(loop.window.recall("c1"))
    check(loop, "esss")
    loop.run(loop.window.evict("c1").recall("c1", before="c2"))
    check(loop, "eeee")
    loop.run(loop.window.insert(loop.entry("c4"), before="c3"))
    check(loop, "eeeea")
    loop.run(loop.window.serve({"c3": PREFILL}))
    check(loop, "eeeee")


@pytest.mark.parametrize("name", ["mrope", "kimi", "deepstack"])
def test_survivors_equal_the_model_under_a_banded_mask(name: str):
    """One forward of the whole history, in which each token sees those of its chunk and of what the window had then."""
    loop, seen = Loop(name, lead=0), dict[str, set[str]]()
    history = [f"c{index}" for index in range(6)]
    for id in history:
        loop.run(loop.window.slide(2).append(loop.entry(id)))
        seen[id] = set(loop.window.ids)
    owner = np.repeat(history, [loop.tokens[id].embeddings.shape[1] for id in history])
    mask = np.array([[key in seen[query] for key in owner] for query in owner]) & np.tri(len(owner), dtype=bool)
    kv = loop.backbone.prefill(loop.prompt(*history), mask=mask[None, None]).kv
    survivors = np.isin(owner, loop.window.ids)
    expected = kv_at(loop, loop.window, {name: np.asarray(value)[:, :, survivors] for name, value in kv.items()})
    for id in loop.window.ids:
        assert loop.window.fidelity(id) == "survivor"
        assert distance(loop.rows_of(id), expected[id]) <= BAR


def test_one_forward_gives_no_survivor_behind_a_lead():
    """What leaves from between brings the rest closer: a later chunk is nearer to the lead than in the history."""
    distances = {}
    for lead in (0, 1):
        loop = Loop(lead=lead)
        loop.append("c0", "c1", "c2")
        loop.run(loop.window.evict(("c0", "c1")[lead]))
        loop.append("c3")
        history, left = ["c0", "c1", "c2", "c3"], ("c0", "c1")[lead]
        owner = np.repeat(history, [loop.tokens[id].embeddings.shape[1] for id in history])
        mask = np.tri(len(owner), dtype=bool) & ~((owner == "c3")[:, None] & (owner == left))
        kv = loop.backbone.prefill(loop.prompt(*history), mask=mask[None, None]).kv
        stay = np.isin(owner, loop.window.ids)
        expected = kv_at(loop, loop.window, {name: np.asarray(value)[:, :, stay] for name, value in kv.items()})
        assert loop.window.fidelity("c3") == "survivor"
        distances[lead] = distance(loop.rows_of("c3"), expected["c3"])
    assert distances[0] <= BAR
    assert distances[1] > 30 * BAR


def test_behind_a_piece_that_is_prefilled_again_nothing_survives_until_it_leaves():
    loop = Loop()
    loop.append("c0", "c1", "c2", "c3")
    loop.run(loop.window.evict("c1"))
    check(loop, "ess")
    before = loop.rows_of("c3")["v"]
    loop.run(loop.window.serve({"c2": PREFILL}))
    check(loop, "eea")
    loop.run(loop.window.evict("c2"))
    check(loop, "es")
    np.testing.assert_array_equal(loop.rows_of("c3")["v"], before)


@pytest.mark.parametrize("name", ["mrope", "gemma3"])
def test_a_hundred_rotations_in_bfloat16_are_one(name: str):
    """All begin at the phase-free source, so that none rounds what another has rounded."""
    loop, random = Loop(name, dtype=jnp.bfloat16), np.random.default_rng(0)
    loop.append("c0", "c1", "c2", "c3")
    first, rows = loop.window, loop.rows()
    other = Loop(name, dtype=jnp.bfloat16)
    other.append("c0", "c1", "c2", "c3")
    rotations = 0
    while rotations < 100:
        step = loop.run(loop.window.reorder([f"c{index}" for index in random.permutation([1, 2, 3])]))
        assert {action.kind for action in step} <= {"rotate"}
        rotations += len(step)
    other.run(other.window.reorder(loop.window.ids[1:]))
    assert same(loop.rows(), other.rows())
    loop.run(loop.window.reorder(["c1", "c2", "c3"]))
    assert (loop.window, same(loop.rows(), rows)) == (first, True)


def test_a_slide_rotates_keys_each_by_its_own_rope_and_leaves_every_value():
    loop = Loop("gemma3")
    layout = loop.backbone.layout
    assert layout.rope_of("k") != layout.rope_of("k_local")
    loop.append("c0", "c1", "c2")
    before = loop.rows_of("c2")
    loop.run(loop.window.evict("c1"))
    after = loop.rows_of("c2")
    moved = {name: not np.array_equal(value, after[name]) for name, value in before.items()}
    assert moved == {"k": True, "v": False, "k_local": True, "v_local": False}


def test_answers_behind_a_window_are_those_behind_its_prompt():
    """Token by token too, and those of a longer input are cut to its length."""
    loop = Loop()
    loop.append("c0", "c1", "c2")
    expected = loop.backbone.generate(loop.prompt("c0", "c1", "c2", question=True), 5).tolist()
    assert loop.executor.generate(loop.window, loop.question(), 5).tolist() == expected
    streamed = [piece.ids.tolist() for piece in loop.executor.stream(loop.window, loop.question(), 5)]
    assert np.array(streamed).T.tolist() == expected
    long = loop.question(6)
    cut = loop.executor.generate(loop.window, long, 5, 3)
    assert cut.tolist() == loop.executor.generate(loop.window, long.take(0, 3), 5).tolist()
    every = loop.executor.prefill(loop.window, long, 3, logits="all").logits
    last = loop.executor.prefill(loop.window, long, 3).logits
    assert np.abs(np.asarray(every[:, 2] - last[:, 0])).max() <= BAR * np.abs(np.asarray(last)).max()


def test_a_window_without_pieces_is_no_context():
    loop = Loop()
    assert loop.executor.context(loop.window) is None
    logits = np.asarray(loop.backbone.prefill(loop.question()).logits)
    assert np.abs(loop.logits() - logits).max() <= BAR * np.abs(logits).max()
