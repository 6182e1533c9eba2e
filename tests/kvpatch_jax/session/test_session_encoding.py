"""Sessions over encoded canonicals: as over their decoded twins, by budget, saved and restored, and never for exact."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from pathlib import Path

import numpy as np
import pytest
from memory_store import MemoryStore
from session_cases import image_of, logits

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.core import KVEncoding
from kvpatch_jax.errors import InputError, SessionError

CERTIFICATE = Path(__file__).parents[3] / "evals/trained/documents/qwen2_5_vl/certificate.json"


def loop(backbone, store, images=(0, 1, 2), **options) -> tuple[np.ndarray, kvp.session.Stats, MemoryStore]:
    """Images and a question behind them: its logits, the counts, and the store."""
    options = {"uncertified": True, "prefills": 0, "rank": 4, **options}
    with kvp.Session(backbone, store, **options) as session:
        for number in images:
            session.add(image_of(number))
        session.runtime.former.flush()
        assert not session.runtime.former.errors
        return logits(session), session.stats(), store


def ids_of(backbone, *numbers: int) -> list[str]:
    return [chunk_id(backbone.fingerprint, image_of(number)) for number in numbers]


@pytest.fixture(scope="module")
def kept(backbone):
    """What a session in k8v8 left behind, and what it served itself."""
    return loop(backbone, MemoryStore(), encoding="k8v8")


def test_a_session_keeps_forms_and_serves_in_its_encoding_as_over_decoded_twins(backbone, kept):
    exact, stats, store = kept
    leading, *others = ids_of(backbone, 0, 1, 2)
    assert store.encodings_of(leading) == {None}, "what stands at the front is exact"
    assert [store.encodings_of(id) for id in others] == [{"k8v8g32"}] * 2
    assert [patch.metadata.encoding for patch in store.patches] == ["k8v8g32"] * 2
    assert (stats.formed.canonicals, stats.formed.encoded, stats.formed.patches) == (3, 2, 2)
    assert stats.formed.canonical_bytes == sum(chunk.nbytes for chunk in store.chunks.values())

    found, again, _ = loop(backbone, store, encoding=KVEncoding(8, 8))
    wanted, twin, _ = loop(backbone, store.decoded(), encoding="k8v8")
    np.testing.assert_array_equal(found, wanted)
    assert (again.hits, again.forwards) == (twin.hits, twin.forwards) == (3, 0)
    assert again.fidelity == {"exact": 1, "approximate": 2}
    assert 0 < np.abs(found - exact).max() < 0.5 * np.abs(exact).max()
    # Packed bytes are counted; the twins' are those of arrays.
    leading_bytes = store.get(leading, "").nbytes
    assert again.canonical_bytes - leading_bytes < 0.6 * (twin.canonical_bytes - leading_bytes)


def test_a_session_without_the_encoding_serves_nothing_of_it(backbone, kept):
    exact, _, store = kept
    found, stats, _ = loop(backbone, store, rank=0)
    np.testing.assert_allclose(found, exact, atol=1e-4)
    assert (stats.hits, stats.forwards) == (1, 2)


def test_exact_prefills_stay_exact_in_any_encoding(backbone):
    store = MemoryStore()
    first, _, _ = loop(backbone, store, encoding="k2v2", prefills="1 GiB")
    second, stats, _ = loop(backbone, store, encoding="k2v2", prefills="1 GiB")
    np.testing.assert_allclose(second, first, atol=1e-5)
    assert (stats.fidelity, stats.forwards) == ({"exact": 3}, 0)
    prefills = [chunk for (_, lead, _), chunk in store.chunks.items() if lead is not None]
    assert prefills
    assert all(chunk.encoding is None for chunk in prefills)


@pytest.mark.slow
def test_auto_switches_once_its_budget_is_spent(backbone):
    images = tuple(range(5))
    whole = loop(backbone, MemoryStore(), images)[2]
    ids = ids_of(backbone, *images)
    size = max(whole.get(id, "").nbytes for id in ids[1:])
    half = max(kvp.encode_chunk(whole.get(id, ""), "k8v8gall").nbytes for id in ids[1:])
    budget = 2 * size
    store = loop(backbone, MemoryStore(), images, encoding="auto", canonicals=budget)[2]
    words = [store.encodings_of(id) for id in ids]
    assert words[:3] == [{None}] * 3, "the one at the front is not counted"
    assert words[3:] == [{"k8v8gall"}] * 2
    assert 2 * half <= budget
    store = loop(backbone, MemoryStore(), images, encoding="auto", canonicals=0)[2]
    assert [store.encodings_of(id) for id in ids[1:]] == [{"k5v5gall"}] * 4
    for patch in store.patches:
        assert patch.metadata.encoding == "k5v5gall"
    # Whatever was chosen is read again.
    stats = loop(backbone, store, images, encoding="auto")[1]
    assert (stats.forwards, stats.formed.patches) == (0, 0)


def test_invalid_encodings_are_refused(backbone, unchecked):
    for wrong in ("k9v9", "int8", 4, "k4v4g0"):
        with pytest.raises(SessionError, match="encoding"):
            kvp.Session(backbone, encoding=wrong)
        with pytest.raises(InputError, match="encoding"):
            kvp.Sessions(backbone, pages=8, encoding=wrong)
    with pytest.raises(SessionError, match="canonicals"):
        kvp.Session(backbone, encoding="auto", canonicals="many")
    certificate = kvp.Certificate.read(CERTIFICATE, backbone=None)
    with pytest.raises(SessionError, match="certificate"):
        kvp.Session(backbone, encoding="k8v8", certificate=certificate)
    with pytest.raises(SessionError, match="certificate"):
        kvp.Session(backbone, certificate=0.05)


def test_a_saved_session_keeps_its_encoding(backbone, kept, tmp_path):
    store = kept[2]
    options = {"uncertified": True, "prefills": 0}
    for word, encoding in (("k8v8", "k8v8g32"), (None, None)):
        path = tmp_path / f"{word}.session"
        with kvp.Session(backbone, store, encoding=word, **options) as session:
            for number in (0, 1):
                session.add(image_of(number))
            before = logits(session)
            session.save(path)
        with kvp.Session.restore(path, backbone, store) as again:
            np.testing.assert_array_equal(logits(again), before)
            assert (again.config.encoding, again.config.canonicals) == (encoding, 1 << 30)
            assert again.runtime.executor.encodings == ((None,) if word is None else ("k8v8g32", None))
    with kvp.Sessions(backbone, store, pages=64, encoding="k4v4") as sessions:
        with pytest.raises(SessionError, match="encoding"):
            sessions.restore(tmp_path / "k8v8.session")
        sessions.restore(tmp_path / "None.session").close()
