"""Sessions over a store: what comes back and how, files to go on from, references, retrieval, compiles."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from session_cases import QUESTION, image_of
from window_oracle import tiny

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError, SessionError, UnknownReferenceError, WindowError
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, RankChoice, Rates
from kvpatch_jax.session import RetrievalQuery, session_file
from kvpatch_jax.store import ExactRetriever, Linker, StaticLibrary
from tests.compilations import compilations


@pytest.fixture(scope="module")
def store(backbone, tmp_path_factory):
    """What a session of three images left behind, patches and no prefills."""
    with kvp.ChunkStore(tmp_path_factory.mktemp("store")) as made:
        with kvp.Session(backbone, made, keep=1, rank=4, prefills=0) as session:
            for step in range(3):
                session.add(image_of(step), id=f"shot {step}")
            assert session.runtime.former is not None
            session.runtime.former.flush()
            assert not session.runtime.former.errors
            assert session.recall("shot 1")  # nothing vouches for patches: it is prefilled
            assert session.fidelity("shot 1") == "exact"
            stats = session.stats()
            assert (stats.hits, stats.misses, stats.stale) == (0, 1, 1)
        yield made


def loop(backbone: Any, store: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any, int]:
    """Three images and a question: what the session counted, the answer, and how often the tower ran."""
    ran, encode = [], backbone.programs.encode
    monkeypatch.setattr(backbone.programs, "encode", lambda *given: (ran.append(given), encode(*given))[1])
    with kvp.Session(backbone, store, keep=2, **options) as session:
        for step in range(3):
            session.add(image_of(step))
        towers = len(ran)
        answer = session.ask(QUESTION, steps=3, stop=(), audit=True)
        former = session.runtime.former
        assert former is not None
        former.flush()
        assert not former.errors
        monkeypatch.undo()
        return session.stats(), answer, towers


def test_exact_data_is_read_from_the_store_and_no_unusable_patch_is_formed(backbone, tmp_path, monkeypatch):
    with kvp.ChunkStore(tmp_path / "store") as own:
        (first, before, towers), (second, after, again) = (loop(backbone, own, monkeypatch) for _ in range(2))
        assert own.patch_count(chunk_id(backbone.fingerprint, image_of(1)), backbone.fingerprint) == 0
    assert (first.formed.patches, first.formed.canonicals, first.formed.forwards) == (0, 1, 0)
    assert (second.formed.patches, second.formed.canonicals, second.formed.forwards) == (0, 0, 0)
    assert (first.hits, first.forwards, towers) == (0, 3, 3)
    assert (second.hits, second.forwards, again) == (3, 0, 0), "all chunks are placed, and no tower runs"
    assert second.flops < first.flops
    assert second.fidelity == first.fidelity == {"exact": 3}
    assert after.ids == before.ids
    assert max(before.kl, after.kl) < 1e-8
    assert after.audit.as_promised


@pytest.mark.slow
def test_patches_are_formed_for_sessions_that_may_serve_them(backbone, tmp_path, monkeypatch):
    with kvp.ChunkStore(tmp_path / "store") as own:
        assert loop(backbone, own, monkeypatch, rank=0, prefills=0, uncertified=True)[0].formed.patches == 0
        assert loop(backbone, own, monkeypatch, prefills=0, uncertified=True)[0].formed.patches == 2
    with kvp.ChunkStore(tmp_path / "shared") as own, kvp.Sessions(backbone, own, pages=64, prefills=0) as sessions:
        former = sessions.shared.former
        assert former is not None
        for options, patches in (({}, 0), ({"uncertified": True}, 1)):
            with sessions.open(**options) as session:
                session.add(image_of(0))
                session.add(image_of(1))
            former.flush()
            assert former.done.patches == patches


@pytest.mark.slow
def test_a_stored_patch_serves_a_returning_chunk_if_uncertified_is_allowed(backbone, store):
    with kvp.Session(backbone, store, keep=1, rank=0, uncertified=True) as session:
        session.add(image_of(0))
        name = session.add(image_of(1))  # another session added it after the very same image
        assert session.fidelity(name) == "approximate"
        assert (session.stats().hits, session.stats().forwards) == (2, 0)
        patched = session.ask(QUESTION, steps=3, stop=(), audit=True)
        assert patched.kl is not None
        assert patched.audit is not None
        assert patched.kl > 1e-8
        assert not patched.audit.as_promised
        found = session.needs(name, QUESTION, steps=2)
        assert found.bare.kl > 0
        session.slide(0)
        assert name in session.plan(name).window
        session.recall(name)
        assert session.stats().hits == 3


def test_a_certificate_serves_no_session_beyond_what_was_measured(backbone, store):
    row = CertifiedLoss("stored", 4, 0, "forget", 0.0, 0.0, 0.0, 0.01, 0.95, 0.9, 1.0, 0.5, 0.0, 0.0, 40)
    texts = ("tiny", "2026-11-22", 0.95, 20, 20, 3, 99, "images", "questions", True, (1, 9), ("image",))
    rows = (row, dataclasses.replace(row, promise="remember"))
    signed = Certificate(backbone.fingerprint, *texts, rows, RankChoice(4, "invented"))
    slow = DeviceCosts("slow", None, {"Prefill": Rates(flop=1.0)})
    for certificate, point, said in (
        (signed, "stored", None),
        (dataclasses.replace(signed, tokens=4), "prefill", "window of 36 tokens; certified up to 4"),
        (dataclasses.replace(signed, modalities=("text",)), "prefill", "chunk of image; certified of text"),
    ):
        with kvp.Session(backbone, store, 2, rank=0, prefills=0, certificate=certificate, costs=slow) as session:
            session.add(image_of(0))
            planned = session.plan(image_of(1))
            assert (planned.chunks[-1].point, planned.beyond) == (point, said)
            session.add(image_of(1))
            assert session.stats().hits == 1 + (said is None)  # the leading chunk, and one by its patch
            assert session.window.as_promised == (said is not None)


@pytest.mark.slow
def test_chunks_deleted_from_the_store_are_prefilled_or_refused(backbone, tmp_path: Path, monkeypatch):
    with (
        kvp.ChunkStore(tmp_path / "store") as own,
        kvp.Session(backbone, own, 1, rank=4, prefills=0, uncertified=True) as session,
    ):
        session.add(image_of(0))
        name = session.add(image_of(1))
        assert session.runtime.former is not None
        session.runtime.former.flush()
        session.slide(0)
        read = own.get
        monkeypatch.setattr(own, "get", lambda *args, **how: None)  # deleted since it was looked for
        session.recall(name)
        assert session.fidelity(name) == "exact"
        session.slide(0)
        monkeypatch.setattr(own, "get", read)
        assert own.delete(name, backbone.fingerprint)
        session.recall(name)
        assert session.fidelity(name) == "exact"
        session.runtime.former.flush()

        with kvp.Session(backbone, own, 1, rank=0, uncertified=True, memory=0) as forgetful:
            forgetful.add(image_of(0))
            name = forgetful.add(image_of(1))
            forgetful.slide(0)
            # What is still being stored in the background would be there again after the deletion.
            assert forgetful.runtime.former is not None
            forgetful.runtime.former.flush()
            own.delete(name, backbone.fingerprint)
            before = forgetful.window
            with pytest.raises(SessionError, match="given again"):
                forgetful.recall(name)
            assert forgetful.window == before


# ------------------------------------------------------------------------------------------------------ files


@pytest.fixture(scope="module")
def saved(backbone, tmp_path_factory) -> tuple[Path, list[Any]]:
    path = tmp_path_factory.mktemp("saved") / "session"
    with kvp.Session(backbone, keep=2, around=("w30 ", " w31")) as session:
        session.add("w5 w6", id="system")
        for step in range(4):
            session.add(image_of(step), id=f"shot {step}")
        session.save(path)
        return path, answers_before_and_after_a_recall(session)


def answers_before_and_after_a_recall(session: kvp.Session) -> list[Any]:
    """Returns what a session answers before and after a chunk is recalled."""
    first = session.ids, session.gone, session.ask(QUESTION, steps=4, stop=(), temperature=1.5, seed=3).ids
    session.recall("shot 1")
    return [*first, session.ids, session.ask(QUESTION, steps=4, stop=()).ids]


def test_a_restored_session_answers_alike(backbone, saved, tmp_path: Path):
    path, expected = saved
    with kvp.Session.restore(path, backbone) as session:
        assert [session.fidelity(name) for name in session.ids] == ["exact", "survivor", "survivor"]
        again = tmp_path / "again"
        session.save(again)
        session.save(again)  # in place of itself
        assert answers_before_and_after_a_recall(session) == expected
        assert (session.keep, session.config.around) == (2, ("w30 ", " w31"))
    with kvp.Session.restore(again, backbone) as session:
        branch = session.fork()
        branch.save(tmp_path / "branch")
        branch.close()
        assert answers_before_and_after_a_recall(session) == expected
        session.save(tmp_path / "bare", kv=False)
    with kvp.Session.restore(tmp_path / "branch", backbone) as session:
        assert answers_before_and_after_a_recall(session) == expected
    with kvp.Session.restore(tmp_path / "bare", backbone) as session:
        assert {session.fidelity(name) for name in session.ids} == {"exact"}  # it forgot what had left
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again", "bare", "branch"]


def test_damaged_and_foreign_files_of_sessions_are_refused(backbone, saved, tmp_path: Path):
    path, _ = saved
    content, bad = path.read_bytes(), tmp_path / "bad"
    other = tiny("gqa")
    with pytest.raises(WindowError, match="backbone"):
        kvp.Session.restore(path, other)
    for damaged in (
        b"",
        b"{}",
        content[:-1],
        content[: len(content) // 2],
        content.replace(b"shot 1", b"shot 7"),
        content.replace(f'"version":"{session_file.VERSION}"'.encode(), b'"version":"1"'),
        bytes([*content[:-3], content[-3] ^ 1, *content[-2:]]),
        (2**60).to_bytes(8, "little") + content[8:],
    ):
        bad.write_bytes(damaged)
        with pytest.raises(SessionError):
            kvp.Session.restore(bad, backbone)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(SessionError):
            kvp.Session.restore(missing, backbone)
    with kvp.Session(backbone) as session, pytest.raises(SessionError, match="cannot be written"):
        session.save(tmp_path / "no folder" / "file")


# ------------------------------------------------------------------------------------- references, retrieval


@pytest.mark.slow
def test_references_and_retrieved_chunks_serve_one_answer(backbone, tmp_path: Path):
    with kvp.ChunkStore(tmp_path / "store") as own:
        library = StaticLibrary(own, quota=1 << 20)
        library.put("A", image_of(8))
        library.put("B", image_of(9))
        linker = Linker(backbone.fingerprint, library)
        with kvp.Session(backbone, own, keep=2, rank=0, linker=linker) as session:
            session.add(image_of(0))
            before = session.window, session.runtime.executor.books.allocator.counts.tolist()
            named = session.ask("w7 IMAGE#A w9 IMAGE#B w11", steps=4, stop=(), audit=True)
            assert named.recalled == ["IMAGE#A", "IMAGE#B"]
            assert named.kl is not None
            assert named.kl < 1e-8
            by_hand = session.fork(keep=4)
            for thing in (kvp.Text("w7 "), image_of(8), kvp.Text(" w9 "), image_of(9)):
                by_hand.add(thing)
            assert named.ids == by_hand.ask("w11", steps=4, stop=()).ids
            by_hand.close()
            assert session.ask("w7 IMAGE#A", steps=2, stop=()).recalled == ["IMAGE#A"]
            with pytest.raises(UnknownReferenceError):
                session.ask("w7 IMAGE#C")
            assert (session.window, session.runtime.executor.books.allocator.counts.tolist()) == before

            seen: list[RetrievalQuery] = []

            def find(looking: RetrievalQuery) -> list[str]:
                seen.append(looking)
                assert looking.hidden(1).shape == looking.vector.shape
                return ["IMAGE#A"] if len(looking.ids) == 2 else []

            plain = session.ask(QUESTION, steps=5, stop=()).ids
            session.save(tmp_path / "session")

            def retrieving(retriever: Any) -> kvp.Session:
                options = {"linker": linker, "retriever": retriever, "rank": 0}
                return kvp.Session.restore(tmp_path / "session", backbone, own, **options)

            with retrieving(find) as asking:
                found = asking.ask(QUESTION, steps=5, stop=(), look=2)
                assert len(found.ids) == 5  # read to its end
            assert found.ids[:2] == plain[:2]
            assert [len(each.ids) for each in seen] == [0, 2, 4]
            assert found.recalled == ["IMAGE#A"]
            behind = session.fork(keep=4)
            behind.add(image_of(8))
            assert found.ids[2:] == behind.ask(_ids(backbone, found.ids[:2]), steps=3, stop=()).ids
            behind.close()

            with retrieving(lambda looking: ["none"]) as asking, pytest.raises(UnknownReferenceError):
                asking.ask(QUESTION, steps=2)
            with retrieving(lambda looking: "IMAGE#A") as asking, pytest.raises(InputError, match="list of names"):
                asking.ask(QUESTION, steps=2)
            nearest = ExactRetriever(len(seen[0].vector))
            nearest.add("IMAGE#B", seen[0].vector)
            with retrieving(nearest) as asking:
                before = asking.window, asking.runtime.executor.books.allocator.counts.tolist()
                assert asking.ask(QUESTION, steps=1).recalled == ["IMAGE#B"]
                assert (asking.window, asking.runtime.executor.books.allocator.counts.tolist()) == before


def _ids(backbone: Any, behind: tuple[int, ...]) -> list[int]:
    return [*backbone.prepare([QUESTION])["input_ids"][0].tolist(), *behind]


# -------------------------------------------------------------------------------------------------- compiles


@pytest.mark.slow
def test_a_loop_of_many_lengths_compiles_in_its_first_steps_alone(backbone):
    after = []
    with compilations() as compiled, kvp.Session(backbone, keep=2) as session:
        for step in range(20):
            session.add(image_of(step, height=20 + 4 * (step % 3)))
            session.ask(" ".join(f"w{5 + number}" for number in range(3 + step % 5)), steps=3, stop=()).ids  # noqa: B018
            after.append(len(compiled))
    assert after[-1] == after[8], compiled[after[8] :]
