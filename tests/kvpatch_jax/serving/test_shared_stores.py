"""Stores of one configuration in a process: shared by both sides, with one host tier, closed by the last user."""

import threading
import time

import pytest
from serving_sides import served, sides_of

from kvpatch_jax.errors import ConfigError, StoreClosedError
from kvpatch_jax.serving.vllm import ConnectorConfig, shared_stores
from kvpatch_jax.serving.vllm.shared_stores import acquire_stores, release_stores
from kvpatch_jax.serving.vllm.stores import Stores
from kvpatch_jax.store import ChunkStore


def config_of(folder, **more) -> ConnectorConfig:
    return ConnectorConfig(store=str(folder / "store"), backbone="tiny", **more)


def test_both_sides_use_one_store_and_one_tier(tmp_path):
    with sides_of(tmp_path) as sides:
        scheduler, worker = sides.scheduler.stores, sides.worker.stores
        assert scheduler.of("acme") is worker.of("acme")
        assert scheduler.shared.memory is worker.shared.memory
        served(sides, "forms", {"segments": [8]})
        served(sides, "own", {"segments": [8]})
        before = worker.shared.memory.nbytes
        assert before > 0
        served(sides, "forms too", {"segments": [8], "tenant": "acme"})
        served(sides, "of acme", {"segments": [8], "tenant": "acme"})
        assert worker.shared.memory.nbytes == pytest.approx(2 * before, rel=0.1), "of another tenant, in the same"


def test_the_host_budget_is_that_of_all_tenants_together(tmp_path):
    """The 64 stores of an engine had a tier each."""
    host = 20_000
    with sides_of(tmp_path, host=host) as sides:
        for number in range(6):
            for name in ("forms", "own"):
                found = served(sides, f"{name} {number}", {"segments": [8], "tenant": f"tenant {number}"})
                assert found.count == (8 if name == "own" else 0)
            assert sides.scheduler.stores.shared.held_bytes()["host"] <= host
        first = sides.scheduler.stores.of("tenant 0")
        hits = first.statistics().counts["disk_hits"]
        served(sides, "own again", {"segments": [8], "tenant": "tenant 0"})
        assert first.statistics().counts["disk_hits"] > hits, "others took its place in memory"


def test_stores_are_opened_with_the_operators_settings(tmp_path):
    stores = Stores(config_of(tmp_path, disk=10 << 20, ttl=60.0))
    store = stores.of("default")
    assert store.objects.index.rows("SELECT tenant, bytes FROM budgets") == [("", 10 << 20)]
    assert store.objects.expiry(None) == pytest.approx(time.time() + 60, abs=5)
    stores.close()


def test_what_an_engine_stores_expires(tmp_path):
    with sides_of(tmp_path, ttl=1.0) as sides:
        served(sides, "forms", {"segments": [8]})
        assert sides.worker.former.counts["canonicals"] == 1
        time.sleep(1.1)
        assert served(sides, "late", {"segments": [8], "save": False}).count == 0
        assert sides.scheduler.stores.of("default").collect() == 1


def test_the_last_user_closes(tmp_path):
    first, second = Stores(config_of(tmp_path)), Stores(config_of(tmp_path))
    store = first.of("default")
    assert first.close()
    assert first.close(), "closing again is none of the other's business"
    with pytest.raises(StoreClosedError, match="after close"):
        first.of("default")
    assert second.of("default") is store
    assert not store.objects.closed
    assert second.close()
    assert store.objects.closed
    third = Stores(config_of(tmp_path))
    assert third.of("default") is not store, "opened again"
    assert third.shared is not second.shared
    third.close()


def test_other_settings_have_other_stores(tmp_path):
    first, second = Stores(config_of(tmp_path)), Stores(config_of(tmp_path, host=1 << 20))
    assert first.shared is not second.shared
    assert first.of("default") is not second.of("default")
    assert first.close()
    assert not second.of("default").objects.closed
    assert second.close()


def test_users_that_come_and_go_at_once_never_get_closed_stores(tmp_path):
    config, errors, stop = config_of(tmp_path), [], threading.Event()

    def uses():
        while not stop.is_set():
            stores = acquire_stores(config)
            try:
                stores.of("default")
            except Exception as error:
                errors.append(error)
            release_stores(stores, 10.0)

    threads = [threading.Thread(target=uses) for _ in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(0.5)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert config not in shared_stores._shared


def test_stores_that_cannot_be_opened_are_nobodys(tmp_path):
    config = config_of(tmp_path, key=f"file:{tmp_path}/missing")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"connector\.key"):
            Stores(config)
    assert config not in shared_stores._shared


def test_a_reset_leaves_nothing_to_serve_and_deletes_nothing(tmp_path):
    with sides_of(tmp_path) as sides:
        served(sides, "forms", {"segments": [8]})
        assert served(sides, "own", {"segments": [8]}).count == 8
        stores = sides.scheduler.stores
        stores.shared.reset()
        assert stores.backbone.startswith("tiny after reset ")
        assert stores.shared.memory.nbytes == 0
        assert served(sides, "again", {"segments": [8]}).count == 0
        assert served(sides, "formed since", {"segments": [8]}).count == 8
        first = stores.backbone
        stores.shared.reset()
        assert stores.backbone != first
        assert served(sides, "after another", {"segments": [8], "save": False}).count == 0
    with sides_of(tmp_path) as later:
        assert served(later, "another engine", {"segments": [8]}).count == 8, "it is still stored"


def test_the_disk_s_size_is_looked_at_in_the_background(tmp_path, monkeypatch):
    """A file system that hangs stops no engine: the last size that was seen stays."""
    monkeypatch.setattr(shared_stores, "SAMPLE_SECONDS", 0.0)
    with sides_of(tmp_path) as sides:
        shared = sides.scheduler.stores.shared
        assert "disk" not in shared.held_bytes(), "no store is open"
        served(sides, "forms", {"segments": [8]})
        shared.held_bytes()
        shared._sampler.flush()
        seen = shared.held_bytes()["disk"]
        assert seen > 4096

        shared._sampler.flush()
        hangs, begun = threading.Event(), threading.Event()

        def gauges():
            begun.set()
            hangs.wait(60)
            return {"root_bytes": 7}

        (store,) = shared._open.values()
        monkeypatch.setattr(store.objects, "gauges", gauges)
        for _ in range(5):
            assert shared.held_bytes()["disk"] == seen
        assert begun.wait(60)
        hangs.set()
        shared._sampler.flush()
        assert shared.held_bytes()["disk"] == 7


def test_the_number_of_open_stores_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_stores, "MAX_TENANTS", 3)
    opened, init = [], ChunkStore.__init__

    def counted(self, *given, **more):
        opened.append(more["tenant"])
        init(self, *given, **more)

    monkeypatch.setattr(ChunkStore, "__init__", counted)
    stores = Stores(config_of(tmp_path))
    for number in range(9):
        stores.of(str(number))
    assert (stores.shared.tenants, len(opened)) == (3, 9)
    stores.close()
    assert stores.shared.tenants == 0
