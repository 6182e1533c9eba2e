"""An answer is the model's over the window as it was asked, with what it refers to; its audits state the true loss."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalOperand=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.models import load
from kvpatch_jax.session import RetrievalQuery, embedded
from kvpatch_jax.store import Linker, StaticLibrary
from tests.goldens.load import write_chatting
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


def divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Returns KL(first ‖ second) of two vectors of logits."""
    logs = []
    for value in (first.astype(np.float64), second.astype(np.float64)):
        logs.append(value - value.max() - np.log(np.exp(value - value.max()).sum()))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())


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


def test_needs_compares_with_the_chunk_bare_and_out_and_leaves_everything_as_it_was(backbone, session):
    for step in range(3):
        session.add(image_of(step), id=f"shot {step}")
    before, served = state(session)[:4], logits(session)
    report = session.needs("shot 1", QUESTION, steps=3, erased=True)
    assert state(session)[:4] == before
    assert (logits(session) == served).all()

    def without_conditioning(oracle: Oracle, index: int, seed: int) -> None:
        oracle.naive.parts[index].kv = Oracle(backbone, image_of(seed)).naive.parts[0].kv

    bare, out, erased = (Oracle(backbone, *map(image_of, range(3))) for _ in range(3))
    without_conditioning(bare, 1, 1)
    out.remove("1")
    erased.remove("1")
    without_conditioning(erased, 1, 2)
    for ablated, oracle in ((report.bare, bare), (report.out, out), (report.erased, erased)):
        assert np.isclose(ablated.first, divergence(served[0, 0], oracle.logits()[0, 0]), rtol=1e-2, atol=1e-8)


@pytest.fixture
def linker(backbone, store):
    library = StaticLibrary(store, quota=1 << 20)
    library.put("A", image_of(8))
    library.put("B", image_of(9))
    return Linker(backbone.fingerprint, library)


def test_references_place_chunks_for_one_question(backbone, linker):
    with kvp.Session(backbone, keep=2, around=("w30 ", " w31"), linker=linker) as session:
        session.add(image_of(0))
        before = state(session)[:6]
        named = session.ask("w7 IMAGE#A w9 IMAGE#B w11", steps=4, stop=(), audit=True)
        assert named.recalled == ["IMAGE#A", "IMAGE#B"]
        assert named.kl < 1e-8
        asked = backbone.prepare([kvp.Text(" w31")])["input_ids"][0].tolist()
        with session.fork(keep=5) as branch:
            for item in ("w30 ", "w7 ", image_of(8), " w9 ", image_of(9), " w11"):
                branch.add(kvp.Text(item) if isinstance(item, str) else item)
            assert named.ids == branch.ask(asked, steps=4, stop=()).ids
        assert state(session)[:6] == before
        assert session.stats().forwards > 1, "the branch's work is the session's"


def test_a_retriever_is_asked_between_parts_of_an_answer(backbone, linker, tmp_path):
    queries: list[RetrievalQuery] = []

    def find(query: RetrievalQuery) -> list[str]:
        queries.append(query)
        assert query.hidden(1).shape == query.vector.shape
        return {2: ["shot 1"], 4: ["IMAGE#A"]}.get(len(query.ids), [])

    with kvp.Session(backbone, keep=1) as plain:
        for number in range(3):
            plain.add(image_of(number), id=f"shot {number}")
        plain.save(tmp_path / "session")
        expected = plain.ask(QUESTION, steps=6, stop=()).ids
        asked = backbone.prepare([QUESTION])["input_ids"][0].tolist()
        with plain.fork(keep=5) as branch:
            # Nothing leaves for what is recalled.
            branch.recall("shot 1")
            recalled = branch.ask([*asked, *expected[:2]], steps=2, stop=()).ids

    def retrieving(retriever: Any) -> kvp.Session:
        return kvp.Session.restore(tmp_path / "session", backbone, linker=linker, retriever=retriever)

    with retrieving(find) as session:
        before = state(session)[:6]
        answer = session.ask(QUESTION, steps=6, stop=(), look=2)
        assert answer.ids[:4] == (*expected[:2], *recalled)
        assert state(session)[:6] == before
    assert [(len(query.ids), query.gone) for query in queries] == [(n, ("shot 1",)) for n in (0, 2, 4)]
    assert answer.recalled == ["shot 1", "IMAGE#A"]

    for names in ("shot 1", ["IMAGE#C"]):
        with retrieving(lambda _, names=names: names) as session:
            before = state(session)[:6]
            with pytest.raises(InputError):
                session.ask(QUESTION, steps=2)
            assert state(session)[:6] == before


def test_a_chat_is_asked_as_the_checkpoint_was_trained(backbone, tmp_path: Path):
    """Answers are those of one message with these images: exact, for nothing has left."""
    chatting, images = load(write_chatting("qwen2_5_vl", tmp_path / "chat")), [image_of(0), image_of(1)]
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "What is this?"}]
    system = {"role": "system", "content": [{"type": "text", "text": "A page"}]}
    prompt = chatting.chat([system, {"role": "user", "content": content}])
    expected = np.asarray(chatting.generate(chatting.embed(**prompt), 4, stop=()))[0].tolist()
    with kvp.Session(chatting, keep=2, chat=True, lead="A page") as session:
        for image in images:
            session.add(image)
        assert list(session.ask("What is this?", steps=4, stop=()).ids) == expected
        session.add(image_of(2))
        assert (len(session.gone), session.window.pieces[0].entry.kind) == (1, "text"), "the template's front stays"
    with pytest.raises(InputError, match="without a chat template"):
        kvp.Session(backbone, chat=True)
    with pytest.raises(SessionError, match="expected"):
        kvp.Session(chatting, chat=True, around=("a", "b"))
