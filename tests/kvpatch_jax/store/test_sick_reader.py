"""A reader whose memory or network flips bits: it destroys nothing that others read well."""

import dataclasses
import functools
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from store_cases import BACKBONE, chunk_of, file_of, name_of, patch_of, same_chunk
from store_gates import remote_through

from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore, StaticLibrary
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.disk import damage_rate
from kvpatch_jax.store.format.naming import name_at

IDS = [f"B{number}" for number in range(20)]
KEY = b"k" * 32


def opened(root: Path, **more: Any) -> ChunkStore:
    return ChunkStore(root, budget=Budget(host=0), **more)


def filled(root: Path, **more: Any) -> list[Path]:
    """Puts twenty chunks. Their files."""
    with opened(root, **more) as store:
        for seed, id in enumerate(IDS):
            store.put(chunk_of(id, seed))
        return [file_of(store, chunk_of(id)) for id in IDS]


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


def damage(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def flipping(place: Callable[[int], int], every: bool = True) -> Callable[..., int]:
    """`os.preadv` with one bit flipped in what it fills, at `place(bytes)`; `every` other call, or all."""
    preadv, calls = os.preadv, [0]

    def flipped(fd: int, targets: Any, offset: int) -> int:
        count, calls[0] = preadv(fd, targets, offset), calls[0] + 1
        if count and (every or calls[0] % 2):
            memoryview(targets[0]).cast("B")[place(min(count, len(targets[0])))] ^= 4
        return count

    return flipped


FAULTS: dict[str, Callable[[], Callable[..., int]]] = {
    "first byte of each call": lambda: flipping(lambda size: 0),
    "last byte of each call": lambda: flipping(lambda size: size - 1),
    "middle of each call": lambda: flipping(lambda size: size // 2),
    "every other call": lambda: flipping(lambda size: size // 2, every=False),
}


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_that_flips_bits_moves_nothing_away(tmp_path: Path, fault: str, key: bytes | None, monkeypatch):
    filled(tmp_path, key=key)
    before = files_of(tmp_path)
    with opened(tmp_path, key=key) as sick:
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", FAULTS[fault]())
            found = [sick.get(id, BACKBONE) for id in IDS]
        assert all(
            each is None or same_chunk(each, chunk_of(id, seed))
            for seed, (id, each) in enumerate(zip(IDS, found, strict=True))
        )
        assert sick.counters["quarantined"] == 0
        assert sick.counters["unsteady_reads"] >= 20
    assert files_of(tmp_path) == before
    with opened(tmp_path, key=key) as sound:
        assert all(same_chunk(sound.get(id, BACKBONE), chunk_of(id, seed)) for seed, id in enumerate(IDS))


def flipping_once() -> Callable[..., int]:
    """`os.preadv` with one bit flipped in what the first call fills."""
    preadv, left = os.preadv, [1]

    def flipped(fd: int, targets: Any, offset: int) -> int:
        count = preadv(fd, targets, offset)
        if left:
            left.pop()
            memoryview(targets[0]).cast("B")[7] ^= 4
        return count

    return flipped


def test_objects_that_verify_in_the_second_read_are_served(tmp_path: Path, monkeypatch):
    filled(tmp_path)
    with opened(tmp_path) as store:
        monkeypatch.setattr(os, "preadv", flipping_once())
        assert same_chunk(store.get("B0", BACKBONE), chunk_of("B0", 0))
        assert (store.counters["unsteady_reads"], store.counters["quarantined"]) == (1, 0)


def test_a_reader_whose_headers_are_never_right_moves_nothing_away(tmp_path: Path, monkeypatch):
    filled(tmp_path)
    before, pread = files_of(tmp_path), os.pread

    def flipped(fd: int, size: int, offset: int) -> bytes:
        raw = bytearray(pread(fd, size, offset))
        raw[len(raw) // 4] ^= 4
        return bytes(raw)

    with opened(tmp_path) as sick:
        monkeypatch.setattr(os, "pread", flipped)
        monkeypatch.setattr(os, "preadv", flipping(lambda size: size // 3))
        assert [sick.get(id, BACKBONE) for id in IDS] == [None] * 20
        assert (sick.counters["unsteady_reads"], sick.counters["quarantined"]) == (20, 0)
    assert files_of(tmp_path) == before


def test_a_header_that_a_second_reading_finds_whole_is_served(tmp_path: Path, monkeypatch):
    filled(tmp_path)
    pread = os.pread
    with opened(tmp_path) as store:
        monkeypatch.setattr(os, "pread", lambda fd, size, at: bytes([*(raw := pread(fd, size, at))[:60], 0, *raw[61:]]))
        assert same_chunk(store.get("B0", BACKBONE), chunk_of("B0", 0))
        assert (store.counters["unsteady_reads"], store.counters["quarantined"]) == (1, 0)


def test_a_stream_continues_after_an_unsteady_read(tmp_path: Path, monkeypatch):
    filled(tmp_path)
    with opened(tmp_path) as store:
        stream = store.stream("B3", BACKBONE)
        assert stream is not None
        monkeypatch.setattr(os, "preadv", flipping_once())
        for layer, values in stream:
            assert np.array_equal(values["k"], chunk_of("B3", 3).kv["k"][layer])
        assert (store.counters["unsteady_reads"], store.counters["quarantined"]) == (1, 0)


def test_a_reader_that_finds_many_damaged_suspects_itself(tmp_path: Path, monkeypatch):
    """The same wrong bits each time: two readings agree, and yet not everything is moved away."""
    paths = filled(tmp_path)
    for path in paths:
        damage(path)
    with opened(tmp_path) as store:
        assert [store.get(id, BACKBONE) for id in IDS] == [None] * 20
        assert store.counters["quarantined"] == damage_rate.MOST
        assert store.counters["quarantine_withheld"] == 20 - damage_rate.MOST
        assert sum(path.exists() for path in paths) == 20 - damage_rate.MOST

        # What is left in place is replaced by a put as any object is.
        store.put(chunk_of("B9", 9))
        assert same_chunk(store.get("B9", BACKBONE), chunk_of("B9", 9))

        monkeypatch.setattr(damage_rate, "SECONDS", 0.0)
        assert store.get("B19", BACKBONE) is None
        assert not paths[19].exists()


def test_verify_of_many_damaged_objects_asks_for_certainty(tmp_path: Path, capsys):
    paths = filled(tmp_path)
    for path in paths[:10]:
        damage(path)
    assert main(["verify", f"--root={tmp_path}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["good"], len(found["bad"]), len(found["left"])) == (10, damage_rate.MOST, 10 - damage_rate.MOST)
    assert main(["verify", f"--root={tmp_path}", "--json", "--yes"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["good"], len(found["bad"]), found["left"]) == (10, 10 - damage_rate.MOST, [])


# ------------------------------------------------------------------------------------------------------ remote store


class Flipping:
    """A tensorstore key-value store whose reads come with a flipped bit: all, or every other one."""

    def __init__(self, values: Any, every: bool):
        self._values, self._every, self._reads, self.sick = values, every, 0, False

    def read(self, *arguments: Any, **more: Any) -> Any:
        self._reads += self.sick
        future = self._values.read(*arguments, **more)
        if not self.sick or (not self._every and self._reads % 2 == 0):
            return future
        return _Flipped(future)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._values, name)


@dataclasses.dataclass
class _Flipped:
    future: Any

    def result(self, timeout: float | None = None) -> Any:
        read = self.future.result(timeout=timeout)
        raw = bytearray(read.value)
        if raw:
            raw[len(raw) // 2] ^= 4
        return tensorstore.KvStore.ReadResult(state=read.state, value=bytes(raw), stamp=read.stamp)

    def cancel(self) -> None:
        self.future.cancel()


@pytest.mark.parametrize("every", [True, False], ids=["each read", "every other read"])
def test_a_reader_that_flips_bits_deletes_nothing_from_the_remote_store(tmp_path: Path, every: bool):
    spec, flipping = {"driver": "memory", "path": "store/"}, functools.partial(Flipping, every=every)
    service, remote = remote_through(flipping, spec, context=tensorstore.Context())
    more: dict[str, Any] = {"secret": b"shared by the machines", "remote": remote}
    filled(tmp_path / "one", **more)
    there = remote.paths("obj/")
    assert len(there) == 20
    with opened(tmp_path / "two", **more) as sick:
        service.sick = True
        for seed, id in enumerate(IDS):
            found = sick.get(id, BACKBONE)
            assert found is None if every else same_chunk(found, chunk_of(id, seed))
        sick.collect()
        service.sick = False
        assert sick.counters["remote_damaged" if every else "unsteady_reads"] >= 20
    assert remote.paths("obj/") == there
    with opened(tmp_path / "three", **more) as sound:
        assert all(same_chunk(sound.get(id, BACKBONE), chunk_of(id, seed)) for seed, id in enumerate(IDS))


def test_verify_deletes_damaged_remote_objects_when_that_is_confirmed(tmp_path: Path, capsys, monkeypatch):
    spec = {"driver": "file", "path": f"{tmp_path}/remote/"}
    remote = KeyValueStore(spec)
    with opened(tmp_path / "one", remote=remote) as store:
        for seed, id in enumerate(IDS[:3]):
            store.put(chunk_of(id, seed))
        bad = name_of(store, chunk_of("B1")).path
    damage(tmp_path / "remote" / bad)
    call = ["verify", f"--root={tmp_path}/one", f"--remote={json.dumps(spec)}", "--json"]
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    assert main(call) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["remote_bad"], found["remote_deleted"]) == ([bad], False)
    assert len(remote.paths("obj/")) == 3
    assert main([*call, "--yes"]) == 1
    assert json.loads(capsys.readouterr().out)["remote_deleted"] is True
    assert len(remote.paths("obj/")) == 2
    assert bad not in remote.paths("obj/")
    assert main(call) == 0
    capsys.readouterr()


# ------------------------------------------------------------------------------------------------ quarantine restore


def quarantined(store: ChunkStore) -> dict[str, bytes]:
    """Moves a root's objects and entries to quarantine, though they are good, as a sick reader would."""
    before = files_of(Path(store.disk.root))
    for entry in [*store.disk.scan("obj"), *store.disk.scan("lib")]:
        assert store.disk.quarantine(name_at(entry.path), entry.file, "a fault of the reader", certain=True)
    return before


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_quarantine_restore_puts_back_intact_objects(tmp_path: Path, key: bytes | None, capsys):
    with opened(tmp_path, key=key) as store:
        for seed, id in enumerate(IDS[:5]):
            store.put(chunk_of(id, seed, encoder=np.ones(5, np.float32)))
        store.put_patches([patch_of(chunk_of("B0"))])
        StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
        before = quarantined(store)
        assert store.get("B0", BACKBONE) is None

        # One is damaged indeed, and one has been put again.
        damage(next((tmp_path / "quarantine").glob(f"*{file_of(store, chunk_of('B1')).name}")))
        store.put(chunk_of("B2", 2))
        newer = file_of(store, chunk_of("B2")).read_bytes()

        assert main(["quarantine", "restore", f"--root={tmp_path}", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert (len(found["restored"]), len(found["damaged"]), len(found["taken"])) == (len(before) - 2, 1, 1)
        damaged, taken = file_of(store, chunk_of("B1")), file_of(store, chunk_of("B2"))
        assert not damaged.exists()
        assert taken.read_bytes() == newer
        for path, raw in before.items():
            if path not in (str(damaged.relative_to(tmp_path)), str(taken.relative_to(tmp_path))):
                assert (tmp_path / path).read_bytes() == raw
        assert same_chunk(store.get("B0", BACKBONE), chunk_of("B0", 0))
        assert len(store.get_patches(patch_of(chunk_of("B0")).metadata)) == 1
        resource = StaticLibrary(store, quota=1 << 20).get("TEXT", "NAME")
        assert resource is not None
        assert resource.content == "a text"
        assert len(list((tmp_path / "quarantine").iterdir())) == 4  # two, each with its reason
    assert main(["quarantine", "list", f"--root={tmp_path}", "--json"]) == 0
    reasons = [one["reason"] for one in json.loads(capsys.readouterr().out)["quarantined"]]
    assert reasons == ["a fault of the reader"] * 2


def test_a_tenant_restores_its_files_including_those_of_older_versions(tmp_path: Path):
    """Whose notes do not say where a file was: a tenant of one backbone leaves no choice."""
    with opened(tmp_path) as one, opened(tmp_path, tenant="two") as two:
        for store in (one, two):
            store.put(chunk_of())
            quarantined(store)
        for note in (tmp_path / "quarantine").glob("*.reason"):
            note.write_text("a checksum")
        found = one.restore_quarantined()
        assert (len(found.restored), found.unplaced) == (1, [])
        assert same_chunk(one.get("B", BACKBONE), chunk_of())
        assert two.get("B", BACKBONE) is None
