"""Tenants: deletion, quotas, wiped memory, and that nobody learns what another one has."""

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import shutil
import tempfile
import traceback
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import BACKBONE, chunk_of, file_of, name_of, patch_of, place_of, same_chunk

from kvpatch_jax.errors import StoreError, StoreFullError
from kvpatch_jax.store import (
    Budget,
    ChunkStore,
    DynamicLibrary,
    KeyValueStore,
    PatchKey,
    StaticLibrary,
    prometheus_text,
)
from kvpatch_jax.store.cli.audit import listing, totals, verify
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.format.buffers import Buffers
from kvpatch_jax.store.snapshots.restore import load_objects
from kvpatch_jax.store.snapshots.save import save_objects
from kvpatch_jax.store.tiers.memory import CacheEntry

KEY = b"k" * 32
SECRET = b"known to the operator alone"


def fill(store: ChunkStore) -> None:
    """Some of everything: two canonicals, an encoder output, patches, an object in quarantine, a dead writer's file."""
    for number in range(2):
        store.put(chunk_of(f"B{number}", number, encoder=np.ones((2, 3), np.float32)))
        store.put_patches([patch_of(chunk_of(f"B{number}", number))])
    spoil(store, "bad")
    name = store.names.canonical(BACKBONE, "dead")
    Path(store.disk.root, "tmp", f"{name.tenant}.1-2-3").write_bytes(b"half an object")


def spoil(store: ChunkStore, id: str) -> None:
    store.put(chunk_of(id))
    store.flush()  # what waits for a remote store is a link to the same file
    path = file_of(store, chunk_of(id))
    path.write_bytes(path.read_bytes()[:-1])
    assert store.disk.get(name_of(store, chunk_of(id))) is None


def everything(root: Path | str) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in Path(root).rglob("*") if path.is_file()}


def own_files(root: Path | str, store: ChunkStore) -> dict[str, bytes]:
    tenant = store.names.space.rpartition("/")[2]
    found = {path: data for path, data in everything(root).items() if tenant in path}
    return {path: data for path, data in found.items() if not path.endswith(".gone")}  # they stay for a day


# ----------------------------------------------------------------------------------------------------------- deletion


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_deleting_a_tenant_removes_everything_of_it_and_nothing_of_others(tmp_path: Path, key):
    remote = KeyValueStore({"driver": "memory"}, context=tensorstore.Context())
    common = {"remote": remote, "write_behind": False, "budget": Budget(host=1 << 20), "key": key}
    with ChunkStore(tmp_path, tenant="one", **common) as one, ChunkStore(tmp_path, tenant="two", **common) as two:
        fill(one)
        fill(two)
        assert one.get("B0", BACKBONE, placement=jax.devices()[0]) is not None
        kept, far = own_files(tmp_path, two), remote.paths("obj/")
        deleted = one.delete_tenant()
        assert (deleted.objects, deleted.quarantined, deleted.remote) == (6, 1, 7)
        assert deleted.nbytes > 0
        assert own_files(tmp_path, one) == {}
        assert own_files(tmp_path, two) == kept
        assert remote.paths("obj/") == [path for path in far if path.startswith(two.names.space)]
        assert one.statistics().held["host"] == 0
        assert one.get("B0", BACKBONE) is None
        again = one.delete_tenant()
        assert (again.objects, again.nbytes, again.quarantined, again.remote) == (0, 0, 0, 0)
        assert same_chunk(two.get("B0", BACKBONE), chunk_of("B0"))
        one.put(chunk_of("B0"))
        assert same_chunk(one.get("B0", BACKBONE), chunk_of("B0"))


CALLS = ("os.rename", "os.fsync", "os.unlink", "os.listdir", "shutil.rmtree", "os.mkdir")


@pytest.mark.parametrize("call", CALLS)
def test_a_deletion_that_is_cut_off_shows_all_or_nothing_and_is_done_again(tmp_path: Path, monkeypatch, call):
    """Cut off at the first, second, … call of a kind, as a crash would."""
    module, function = {"os": os, "shutil": shutil}[call.partition(".")[0]], call.partition(".")[2]
    real = getattr(module, function)
    with ChunkStore(tmp_path, tenant="one") as one, ChunkStore(tmp_path, tenant="two") as two:
        two.put(chunk_of())
        for after in itertools.count():
            fill(one)
            calls = itertools.count()

            def cut(*arguments, calls=calls, after=after, **more):
                if next(calls) == after:
                    raise KeyboardInterrupt
                return real(*arguments, **more)

            with monkeypatch.context() as patched:
                patched.setattr(module, function, cut)
                whole = False
                with contextlib.suppress(KeyboardInterrupt):
                    one.delete_tenant()
                    whole = True
            there = [one.contains(f"B{number}", BACKBONE) for number in range(2)]
            assert all(there) or not any(there)
            one.delete_tenant()
            assert own_files(tmp_path, one) == {}
            assert same_chunk(two.get("B", BACKBONE), chunk_of())
            if whole:
                break
    assert after > 0


# -------------------------------------------------------------------------------------------------------- wiped memory


def content(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


@pytest.mark.parametrize(("how", "key"), [("evicted", None), ("tenant", KEY)], ids=["evicted", "tenant"])
def test_memory_is_wiped_when_the_last_user_lets_go(tmp_path: Path, monkeypatch, key, how):
    """And not before: an evicted chunk that someone still uses stays as it was."""
    chunk, returned = chunk_of(tokens=64), []
    take_back = Buffers.take_back

    def keep(self: Buffers, block: np.ndarray) -> None:
        take_back(self, block)
        returned.append(block)  # so that its address is nobody else's when it is looked at

    monkeypatch.setattr(Buffers, "take_back", keep)
    with ChunkStore(tmp_path, key=key, wipe=True, budget=Budget(host=int(chunk.nbytes * 1.5))) as store:
        store.put(chunk)
        found = store.get("B", BACKBONE)
        assert found is not None
        address, size = np.asarray(found.kv["k"]).ctypes.data, np.asarray(found.kv["k"]).nbytes
        aliased, lent = np.asarray(found.kv["k"]), jax.numpy.asarray(found.kv["k"])  # JAX may copy it
        del found
        row = np.asarray(chunk.kv["k"])[0].tobytes()
        assert content(address, size).startswith(row)  # held by the tier
        store.put(chunk_of("C", 1, tokens=64))
        if how == "evicted":
            assert store.get("C", BACKBONE) is not None
        elif how == "deleted":
            store.delete("B", BACKBONE)
        elif how == "tenant":
            store.delete_tenant()
        else:
            store.close()
        if how != "evicted":
            assert store.statistics().held["host"] == 0
        assert np.asarray(lent).tobytes() == np.asarray(chunk.kv["k"]).tobytes()
        assert aliased.ctypes.data == address
        assert aliased.tobytes() == np.asarray(chunk.kv["k"]).tobytes()
        del aliased, lent
        gc.collect()
        assert any(0 <= address - block.ctypes.data < block.nbytes for block in returned)
        assert content(address, size) == bytes(size)


# -------------------------------------------------------------------------------------------------------------- quotas


def test_a_tenant_over_its_quota_lets_its_own_go(tmp_path: Path):
    size = 4096 + 64 + chunk_of().nbytes
    quota = Budget(host=0, tenant=3 * size)
    with ChunkStore(tmp_path, tenant="one", budget=quota) as one, ChunkStore(tmp_path, tenant="two") as two:
        for number in range(6):
            two.put(chunk_of(f"B{number}", number))
        for number in range(9):
            one.put(chunk_of(f"B{number}", number))
            assert sum(entry.size for entry in one.disk.scan(one.names.space)) <= 3 * size
        assert one.contains("B8", BACKBONE)
        assert not one.contains("B0", BACKBONE)
        assert all(two.contains(f"B{number}", BACKBONE) for number in range(6))
        with pytest.raises(StoreFullError):
            one.put(chunk_of("huge", tokens=99))


# ----------------------------------------------------------------------------------------------------------- isolation

IDS = ("B0", "B1", "B2")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["get", "placed", "stream", "contains", "put", "patch", "patches", "encoder", "delete", "spoil",
                         "collect", "list", "stat", "verify", "bad", "gone", "upload", "publish", "entries", "snapshot",
                         "restore"]),
        st.sampled_from(IDS),
    ),
    max_size=12,
)  # fmt: skip


def act(store: ChunkStore, what: str, id: str) -> object:
    """One call of a tenant, and all that it is told."""
    chunk, space = chunk_of(id), (store.names.space, store.names.libraries)
    answers = {
        "get": lambda: same_chunk(store.get(id, BACKBONE), chunk),
        "placed": lambda: store.get(id, BACKBONE, placement=jax.devices()[0]) is not None,
        "stream": lambda: (lambda stream: stream and len(list(stream)))(store.stream(id, BACKBONE)),
        "contains": lambda: store.contains(id, BACKBONE),
        "put": lambda: store.put(chunk),
        "patch": lambda: store.put_patches([patch_of(chunk)]),
        "patches": lambda: len(store.get_patches(PatchKey(id, BACKBONE, ("A",)))),
        "encoder": lambda: store.get_encoder(id, BACKBONE) is None,
        "delete": lambda: store.delete(id, BACKBONE),
        "spoil": lambda: spoil(store, id),
        "collect": lambda: store.collect(),
        "list": lambda: [(one.path, one.kind, one.nbytes, one.encrypted) for one in listing(store.disk, space)],
        "stat": lambda: totals(store.disk, space),
        "verify": lambda: verify(store.disk, space),
        "bad": lambda: store.get("", BACKBONE) or store.put(chunk, ttl=-1),
        "gone": lambda: store.delete_tenant(),
        "upload": lambda: StaticLibrary(store, quota=1 << 20).put(id, "text", chunk=chunk),
        "publish": lambda: DynamicLibrary(store).publish(id, "text"),
        "entries": lambda: [StaticLibrary(store, quota=1).entries(), DynamicLibrary(store).entries()],
        "snapshot": lambda: saved(store, None),
        "restore": lambda: saved(store, id),
    }
    try:
        return answers[what]()
    except StoreError as error:
        return traceback.format_exception_only(error)
    except ValueError as error:
        return str(error)


def saved(store: ChunkStore, delete: str | None) -> object:
    """A snapshot: its list and its files; taken over again after something was deleted."""
    with tempfile.TemporaryDirectory() as folder:
        made = save_objects(store, folder)
        files = sorted((str(path.relative_to(folder)), path.stat().st_size) for path in Path(folder).rglob("*.*"))
        if delete is not None:
            store.delete(delete, BACKBONE)
            StaticLibrary(store, quota=1).delete("TEXT", delete)
        return made, files, delete and load_objects(store.tenant_disk, folder)


def transcript(root: Path, steps: list[tuple[str, str]], other: bool, shared: Budget) -> list[object]:
    """What tenant two is told, where tenant one has everything (`other`) or is not there at all."""
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(ChunkStore(root, tenant="one", secret=SECRET)) if other else None
        two = stack.enter_context(ChunkStore(root, tenant="two", secret=SECRET, budget=shared))
        if one is not None:
            for id in IDS:
                one.put(chunk_of(id, encoder=np.ones(3, np.float32)), ttl=None if id == "B0" else 1e-6)
                one.put_patches([patch_of(chunk_of(id))])
                StaticLibrary(one, quota=1 << 20).put(id, "another's")
                DynamicLibrary(one).publish(id, "another's")
            spoil(one, "bad")
            Path(root, "tmp", f"{one.names.space.rpartition('/')[2]}.1-2").write_bytes(b"dead")
        answers = [act(two, *step) for step in steps]
        counts = two.statistics()
        calls = {key: histogram.count for key, histogram in counts.latencies.items()}
        answers.append((counts.counts, counts.held, calls))
        if one is not None:
            assert same_chunk(one.get("B0", BACKBONE), chunk_of("B0"))  # and nobody touched it
            assert one.counters["quarantined"] == 1
        return answers


@settings(max_examples=10, deadline=None)
@given(STEPS)
def test_results_of_a_tenant_do_not_depend_on_other_tenants(tmp_path_factory: pytest.TempPathFactory, steps):
    for shared in (Budget(host=1 << 20, tenant=1 << 20), Budget(host=0)):
        roots = [tmp_path_factory.mktemp("root") for _ in range(2)]
        answers = [transcript(root, steps, other, shared) for root, other in zip(roots, (True, False), strict=True)]
        first, second = (repr(answer).replace(str(root), "") for answer, root in zip(answers, roots, strict=True))
        assert first == second
        for root in roots:
            shutil.rmtree(root)


def test_no_call_of_a_tenant_opens_files_of_another(tmp_path: Path, monkeypatch):
    """No timing probe: which files are opened, looked at and listed does not depend on what another tenant has."""
    with ChunkStore(tmp_path, tenant="one") as one, ChunkStore(tmp_path, tenant="two") as two:
        for store in (one, two):
            fill(store)
            StaticLibrary(store, quota=1 << 20).put("A", "text")
            DynamicLibrary(store).publish("A", "text")
        touched: list[str] = []
        for call in ("open", "stat", "rename", "unlink", "mkdir", "rmdir", "scandir"):
            real = getattr(os, call)

            def noted(*arguments, real=real, **more):
                touched.append(place_of(arguments, more))
                return real(*arguments, **more)

            monkeypatch.setattr(os, call, noted)
        for what in ("get", "stream", "contains", "put", "patch", "patches", "encoder", "delete", "spoil", "collect",
                     "upload", "publish", "entries", "snapshot", "restore", "list", "stat", "verify", "bad",
                     "gone"):  # fmt: skip
            act(two, what, "B0")
        assert any(two.names.space in path for path in touched)
        assert not any(one.names.space.rpartition("/")[2] in path for path in touched)


# ------------------------------------------------------------------------------------------------------------ silence

WORDS = ("cat.png", "before.png", "secret text", "a model of ours")


def provoke(root: Path, key: bytes | None) -> tuple[list[object], list[BaseException]]:
    """Everything the store has to show, and all that it complains of, over ids that are texts."""
    shown: list[object] = []
    errors: list[BaseException] = []
    chunk = chunk_of("cat.png", backbone="a model of ours")
    patch = patch_of(chunk, ("before.png", "secret text"))

    def attempt(call) -> None:
        try:
            shown.append(type(call()).__name__)
        except Exception as error:
            errors.append(error)

    with ChunkStore(root, tenant="one", key=key, wipe=True, budget=Budget(disk=1 << 20)) as store:
        get = lambda: store.get("cat.png", "a model of ours")
        put = lambda: store.put(chunk)
        attempt(put)
        attempt(lambda: store.put_patches([patch]))
        attempt(lambda: list(store.stream("cat.png", "a model of ours") or []))
        assert get() is not None
        held = next(each for each in gc.get_objects() if type(each) is CacheEntry)
        found = store.disk.get(store.names.canonical("a model of ours", "cat.png"))
        shown += [
            store,
            store.names,
            held,
            found,
            found and found.header,
            patch.metadata.__class__.__name__,
            store.disk,
        ]
        shown += [PatchKey("cat.png", "b", ("before.png",), base_antecedent=("secret text",)), store.statistics()]
        shown += [
            prometheus_text(store.statistics()),
            list(listing(store.disk)),
            totals(store.disk),
            store.disk.encryption,
        ]
        attempt(lambda: store.put(chunk, ttl=-1))
        attempt(lambda: store.put(chunk, encoding="int3"))  # pyright: ignore
        attempt(lambda: store.get("cat.png", "a model of ours", placement={"k": jax.devices()[0]}))
        attempt(lambda: store.put(chunk_of("cat.png", backbone="a model of ours", tokens=4000)))
        path = next(entry.path for entry in store.disk.scan() if entry.part == "kv")
        full = Path(root, path).read_bytes()
        for data in (b"cat.png" * 2000, full[:-9], full[:5000] + b"\1" + full[5001:], full.replace(b"kv", b"vk", 1)):
            Path(root, path).write_bytes(data)
            attempt(get)
            Path(root, path).write_bytes(data)
            attempt(lambda: list(store.stream("cat.png", "a model of ours") or []))
            attempt(put)
        if key is None:
            Path(root, path).write_bytes(contradicting(full))
            attempt(get)
            attempt(put)
        shown += [Path(root, "quarantine", name).read_text() for name in os.listdir(f"{root}/quarantine") if
                  name.endswith(".reason")]  # fmt: skip
        store.close()
        attempt(get)
    return shown, errors


def contradicting(full: bytes) -> bytes:
    """An object whose checksums agree and whose body does not fit its arrays."""
    from kvpatch_jax.store.format.header import parse_header
    from kvpatch_jax.store.format.objects import Blob, take_leaves

    header = parse_header(full[: 8 + int.from_bytes(full[:8], "little")], len(full))
    payload = np.frombuffer(bytearray(full[header.start :]), np.uint8)
    arrays = take_leaves(payload, header.start, header.leaves.values())
    from kvpatch_jax.store.format.objects import blob_bytes

    return blob_bytes(Blob("kv", dict(header.body) | {"length": 10**6}, arrays), header.name)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_no_log_error_or_print_reveals_stored_content(tmp_path: Path, caplog, capsys, unchecked: None, key):
    root = tmp_path / "root"
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        shown, errors = provoke(root, key)
        key_file = tmp_path / "key"
        key_file.write_bytes(KEY)
        for command in ("ls", "stat", "verify", "gc", "rm-tenant"):
            for more in ([], ["--json"]):
                more = [*more, "--tenant=one", *([f"--key-file={key_file}"] if key else [])]
                main([command, f"--root={root}", *more, "--yes"])
    assert len(errors) >= (4 if key else 5)
    output = capsys.readouterr()
    texts = [repr(one) + str(one) for one in shown] + ["".join(traceback.format_exception(error)) for error in errors]
    code = [line.strip() for line in Path(__file__).read_text("utf-8").splitlines()]
    texts = ["\n".join(line for line in text.splitlines() if line.strip() not in code) for text in texts]
    everything = "\n".join([*texts, output.out, output.err, *(str(each.message) for each in warned)])
    found = [word for word in WORDS if word in everything]
    assert not found, [line for line in everything.splitlines() if found[0] in line]
    assert [record for record in caplog.records if record.name.startswith("kvpatch_jax")] == []
    assert not any(word in caplog.text for word in WORDS)
    assert len(output.out) > 500
