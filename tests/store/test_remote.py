"""Machines share what they store through a remote store, in the order of each, also after an outage."""
# pyright: reportOptionalMemberAccess=false, reportOptionalContextManager=false

import concurrent.futures
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import fakeredis
import numpy as np
import obstore.store
import pytest

from kvpatch_jax.errors import InputError, StoreError, StoreUnreachableError
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.objects import Objects
from kvpatch_jax.store.remote import Remote, open_remote, take_lease

SECRET = b"the same on all machines, 32 byt"


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


SERVERS = {"s3": ("moto_server", "-p"), "valkey-server": ("valkey-server", "--save", "", "--port")}
REMOTES = ["memory", "file", "valkey", *(pytest.param(name, marks=pytest.mark.nightly) for name in SERVERS)]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def server(*command):
    port = free_port() if shutil.which(command[0]) else pytest.skip(f"no {command[0]}")
    with subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: process.poll() is not None or answers(port), 60.0)
            if process.poll() is not None:
                pytest.skip(f"{command[0]} does not run")
            yield port
        finally:
            process.kill()


@pytest.fixture(params=REMOTES)
def connect(request, tmp_path, monkeypatch):
    """Returns a function that opens the same remote store anew, as another machine does; "index" has none."""
    with contextlib.ExitStack() as stack:
        if request.param in SERVERS:
            port = stack.enter_context(server(*SERVERS[request.param]))
        if request.param == "s3":
            url = f"http://127.0.0.1:{port}"
            settings = {"ENDPOINT": url, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "REGION": "us-east-1"}
            for name, value in {**settings, "ALLOW_HTTP": "true"}.items():
                monkeypatch.setenv(f"AWS_{name}", value)
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=60).close()
            yield lambda: open_remote("s3://bucket/prefix")
        elif request.param == "valkey-server":
            yield lambda: open_remote(f"valkey://127.0.0.1:{port}/0")
        elif request.param == "file":
            yield lambda: open_remote(f"file://{tmp_path}/shared")
        elif request.param == "memory":
            store = obstore.store.MemoryStore()
            yield lambda: open_remote(store)
        elif request.param == "valkey":
            fake = fakeredis.FakeServer(server_type="valkey")
            yield lambda: open_remote(fakeredis.FakeValkey(server=fake))
        else:
            yield lambda: None


@pytest.fixture
def machine(folder):
    with contextlib.ExitStack() as stack:

        def open_objects(number, remote, **options):
            objects = Objects(folder / f"machine{number}", secret=SECRET, remote=remote, memory=0, **options)
            stack.callback(objects.close)
            return objects

        yield open_objects


def encoded(value, kind="encoder"):
    return Encoded(kind, {"value": value}, {"leaf": np.arange(100) + value})


def value_of(stored):
    assert (stored.arrays["leaf"] == np.arange(100) + stored.body["value"]).all()
    assert stored.arrays["leaf"].ctypes.data % 64 == 0
    return stored.body["value"]


def name_of(number, part="enc"):
    return f"{number:032x}/{part}"


def waiting(objects):
    return objects.index.row("SELECT COUNT(*) FROM outbox")[0]


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


def test_another_machine_reads_the_very_bytes_of_the_file(connect, machine):
    first, second = machine(1, connect()), machine(2, connect())
    first.put([(name_of(1), encoded(1)), (name_of(2, "kv"), encoded(2, "chunk"))])
    first.flush()
    assert second.get(name_of(1), value_of) == 1
    assert second.get(name_of(2, "kv"), value_of) == 2
    (file,) = first.index.row("SELECT file FROM objects WHERE name = ?", name_of(1)) or ("",)
    assert connect().get(f"{first.tenant}/{name_of(1)}")[0].tobytes() == Path(first.root, "data", file).read_bytes()
    assert second.get(name_of(1), value_of, remote=False) == 1  # on this disk from now on, and not sent back
    assert waiting(second) == 0


def test_names_that_begin_so_are_listed_with_those_of_other_machines(connect, machine):
    first, second = machine(1, connect()), machine(2, connect())
    first.put([(name_of(1, f"p.{letter}.x"), encoded(1, "patch")) for letter in "ab"])
    second.put([(name_of(1, "p.a.y"), encoded(2, "patch"))])
    first.flush()
    assert sorted(second.with_prefix(name_of(1, "p.a."))) == [name_of(1, "p.a.x"), name_of(1, "p.a.y")]
    assert second.with_prefix(name_of(1, "p.c.")) == []


def test_the_latest_write_and_deletion_of_a_machine_reach_the_others_in_order(connect, machine):
    first, second = machine(1, connect()), machine(2, connect())
    first.put([(name_of(1), encoded(1))])
    first.put([(name_of(1), encoded(2)), (name_of(2), encoded(2)), (name_of(3), encoded(3))])
    first.delete(name_of(2).partition("/")[0])
    first.delete(name_of(3).partition("/")[0])
    first.put([(name_of(3), encoded(4))])
    first.flush()
    assert second.get(name_of(1), value_of) == 2
    assert second.get(name_of(2), value_of) is None
    assert second.get(name_of(3), value_of) == 4
    first.delete_tenant()
    first.flush()
    assert connect().with_prefix(f"{first.tenant}/") == []


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


def test_compare_and_set_loses_no_increment(connect):
    def increment(_):
        remote = connect()
        while True:
            data, etag = remote.get("counter/x")
            number = 0 if data is None else int(data.tobytes())
            if remote.swap("counter/x", b"%d" % (number + 1), etag):
                return

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(increment, range(40)))
    assert int(connect().get("counter/x")[0].tobytes()) == 40


def test_a_damaged_object_is_a_counted_miss(connect, machine):
    first, second = machine(1, connect()), machine(2, connect())
    first.put([(name_of(1), encoded(1)), (name_of(2), encoded(2))])
    first.flush()
    remote, path = connect(), f"{first.tenant}/{name_of(1)}"
    data = remote.get(path)[0]
    data[-100] ^= 1  # within the leaf
    other = remote.get(f"{first.tenant}/{name_of(2)}")[0]
    remote.put([(path, data)])
    assert second.get(name_of(1), value_of) is None
    remote.put([(path, other)])
    assert second.get(name_of(1), value_of) is None
    assert second.counters["remote_damaged"] == 2
    assert second.get(name_of(2), value_of) == 2


def test_encrypted_objects_are_sent_encrypted(connect, machine):
    first, second = (machine(number, connect(), key=b"k" * 32) for number in (1, 2))
    first.put([(name_of(1), encoded(1))])
    first.flush()
    assert np.arange(100).tobytes()[:64] not in connect().get(f"{first.tenant}/{name_of(1)}")[0].tobytes()
    assert second.get(name_of(1), value_of) == 1


def test_an_outage_delays_puts_and_makes_reads_misses(connect, machine):
    client = Unreliable(connect()._client)
    objects = machine(1, Remote(client))
    client.is_away = True
    objects.put([(name_of(1), encoded(1))])
    with pytest.raises(StoreUnreachableError):
        objects.flush()
    assert objects.get(name_of(1), value_of) == 1
    assert objects.get(name_of(2), value_of) is None
    assert waiting(objects) == 1
    client.is_away = False
    wait_for(lambda: waiting(objects) == 0)  # by the thread, without another call
    assert machine(2, connect()).get(name_of(1), value_of) == 1


def test_after_a_failure_reads_do_not_ask_for_a_while(connect):
    client = Unreliable(connect()._client)
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


def test_a_later_process_sends_what_an_earlier_one_left(connect, machine):
    client = Unreliable(connect()._client)
    client.is_away = True
    first = machine(1, Remote(client))
    first.put([(name_of(1), encoded(1))])
    first.close()
    client.is_away = False
    again = machine(1, connect())
    wait_for(lambda: waiting(again) == 0)
    assert machine(2, connect()).get(name_of(1), value_of) == 1


def test_a_refused_object_does_not_hold_up_the_others(connect, machine):
    client = Unreliable(connect()._client)
    objects = machine(1, Remote(client))
    client.refused = {f"{objects.tenant}/{name_of(1)}"}
    objects.put([(name_of(number), encoded(number)) for number in (1, 2)])
    with pytest.raises(StoreError, match="PermissionError"):
        objects.flush()
    other = machine(2, connect())
    assert [other.get(name_of(number), value_of) for number in (1, 2)] == [None, 2]
    client.refused = set()
    objects.flush()
    assert other.get(name_of(1), value_of) == 1


def test_several_stores_of_a_root_send_each_object_once(connect, machine):
    client = Unreliable(connect()._client)
    stores = [machine(1, Remote(client)) for _ in range(4)]

    def put(number):
        stores[number % 4].put([(name_of(number), encoded(number))])
        stores[number % 4].flush()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(16)))
    assert sorted(client.sent) == sorted(f"{stores[0].tenant}/{name_of(number)}" for number in range(16))


WRITER = """
import sys
import numpy as np
from kvpatch_jax.store.files import Encoded
from kvpatch_jax.store.objects import Objects
from kvpatch_jax.store.remote import open_remote
root, shared, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
objects = Objects(root, secret=b"the same on all machines, 32 byt", remote=open_remote(f"file://{shared}"), memory=0)
for number in range(first, first + 1000):
    objects.put([(f"{number:032x}/enc", Encoded("encoder", {"value": number}, {"leaf": np.arange(100) + number}))])
    print(number, flush=True)
"""


def test_killed_writers_lose_nothing_that_they_acknowledged(tmp_path, folder, machine):
    machine(1, None).close()
    command = [sys.executable, "-c", WRITER, str(folder / "machine1"), str(tmp_path / "shared")]
    writers = [subprocess.Popen([*command, str(first)], stdout=subprocess.PIPE, text=True) for first in (0, 1000)]
    try:
        acknowledged = [int(writer.stdout.readline()) for writer in writers for _ in range(20)]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    machine(1, remote := open_remote(f"file://{tmp_path}/shared")).flush()
    other = machine(2, remote)
    assert [other.get(name_of(number), value_of) for number in acknowledged] == acknowledged


@pytest.fixture
def holders(connect, machine):
    """Returns two stores that compete for leases: of two machines, or of one root if there is no remote store."""
    remote = connect()
    return machine(1, remote), machine(1 if remote is None else 2, connect())


with_index = pytest.mark.parametrize("connect", ["index", *REMOTES], indirect=True)


@with_index
def test_one_holder_has_a_lease_until_it_is_released(holders):
    first, second = holders
    with take_lease(first, "chunk", 60) as lease:
        assert lease.held
        assert take_lease(second, "chunk", 60) is None
        assert take_lease(second, "another", 60).held
        assert lease.renew(120)
        assert take_lease(second, "chunk", 60) is None
    assert not lease.held
    assert not lease.renew(60)
    assert take_lease(second, "chunk", 60).held


@with_index
def test_a_lease_that_ended_goes_to_another_holder(holders, monkeypatch):
    monkeypatch.setattr("kvpatch_jax.store.remote.SKEW_SECONDS", 0.0)
    first, second = holders
    lease = take_lease(first, "chunk", 2.0)
    wait_for(lambda: not lease.held)
    time.sleep(0.01)
    later = take_lease(second, "chunk", 60)
    assert later.held
    assert not lease.renew(60)
    lease.release()  # of no effect
    assert take_lease(first, "chunk", 60) is None


@with_index
def test_of_many_takers_one_has_the_lease(holders):
    barrier = threading.Barrier(8)

    def take(number):
        barrier.wait()
        return take_lease(holders[number % 2], "chunk", 60)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(lease is not None for lease in pool.map(take, range(8))) == 1


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_lease_without_an_end_is_refused(machine, seconds):
    with pytest.raises(InputError, match="expected a finite number above 0"):
        take_lease(machine(1, None), "chunk", seconds)


@pytest.mark.parametrize("url", ["ftp://host", "nothing", 7, "s3://", "valkey://host:port"])
def test_another_url_is_refused(url):
    with pytest.raises(InputError, match="expected"):
        open_remote(url)


@pytest.mark.parametrize("scheme", ["http", "valkey"])
def test_a_service_that_is_not_there_is_unreachable(scheme):
    remote = open_remote(f"{scheme}://127.0.0.1:{free_port()}/0", timeout=1.0)
    with pytest.raises(StoreUnreachableError):
        remote.get("x/y")
    with pytest.raises(StoreUnreachableError):
        remote.put([("x/y", b"1")])
