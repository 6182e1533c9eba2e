"""Machines share what they store through a remote store, in the order of each, also after an outage."""
# pyright: reportOptionalMemberAccess=false, reportOptionalContextManager=false

import concurrent.futures
import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from kvpatch_jax.errors import InputError, StoreError, StoreUnreachableError
from kvpatch_jax.store import ChunkStore, Remote, open_remote
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.objects import Objects
from tests.store import store_cases
from tests.store.store_cases import KEY, MODEL, SECRET, name_of, object_of, value_of, wait_for

REMOTES = ["memory", "file", "valkey"]


@pytest.fixture(params=REMOTES)
def connect(request, tmp_path):
    """Returns a function that opens the same remote store anew, as another machine does; "index" has none."""
    if request.param == "file":
        return lambda: open_remote(f"file://{tmp_path}/shared")
    if request.param == "memory":
        store = pytest.importorskip("obstore.store").MemoryStore()
        return lambda: open_remote(store)
    if request.param == "valkey":
        fakeredis = pytest.importorskip("fakeredis")
        fake = fakeredis.FakeServer(server_type="valkey")
        return lambda: open_remote(fakeredis.FakeValkey(server=fake))
    return lambda: None


in_memory = pytest.mark.parametrize("connect", ["memory"], indirect=True)


@pytest.fixture
def machine(folder):
    """Returns a function that opens a machine's store."""
    with contextlib.ExitStack() as stack:

        def open_objects(number, remote, **options):
            objects = Objects(folder / f"machine{number}", secret=SECRET, remote=remote, memory=0, **options)
            stack.callback(objects.close)
            return objects

        yield open_objects


def waiting(objects):
    return objects.index.row("SELECT COUNT(*) FROM outbox")[0]


def test_the_latest_write_and_deletion_of_a_machine_reach_the_others_in_order(connect, machine):
    first, second = machine(1, connect()), machine(2, connect())
    first.put([(name_of(1), object_of(1)), (name_of(4, "kv"), object_of(7, "chunk"))])
    first.put([(name_of(1), object_of(2)), (name_of(2), object_of(2)), (name_of(3), object_of(3))])
    first.delete(name_of(2).partition("/")[0])
    first.delete(name_of(3).partition("/")[0])
    first.put([(name_of(3), object_of(4))])
    first.flush()
    content = store_cases.file_of(first, name_of(1)).read_bytes()
    assert connect().get(f"{first.tenant}/{name_of(1)}")[0].tobytes() == content
    assert [second.get(name_of(number), value_of) for number in (1, 2, 3)] == [2, None, 4]
    assert second.get(name_of(4, "kv"), lambda stored: (stored.kind, value_of(stored))) == ("chunk", 7)
    assert second.get(name_of(4, "kv"), lambda stored: stored.arrays["leaf"].ctypes.data % 64, remote=False) == 0
    assert second.get(name_of(1), value_of, remote=False) == 2  # on this disk from now on, and not sent back
    assert waiting(second) == 0
    first.delete_tenant()
    first.flush()
    assert connect().with_prefix(f"{first.tenant}/") == []


def test_names_that_begin_so_are_listed_with_those_of_other_machines(connect, machine):
    first, second = machine(1, connect()), machine(2, connect())
    first.put([(name_of(1, f"p.{letter}.x"), object_of(1, "patch")) for letter in "ab"])
    second.put([(name_of(1, "p.a.y"), object_of(2, "patch"))])
    first.flush()
    assert sorted(second.with_prefix(name_of(1, "p.a."))) == [name_of(1, "p.a.x"), name_of(1, "p.a.y")]
    assert second.with_prefix(name_of(1, "p.c.")) == []
    assert second.with_prefix(name_of(1, "p.a."), remote=False) == [name_of(1, "p.a.y")]


def test_no_amendment_of_two_machines_is_lost(connect, machine):
    machines = [machine(1, connect()), machine(2, connect())]

    def amend(number):
        def more(stored):
            members = {member for copy in stored for member in copy.body["members"]}
            return Encoded("encoder", {"members": sorted(members | {number})}, {"leaf": np.zeros(1)})

        machines[number % 2].amend(name_of(1), more)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(amend, range(12)))
    assert machine(3, connect()).get(name_of(1), lambda stored: stored.body["members"]) == list(range(12))


@in_memory
def test_damaged_expired_and_encrypted_objects(connect, machine, clock):
    """Of another machine's objects, those that are intact, alive and of the same key are read."""
    first, second = (machine(number, connect(), key=KEY) for number in (1, 2))
    first.put([(name_of(number), object_of(number)) for number in (1, 2)])
    first.put([(name_of(3), object_of(3))], expires=clock.now + 30)
    first.flush()
    remote, path = connect(), f"{first.tenant}/{name_of(1)}"
    data, other = remote.get(path)[0], remote.get(f"{first.tenant}/{name_of(2)}")[0]
    assert np.arange(100).tobytes()[:64] not in data.tobytes()
    data[-100] ^= 1  # within the leaf
    for number, content in enumerate((data, other), 1):  # damaged, and another object's
        remote.put([(path, content)])
        assert second.get(name_of(1), value_of) is None
        assert second.counters["remote_damaged"] == number
    assert second.get(name_of(2), value_of) == 2
    assert remote.with_prefix(f"{first.tenant}/{name_of(3)}")
    clock.now += 30
    assert second.get(name_of(3), value_of) is None


def test_each_tier_of_an_encoder_output_is_read_by_itself(folder):
    remote = open_remote("memory://")
    options = {"secret": SECRET, "remote": remote}
    with ChunkStore(folder / "a", **options) as here, ChunkStore(folder / "b", **options) as there:
        here.put_encoder("page", MODEL, np.zeros(2))
        here.flush()
        assert there.get_encoder("page", MODEL, tier="here") is None
        assert there.get_encoder("page", MODEL, tier="remote").tolist() == [0, 0]
        assert there.get_encoder("page", MODEL, tier="here") is None  # no copy was kept
        there.amend_encoder("page", MODEL, lambda outputs: outputs[0] + 1)
        assert here.get_encoder("page", MODEL).tolist() == [0, 0]
        assert here.get_encoder("page", MODEL, tier="remote").tolist() == [1, 1]
        assert there.may_have("unknown", MODEL)
        assert not there.contains("unknown", MODEL)


# ----------------------------------------------------------------------------------------------------------- outages


class Unreliable:
    """A client whose service is away while `is_away`, refuses the names in `refused`, and counts calls."""

    def __init__(self, client):
        self.client = client
        self.errors, self.temporary = (*client.errors, OSError), (*client.temporary, TimeoutError)
        self.is_away, self.refused, self.calls, self.sent = False, set(), 0, []

    def __getattr__(self, call):
        def ask(*args):
            self.calls += 1
            if self.is_away:
                raise TimeoutError("no answer")
            return getattr(self.client, call)(*args)

        return ask

    def put(self, writes):
        accepted = [write for write in writes if write[0] not in self.refused]
        self.__getattr__("put")(accepted)
        self.sent += [name for name, _ in accepted]
        if len(accepted) < len(writes):
            raise PermissionError("refused")


@pytest.fixture
def client():
    return Unreliable(open_remote("memory://")._client)


def test_an_outage_delays_puts_and_makes_reads_misses(client, machine):
    objects = machine(1, Remote(client))
    client.is_away = True
    objects.put([(name_of(1), object_of(1))])
    with pytest.raises(StoreUnreachableError):
        objects.flush()
    assert objects.get(name_of(1), value_of) == 1
    assert objects.get(name_of(2), value_of) is None
    assert waiting(objects) == 1
    client.is_away = False
    wait_for(lambda: waiting(objects) == 0)  # by the thread, without another call
    assert machine(2, Remote(client)).get(name_of(1), value_of) == 1

    # A later process sends what an earlier one left, and nothing of what was deleted meanwhile but the deletion.
    client.is_away = True
    objects.put([(name_of(number), object_of(2)) for number in (3, 2)])
    assert objects.delete(f"{3:032x}")
    assert waiting(objects) == 2
    objects.close()
    client.is_away = False
    again = machine(1, Remote(client))
    wait_for(lambda: waiting(again) == 0)
    assert machine(3, Remote(client)).get(name_of(2), value_of) == 2


def test_after_a_failure_reads_do_not_ask_for_a_while(client):
    remote, client.is_away = Remote(client), True
    with pytest.raises(StoreUnreachableError):
        remote.get("x/y")
    calls = client.calls
    for _ in range(5):
        with pytest.raises(StoreUnreachableError) as failure:
            remote.get("x/y")
        assert not failure.value.asked
    assert client.calls == calls
    client.is_away = False
    remote.put([("x/y", b"1")])  # writes do ask, and an answer ends the pause
    assert remote.get("x/y")[0].tobytes() == b"1"


def test_a_refused_object_does_not_hold_up_the_others(client, machine):
    objects, other = machine(1, Remote(client)), machine(2, Remote(client))
    client.refused = {f"{objects.tenant}/{name_of(1)}"}
    objects.put([(name_of(number), object_of(number)) for number in (1, 2)])
    with pytest.raises(StoreError, match="PermissionError"):
        objects.flush()
    assert [other.get(name_of(number), value_of) for number in (1, 2)] == [None, 2]
    client.refused = set()
    objects.flush()
    assert other.get(name_of(1), value_of) == 1


def test_what_is_deleted_does_not_come_back_before_the_deletion_is_sent(client, machine):
    objects = machine(1, Remote(client))
    objects.put([(name_of(number), object_of(number)) for number in (1, 2)])
    objects.flush()
    with objects.sender.alone():  # the remote store still has both
        objects.delete(name_of(1).partition("/")[0])
        assert objects.get(name_of(1), value_of) is None
        assert objects.get(name_of(1), value_of, remote=False) is None
        objects.delete_tenant()
        assert objects.get(name_of(2), value_of) is None
    objects.flush()
    assert [objects.get(name_of(number), value_of) for number in (1, 2)] == [None, None]


def test_several_stores_of_a_root_send_each_object_once(client, machine):
    stores = [machine(1, Remote(client)) for _ in range(4)]

    def put(number):
        stores[number % 4].put([(name_of(number), object_of(number))])
        stores[number % 4].flush()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(16)))
    assert sorted(client.sent) == sorted(f"{stores[0].tenant}/{name_of(number)}" for number in range(16))


@pytest.mark.usefixtures("unchecked")
def test_urls_and_services_that_do_not_exist():
    for url in ("ftp://host", 7, "file://relative"):
        with pytest.raises(InputError, match="expected"):
            open_remote(url)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for scheme in ("http", "valkey"):
        remote = open_remote(f"{scheme}://127.0.0.1:{port}/0", timeout=1.0)
        with pytest.raises(StoreUnreachableError):
            remote.get("x/y")
        with pytest.raises(StoreUnreachableError):
            remote.put([("x/y", b"1")])


# ------------------------------------------------------------------------------------------------------------ leases


@pytest.mark.parametrize("connect", ["index", *REMOTES], indirect=True)
def test_a_lease_has_at_most_one_holder(connect, folder, clock, monkeypatch):
    """Of two machines, or of one root if there is no remote store."""
    monkeypatch.setattr(time, "monotonic", time.time)
    monkeypatch.setattr("kvpatch_jax.store.remote.SKEW_SECONDS", 0.0)
    roots = [folder / "a", folder / ("a" if connect() is None else "b")]
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(ChunkStore(root, secret=SECRET, remote=connect(), memory=0)) for root in roots
        )
        with first.lease("chunk", MODEL) as lease:
            assert lease.held
            assert second.lease("chunk", MODEL) is None
            assert second.lease("another", MODEL).held
            assert lease.renew(120)
            assert second.lease("chunk", MODEL) is None
        assert not lease.held
        assert not lease.renew(60)
        brief = second.lease("chunk", MODEL, 30)
        assert brief.held
        assert first.lease("chunk", MODEL) is None
        clock.now += 30
        assert not brief.held
        assert first.lease("chunk", MODEL).held  # it has ended
        assert not brief.renew(60)
        brief.release()  # of no effect
        assert second.lease("chunk", MODEL) is None

        barrier = threading.Barrier(8)

        def take(number):
            barrier.wait()
            return (first, second)[number % 2].lease("contested", MODEL)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert sum(lease is not None for lease in pool.map(take, range(8))) == 1
        with pytest.raises(InputError, match="expected a finite number above 0"):
            first.lease("chunk", MODEL, 0)


@in_memory
def test_clocks_of_machines_may_differ_by_the_skew(connect, folder, clock, monkeypatch):
    monkeypatch.setattr("kvpatch_jax.store.remote.SKEW_SECONDS", 5.0)
    stores = [ChunkStore(folder / name, secret=SECRET, remote=connect(), memory=0) for name in "ab"]
    assert stores[0].lease("chunk", MODEL, 10)
    for seconds, is_free in ((9.0, False), (5.9, False), (0.1, True)):
        clock.now += seconds
        assert (stores[1].lease("chunk", MODEL, 10) is not None) == is_free
    for store in stores:
        store.close()
