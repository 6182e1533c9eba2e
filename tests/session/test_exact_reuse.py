"""Sessions over a store without any certificate: the same history is served bit for bit, without a forward."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.window import StoredPrefills
from tests.shared.session_cases import image_of, logits, settled

ORDER = [0, 1, 2, 3, 4, *(random.Random(0).randrange(5) for _ in range(10))]


def visit(backbone: Any, store: Any, order: list[int], **options: Any) -> tuple[list[np.ndarray], list[str], Any]:
    """Adds images in this order to a window of three. Returns logits and the fidelity of each, and the counts."""
    outcomes, served = [], []
    with kvp.Session(backbone, store, **{"keep": 3, **options}) as session:
        for number in order:
            name = session.add(image_of(number))
            outcomes.append(logits(session))
            served.append(session.fidelity(name))
        if store is not None:
            settled(session)
        return outcomes, served, session.stats()


def expect_alike(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("promise", ["remember", pytest.param("forget", marks=pytest.mark.nightly)])
def test_a_session_that_starts_again_computes_no_chunk_twice(backbone, tmp_path, promise, monkeypatch):
    towers, encode = [], backbone.programs.encode
    monkeypatch.setattr(backbone.programs, "encode", lambda *given: (towers.append(given), encode(*given))[1])
    with kvp.ChunkStore(tmp_path) as store:
        first, fidelities, _ = visit(backbone, store, ORDER, promise=promise)
        ran = len(towers)
    with kvp.ChunkStore(tmp_path) as store:
        second, again, stats = visit(backbone, store, ORDER, promise=promise)
    # The first chunk is a canonical; all others were prefilled behind pieces that the second session has again.
    assert (stats.forwards, stats.misses, len(towers)) == (0, 0, ran)
    assert stats.encoded >= 5
    assert (stats.formed.patches, stats.formed.prefills) == (0, 0)
    assert again == fidelities
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after)


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
    expect_alike(truth, answers)


class DistantStore(LosingStore):
    """A store whose remote side may have every prefill and has none."""

    asked = 0

    def contains(self, id: str, backbone: str, **options: Any) -> bool:
        return options.get("lead") is None and super().contains(id, backbone, **options)

    def may_have(self, id: str, backbone: str, **options: Any) -> bool:
        return options.get("lead") is not None or super().may_have(id, backbone, **options)

    def get(self, id: str, backbone: str, **options: Any) -> Any:
        self.asked += options.get("lead") is not None
        return super().get(id, backbone, **options)


def test_what_was_read_in_vain_is_not_read_again(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path) as store:
        visit(backbone, store, [0, 1])
    distant = DistantStore(tmp_path)
    with distant, kvp.Session(backbone, distant, keep=3) as session:
        session.add(image_of(0))
        for _ in range(3):
            name = session.add(image_of(1))
            session.evict(name)
        assert (distant.asked, session.stats().forwards) == (1, 3)


def test_a_prefill_of_another_length_is_computed_instead(backbone, store):
    """Whoever may write to the store may have written anything under the name of a prefill."""
    truth, _, _ = visit(backbone, store, [0, 1])
    with kvp.Session(backbone, store) as session:
        name = [session.add(image_of(number)) for number in range(2)][-1]
        made = session.window.piece(name).made
    prefills = StoredPrefills(store, backbone.fingerprint, "float32")
    forged = kvp.make_chunk(backbone, [image_of(7, 56)], id=name)
    store.put(dataclasses.replace(forged, content=name, lead=prefills.lead(made)))
    answers, _, stats = visit(backbone, store, [0, 1])
    assert stats.forwards == 1
    expect_alike(truth, answers)
