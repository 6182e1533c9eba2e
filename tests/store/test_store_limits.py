"""What the system refuses, and what the store itself bounds: typed errors, nothing lost, and it works afterwards."""

import concurrent.futures
import contextlib
import errno
import gc
import itertools
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from kvpatch_jax.errors import (
    InputError,
    KVPatchError,
    StoreError,
)
from kvpatch_jax.store import index
from kvpatch_jax.store.files import Encoded, Stored
from kvpatch_jax.store.objects import Objects

PARTS = {"chunk": "kv", "patch": "p.1.2", "encoder": "enc", "entry": "e"}
KEY = b"k" * 32


def name_of(number: int, kind: str = "encoder") -> str:
    return f"{number:032x}/{PARTS[kind]}"


def object_of(value: int, size: int = 100, kind: str = "encoder") -> Encoded:
    return Encoded(kind, {}, {"output": np.full(size, value, np.int32)})


def value_of(stored: Stored) -> int:
    assert len(set(stored.arrays["output"].tolist())) == 1
    return int(stored.arrays["output"][0])


def put(
    store: Objects, number: int, value: int | None = None, size: int = 100, kind: str = "encoder", **options
) -> None:
    encoded = object_of(number if value is None else value, size, kind)
    assert store.put([(name_of(number, kind), encoded)], **options) == [True]


def numbers_of(store: Objects, kind: str = "encoder") -> list[int]:
    names = store.with_prefix("")
    return sorted(int(name.partition("/")[0], 16) for name in names if name.endswith(f"/{PARTS[kind]}"))


def run(code: str, *arguments: str) -> str:
    """Runs a program; returns its output, errors and warnings included."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-W",
        "default",
        "-W",
        "ignore:This process:DeprecationWarning",
        "-c",
        textwrap.dedent(code),
        *arguments,
    ]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120}
    return subprocess.run(command, env=environment, check=False, **options).stdout


# ------------------------------------------------------------------------------------------- what the system refuses


def fill(store: Objects, numbers: range, size: int) -> int:
    """Puts objects until there is no room. Returns the number that failed."""
    for number in numbers:
        try:
            put(store, number, size=size)
        except StoreError:
            return number
    raise AssertionError("the disk had room")


@pytest.mark.nightly
def test_a_full_disk(folder):
    """A file system of 2 MB, which only root may mount."""
    root = folder / "disk"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", root], check=False).returncode:
        pytest.skip("no right to mount")
    try:
        store = Objects(root / "root", memory=0)
        put(store, 0, size=50_000)
        count = fill(store, range(1, 100), 50_000)
        fill(store, range(1000, 3000), 1)  # until the index has no room either
        assert [store.get(name_of(number), value_of) for number in range(count)] == list(range(count))
        store.delete(f"{0:032x}")
        store.delete(f"{1:032x}")
        put(store, 0, 7, size=10_000)
        assert store.get(name_of(0), value_of) == 7
        assert store.damaged() == []
        store.close()
    finally:
        subprocess.run(["umount", "-l", root], check=True)


@pytest.mark.nightly
def test_a_root_that_is_mounted_read_only(folder):
    root = folder / "root"
    with contextlib.closing(Objects(root)) as store:
        put(store, 1)
    if subprocess.run(["mount", "--bind", root, root], check=False).returncode:
        pytest.skip("no right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
        with pytest.raises(StoreError, match="Read-only"):
            Objects(root)
    finally:
        subprocess.run(["umount", "-l", root], check=True)
    with contextlib.closing(Objects(root)) as store:
        assert store.get(name_of(1), value_of) == 1


class Refusing:
    """Stands for `os` in a module of the store; some calls fail."""

    def __init__(self, code: int, *calls: str):
        self.code, self.calls = code, calls

    def __getattr__(self, name: str):
        if name in self.calls:
            return self.refuse
        return getattr(os, name)

    def refuse(self, *_: object, **__: object) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(
    ("code", "error"),
    [(errno.ENOSPC, StoreError), (errno.EROFS, StoreError), (errno.EIO, StoreError)],
)
@pytest.mark.parametrize("call", ["open", "mkdir", "rename", "fsync"])
def test_a_root_that_cannot_be_made_is_made_later(folder, monkeypatch, code, error, call):
    with monkeypatch.context() as patch:
        patch.setattr(index, "os", Refusing(code, call))
        patch.setattr("kvpatch_jax.store.files.os", Refusing(code, call))
        with pytest.raises(error):
            Objects(folder / "root")
    with contextlib.closing(Objects(folder / "root")) as store:
        put(store, 1)


def test_a_queued_put_that_fails_says_so_and_the_next_one_succeeds(folder, monkeypatch):
    store = Objects(folder / "root")
    with monkeypatch.context() as patch:
        patch.setattr("kvpatch_jax.store.files.os", Refusing(errno.ENOSPC, "writev"))
        acks = [store.put_async(name_of(number), lambda: object_of(1), 400) for number in range(3)]
        assert all(isinstance(ack.exception(), StoreError) for ack in acks)
        assert all("No space left" in str(ack.exception()) for ack in acks)
    with pytest.raises(StoreError, match="No space left"):
        store.flush()
    store.flush()
    assert numbers_of(store) == []
    assert store.put_async(name_of(1), lambda: object_of(1), 400).result()
    store.close()


def test_a_bad_object_in_the_queue_fails_alone(folder):
    store = Objects(folder / "root")
    bad = Encoded("encoder", {}, {"output": np.zeros(3, np.complex64)})
    acks = [
        store.put_async(name_of(number), lambda n=number: bad if n == 2 else object_of(n), 9) for number in range(5)
    ]
    assert [ack.exception() is None for ack in acks] == [True, True, False, True, True]
    with pytest.raises(KVPatchError):
        store.flush()
    assert numbers_of(store) == [0, 1, 3, 4]
    store.close()


def test_a_queued_put_cannot_be_cancelled(folder):
    store = Objects(folder / "root")
    acks = [store.put_async(name_of(number), lambda n=number: object_of(n), 400) for number in range(20)]
    assert not any(ack.cancel() for ack in acks)
    store.flush()
    assert numbers_of(store) == list(range(20))
    store.close()


def test_many_objects_are_put_at_once_with_few_descriptors(folder):
    store = Objects(folder / "root", memory=0)
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    most = list(itertools.islice((number for number in itertools.count() if number not in taken), 100))[-1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        stored = store.put([(name_of(number), object_of(number)) for number in range(300)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert stored == [True] * 300
    assert numbers_of(store) == list(range(300))
    store.close()


def test_an_index_that_another_process_locks(folder, monkeypatch):
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.2)
    store = Objects(folder / "root", memory=0)
    put(store, 1)
    other = sqlite3.connect(f"{folder}/root/index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        put(store, 2)
    with pytest.raises(StoreError, match="locked"):
        store.delete(f"{1:032x}")
    assert store.get(name_of(1), value_of) == 1
    assert len([path for path in (folder / "root" / "data").rglob("*") if path.is_file()]) == 1
    other.execute("ROLLBACK")
    other.close()
    put(store, 2)
    assert numbers_of(store) == [1, 2]
    store.close()


def test_a_root_that_is_removed_while_it_is_open(folder):
    store = Objects(folder / "root", memory=0)
    put(store, 1)
    store.get(name_of(1), value_of)
    shutil.rmtree(folder / "root")
    assert store.get(name_of(1), value_of) is None
    for action in (lambda: put(store, 2), lambda: store.delete(f"{1:032x}")):
        with pytest.raises(StoreError, match=r"removed|No such file"):
            action()
    with pytest.raises(StoreError, match=r"No such file|unable to open"):
        store.put_async(name_of(3), lambda: object_of(3), 400).result()
    with contextlib.suppress(StoreError):
        store.close()
    assert not (folder / "root").exists()


def test_a_root_in_place_of_one_that_was_removed(folder):
    """Memory, too, answers only for what is in the new root."""
    options = {"secret": b"s" * 16, "memory": 1 << 20}
    old = Objects(folder / "root", **options)
    put(old, 1, 10)
    assert old.get(name_of(1), value_of) == 10
    shutil.rmtree(folder / "root")
    new = Objects(folder / "root", **options)
    put(new, 1, 20)
    assert new.get(name_of(1), value_of) == 20
    assert old.get(name_of(1), value_of) != 20
    with pytest.raises(StoreError, match="removed"):
        put(old, 2)
    old.close()
    assert numbers_of(new) == [1]
    new.close()


@pytest.mark.parametrize("content", ["STORE.json", "index.sqlite", "notes.txt", "data"])
def test_a_directory_of_something_else_is_refused_and_left_alone(folder, content):
    root = folder / "root"
    root.mkdir()
    (root / content).write_text("{}")
    with pytest.raises(StoreError, match="directory"):
        Objects(root)
    assert [path.name for path in root.iterdir()] == [content]


def test_a_root_of_another_format_is_refused(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(index, "FORMAT", index.FORMAT + 1)
        Objects(folder / "root").close()
    files = {path: path.read_bytes() for path in (folder / "root").rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=f"format {index.FORMAT + 1}"):
        Objects(folder / "root")
    assert {path: path.read_bytes() for path in (folder / "root").rglob("*") if path.is_file()} == files


def test_a_later_index_is_refused_and_left_alone(folder):
    Objects(folder / "root").close()
    path = folder / "root" / "index.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {index.FORMAT + 1}")
    content = path.read_bytes()
    with pytest.raises(StoreError, match=f"got an index of format {index.FORMAT + 1}; expected {index.FORMAT}"):
        Objects(folder / "root")
    assert path.read_bytes() == content


def test_a_file_in_place_of_a_root_is_named(folder):
    (folder / "root").write_text("notes")
    for root in (folder / "root", folder / "root" / "deeper"):
        with pytest.raises(StoreError, match=r"store\.root: got '.*', where '.*/root' is a file; expected a directory"):
            Objects(root)


def test_a_network_file_system_is_refused(folder, monkeypatch):
    monkeypatch.setattr(index, "file_system", lambda _: "nfs4")
    with pytest.raises(StoreError, match="nfs4"):
        Objects(folder / "root")
    assert list((folder / "root").iterdir()) == []


def test_a_file_system_without_locks_is_refused(folder, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(index.fcntl, "flock", refuse)
        with pytest.raises(StoreError, match="No locks"):
            Objects(folder / "root")
    Objects(folder / "root").close()


# --------------------------------------------------------------------------------------------- processes and threads

FORK = """
import os, sys
import numpy as np
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.objects import Objects

def write(numbers):
    for number in numbers:
        assert store.put([(f"{number:032x}/enc", Encoded("encoder", {}, {"output": np.full(9, number)}))]) == [True]

store = Objects(sys.argv[1], memory=1 << 20)
write(range(5))
acks = [store.put_async(f"{n:032x}/enc", lambda n=n: Encoded("encoder", {}, {"output": np.full(9, n)}), 9)
        for n in range(100, 110)]
(mine, yours), (read, told) = os.pipe(), os.pipe()
if os.fork() == 0:
    assert all(store.contains(f"{number:032x}/enc") for number in range(5))
    write(range(10, 20))
    os.write(yours, b"1")
    os.read(read, 1)  # the parent has closed its store, and another process opened the root
    write(range(20, 30))
    store.put_async(f"{30:032x}/enc", lambda: Encoded("encoder", {}, {"output": np.full(9, 30)}), 9).result()
    store.close()
    os._exit(0)
os.read(mine, 1)
write(range(40, 45))
store.close()
assert all(ack.result() for ack in acks)
Objects(sys.argv[1]).close()
os.write(told, b"1")
assert os.wait()[1] == 0
"""


def test_a_forked_process_goes_on_with_its_parents_store(folder):
    assert run(FORK, str(folder / "root")) == ""
    with contextlib.closing(Objects(folder / "root")) as store:
        assert numbers_of(store) == [*range(5), *range(10, 31), *range(40, 45), *range(100, 110)]
        assert store.damaged() == []


def test_a_process_that_ends_without_close_says_nothing_and_its_queue_is_written(folder):
    code = """
    import sys
    import numpy as np
    from kvpatch_jax.store.files import Encoded
    from kvpatch_jax.store.objects import Objects
    store = Objects(sys.argv[1])
    for n in range(50):
        store.put_async(f"{n:032x}/enc", lambda n=n: Encoded("encoder", {}, {"output": np.full(9, n)}), 9)
    """
    assert run(code, str(folder / "root")) == ""
    with contextlib.closing(Objects(folder / "root")) as store:
        assert numbers_of(store) == list(range(50))


def test_connections_end_with_their_threads(folder):
    store = Objects(folder / "root")
    put(store, 1)
    counts = []
    for _ in range(30):
        thread = threading.Thread(target=store.get, args=(name_of(1), value_of))
        thread.start()
        thread.join()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts) - min(counts) < 10
    store.close()
    with pytest.raises(StoreError, match="after close"):
        store.get(name_of(1), value_of)
    with pytest.raises(StoreError, match="after close"):
        put(store, 1)
    store.close()


def test_a_store_that_is_dropped_holds_nothing(folder):
    """Its lock neither: another one may make a lost index again."""
    store = Objects(folder / "root")
    put(store, 1)
    del store
    gc.collect()
    (folder / "root" / "damaged").touch()
    with contextlib.closing(Objects(folder / "root")) as store:
        assert store.index.rebuilt == 1


# --------------------------------------------------------------------------------------------------- the store's own


def test_budgets_hold_for_the_root_and_for_tenants(folder):
    """Least recently used first; of one age patches before others; entries never, and outside of the budgets."""
    one = Objects(folder / "root", "one", root_budget=40_000, share=20_000, memory=0)
    two = Objects(folder / "root", "two", memory=0)
    put(one, 0, kind="entry", size=20_000)
    for number in range(60):
        put(one, number)
        assert one.usage().bytes <= 20_000
    assert numbers_of(one)[-1] == 59
    for number in range(100):
        put(two, number)
        assert one.usage().bytes + two.usage().bytes <= 40_000
    assert numbers_of(one, "entry") == [0]
    assert one.get(name_of(0, "entry"), value_of) == 0
    usage = two.usage()
    with pytest.raises(StoreError, match="at most the share of 20000"):
        put(one, 99, size=6000)
    assert two.usage() == usage
    one.close()

    with contextlib.closing(
        Objects(folder / "root", "one", memory=0)
    ) as one:  # budgets are the root's, not the object's
        for number in range(100):
            put(one, number)
        assert one.usage().bytes <= 20_000
    two.close()


def test_tenants_take_from_whoever_holds_more_than_is_theirs(folder):
    """A tenant alone fills the root; beside others it keeps an equal part, or its share, whoever writes more."""
    root = folder / "root"
    one, two, again = (Objects(root, name, root_budget=40_000, memory=0) for name in ("one", "two", "two"))
    for number in range(60):
        put(one, number)
    assert one.usage().bytes > 38_000
    size = one.usage().bytes // one.usage().count
    for number in range(80):
        put((two, again)[number % 2], number)
        # What takes a tenant below its part is one object at most.
        assert one.usage().bytes > 20_000 - size
        assert one.usage().bytes + two.usage().bytes <= 40_000
    assert numbers_of(one)[-1] == 59
    assert numbers_of(two)[-1] == 79

    # In turn, each evicts its own; a share moves the parts.
    for number in range(100, 120):
        put(one, number)
        put(two, number)
        assert min(one.usage().bytes, two.usage().bytes) > 0.97 * 20_000 - size
    three = Objects(root, "three", share=30_000, memory=0)
    for number in range(50):
        put(three, number)
    assert 0.97 * 30_000 - size < three.usage().bytes <= 30_000
    for number in range(200, 240):
        put(one, number)
        put(two, number)
    assert three.usage().bytes > 0.97 * 30_000 - size
    assert min(one.usage().bytes, two.usage().bytes) > 0.97 * 5_000 - size
    with pytest.raises(StoreError, match="other tenants' shares stay"):
        put(one, 999, size=4000)
    for store in (one, two, again, three):
        store.close()


def test_two_processes_share_a_root_by_equal_parts(folder):
    one = Objects(folder / "root", "one", root_budget=40_000, memory=0)
    for number in range(20):
        put(one, number)
    before = one.usage()
    code = """
    import sys
    import numpy as np
    from kvpatch_jax.store.files import Encoded
    from kvpatch_jax.store.objects import Objects
    store = Objects(sys.argv[1], "two", memory=0)
    for number in range(60):
        store.put([(f"{number:064x}/enc", Encoded("encoder", {}, {"output": np.zeros(100, np.int32)}))])
    print(store.usage().bytes > 20_000)
    """
    assert run(code, str(folder / "root")).strip() == "True"
    assert one.usage() == before
    one.close()


def test_what_was_used_last_stays_and_patches_leave_first(folder, monkeypatch):
    clock = [time.time()]
    monkeypatch.setattr(index.time, "time", lambda: clock[0])
    store = Objects(folder / "root", root_budget=10_000, memory=0)
    put(store, 0)
    put(store, 1)
    put(store, 2, kind="patch")
    clock[0] += 120
    assert store.get(name_of(0), value_of) == 0
    before = store.usage()
    for number in range(3, 3 + (10_000 - before.bytes) * before.count // before.bytes):
        put(store, number)
    assert numbers_of(store, "patch") == [2]
    put(store, 99)
    assert numbers_of(store, "patch") == []
    put(store, 100)
    assert {0, 1} & set(numbers_of(store)) == {0}
    store.close()


def test_objects_expire(folder, monkeypatch):
    clock = [time.time()]
    monkeypatch.setattr(index.time, "time", lambda: clock[0])
    store = Objects(folder / "root", ttl=100, memory=1 << 20)
    put(store, 1, expires=store.expiry(None))
    put(store, 2, expires=store.expiry(1000))
    assert store.get(name_of(1), value_of) == 1
    clock[0] += 200
    assert store.get(name_of(1), value_of) is None
    assert not store.contains(name_of(1))
    assert numbers_of(store) == [2]
    assert store.index.collect() == 1
    assert store.usage().count == 1
    put(store, 1, 11)
    assert store.get(name_of(1), value_of) == 11
    for ttl in (0, -1, float("nan"), float("inf"), True):
        with pytest.raises(InputError):
            store.expiry(ttl)
    store.close()


def test_encrypted_objects_open_with_their_key_alone(folder):
    store = Objects(folder / "root", key=KEY)
    put(store, 1, 12345)
    plain = Objects(folder / "root", memory=0)
    wrong = Objects(folder / "root", key=b"x" * 32)
    other = Objects(folder / "root", "other", key=KEY)
    assert store.get(name_of(1), value_of) == 12345
    for reader in (plain, wrong):
        with pytest.raises(StoreError, match="key"):
            reader.get(name_of(1), value_of)
        with pytest.raises(StoreError, match="key"):
            reader.damaged(delete=True)
        with pytest.raises(StoreError, match="one that is there, encrypted with another key"):
            put(reader, 1)
    assert store.get(name_of(1), value_of) == 12345
    put(store, 1, 12345)
    assert other.get(name_of(1), value_of) is None
    put(plain, 2)
    with pytest.raises(StoreError, match="not encrypted"):
        store.get(name_of(2), value_of)
    put(store, 2, 22)
    assert store.get(name_of(2), value_of) == 22
    needle = np.full(3, 12345, np.int32).tobytes()
    assert not any(needle in path.read_bytes() for path in (folder / "root").rglob("*") if path.is_file())
    with pytest.raises(InputError):
        Objects(folder / "root", key=b"short")
    for reader in (store, plain, wrong, other):
        reader.close()


def test_names_depend_on_the_secret_and_the_tenant(folder):
    roots = [("a", "one", b"s" * 16), ("b", "one", b"s" * 16), ("a", "two", b"s" * 16), ("a", "one", None)]
    names = []
    for root, tenant, secret in roots:
        with contextlib.closing(Objects(folder / root, tenant, secret=secret)) as store:
            names.append((store.tenant, store.names.chunk("tiny", "chunk")))
            assert store.index.secret != b"s" * 16
    assert names[0] == names[1]
    assert len(set(names)) == 3
    with pytest.raises(InputError):
        Objects(folder / "c", secret=b"short")
    with pytest.raises(InputError):
        Objects(folder / "c", "")
    assert not (folder / "c").exists()


def test_memory_keeps_to_its_limit_and_is_one_for_a_process(folder):
    one = Objects(folder / "root", "one", memory=20_000)
    two = Objects(folder / "root", "two", memory=10_000)
    for number in range(50):
        for store in (one, two):
            put(store, number)
            assert store.get(name_of(number), value_of) == number
            assert store.memory.nbytes <= 20_000
    assert one.memory is two.memory
    hits = one.counters["memory_hits"]
    assert one.get(name_of(49), value_of) == 49
    assert one.counters["memory_hits"] == hits + 1
    put(one, 1, size=100_000)
    one.get(name_of(1), value_of)
    assert one.memory.nbytes <= 20_000
    one.close()
    two.close()


def test_the_queue_waits_while_it_is_full(folder, monkeypatch):
    monkeypatch.setattr("kvpatch_jax.store.objects.QUEUE_BYTES", 1000)
    store = Objects(folder / "root")
    gate, encoding = threading.Event(), threading.Event()

    def make() -> Encoded:
        encoding.set()
        gate.wait()
        return object_of(1)

    store.put_async(name_of(1), make, 800)
    encoding.wait()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(store.put_async, name_of(2), lambda: object_of(2), 800)
        assert not concurrent.futures.wait([second], 0.1).done
        gate.set()
        assert second.result().result()
    store.close()


@pytest.mark.parametrize("size", [10, 1 << 18, 3 << 20])  # the last one is mapped
@pytest.mark.parametrize("key", [None, KEY])
def test_arrays_are_aligned_and_read_only_and_jax_takes_them_without_a_copy(folder, size, key):
    store = Objects(folder / "root", key=key, memory=0)
    leaves = {"odd": np.ones(3, np.uint8), "output": np.arange(size, dtype=np.float32)}
    store.put([(name_of(1), Encoded("encoder", {}, leaves))])
    arrays = store.get(name_of(1), lambda stored: stored.arrays)
    assert arrays is not None
    for array in arrays.values():
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable
    taken = jax.device_put(arrays["output"])
    np.testing.assert_array_equal(taken, leaves["output"])
    if size > 1000:
        assert taken.unsafe_buffer_pointer() == arrays["output"].ctypes.data
    store.delete(f"{1:032x}")
    np.testing.assert_array_equal(taken, leaves["output"])  # as long as somebody has it
    store.close()
