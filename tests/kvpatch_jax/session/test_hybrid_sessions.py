"""Sessions over a hybrid model (a tiny Qwen3.5): what its linear layers hold is composed of the pieces that are there.

The oracle is plain prefills over contiguous contexts, whose transitions are composed by definition.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from session_cases import QUESTION, logits, worded
from window_oracle import NaivePart, tiny, transition_behind

import kvpatch_jax as kvp
from kvpatch_jax.session import embedded

BAR = 2e-5
QUESTIONS = (QUESTION, "w9 w30 w31 w32", "w40 w8")


@pytest.fixture(scope="module")
def backbone() -> Any:
    return worded(tiny("hybrid"))


def image_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (24, 24, 3), np.uint8)


class Oracle:
    """Images that were prefilled one behind the other, in any order and number afterwards."""

    def __init__(self, backbone: Any):
        self.backbone = backbone
        self.parts: dict[int, NaivePart] = {}

    def context(self, order: list[int]) -> tuple[dict[str, Any] | None, int]:
        """What these images are as a context, and where it ends."""
        layout, start, turned = self.backbone.layout, 0, []
        for seed in order:
            part = self.parts[seed]
            turned.append(kvp.to_engine(layout, part.kv, np.asarray(part.tokens.positions)[0], start))
            start += part.span
        if not turned:
            return None, 0
        rows = [channel.name for channel in layout.token_channels]
        context = {name: jnp.concatenate([kv[name] for kv in turned], axis=2) for name in rows}
        return context | transition_behind(layout, [self.parts[seed] for seed in order]), start

    def add(self, seed: int, behind: list[int]) -> None:
        tokens = self.backbone.embed(**self.backbone.prepare([image_of(seed)]))
        context, start = self.context(behind)
        kv = self.backbone.prefill(tokens.shift(start), context).kv
        self.parts[seed] = NaivePart(str(seed), tokens, 0, {name: np.asarray(value) for name, value in kv.items()})

    def logits(self, order: list[int]) -> np.ndarray:
        context, start = self.context(order)
        asked = embedded(self.backbone, [QUESTION])
        return np.asarray(self.backbone.prefill(asked.tokens.take(0, asked.length).shift(start), context).logits)


def expect(session: kvp.Session, oracle: Oracle, order: list[int]) -> None:
    found, expected = logits(session), oracle.logits(order)
    assert np.abs(found - expected).max() <= BAR * np.abs(expected).max(), order


@pytest.mark.slow
def test_images_that_slide_change_places_and_return_are_served_as_they_were_computed(backbone: Any, tmp_path: Path):
    oracle = Oracle(backbone)
    for seed in range(4):
        oracle.add(seed, list(range(seed)))
    with kvp.Session(backbone, lead=0) as session:
        for seed in range(4):
            session.add(image_of(seed), order_free=True)
        first, second, third, fourth = session.ids
        expect(session, oracle, [0, 1, 2, 3])
        assert {session.fidelity(id) for id in session.ids} == {"exact"}
        answers = [list(session.ask(question, steps=5, stop=()).ids) for question in QUESTIONS]
        assert len(set(map(tuple, answers))) > 1

        # What left is out of every state, and what stayed is as it was computed.
        session.evict(second)
        expect(session, oracle, [0, 2, 3])
        assert [session.fidelity(id) for id in session.ids] == ["exact", "survivor", "survivor"]
        session.reorder([fourth, third, first])
        expect(session, oracle, [3, 2, 0])
        session.save(tmp_path / "session")
        session.recall(second)
        oracle.add(1, [3, 2, 0])
        expect(session, oracle, [3, 2, 0, 1])
        executor = session.runtime.executor
        one = 4 * backbone.layout.transition_numbers
        assert executor.books.transition_bytes == 4 * one
        assert session.stats().transition_bytes == executor.transition_bytes > 4 * one
        assert f"states    {executor.transition_bytes / 2**20:.2f} MiB of transitions" in str(session.stats())

    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        expect(session, oracle, [3, 2, 0])
        fork = session.fork()
        fork.slide(1)
        expect(fork, oracle, [0])
        expect(session, oracle, [3, 2, 0])
        fork.close()


def test_a_stored_image_is_served_bit_for_bit(backbone: Any, tmp_path: Path):
    with kvp.ChunkStore(tmp_path / "chunks") as store, kvp.Session(backbone, store, lead=0) as session:
        session.add(image_of(7))
        first = logits(session)
    with kvp.ChunkStore(tmp_path / "chunks") as store, kvp.Session(backbone, store, lead=0) as session:
        session.add(image_of(7))
        assert session.stats().forwards == 0
        assert (logits(session) == first).all()


@pytest.mark.slow
def test_answers_in_company_are_those_of_sessions_alone(backbone: Any):
    """Three windows of one pool, asked at once, whose rows carry their states; alone each is asked by itself."""
    alone = []
    for number, question in enumerate(QUESTIONS):
        with kvp.Session(backbone, lead=0) as session:
            for seed in range(number):
                session.add(image_of(seed))
            alone.append(list(session.ask(question, steps=4 + number, stop=()).ids))

    with kvp.Sessions(backbone, pages=64, page_size=8) as sessions:
        opened = [sessions.open(lead=0) for _ in QUESTIONS]
        for number, session in enumerate(opened):
            for seed in range(number):
                session.add(image_of(seed))
        # Each joins the batch while the ones before it are being decoded, and leaves at another time.
        answers = []
        for number, (session, question) in enumerate(zip(opened, QUESTIONS, strict=True)):
            answers.append(session.ask(question, steps=4 + number, stop=()))
        assert [list(answer.ids) for answer in answers] == alone
        assert sessions.shared.decode_loop.batch.steps < sum(map(len, alone)) - len(alone)
