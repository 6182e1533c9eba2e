"""Sessions over a store on the disk that keeps canonicals encoded: read packed, formed on once, exact data exact."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

import numpy as np
import pytest
from session_cases import image_of, logits

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.core import is_packed


def loop(backbone, store, images=(0, 1, 2), **options):
    options = {"uncertified": True, "prefills": 0, "rank": 4, **options}
    with kvp.Session(backbone, store, **options) as session:
        for number in images:
            session.add(image_of(number))
        session.runtime.former.flush()
        assert not session.runtime.former.errors
        packed = []
        for id in session.runtime.executor.current[session.window.branch]:
            chunk = session.runtime.executor.sources[id.entry.id].chunk
            packed.append(chunk is not None and any(map(is_packed, chunk.kv.values())))
        return logits(session), session.stats(), packed


@pytest.mark.parametrize("default", [None, "k8v8"])
def test_what_a_session_keeps_encoded_serves_later_sessions(backbone, tmp_path, default):
    """By the session's word, or by the store's default, which a session without a word follows."""
    word, ids = "k8v8" if default is None else None, [chunk_id(backbone.fingerprint, image_of(n)) for n in (1, 2)]
    with kvp.ChunkStore(tmp_path, encoding=default) as store:
        exact, first, _ = loop(backbone, store, encoding=word)
        assert (first.formed.canonicals, first.formed.encoded, first.formed.patches) == (3, 2, 2)
        for id in ids:
            assert store.contains(id, backbone.fingerprint, encoding="k8v8")
            assert not store.contains(id, backbone.fingerprint, encoding="unreduced")
    with kvp.ChunkStore(tmp_path, encoding=default) as store:
        found, again, packed = loop(backbone, store, encoding=word)
        assert again.formed.patches == again.formed.forwards == 0
        assert packed == [False, True, True]
        assert again.fidelity == {"exact": 1, "approximate": 2}
        assert 0 < np.abs(found - exact).max() < 0.5 * np.abs(exact).max()
        restored = loop(backbone, store, encoding=word)[0]
        np.testing.assert_array_equal(restored, found)


def test_prefills_of_a_store_that_encodes_are_exact(backbone, tmp_path):
    with kvp.ChunkStore(tmp_path, encoding="k2v2") as store:
        first = loop(backbone, store, prefills="1 GiB")[0]
        second, stats, _ = loop(backbone, store, prefills="1 GiB")
        np.testing.assert_allclose(second, first, atol=1e-5)
        assert stats.fidelity == {"exact": 3}
