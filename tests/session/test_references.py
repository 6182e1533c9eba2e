"""Chunks that a question refers to, or that a retriever finds, serve one answer."""
# pyright: reportArgumentType=false, reportOptionalOperand=false

from typing import Any

import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.session import RetrievalQuery
from kvpatch_jax.store import ExactRetriever, Linker, StaticLibrary
from tests.shared.session_cases import QUESTION, image_of, state


@pytest.fixture
def linker(backbone, store):
    library = StaticLibrary(store, quota=1 << 20)
    library.put("A", image_of(8))
    library.put("B", image_of(9))
    return Linker(backbone.fingerprint, library)


def answer_by_hand(session: kvp.Session, items: list[Any], question: Any, steps: int = 4) -> tuple[int, ...]:
    """Returns the answer behind items that are added on a branch."""
    with session.fork(keep=5) as branch:
        for item in items:
            branch.add(item)
        return branch.ask(question, steps=steps, stop=()).ids


def test_references_place_chunks_for_one_question(backbone, linker):
    with kvp.Session(backbone, keep=2, around=("w30 ", " w31"), linker=linker) as session:
        session.add(image_of(0))
        before = state(session)[:6]
        named = session.ask("w7 IMAGE#A w9 IMAGE#B w11", steps=4, stop=(), audit=True)
        assert named.recalled == ["IMAGE#A", "IMAGE#B"]
        assert named.kl < 1e-8
        items = [kvp.Text("w30 "), kvp.Text("w7 "), image_of(8), kvp.Text(" w9 "), image_of(9), kvp.Text(" w11")]
        asked = backbone.prepare([kvp.Text(" w31")])["input_ids"][0].tolist()
        assert named.ids == answer_by_hand(session, items, asked)
        assert session.ask("w7 IMAGE#A", steps=2, stop=()).recalled == ["IMAGE#A"]
        with pytest.raises(InputError, match="no library has it"):
            session.ask("w7 IMAGE#C")
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

        def retrieving(retriever: Any) -> kvp.Session:
            return kvp.Session.restore(tmp_path / "session", backbone, linker=linker, retriever=retriever)

        with retrieving(find) as session:
            before = state(session)[:6]
            answer = session.ask(QUESTION, steps=6, stop=(), look=2)
            ids = answer.ids
            assert state(session)[:6] == before
        assert [(len(query.ids), query.gone) for query in queries] == [(n, ("shot 1",)) for n in (0, 2, 4)]
        assert answer.recalled == ["shot 1", "IMAGE#A"]
        asked = backbone.prepare([QUESTION])["input_ids"][0].tolist()
        assert ids[:2] == expected[:2]
        with plain.fork(keep=5) as branch:
            # Nothing leaves for what is recalled.
            branch.recall("shot 1")
            assert ids[2:4] == branch.ask([*asked, *ids[:2]], steps=2, stop=()).ids

        closing = retrieving(lambda query: [] if not query.ids else closing.close() or [])
        answer = closing.ask(QUESTION, steps=6, stop=(), look=2)
        with pytest.raises(SessionError, match="got closed after"):
            str(answer)
        for names in ("shot 1", None, [7], [["shot 1"]]):
            with retrieving(lambda _, names=names: names) as session, pytest.raises(InputError, match="list of names"):
                session.ask(QUESTION, steps=2)

        nearest = ExactRetriever(len(queries[0].vector))
        nearest.add("IMAGE#B", queries[0].vector)
        with retrieving(nearest) as session:
            assert session.ask(QUESTION, steps=1).recalled == ["IMAGE#B"]
        for names, error in ((["IMAGE#C"], InputError), ("shot 1", InputError), (None, InputError)):
            with retrieving(lambda query, names=names: names) as session:
                before = state(session)[:6]
                with pytest.raises(error):
                    session.ask(QUESTION, steps=2)
                assert state(session)[:6] == before
