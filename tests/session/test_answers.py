"""Answers: streams, sampling, stop tokens, texts around questions, audits, and whether a question needs a chunk."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from typing import Any

import numpy as np

from kvpatch_jax.session import embedded
from tests.shared.session_cases import QUESTION, Oracle, image_of, logits, state


def test_an_answer_belongs_to_the_window_that_was_asked(backbone, session):
    session.add(image_of(0))
    asked = embedded(backbone, [QUESTION])
    expected = session.runtime.executor.generate(session.window, asked.tokens, 6, asked.length)
    assert session.ask(QUESTION, steps=6, stop=()).ids == tuple(expected[0].tolist())
    begun = session.ask(QUESTION, steps=6, stop=())
    for number in (1, 2, 3):
        session.add(image_of(number))
    assert begun.ids == tuple(expected[0].tolist())
    assert "".join(begun) == str(begun) == "".join(begun)
    assert begun.done
    assert session.ask(QUESTION, steps=0).ids == ()


def test_sampled_answers_follow_the_seed(session):
    session.add(image_of(0))
    options: Any = {"steps": 6, "temperature": 2, "top_p": 0.9, "stop": ()}
    first, again, *others = (session.ask(QUESTION, **options, seed=seed).ids for seed in (1, 1, 2, 3))
    assert first == again
    assert len({first, *others}) > 1
    drawn = session.ask(QUESTION, **options)
    assert session.ask(QUESTION, **options, seed=drawn.seed).ids == drawn.ids
    assert session.ask(QUESTION, steps=1).seed is None


def test_an_audit_measures_the_difference_from_a_reprefill(backbone, session):
    for step in range(3):
        session.add(image_of(step))
    exact = session.ask(QUESTION, steps=4, stop=(), audit=True)
    assert exact.kl < 1e-8
    assert (exact.audit.flips, exact.audit.places, exact.audit.as_promised) == (0, 4, True)
    session.add(image_of(3))
    survived = session.ask(QUESTION, steps=4, stop=(), audit=True)
    truth = Oracle(backbone, image_of(0), image_of(2), image_of(3)).logits()[0, 0]
    assert np.isclose(survived.audit.first, divergence(truth, logits(session)[0, 0]), rtol=1e-3)
    # It remembers what has left, as it promises.
    assert survived.audit.as_promised
    assert survived.kl > 1e-6
    assert session.ask(QUESTION, steps=4).kl is None


def divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Returns KL(first ‖ second) of two vectors of logits."""
    logs = []
    for value in (first.astype(np.float64), second.astype(np.float64)):
        logs.append(value - value.max() - np.log(np.exp(value - value.max()).sum()))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())


def test_needs_compares_with_the_chunk_bare_and_out_and_leaves_everything_as_it_was(backbone, session):
    for step in range(3):
        session.add(image_of(step), id=f"shot {step}")
    before, served = state(session)[:4], logits(session)
    report = session.needs("shot 1", QUESTION, steps=3, erased=True)
    assert state(session)[:4] == before
    assert (logits(session) == served).all()
    assert "'shot 1'" in str(report)
    assert report.verdict in ("needed", "canonical", "disposable")

    def without_conditioning(oracle: Oracle, index: int, seed: int) -> None:
        oracle.naive.parts[index].kv = Oracle(backbone, image_of(seed)).naive.parts[0].kv

    bare, out, erased = (Oracle(backbone, *map(image_of, range(3))) for _ in range(3))
    without_conditioning(bare, 1, 1)
    out.remove("1")
    erased.remove("1")
    without_conditioning(erased, 1, 2)
    for ablated, oracle in ((report.bare, bare), (report.out, out), (report.erased, erased)):
        assert np.isclose(ablated.first, divergence(served[0, 0], oracle.logits()[0, 0]), rtol=1e-2, atol=1e-8)
