"""Sessions over a store without any certificate: the same history is served bit for bit, without a forward."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from session_cases import QUESTION, image_of, logits, reader

import kvpatch_jax as kvp
from kvpatch_jax.errors import SessionError
from kvpatch_jax.window import StoredPrefills, likeness_keys


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


def visit(backbone: Any, store: Any, order: list[int], **options: Any) -> tuple[list[np.ndarray], list[str], Any]:
    """Adds images in this order to a window of three. Returns logits and the fidelity of each, and the counts."""
    seen, served = [], []
    with kvp.Session(backbone, store, keep=3, **options) as session:
        for number in order:
            name = session.add(image_of(number))
            seen.append(logits(session))
            served.append(session.fidelity(name))
        stats = session.stats()
        if session.runtime.former is not None:
            session.runtime.former.flush()
            assert not session.runtime.former.errors
    return seen, served, stats


ORDER = [0, 1, 2, 3, 4, *(random.Random(0).randrange(5) for _ in range(12))]


@pytest.mark.parametrize("promise", ["remember", pytest.param("forget", marks=pytest.mark.slow)])
def test_a_session_that_starts_again_computes_no_chunk_twice(backbone, tmp_path, promise):
    with kvp.ChunkStore(tmp_path) as store:
        first, fidelities, _ = visit(backbone, store, ORDER, promise=promise)
        second, again, stats = visit(backbone, store, ORDER, promise=promise)

    # The first chunk is a canonical; all others were prefilled behind pieces that the second session has again.
    assert (stats.forwards, stats.misses) == (0, 0)
    assert again == fidelities
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after)


def test_another_order_is_not_taken_for_the_same_history(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path) as store:
        visit(backbone, store, [0, 1, 2])
        alone, fidelities, _ = visit(backbone, None, [0, 2, 1])
        after, again, stats = visit(backbone, store, [0, 2, 1])
    assert stats.forwards == 2
    assert again == fidelities
    for one, other in zip(alone, after, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_no_prefill_is_stored_beyond_the_bytes_that_are_given(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path) as store:
        stats = visit(backbone, store, [0, 1, 2], prefills=0)[2]
        assert stats.formed.prefills == 0
        assert visit(backbone, store, [0, 1, 2], prefills=0)[2].forwards == 2
    with pytest.raises(SessionError, match=r"session\.prefills: got -1; expected"):
        kvp.Session(backbone, None, prefills=-1)


class LosingStore(kvp.ChunkStore):
    """A store that loses every prefill between the look and the read, as another process may delete it."""

    def get(self, id: str, backbone: str, **options: Any) -> Any:
        return None if options.get("lead") is not None else super().get(id, backbone, **options)


def test_a_prefill_that_is_gone_when_it_is_read_is_computed(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path) as store:
        truth, _, _ = visit(backbone, store, [0, 1, 2])
    with LosingStore(tmp_path) as store:
        answers, fidelities, stats = visit(backbone, store, [0, 1, 2])
    assert stats.forwards == 2
    assert fidelities == ["exact"] * 3
    for one, other in zip(truth, answers, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_prefill_of_another_length_is_computed_instead(backbone, tmp_path):
    """Whoever may write to the store may have written anything under the name of a prefill."""
    with kvp.ChunkStore(tmp_path) as store:
        with kvp.Session(backbone, store, keep=3) as session:
            names = [session.add(image_of(number)) for number in range(2)]
            session.runtime.former.flush()
            front = session.window.piece(names[1]).front
            truth = logits(session)

        prefills = StoredPrefills(store, backbone.fingerprint, "float32")
        forged = kvp.make_chunk(backbone, [image_of(7, 56)], id=names[1])
        whole = prefills.get(names[1], front)
        kv = {name: np.asarray(value) for name, value in forged.kv.items()}
        store.put(
            kvp.Chunk(
                kv=kv,
                local=forged.local,
                span=forged.span,
                length=forged.length,
                id=names[1],
                layout=forged.layout,
                backbone=forged.backbone,
                content=whole.content,
                lead=prefills.lead(front),
            )
        )
        with kvp.Session(backbone, store, keep=3) as session:
            for number in range(2):
                session.add(image_of(number))
            assert session.stats().forwards == 1
            np.testing.assert_allclose(logits(session), truth, atol=2e-5)


def test_a_prefill_behind_the_same_nearest_chunk_is_served_only_where_losses_may_be(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path) as store:
        visit(backbone, store, [0, 1, 2, 3])
        # 3 stood behind 2, and farther away other chunks.
        _, served, stats = visit(backbone, store, [0, 4, 2, 3], uncertified=True, rank=0)
        assert served[-1] == "approximate"
        assert (stats.hits, stats.forwards) == (2, 2)  # the first chunk leads, the last one is near
        _, served, stats = visit(backbone, store, [0, 5, 2, 3])
        assert served[-1] == "exact"
        assert (stats.hits, stats.forwards) == (1, 3)


def test_what_follows_an_approximate_chunk_is_approximate(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path) as store:
        visit(backbone, store, [0, 1, 2, 3])
        with kvp.Session(backbone, store, keep=4, uncertified=True, rank=0) as session:
            names = [session.add(image_of(number)) for number in (0, 4, 2, 3, 6)]
            assert [session.fidelity(name) for name in names[-2:]] == ["approximate"] * 2
            assert not session.window.as_promised
            # It stays approximate when what it was prefilled behind has left, whatever that was.
            session.slide(1)
            assert session.fidelity(names[-1]) == "approximate"
            assert str(session.ask(QUESTION, steps=1)) is not None


def stored_behind(backbone: Any, store: Any, order: list[int]) -> tuple[str, str, dict[str, str]]:
    """Stores what a forward of the last image leaves behind the others. Returns its name, front and keys."""
    with kvp.Session(backbone, store, keep=4) as session:
        session.runtime.former.form_means()  # as a session does that may serve approximately
        names = [session.add(image_of(number)) for number in order]
        window = session.window
        keys = likeness_keys(window.pieces, len(order) - 1, window.lead)
    return names[-1], window.pieces[-1].front, {str(likeness): key for likeness, key in keys.items()}


def test_a_mean_over_histories_with_one_nearest_chunk_serves_before_each_of_them(backbone, tmp_path):
    """It is the mean of what forwards left there, and has a digest of its own after each."""
    with kvp.ChunkStore(tmp_path) as store:
        prefills, parts, means = StoredPrefills(store, backbone.fingerprint, "float32"), [], []
        fronts = []
        for number in (1, 4, 5):
            id, front, keys = stored_behind(backbone, store, [0, number, 3, 2])
            fronts.append(front)
            parts.append(prefills.get(id, front))
            means.append(prefills.alike(id, keys).get("mean"))
            assert prefills.alike(id, keys)["near"] == fronts[0]
        assert means[0] is None
        assert len({*means}) == 3
        for count, front in ((2, means[1]), (3, means[2])):
            found = prefills.get(id, front)
            for name, value in found.kv.items():
                truth = np.mean([np.asarray(part.kv[name])[:, : found.length] for part in parts[:count]], axis=0)
                np.testing.assert_allclose(np.asarray(value), truth, atol=1e-5)

        with kvp.Session(backbone, store, keep=4, uncertified=True, rank=0) as session:
            name = [session.add(image_of(number)) for number in (0, 6, 3, 2)][-1]
            piece = session.window.piece(name)
            assert piece.ways == (("mean", 0),)
            assert piece.state.patch == means[2]


def test_what_is_stored_of_a_prefill_is_counted(backbone, tmp_path):
    """A mean is as large as a prefill, and is stored once more for each history that is added to it, up to eight."""
    with kvp.ChunkStore(tmp_path) as store:
        id, front, keys = stored_behind(backbone, store, [0, 1, 3, 2])
        prefills = StoredPrefills(store, backbone.fingerprint, "float32")
        first = prefills.get(id, front)
        counts = []
        for number in range(9):
            other = f"{number:032x}"
            counts.append(prefills.put(dataclasses.replace(first, lead=prefills.lead(other)), other, keys, mean=True))
        assert counts == [2] * 7 + [1] * 2
        assert prefills.put(dataclasses.replace(first, lead=prefills.lead("f" * 32)), "f" * 32, keys) == 1


@pytest.mark.parametrize("saved", [np.zeros(3, np.uint8), np.zeros((1, 57), np.float32), np.zeros((2, 17), np.uint8)])
def test_a_listing_that_says_nothing_lists_no_prefill(backbone, tmp_path, saved):
    with kvp.ChunkStore(tmp_path) as store:
        id, front, keys = stored_behind(backbone, store, [0, 1, 2])
        prefills = StoredPrefills(store, backbone.fingerprint, "float32")
        assert prefills.alike(id, keys)["near"] == front
        store.put_encoder(prefills.name(id), backbone.fingerprint, saved)
        fresh = StoredPrefills(store, backbone.fingerprint, "float32")
        assert fresh.alike(id, keys) == {}
        assert fresh.contains(id, front)


def test_patches_are_formed_of_chunks_that_come_for_the_second_time(backbone, tmp_path):
    """Most of what an agent sees it never sees again. Which chunks came before, stored prefills tell."""
    with kvp.ChunkStore(tmp_path) as store:
        # A rank that is asked for forms at once.
        for order, options, patches in (([0, 1, 2], {}, 0), ([0, 3, 1], {}, 1), ([0, 4, 5], {"rank": 4}, 2)):
            with kvp.Session(backbone, store, keep=3, uncertified=True, **options) as session:
                for number in order:
                    session.add(image_of(number))
                former = session.runtime.former
                former.flush()
                assert not former.errors
                assert (former.done.patches, former.done.forwards) == (patches, patches)
