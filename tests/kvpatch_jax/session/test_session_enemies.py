"""Sessions whose surroundings fail them: threads at once, a store's folder that is deleted, names without end."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import re
import shutil
import threading
from pathlib import Path

import pytest
from session_cases import QUESTION, image_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import KVPatchError, SessionError
from kvpatch_jax.session import piece_registry

IMAGES = 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rank": -1}, "rank -1"),
        ({"rank": {"nope": 4}}, "a rank of channel 'nope'; expected channels among"),
        ({"pages": 0}, "session.pages: got 0; expected a number of pages"),
        ({"uncertified": 1}, "session.uncertified: got 1; expected True or False"),
        ({"dtype": "int8"}, "dtype 'int8'; expected a floating-point one"),
    ],
)
def test_options_of_another_kind_are_refused_at_the_door(backbone, options, expected, unchecked):
    with pytest.raises(KVPatchError, match=re.escape(expected)):
        kvp.Session(backbone, None, **options)


@pytest.mark.slow
def test_two_threads_on_one_session_take_turns(backbone):
    """Each adds, asks about and evicts its own chunks. An answer equals that of one thread with the same window."""
    said: dict[tuple[str, ...], tuple[int, ...]] = {}
    failed: list[BaseException] = []
    together = threading.Barrier(2)

    def work(own: int, session: kvp.Session) -> None:
        try:
            together.wait(60)
            for step in range(IMAGES):
                name = session.add(image_of(own * IMAGES + step), id=f"{own}.{step}", kind="chunk")
                with session.fork() as branch:  # which the other thread does not change
                    if all(piece.fidelity == "exact" for piece in branch.window.pieces):  # no survivor of the other's
                        said[branch.ids] = branch.ask(QUESTION, steps=2, stop=()).ids
                session.ask(QUESTION, steps=2, stop=()).close()
                session.evict(name)
        except BaseException as error:
            failed.append(error)

    with kvp.Session(backbone, lead=image_of(99)) as session:
        free = session.stats().free_pages
        threads = [threading.Thread(target=work, args=(own, session)) for own in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not failed
        assert len(session) == 1
        assert sorted(session.gone) == sorted(f"{own}.{step}" for own in range(2) for step in range(IMAGES))
        assert session.stats().free_pages == free
        assert session.stats().asked == 2 * IMAGES
        for ids, answer in said.items():
            for name in ids[1:]:
                session.recall(name)
            assert session.ask(QUESTION, steps=2, stop=()).ids == answer
            for name in ids[1:]:
                session.evict(name)


@pytest.mark.slow
def test_a_stores_folder_may_be_deleted_between_two_steps(backbone, tmp_path: Path):
    """The session goes on as one without a store: what comes back is prefilled, or asked for again."""
    with kvp.ChunkStore(tmp_path / "store") as store:
        with (
            kvp.Session(backbone, store, keep=1, rank=4, uncertified=True) as session,
            kvp.Session(backbone, keep=1) as bare,
        ):
            for each in (session, bare):
                each.add(image_of(0))
                first = each.add(image_of(1))
            former = session.runtime.former
            assert former is not None
            former.flush()
            assert store.contains(first, backbone.fingerprint)
            shutil.rmtree(tmp_path / "store")
            for each in (session, bare):
                each.add(image_of(2))
            assert session.ids == bare.ids
            for each in (session, bare):
                each.recall(first)
            former.flush()
            assert session.ask(QUESTION, steps=3, stop=()).ids == bare.ask(QUESTION, steps=3, stop=()).ids
            assert session.ids == bare.ids
            session.save(tmp_path / "session")
        with kvp.Session.restore(tmp_path / "session", backbone, store, rank=0) as again:
            assert again.ids == bare.ids


def test_names_without_end_take_bounded_room_and_none_is_given_twice_meanwhile(backbone, monkeypatch):
    monkeypatch.setattr(piece_registry, "MOST_NAMES", 4)
    with kvp.Session(backbone, lead="w5") as session:
        for number in range(3):  # texts that leave are forgotten, but for their names
            session.add("w6", id=f"note {number}")
            session.evict(f"note {number}")
        with session.fork() as branch:
            for taken in ("note 1", "note 2"):
                with pytest.raises(SessionError, match="name of another piece"):
                    branch.add("w6", id=taken)
            for number in range(3, 6):
                branch.add("w6", id=f"note {number}")
            assert branch.add("w6", id="note 1") == "note 1"  # the oldest name was dropped, here alone
        with pytest.raises(SessionError, match="name of another piece"):
            session.add("w6", id="note 1")
        copies = []
        for _ in range(6):  # counted on, although the names of the first ones were dropped
            copies.append(session.add("w7"))
            session.evict(copies[-1])
        assert copies[1:] == [f"{copies[0]}#{number}" for number in range(2, 7)]

    monkeypatch.setattr(piece_registry, "MOST_NAMES", 2)
    with kvp.Session(backbone, keep=1) as session:
        session.add(image_of(0), id="lead")
        for step in range(3):
            session.add(image_of(1), id=f"shot {step}") if not step else session.add(image_of(1 + step))
        for name in (
            "lead",
            "shot 0",
            session.ids[-1],
        ):  # pinned, evicted, in the window
            with pytest.raises(SessionError, match="name of another piece"):
                session.add(image_of(9), id=name)
