"""The remote tier, over TensorStore's file and memory drivers."""

from pathlib import Path

import pytest
import tensorstore
from store_cases import BACKBONE, chunk_of, name_of, patch_of, same_chunk

from kvpatch_jax.errors import StoreIOError
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore


@pytest.fixture(params=["memory", "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValueStore:
    if request.param == "memory":
        return KeyValueStore({"driver": "memory", "path": "store/"}, context=tensorstore.Context())
    return KeyValueStore({"driver": "file", "path": f"{tmp_path}/remote/"})


def machine(folder: Path, remote: KeyValueStore) -> ChunkStore:
    """A store on another machine: its own disk, the same names."""
    return ChunkStore(folder, budget=Budget(host=0), secret=b"shared by the machines", remote=remote)


def test_another_machine_finds_what_was_put(remote: KeyValueStore, tmp_path: Path):
    chunk, patch = chunk_of(), patch_of(chunk_of())
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(chunk)
        one.put_patches([patch, patch_of(chunk, rank=1)])
        assert not two.contains("B", BACKBONE)
        assert same_chunk(two.get("B", BACKBONE), chunk)
        assert [found.ranks["k"] for found in two.get_patches(patch.stamp)] == [2, 1]
        assert two.counters["remote_hits"] == 3
        assert two.contains("B", BACKBONE)  # and has its own copy now
        assert same_chunk(two.get("B", BACKBONE), chunk)
        assert two.counters["remote_hits"] == 3
        assert two.delete("B", BACKBONE)
        for entry in one.disk.scan():
            one.disk.delete(entry.path)
        assert one.get("B", BACKBONE) is None
        assert one.get_patches(patch.stamp) == []


def test_a_damaged_copy_is_replaced_from_beyond(remote: KeyValueStore, tmp_path: Path):
    with machine(tmp_path / "one", remote) as one:
        one.put(chunk_of())
        path = Path(one.disk.root, name_of(one, chunk_of()).path)
        path.write_bytes(path.read_bytes()[:-1])
        assert same_chunk(one.get("B", BACKBONE), chunk_of())
        assert one.counters["quarantined"] == 1
        assert path.stat().st_size > 0


@pytest.mark.parametrize("at", [3, 100, 5000])
def test_a_damaged_remote_object_is_a_miss_and_goes(remote: KeyValueStore, tmp_path: Path, at: int):
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(chunk_of())
        name = name_of(one, chunk_of())
        raw = bytearray(remote._values.read(name.path).result().value)
        raw[at] ^= 16
        remote._values.write(name.path, bytes(raw)).result()
        assert two.get("B", BACKBONE) is None
        assert remote.paths(name.path) == []
        one.put(chunk_of())
        assert same_chunk(two.get("B", BACKBONE), chunk_of())


def test_expired_objects_and_failing_services(remote: KeyValueStore, tmp_path: Path, monkeypatch):
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(chunk_of(), ttl=5)
        monkeypatch.setattr(remote, "_clock", lambda: 1e11)
        assert two.get("B", BACKBONE) is None

        class Failing:
            def write(self, *_):
                raise ValueError("UNAVAILABLE")

            read = list = write

        monkeypatch.setattr(remote, "_values", Failing())
        with pytest.raises(StoreIOError, match="UNAVAILABLE; expected"):
            one.put(chunk_of("C"))
        assert same_chunk(one.get("C", BACKBONE), chunk_of("C"))  # on this disk, though not acknowledged
        assert two.get("C", BACKBONE) is None
    with pytest.raises(StoreIOError, match="open"):
        KeyValueStore({"driver": "no such driver"})
