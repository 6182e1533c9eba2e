"""A damaged file, index or secret is a miss or a typed error, never wrong numbers, and the next put repairs it."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax.errors import KVPatchError, StoreCorruptError, StoreError
from kvpatch_jax.store import codec, files, index
from kvpatch_jax.store.files import Encoded, Header, Stored, object_parts, parse_object
from kvpatch_jax.store.objects import Objects
from tests.store.store_cases import KEY, chunk_of, file_of, name_of, opened, patch_for

OBJECTS = 40
HEADER = Header("tenant", "name", 7, 1e12)


def object_of(number: int, version: int = 0) -> Encoded:
    leaves = {"output": np.arange(number, number + 60, dtype=np.int32), "empty": np.zeros((0, 3), np.float64)}
    return Encoded("encoder", {"number": number, "version": version}, leaves)


def content_of(stored: Stored) -> tuple[int, int, list[int]]:
    return stored.body["number"], stored.body["version"], stored.arrays["output"].tolist()


def filled(root: Path, **options) -> Objects:
    store = opened(root, **options)
    store.put([(name_of(number), object_of(number)) for number in range(OBJECTS)])
    return store


def flipped(data: bytes, position: int, bit: int) -> bytes:
    copy = bytearray(data)
    copy[position] ^= 1 << bit
    return bytes(copy)


# ------------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("key", [None, KEY])
def test_every_flip_and_every_length_of_a_file_is_noticed(key: bytes | None):
    data = b"".join(object_parts(Encoded("encoder", {"id": "ü"}, object_of(3).arrays), HEADER, key))
    assert parse_object(np.frombuffer(data, np.uint8), key)[1].arrays["output"].tolist() == list(range(3, 63))
    damages = [flipped(data, position, position % 8) for position in range(len(data))]
    damages += [data[:size] for size in range(len(data))] + [data + bytes(64)]
    for damaged in damages:
        with pytest.raises(StoreCorruptError if key is None else StoreError):
            parse_object(np.frombuffer(damaged, np.uint8), key)


def _version(file: Path, _: Path) -> None:
    """Gives the file another number of the format, with the checksum that belongs to it."""
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    text = data[8:length].replace(f'"format":"{files.FORMAT}"'.encode(), f'"format":"{files.FORMAT + 1}"'.encode())
    blank = text[: files._SUM.start] + b"0" * 16 + text[files._SUM.stop :]
    text = text[: files._SUM.start] + files.xxhash.xxh3_64_hexdigest(blank).encode() + text[files._SUM.stop :]
    file.write_bytes(data[:8] + text + data[length:])


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "cut": lambda file, _: os.truncate(file, file.stat().st_size // 2),
    "gone": lambda file, _: file.unlink(),
    "another's": lambda file, other: file.write_bytes(other.read_bytes()),
    "folder": lambda file, _: (file.unlink(), file.mkdir()),
    "link": lambda file, other: (file.unlink(), file.symlink_to(other)),
    "pipe": lambda file, _: (file.unlink(), os.mkfifo(file)),
    "later version": _version,
}


def refused(key: bytes | None) -> contextlib.suppress:
    """Encrypted bytes of another object are intact, but do not open for this name: that may be an error instead."""
    return contextlib.suppress(*([] if key is None else [StoreError]))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("key", [None, KEY])
def test_a_damaged_file_is_a_miss_until_the_next_put(folder: Path, damage: str, key: bytes | None):
    store = filled(folder / "root", key=key)
    DAMAGES[damage](file_of(store, name_of(3)), file_of(store, name_of(4)))
    with refused(key):
        assert store.get(name_of(3), content_of) is None
        assert not store.contains(name_of(3))  # whoever asks puts it again
    assert store.get(name_of(4), content_of) == (4, 0, list(range(4, 64)))
    if damage not in ("later version", "folder", "link") and (damage, key) != ("another's", KEY):
        assert store.damaged() == [name_of(3)]
    assert store.put([(name_of(3), object_of(3, 1))]) == [True]
    assert store.get(name_of(3), content_of) == (3, 1, list(range(3, 63)))
    store.close()


@pytest.mark.parametrize("key", [None, KEY])
def test_a_file_of_another_tenant_is_never_read(folder, key):
    store, other = filled(folder / "root", key=key), filled(folder / "root", tenant="other", key=key)
    file_of(store, name_of(3)).write_bytes(file_of(other, name_of(3)).read_bytes())
    with refused(key):
        assert store.get(name_of(3), content_of) is None
    store.close()
    other.close()


def test_verify_deletes_what_is_damaged_and_nothing_else(folder, monkeypatch):
    store = filled(folder / "root")
    os.truncate(file_of(store, name_of(3)), 400)
    _version(file_of(store, name_of(5)), file_of(store, name_of(4)))

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("kvpatch_jax.store.objects.file_bytes", fail)
        assert store.damaged(delete=True) == []  # nobody knows
        assert store.get(name_of(6), content_of) is None
    assert store.usage().count == OBJECTS
    assert store.damaged(delete=True) == [name_of(3)]
    assert store.usage().count == OBJECTS - 1
    assert store.damaged() == []
    store.close()


# ----------------------------------------------------------------------------------------------------------- bodies

PRIVATE = "an id that nobody may read"
PAGE = chunk_of(PRIVATE, tokens=9)


@pytest.mark.parametrize("kind", ["packed", "patch"])
def test_whatever_a_malformed_body_holds_is_damage_without_ids(kind: str):
    """Any value in any place of the body but free words, and any leaf of another shape, is an error of the store."""
    encoded, decode = codec.encode_chunk_object(PAGE, "k4v4"), codec.decode_chunk_object
    if kind == "patch":
        encoded, decode = codec.encode_patch_object(patch_for((PRIVATE,), chunk=PAGE)), codec.decode_patch_parts
    attempts = []
    for name in encoded.body:
        for value in (None, -1, 1 << 62, 2.5, "", [1], {}, [["x", None, "y"]]):
            attempts.append((name, Stored(encoded.kind, {**encoded.body, name: value}, encoded.arrays)))
    for name, array in encoded.arrays.items():
        for other in (array[:-1], array[None], np.zeros(0, np.uint8)):
            attempts.append((name, Stored(encoded.kind, encoded.body, {**encoded.arrays, name: other})))
    accepted, refusals = set(), []
    for name, attempt in attempts:
        try:
            decode(attempt)
            accepted.add(name)
        except StoreCorruptError as error:
            refusals.append(error)
    assert not any(PRIVATE in str(error) for error in refusals)
    assert all(error.__suppress_context__ or error.__context__ is None for error in refusals)
    assert accepted == ({"packed"} if kind == "patch" else {"backbone", "span", "content", "lead"})


# ------------------------------------------------------------------------------------------------------------ index


def check_root(root: Path, allowed: dict[int, set[int | None]]) -> int:
    """Opens a damaged root and uses all of it. Returns how many objects are there. Afterwards everything works.

    Args:
      allowed: versions that each object may have.
    """
    count = 0
    for attempt in range(3):
        try:
            with contextlib.closing(opened(root)) as store:
                count = 0
                for number, versions in allowed.items():
                    content = store.get(name_of(number), content_of)
                    count += content is not None
                    assert content is None or content[1] in versions
                    assert content is None or content == (number, content[1], list(range(number, number + 60)))
                store.with_prefix("")
                store.usage()
                store.index.collect()
                for number in range(OBJECTS):
                    store.put([(name_of(number), object_of(number, 9))])
                    content = store.get(name_of(number), content_of)
                    if content is None:  # the index finds no more what it holds: to be seen by a look at all of it
                        store.damaged()
                    assert content == (number, 9, list(range(number, number + 60)))
                store.delete(f"{0:032x}")
                assert store.get(name_of(0), content_of) is None
            return count
        except KVPatchError as error:  # it says what is wrong; the next open makes the index again
            if "an index of format" in str(error):  # a later version's is not replaced
                (root / "index.sqlite").unlink()
            allowed = {number: versions | {9, None} for number, versions in allowed.items()}
            assert attempt < 2
    return count


@pytest.fixture(scope="module")
def closed(module_folder: Path) -> Path:
    """A root whose index has several pages of every kind; its checksums hold for objects 0 to 39."""
    store = filled(module_folder / "closed", root_budget="10 MB")
    store.put([(name_of(number, "kv"), Encoded("chunk", {}, {"kv": np.zeros(1)})) for number in range(100, 400)])
    for number in range(100, 400):
        store.delete(f"{number + 1000:032x}")
    store.put([(name_of(number), object_of(number, 1)) for number in range(10)])
    store.delete(f"{39:032x}")
    store.close()
    return module_folder / "closed"


VERSIONS: dict[int, set[int | None]] = {number: {1 if number < 10 else 0} for number in range(OBJECTS - 1)}
VERSIONS[39] = {None}


def copied(closed: Path, root: Path) -> Path:
    """Copies a root; files as links, because they are never changed."""
    shutil.copytree(closed, root, copy_function=os.link)
    for name in ("index.sqlite", "lock", "secret"):
        (root / name).unlink()
        shutil.copy(closed / name, root / name)
    return root


@pytest.mark.parametrize("count", [20, pytest.param(2000, marks=pytest.mark.nightly)])
def test_flips_in_the_index_never_give_wrong_bytes(
    closed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.2)
    chance, data = random.Random(1), (closed / "index.sqlite").read_bytes()
    for trial in range(count):
        # Half of the flips hit the first bytes of a page, or the first page: its header and pointers.
        position = chance.randrange(len(data))
        if trial % 2:
            position = chance.choice([chance.randrange(100), position // 4096 * 4096 + chance.randrange(40)])
        copy = copied(closed, folder / str(trial))
        (copy / "index.sqlite").write_bytes(flipped(data, position, chance.randrange(8)))
        check_root(copy, VERSIONS)
        shutil.rmtree(copy)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 0.9])
def test_a_shortened_index_is_made_again(closed, folder, share):
    copy = copied(closed, folder / "root")
    os.truncate(copy / "index.sqlite", int(share * (copy / "index.sqlite").stat().st_size))
    assert check_root(copy, VERSIONS) == OBJECTS - 1


def test_a_lost_index_is_made_again(folder):
    key = b"k" * 32
    store = filled(folder / "root", key=key)
    part = f"{7:032x}/"
    store.put([(part + "kv", Encoded("chunk", {}, {})), (part + "p.1.2", Encoded("patch", {}, {}))])
    store.put([(part + "e", Encoded("entry", {}, {})), (part + "e.v000000001", Encoded("entry", {}, {}))])
    store.put([(name_of(3), object_of(3, 1))], expires=4e9)
    rows = store.index.rows("SELECT tenant, name, kind, rank, file, size, expires FROM objects ORDER BY name")
    usage = store.usage()
    store.close()
    for suffix in ("", "-wal", "-shm"):
        (folder / "root" / f"index.sqlite{suffix}").unlink(missing_ok=True)
    with contextlib.closing(opened(folder / "root", key=key)) as store:
        again = store.index.rows("SELECT tenant, name, kind, rank, file, size, expires FROM objects ORDER BY name")
        assert again == rows
        assert store.usage() == usage
        assert store.index.rebuilt == OBJECTS + 4
        assert store.get(name_of(3), content_of) == (3, 1, list(range(3, 63)))
        assert store.put_async(name_of(3), lambda: object_of(3, 2), 100).result()
        assert store.get(name_of(3), content_of) == (3, 2, list(range(3, 63)))


def test_of_two_files_of_a_name_a_new_index_takes_the_later(folder):
    """The earlier one is what a crash left between the commit and the unlink."""
    store = filled(folder / "root")
    file = file_of(store, name_of(3))
    content = file.read_bytes()
    store.put([(name_of(3), object_of(3, 1))])
    file.write_bytes(content)
    store.close()
    (folder / "root" / "index.sqlite").unlink()
    with contextlib.closing(opened(folder / "root")) as store:
        assert store.get(name_of(3), content_of) == (3, 1, list(range(3, 63)))
        os.utime(file, (1, 1))
        store.index.collect()
        assert not file.exists()


# ----------------------------------------------------------------------------------------------------------- secret


def test_each_byte_of_the_secret_may_be_damaged(folder):
    root = folder / "root"
    with contextlib.closing(Objects(root)) as store:
        store.put([(name_of(1), object_of(1))])
        secret, tenant = store.index.secret, store.tenant
    data = (root / "secret").read_bytes()
    for position in range(len(data)):
        (root / "secret").write_bytes(flipped(data, position, position % 7))
        with contextlib.closing(Objects(root)) as store:
            assert (store.index.secret, store.tenant) == (secret, tenant)
    assert len(data) > 100

    for broken in (b"", data[: len(data) // 3], flipped(flipped(data, 20, 1), len(data) // 2 + 20, 1)):
        (root / "secret").write_bytes(broken)
        with pytest.raises(StoreCorruptError):
            Objects(root)
    (root / "secret").unlink()
    with pytest.raises(StoreError):
        Objects(root)  # no new secret, under which nothing would be found
    (root / "secret").write_bytes(data)
    with contextlib.closing(Objects(root)) as store:
        assert store.get(name_of(1), content_of) == (1, 0, list(range(1, 61)))
