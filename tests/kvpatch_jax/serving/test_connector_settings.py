"""The operator's settings of the stores: sizes, key and remote; secrets that no message holds; services that fail."""

import os
import threading
import time
from pathlib import Path

import pytest
from serving_sides import TOKENS, served, sides_of

from kvpatch_jax.errors import ConfigError, StoreIOError
from kvpatch_jax.serving.vllm import ConnectorConfig, shared_stores
from kvpatch_jax.serving.vllm.shared_stores import MIN_KEY_BYTES, SharedStores, read_key, remote_of
from kvpatch_jax.store import Remote

pytestmark = pytest.mark.usefixtures("unchecked")
GIVEN = {"store": "s", "backbone": "b"}
SECRET = "correct horse battery staple, thirty-two bytes"


def key_file(folder: Path, content: bytes = SECRET.encode(), mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return f"file:{path}"


def test_sizes_are_read_as_people_write_them():
    config = ConnectorConfig.read({**GIVEN, "host": "8 GiB", "disk": "500 GB", "ttl": 3600})
    assert (config.host, config.disk, config.ttl) == (8 << 30, 500 * 10**9, 3600)
    plain = ConnectorConfig.read(GIVEN)
    assert (plain.host, plain.disk, plain.ttl, plain.key, plain.remote) == (1 << 30, None, None, None, None)
    assert hash(config) != hash(plain), "the stores of a process are kept by their configuration"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("host", value) for value in (-1, True, "many", 2**70)),
        *(("disk", value) for value in (0, "lots")),
        *(("ttl", value) for value in (0, float("nan"))),
        *(("key", value) for value in ("key", "file:relative", "env:lower", 7)),
        ("secret", "secret"),
        *(("remote", value) for value in ("host:6379", "env:lower", "valkey://[::1/0")),
    ],
)
def test_invalid_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^connector\.{name}: got .*; expected "):
        ConnectorConfig.read({**GIVEN, name: value})


@pytest.mark.parametrize("setting", ["key", "secret"])
@pytest.mark.parametrize("key", [SECRET, f"env:{SECRET}", f"file:{SECRET}"])
def test_a_key_that_is_written_out_is_refused_and_not_repeated(setting, key):
    with pytest.raises(ConfigError, match=f"never the {setting} itself") as raised:
        ConnectorConfig.read({**GIVEN, setting: key})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("url", ["valkey://a%40hunter2@h/0", "valkey://h/0?Password=hunter2"])
def test_a_url_with_a_password_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="env:NAME") as raised:
        ConnectorConfig.read({**GIVEN, "remote": url})
    assert "hunter2" not in str(raised.value)


# ------------------------------------------------------------------------------------------------------------- the key


def config_of(**more) -> ConnectorConfig:
    return ConnectorConfig(**GIVEN, **more)


def test_a_key_is_read_from_a_private_file_or_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPATCH_KEY", SECRET)
    assert read_key(config_of(key=key_file(tmp_path))) == SECRET.encode()
    assert read_key(config_of(key="env:KVPATCH_KEY")) == SECRET.encode()
    assert read_key(config_of()) is None
    assert SECRET not in repr(config_of(key="env:KVPATCH_KEY"))


def test_a_key_that_cannot_be_read_is_refused_by_its_setting(tmp_path, monkeypatch):
    monkeypatch.delenv("KVPATCH_KEY", raising=False)
    os.mkfifo(tmp_path / "pipe", 0o600)
    cases = {
        f"file:{tmp_path}/missing": "No such file",
        f"file:{tmp_path}": "no regular file|directory",
        f"file:{tmp_path}/pipe": "no regular file",
        "env:KVPATCH_KEY": "no environment variable KVPATCH_KEY",
    }
    for key, why in cases.items():
        with pytest.raises(ConfigError, match=rf"^connector\.key: got .*({why})"):
            read_key(config_of(key=key))


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (SECRET.encode(), 0o640, "got mode 640"),
        (SECRET.encode(), 0o604, "got mode 604"),
        (b"k" * (MIN_KEY_BYTES - 1), 0o600, f"got {MIN_KEY_BYTES - 1} bytes"),
        (b"", 0o600, "got 0 bytes"),
        (b"k" * (1 << 17), 0o600, "more than"),
    ],
)
def test_a_key_file_that_others_may_read_or_of_another_length_is_refused(tmp_path, content, mode, why):
    with pytest.raises(ConfigError, match=why) as raised:
        read_key(config_of(key=key_file(tmp_path, content, mode)))
    assert SECRET not in str(raised.value)
    assert SECRET not in repr(raised.value.__cause__)


def test_chunks_of_an_engine_with_a_key_are_encrypted_and_served_to_engines_with_it(tmp_path):
    key = key_file(tmp_path)
    with sides_of(tmp_path, key=key) as sides:
        served(sides, "forms", {"segments": [8]})
        assert served(sides, "own", {"segments": [8]}).count == 8
        assert all(b'"kind":"sealed"' in path.read_bytes()[:4096] for path in (tmp_path / "store" / "data").glob("*/*"))
    with sides_of(tmp_path, key=key, patience=29.0) as again:
        assert served(again, "again", {"segments": [8]}).count == 8
    other = tmp_path / "other"
    other.mkdir()
    with sides_of(tmp_path, key=key_file(other, b"x" * 40)) as sides:
        assert served(sides, "other key", {"segments": [8]}).count == 0
        assert sides.scheduler.metrics.take({}, {})["counts"]["refusals"] == {"unread": 1}
    with sides_of(tmp_path) as sides:
        assert served(sides, "no key", {"segments": [8], "save": False}).count == 0, "plainly, whatever the reason"


# ---------------------------------------------------------------------------------------------------------- the remote


def test_engines_of_one_secret_share_a_remote_store(tmp_path, monkeypatch):
    """Canonicals and prefills: the second engine places what the first one formed, and forms nothing again."""
    remote, secret = f"file://{tmp_path}/remote", key_file(tmp_path)
    monkeypatch.setenv("KVPATCH_SECRET", "another secret of the names, of 32 bytes")
    ends = {"segments": [8, 16, 24]}
    with sides_of(tmp_path / "one", remote=remote, secret=secret, patch_after=9) as sides:
        served(sides, "forms", ends)
        assert sides.worker.former.counts == {"canonicals": 1, "prefills": 2}
        sides.worker.stores.of("default").flush()
    with sides_of(tmp_path / "two", remote=remote, secret=secret, patch_after=9) as other:
        own = served(other, "own", ends)
        assert (own.count, other.worker.former.counts) == (24, {})
    with sides_of(tmp_path / "three", remote=remote, secret="env:KVPATCH_SECRET") as third:
        assert served(third, "unrelated", ends).count == 0
    with sides_of(tmp_path / "one", secret="env:KVPATCH_SECRET", patch_after=9) as sides:
        served(sides, "another secret here", ends)  # names of its own in one directory, which keeps none
        assert sides.worker.former.counts == {"canonicals": 1, "prefills": 2}


def test_planning_asks_the_remote_store_once_of_a_chunk_that_nobody_knows(tmp_path, monkeypatch):
    asked = list[str]()
    get = Remote.get

    def noting(self, name):
        asked.append(name)
        return get(self, name)

    monkeypatch.setattr(Remote, "get", noting)
    given = {"remote": f"file://{tmp_path}/remote", "secret": key_file(tmp_path), "patch_after": 9}

    def planned(sides, name, ends, **more):
        """How often a plan asks for each chunk's listing."""
        asked.clear()
        count = served(sides, name, {"segments": ends, "save": False, **more}).count
        listings = [name for name in asked if name.endswith("/enc")]
        return count, sorted(map(listings.count, set(listings)))

    with sides_of(tmp_path / "one", **given) as sides:
        asked.clear()
        served(sides, "forms", {"segments": [8, 16, 24]})
        sides.worker.former.flush()
        sides.worker.stores.of("default").flush()
    with sides_of(tmp_path / "two", **given) as other:
        assert planned(other, "known", [8, 16, 24]) == (24, [1, 1])
        assert planned(other, "here", [8, 16, 24]) == (24, [])
        # The first chunk is known, and the next one to nobody.
        assert planned(other, "unknown", [8, 15, 24]) == (8, [1])
        assert planned(other, "alone", [8, 14, 24], policy="approximate") == (8, [1])


def test_an_unreachable_remote_store_costs_no_request(tmp_path, monkeypatch):
    """The engine starts, forms, and serves from its own disk; what the remote store lacks waits."""
    monkeypatch.setenv("KVPATCH_REMOTE", "valkey://:hunter2@127.0.0.1:1/0")
    with sides_of(tmp_path, remote="env:KVPATCH_REMOTE", patience=20.0) as sides:
        began = time.monotonic()
        assert served(sides, "forms", {"segments": [8]}).count == 0
        assert served(sides, "own", {"segments": [8]}).count == 8
        assert time.monotonic() - began < 15
        counts = sides.worker.stores.of("default").statistics().counts
        assert counts["remote_errors"] > 0
        assert served(sides, "plain", {"segments": [9], "save": False}).count == 0


def test_a_remote_store_that_cannot_be_opened_is_refused_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for url in ("nothing://host/0", f"file://{tmp_path}/file/below", "file://elsewhere/path"):
        with pytest.raises(ConfigError, match=r"^connector\.remote: got .*; expected a URL that can be opened"):
            remote_of(config_of(remote=url))
    monkeypatch.delenv("KVPATCH_REMOTE", raising=False)
    with pytest.raises(ConfigError, match=r"^connector\.remote: got no environment variable KVPATCH_REMOTE"):
        SharedStores(config_of(remote="env:KVPATCH_REMOTE"))


def test_a_remote_store_that_hangs_at_the_start_is_refused_in_time(monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(shared_stores, "open_remote", lambda url, **_: hangs.wait(60))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"^connector\.remote: got no answer from 'file:///srv/kv' within 0.2 s"):
        remote_of(config_of(remote="file:///srv/kv", patience=0.2))
    assert time.monotonic() - began < 10
    hangs.set()


def test_no_message_holds_a_url_that_is_in_a_variable(monkeypatch):
    def fails(url, **_):
        raise StoreIOError("hunter2")

    monkeypatch.setattr(shared_stores, "open_remote", fails)
    monkeypatch.setenv("KVPATCH_REMOTE", "valkey://:hunter2@host/0")
    with pytest.raises(ConfigError, match="StoreIOError") as raised:
        remote_of(config_of(remote="env:KVPATCH_REMOTE"))
    assert "hunter2" not in str(raised.value)


def test_a_remote_store_that_hangs_later_delays_a_request_no_longer_than_its_patience(tmp_path, monkeypatch):
    remote = f"file://{tmp_path}/remote"
    with sides_of(tmp_path, remote=remote, patience=1.0) as sides:
        hangs = threading.Event()
        store = sides.scheduler.stores.of("default")
        assert store.objects.remote is not None
        monkeypatch.setattr(store.objects.remote, "get", lambda name: hangs.wait(60) and (None, None))
        began = time.monotonic()
        found = served(sides, "own", {"segments": [8], "save": False}, TOKENS)
        assert (found.count, sides.scheduler.counts["unread"]) == (0, 1)
        assert time.monotonic() - began < 20
        hangs.set()
