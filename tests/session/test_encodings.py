"""Sessions over encoded canonicals: as over their decoded twins, saved and restored, and never for exact data."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.core import KVEncoding
from tests.shared.session_cases import PatchesAlone, image_of, logits, settled


def loop(backbone, store, **options) -> tuple[np.ndarray, kvp.session.Stats]:
    """Three images and a question behind them: its logits, and the counts."""
    with kvp.Session(backbone, store, **{"reuse": "patched", "rank": 4, **options}) as session:
        for number in range(3):
            session.add(image_of(number))
        settled(session)
        return logits(session), session.stats()


def test_a_session_keeps_forms_and_serves_in_its_encoding(backbone, store):
    patches = PatchesAlone(store)
    exact, stats = loop(backbone, patches, encoding="k8v8")
    ids = [chunk_id(backbone.fingerprint, image_of(number)) for number in range(3)]
    kept = [[word for word in (None, "k8v8g32") if store.contains(id, backbone.fingerprint, **({"encoding": word} if
            word else {}))] for id in ids]  # fmt: skip
    assert kept == [[None], ["k8v8g32"], ["k8v8g32"]], "what stands at the front is exact"
    assert (stats.formed.canonicals, stats.formed.encoded, stats.formed.patches) == (3, 2, 2)

    served, again = loop(backbone, patches, encoding=KVEncoding(8, 8))
    assert (again.hits, again.forwards, again.fidelity) == (3, 0, {"exact": 1, "approximate": 2})
    assert 0 < np.abs(served - exact).max() < 0.5 * np.abs(exact).max()
    # A session without the encoding serves nothing of it.
    plain, stats = loop(backbone, patches, rank=0)
    np.testing.assert_allclose(plain, exact, atol=1e-4)
    assert (stats.hits, stats.forwards) == (1, 2)


def test_exact_prefills_stay_exact_in_any_encoding(backbone, store):
    first, _ = loop(backbone, store, encoding="k2v2", reuse="exact", rank=None)
    second, stats = loop(backbone, store, encoding="k2v2")
    np.testing.assert_array_equal(second, first)
    assert (stats.fidelity, stats.forwards) == ({"exact": 3}, 0)
