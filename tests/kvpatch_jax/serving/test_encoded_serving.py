"""The connector over encoded canonicals: pages hold the bits of the decoded twins, and nothing is taken for exact."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from memory_store import MemoryStore
from serving_sides import LAYOUT, TOKENS, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, antecedent_of
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.serving.vllm import ConnectorConfig, shared_stores, stores
from kvpatch_jax.serving.vllm.forming import check_lowest_layer
from kvpatch_jax.serving.vllm.layouts import CacheFormat
from kvpatch_jax.store import ChunkStore

BLIND = {"policy": "blind", "segments": [8, 18]}


@dataclasses.dataclass
class Key:
    """What a store is asked for patches by."""

    chunk: str
    backbone: str
    antecedent: tuple
    encoding: str | None = None
    orbit: bool = False

    @property
    def behind(self) -> Antecedent:
        return antecedent_of(self.antecedent)


class Memory(MemoryStore, ChunkStore):
    """A store in memory in the place of a tenant's."""

    def close(self):
        pass


@pytest.fixture
def memory(monkeypatch):
    """The stores of all tenants that are opened: one in memory."""
    made = [Memory()]
    monkeypatch.setattr(shared_stores, "ChunkStore", lambda *_, **__: made[0])
    monkeypatch.setattr(stores, "PatchKey", Key)
    return made


def read(folder) -> tuple[int, np.ndarray]:
    """What a request is matched of, and what stands in its pages then."""
    with sides_of(folder, encoding="k8v8", save=False) as sides:
        found = served(sides, "again", BLIND)
        assert not found.failed
        return found.count, found.loaded[:, :18].astype(np.float32)


def test_pages_hold_what_the_decoded_twins_give(memory, tmp_path):
    with sides_of(tmp_path, encoding="k8v8") as sides:
        # A chunk becomes a canonical where it is the first of a prompt, and gets a patch behind another one.
        served(sides, "second", {**BLIND, "segments": [10]}, tokens=TOKENS[8:])
        served(sides, "first", BLIND)
        assert sides.worker.former.counts == {"canonicals": 2, "patches": 1, "survivors": 1}

    store = memory[0]
    assert {chunk.encoding for chunk in store.chunks.values()} == {"k8v8g32"}
    assert [patch.metadata.encoding for patch in store.patches] == ["k8v8g32"]
    count, found = read(tmp_path)
    memory[0] = twins = Memory()
    twins.patches = store.patches
    twins.chunks = {key: kvp.decode_chunk(chunk) for key, chunk in store.chunks.items()}
    twin_count, wanted = read(tmp_path)
    assert count == twin_count == 18
    np.testing.assert_array_equal(found, wanted)

    exact = true_kv(TOKENS)
    for begin, name in ((0, "k"), (64, "v")):
        true = exact[name][:, :18, 0]
        error = np.abs(found[..., begin : begin + 64] - true).max()
        assert 0 < error < 0.05 * np.abs(true).max()


def test_encoded_canonicals_are_nothing_exact(memory, tmp_path):
    with sides_of(tmp_path, encoding="k8v8") as sides:
        served(sides, "first", BLIND)
        assert memory[0].chunks
        for policy, matched in (("exact", 0), ("blind", 8)):
            assert served(sides, policy, {"policy": policy, "segments": [8]}, tokens=TOKENS[:12]).count == matched
    # As they were prefilled, canonicals of the same chunk are other objects.
    with sides_of(tmp_path) as sides:
        assert served(sides, "plain", BLIND).count == 0


def test_the_lowest_layer_may_differ_by_the_rounding_alone():
    local = np.arange(8, dtype=np.float32)
    free = kvp.to_phase_free(LAYOUT, true_kv(TOKENS[:8]), local, 0)
    kv = {name: jnp.asarray(value) for name, value in free.items()}
    chunk = kvp.Chunk(kv, local, 8, 8, "c", LAYOUT, "tiny")
    for word in ("k8v8", "k2v2"):
        encoded = kvp.encode_chunk(chunk, word)
        check_lowest_layer(encoded, kv)
        CacheFormat(LAYOUT, np.dtype(np.float32)).check(encoded, 8)
    turned = {**kv, "k": -kv["k"]}
    for word in ("k8v8", "k2v2"):
        with pytest.raises(InputError, match="lowest layer"):
            check_lowest_layer(kvp.encode_chunk(chunk, word), turned)


def test_settings_name_an_encoding(unchecked):
    given = {"store": "s", "backbone": "b"}
    assert ConnectorConfig.read({**given, "encoding": "k4v6"}).encoding == "k4v6g32"
    assert ConnectorConfig.read(given).encoding is None
    for wrong in ("k9v4", "auto", 8):
        with pytest.raises(ConfigError, match="encoding"):
            ConnectorConfig.read({**given, "encoding": wrong})
    with pytest.raises(ConfigError, match="certificate"):
        ConnectorConfig.read({**given, "encoding": "k4v4", "certificate": "c.json"})
