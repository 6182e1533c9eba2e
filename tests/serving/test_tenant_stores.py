"""Stores of tenants in a process: shared by both sides, of one checkpoint, reset, closed in time; keys and remotes."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, StoreError, WeightsError
from kvpatch_jax.serving.vllm import ConnectorConfig, stores
from kvpatch_jax.serving.vllm.plan import Survivor, SurvivorKey
from kvpatch_jax.serving.vllm.stores import MIN_KEY_BYTES, WEIGHTS_RECORD, Stores, Survivors, expect_weights
from kvpatch_jax.store import ChunkStore

SECRET = "correct horse battery staple, thirty-two bytes"
KEY = SECRET.encode()
DIGEST, OTHER = "11" * 32, "22" * 32


def chunk_of(tokens=4) -> kvp.Chunk:
    layout = kvp.KVLayout.gqa(1, 1, 8, kvp.Rope(1e4, 8))
    kv = {name: np.zeros((1, tokens, 1, 8), np.float32) for name in "kv"}
    return kvp.Chunk(kv, np.arange(tokens), tokens, tokens, "chunk", layout, "tiny")


@pytest.fixture
def opened(tmp_path):
    """Opens one side's stores in a folder, and closes them after the test."""
    sides = []

    def opens(weights=None, folder="store", **options) -> Stores:
        store = {"root": str(tmp_path / folder), **options}
        sides.append(Stores(ConnectorConfig.read({"store": store, "backbone": "tiny"}), weights))
        return sides[-1]

    yield opens
    for side in sides:
        side.close()


# ------------------------------------------------------------------------------------------------------ shared, closed


def test_both_sides_share_stores_until_the_last_one_closes(opened):
    first, second = opened(), opened()
    store = first.of("acme")
    assert second.of("acme") is store
    assert first.survivors is second.survivors
    assert first.close()
    assert first.close(), "closing again is none of the other's business"
    with pytest.raises(StoreError, match="after close"):
        first.of("acme")
    assert second.of("acme") is store
    assert second.close()
    assert store.objects.closed
    assert opened().of("acme") is not store


def test_a_store_that_hangs_closes_in_time(opened, monkeypatch):
    side, hangs = opened(), threading.Event()
    stuck, other = side.of("stuck"), side.of("other")
    monkeypatch.setattr(stuck, "close", lambda: hangs.wait(60))
    assert side.close(0.2) is False
    assert other.objects.closed, "the others are closed all the same"
    hangs.set()


def test_no_more_stores_stay_open_than_the_limit_however_many_tenants_there_are(opened, monkeypatch):
    """Tenants are salts, which any client may send: the files of their stores are not left open."""
    monkeypatch.setattr(stores, "MAX_TENANTS", 2)
    side = opened()
    first, *_, last = [side.of(f"tenant {number}") for number in range(4)]
    deadline = time.monotonic() + 30
    while not first.objects.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (side.tenants, last.objects.closed) == (2, False)
    assert not side.of("tenant 0").objects.closed, "it is opened again"


def test_a_reset_leaves_nothing_to_serve_and_deletes_nothing(opened):
    side, other = opened(), opened()
    side.of("default").put(chunk_of())
    assert side.canonical("default", "chunk") is not None
    names = [side.backbone]
    for _ in range(2):
        side.reset()
        assert not side.has_canonical("default", "chunk")
        assert other.backbone == side.backbone
        names.append(side.backbone)
    assert len(set(names)) == 3
    assert side.of("default").contains("chunk", "tiny"), "for other engines"


def test_survivors_are_kept_within_their_budget_the_latest_used_ones():
    chunk = chunk_of()
    survivors = Survivors(2 * chunk.nbytes)
    keys = [SurvivorKey("default", "", str(number)) for number in range(3)]
    for key in keys[:2]:
        survivors.put(key, Survivor(chunk, "i", ()))
    assert survivors.get(keys[0]) is not None
    survivors.put(keys[2], Survivor(chunk, "i", ()))
    assert [survivors.get(key) is None for key in keys] == [False, True, False]
    assert survivors.nbytes == 2 * chunk.nbytes
    survivors.put(keys[0], Survivor(chunk_of(tokens=64), "i", ()))
    assert (survivors.get(keys[0]), len(survivors)) == (None, 1), "too large, and the earlier version is outdated"


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_of_another_checkpoint_are_never_served(opened):
    """The first engine's count; a deleted record is written again by whoever uses the store next."""
    first, other = opened(DIGEST), opened(OTHER)
    first.of("default").put(chunk_of())
    for call in (other.of, lambda tenant: other.canonical(tenant, "chunk")):
        with pytest.raises(WeightsError, match="111111111111…; expected the engine's, 222222222222…: give each"):
            call("default")
    other.of("another")
    with pytest.raises(WeightsError):
        first.of("another")
    first.of("default").delete_tenant()
    first.of("default")
    with pytest.raises(WeightsError):
        other.of("default")
    assert opened().of("default").get_encoder(WEIGHTS_RECORD, "tiny").tobytes().hex() == DIGEST


def test_only_one_of_several_concurrent_engines_claims_a_store(tmp_path):
    def claims(digest):
        with ChunkStore(tmp_path) as store:
            try:
                expect_weights(store, "tiny", digest)
            except WeightsError:
                return False
            return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(claims, [f"{place:02d}" * 32 for place in range(6)])) == 1


# ---------------------------------------------------------------------------------------------------- keys and remotes


def key_file(folder, content=KEY, mode=0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return f"file:{path}"


def test_chunks_are_encrypted_with_the_key_of_a_private_file_or_a_variable(tmp_path, opened, monkeypatch):
    monkeypatch.setenv("KVPATCH_KEY", SECRET)
    first = opened(key=key_file(tmp_path)).of("default")
    first.put(chunk_of())
    first.flush()
    assert opened(key="env:KVPATCH_KEY", memory=0).canonical("default", "chunk") is not None
    monkeypatch.setenv("KVPATCH_KEY", SECRET[::-1])
    with pytest.raises(StoreError, match="another key"):
        opened(key="env:KVPATCH_KEY", memory=1).canonical("default", "chunk")


@pytest.mark.parametrize("setting", ["key", "secret"])
def test_a_key_that_is_missing_short_or_open_to_others_is_refused_and_not_repeated(tmp_path, opened, setting):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for place, why in (
        (f"file:{tmp_path}/missing", "No such file"),
        (f"file:{tmp_path}", "no regular file|directory"),
        (f"file:{tmp_path}/pipe", "no regular file"),
        ("env:KVPATCH_ABSENT", "no environment variable KVPATCH_ABSENT"),
        ((KEY, 0o640), "mode 640"),
        ((KEY, 0o604), "mode 604"),
        ((KEY[: MIN_KEY_BYTES - 1], 0o600), f"{MIN_KEY_BYTES - 1} bytes"),
        ((KEY * 2000, 0o600), "more than"),
    ):
        place = place if isinstance(place, str) else key_file(tmp_path, *place)
        with pytest.raises(ConfigError, match=rf"^connector\.store\.{setting}: got .*({why})") as raised:
            opened(**{setting: place})
        assert SECRET[:16] not in f"{raised.value} {raised.value.__cause__!r}"


def test_engines_of_one_secret_share_a_remote_store(tmp_path, opened, monkeypatch):
    monkeypatch.setenv("KVPATCH_SECRET", "another secret of the names, of 32 bytes")
    shared = {"remote": f"file://{tmp_path}/remote", "secret": key_file(tmp_path)}
    first = opened(folder="one", **shared).of("default")
    first.put(chunk_of())
    first.flush()
    assert opened(folder="two", **shared).canonical("default", "chunk") is not None
    third = opened(folder="three", **shared | {"secret": "env:KVPATCH_SECRET"})
    assert third.canonical("default", "chunk") is None


def test_an_unreachable_remote_store_is_a_miss(opened, monkeypatch):
    monkeypatch.setenv("KVPATCH_REMOTE", "valkey://:hunter2@127.0.0.1:1/0")
    side = opened(remote="env:KVPATCH_REMOTE")
    assert side.canonical("default", "absent") is None
    side.of("default").put(chunk_of())
    assert side.canonical("default", "chunk") is not None, "from its own disk"


def test_a_remote_store_that_cannot_be_opened_is_refused_and_its_url_not_repeated(tmp_path, opened, monkeypatch):
    (tmp_path / "file").write_text("")
    for url, expected in (
        *((url, "a URL") for url in ("nothing://host/0", f"file://{tmp_path}/file/below", "file://elsewhere/path")),
        ("env:KVPATCH_ABSENT", "one that is set"),
    ):
        with pytest.raises(ConfigError, match=rf"^connector\.store\.remote: got .*; expected {expected}"):
            opened(remote=url)

    def fails(url, **_):
        raise StoreError("hunter2")

    monkeypatch.setattr(stores, "open_remote", fails)
    monkeypatch.setenv("KVPATCH_REMOTE", "valkey://:hunter2@host/0")
    with pytest.raises(ConfigError, match="StoreError") as raised:
        opened(remote="env:KVPATCH_REMOTE")
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None
