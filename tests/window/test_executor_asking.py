"""A question in one forward with the last prefill gives the logits of two forwards, and leaves nothing behind."""
# pyright: reportArgumentType=false

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import BAR, Loop, Watched, backbone_of, owners, same

from kvpatch_jax.errors import InputError, KVPatchError, NotFiniteError
from kvpatch_jax.window import BARE, total


@pytest.mark.parametrize("name", ["gqa", "kimi", "deepstack", "gemma3", "hybrid"])
def test_asking_with_the_last_prefill_equals_asking_separately(name: str):
    watched = Watched(backbone_of(name))
    loop, other = Loop(name, backbone=watched.backbone), Loop(name)
    for each in (loop, other):
        each.append("c0", "c1")
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


def test_a_question_behind_what_needs_no_prefill_has_its_own_forward():
    watched = Watched(backbone_of("gqa"))
    loop = Loop(backbone=watched.backbone)
    loop.append("c0", "c1")
    loop.executor.provide("c1", chunk=loop.canonical("c1"))
    for window in (loop.window, loop.window.serve({"c1": BARE})):
        watched.forwards = 0
        logits, step = loop.executor.ask(window, loop.question())
        assert (watched.forwards, step[-1].kind) == (1, "question")
        assert np.array_equal(np.asarray(logits), loop.logits(window))


@pytest.mark.usefixtures("unchecked")
def test_a_refused_question_changes_nothing():
    loop = Loop()
    loop.append("c0", "c1", "c2")
    window, question = loop.window.evict("c1").append(loop.entry("c3")), loop.question()
    rows, counts = loop.rows(), loop.executor.slots.counts
    nan = question._replace(embeddings=jnp.full_like(question.embeddings, jnp.nan))
    for tokens, length, error in (
        (nan, None, NotFiniteError),
        (question, 0, InputError),
        (question, 4, InputError),
        (question.take(0, 0), None, KVPatchError),
        ("a text", None, InputError),
    ):
        with pytest.raises(error):
            loop.executor.ask(window, tokens, length)
        assert (loop.executor.slots.counts == counts).all()
        assert same(loop.rows(), rows)
