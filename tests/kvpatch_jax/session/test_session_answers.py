"""Answers of sessions: streams, sampling, stop tokens, audits, and whether a question needs a chunk."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import threading
from typing import Any

import numpy as np
import pytest
from session_cases import QUESTION, image_of, logits, state

from kvpatch_jax.errors import ConfigError, InputError, SessionClosedError
from kvpatch_jax.session import embedded


def test_an_answer_belongs_to_the_window_that_was_asked(backbone, session):
    session.add(image_of(0))
    whole = session.ask(QUESTION, steps=6)
    expected = session.runtime.executor.generate(
        session.window, *(lambda asked: (asked.tokens, 6, asked.length))(embedded(backbone, [QUESTION]))
    )
    assert whole.ids == tuple(expected[0])
    begun = session.ask(QUESTION, steps=6)
    session.add(image_of(1))
    session.add(image_of(2))
    session.add(image_of(3))
    assert begun.ids == whole.ids
    assert "".join(begun) == str(begun) == "".join(begun)
    assert begun.done
    assert session.ask(QUESTION, steps=0).ids == ()
    with pytest.raises(InputError, match="steps"):
        session.ask(QUESTION, steps=-1)


def test_sampled_answers_follow_the_seed(session):
    session.add(image_of(0))
    drawn = [session.ask(QUESTION, steps=6, temperature=2, top_p=0.9, seed=seed).ids for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    own = session.ask(QUESTION, steps=6, temperature=2.0, top_p=0.9)
    assert session.ask(QUESTION, steps=6, temperature=2.0, top_p=0.9, seed=own.seed).ids == own.ids
    assert session.ask(QUESTION, steps=6).seed is None


def test_answers_end_at_stop_tokens(session):
    session.add(image_of(0))
    free = session.ask(QUESTION, steps=6, stop=()).ids
    assert len(free) == 6
    assert session.ask(QUESTION, steps=6, stop=[free[2]]).ids == free[: free.index(free[2]) + 1]
    with pytest.raises(InputError, match="2 tokens"):
        session.ask(QUESTION, stop=["w5 w6"])
    with pytest.raises(InputError, match="stop token"):
        session.ask(QUESTION, stop=[10**6])
    with pytest.raises(ConfigError):
        session.ask(QUESTION, temperature=-1)


def test_an_answer_is_as_long_as_the_checkpoint_says_by_default(session, monkeypatch):
    """`max_new_tokens` of its generation_config.json; a model that ends no answer would go on to the limit."""
    session.add(image_of(0))
    monkeypatch.setattr(session.backbone, "answer_tokens", 3)
    assert len(session.ask(QUESTION, stop=()).ids) == 3
    assert len(session.ask(QUESTION, steps=5, stop=()).ids) == 5
    assert session.ask(QUESTION, steps=0).ids == ()


def test_an_answer_may_be_closed_and_read_by_several_threads(session):
    session.add(image_of(0))
    answer = session.ask(QUESTION, steps=6, stop=())
    answer.close()
    for _ in range(2):
        with pytest.raises(SessionClosedError):
            str(answer)
    shared = session.ask(QUESTION, steps=6, stop=())
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(shared.ids)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [shared.ids] * 4


@pytest.mark.slow
def test_an_audit_measures_the_difference_from_a_reprefill(session):
    for step in range(3):
        session.add(image_of(step))
    exact = session.ask(QUESTION, steps=4, stop=(), audit=True)
    assert exact.kl is not None
    assert exact.kl < 1e-8
    assert (exact.audit.flips, exact.audit.places, exact.audit.as_promised) == (0, 4, True)
    session.add(image_of(3))
    session.add(image_of(4))
    kept = session.ask(QUESTION, steps=4, stop=(), audit=True)
    assert kept.audit.as_promised
    assert kept.kl > exact.kl  # it remembers what has left
    assert session.ask(QUESTION, steps=4).kl is None


def test_needs_leaves_the_session_as_it_was(backbone, session):
    names = [session.add(image_of(step)) for step in range(3)]
    before, drawn = state(session)[:4], logits(session)
    found = session.needs(names[1], QUESTION, steps=3, erased=True)
    assert state(session)[:4] == before
    assert (logits(session) == drawn).all()
    assert found.verdict in ("needed", "canonical", "disposable")
    assert found.chunk in str(found) or found.chunk[:12] in str(found)

    out = session.fork()
    out.evict(names[1])
    bare = session.fork()
    window, edits = bare.window.bare(names[1])
    bare.runtime.run(window, edits)
    asked = embedded(backbone, [QUESTION])
    first = lambda window: np.asarray(bare.runtime.executor.prefill(window, asked.tokens, asked.length).logits[0, 0])
    for without, there in ((found.out, out.window), (found.bare, window)):
        own, other = (value.astype(np.float64) for value in (drawn[0, 0], first(there)))
        log = [value - np.log(np.exp(value - value.max()).sum()) - value.max() for value in (own, other)]
        assert np.isclose(without.first, (np.exp(log[0]) * (log[0] - log[1])).sum(), rtol=1e-3, atol=1e-9)
    out.close()
    bare.close()
