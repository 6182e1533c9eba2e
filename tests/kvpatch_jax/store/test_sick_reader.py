"""A reader whose memory or network flips bits: it destroys nothing that others read well."""

import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstore
from store_cases import BACKBONE, chunk_of, file_of, name_of, same_chunk
from store_gates import remote_through

from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore
from kvpatch_jax.store.cli.main import main

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


# ------------------------------------------------------------------------------------------------------ remote store


class Flipping:
    """A tensorstore key-value store whose reads all come with a flipped bit."""

    def __init__(self, values: Any):
        self._values, self.sick = values, False

    def read(self, *arguments: Any, **more: Any) -> Any:
        future = self._values.read(*arguments, **more)
        return _Flipped(future) if self.sick else future

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


def test_a_reader_that_flips_bits_deletes_nothing_from_the_remote_store(tmp_path: Path):
    spec = {"driver": "memory", "path": "store/"}
    service, remote = remote_through(Flipping, spec, context=tensorstore.Context())
    more: dict[str, Any] = {"secret": b"shared by the machines", "remote": remote}
    filled(tmp_path / "one", **more)
    there = remote.paths("obj/")
    assert len(there) == 20
    with opened(tmp_path / "two", **more) as sick:
        service.sick = True
        assert all(sick.get(id, BACKBONE) is None for id in IDS)
        sick.collect()
        service.sick = False
        assert sick.counters["remote_damaged"] >= 20
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
