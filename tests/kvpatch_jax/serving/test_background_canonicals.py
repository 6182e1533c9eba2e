"""Canonicals formed in the background: which chunks, when, once per store, and what becomes of them."""
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportArgumentType=false

import shutil
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from engine_page import Page
from serving_sides import LAYOUT, request_of, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.serving.vllm import ConnectorConfig, canonical_former, segments_of
from kvpatch_jax.serving.vllm.canonical_former import CanonicalFormer
from kvpatch_jax.serving.vllm.engine_activity import EngineActivity
from kvpatch_jax.serving.vllm.engine_metrics import collect_worker
from kvpatch_jax.store import ChunkStore, Lease
from kvpatch_jax.store.disk.root_config import SECRETS
from kvpatch_jax.store.remotes import leases

LEAD, QUESTION, SIZE = (901, 902, 903, 904), (7, 8), 6
PAGES = [tuple(range(100 * page, 100 * page + SIZE)) for page in range(1, 6)]
BLOCKS = tuple(range(3, 19))


class Model:
    """Prefills a chunk alone as the stand-in of an engine's pool would, in slices of `step` tokens.

    `before` is called before each slice is asked for; `asked` are the slices, with the times at which they began.
    """

    nbytes, capacity, step = 1000, 64, 4

    def __init__(self):
        self.asked, self.before = [], lambda: None

    def prefill(self, chunk, may_go_on):
        for first in range(0, len(chunk.tokens), self.step):
            self.before()
            count = min(self.step, len(chunk.tokens) - first)
            if not may_go_on(count):
                return None
            self.asked.append((count, time.monotonic()))
        return kvp.core.EngineKV({name: jnp.asarray(value) for name, value in true_kv(chunk.tokens.tolist()).items()})


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What is waited for in a fleet would only make these tests long."""
    monkeypatch.setattr(canonical_former, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(canonical_former, "MOST_TIME", 1.0)


def begun(sides):
    """Has a side form canonicals; returns the model that prefills them."""
    worker, model = sides.worker, Model()
    worker.canonicals = CanonicalFormer(worker.config, worker.stores, worker.former, model)
    return model


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path, patch_after=2, forming_rate=1e6) as made:
        made.model = begun(made)
        yield made


def asked(sides, name, pages, finished=True, **options):
    """Sends a prompt of the lead, some pages and a question; returns what was saved of it, and how it was served."""
    tokens, ends = [*LEAD], [len(LEAD)]
    for page in pages:
        tokens += PAGES[page]
        ends.append(len(tokens))
    tokens += QUESTION
    save = sides.worker.save

    def noting(orders):
        for request in sides.pool.requests.values():
            request.prompt_token_ids, request.mm_features = tokens, []
        save(orders)

    sides.worker.save = noting
    found = served(sides, name, {"segments": ends, "policy": "approximate", **options}, tokens, BLOCKS)
    sides.worker.save = save
    told = sides.scheduler.finish(found.request)["kvpatch"] if finished else None
    if finished:
        sides.worker.canonicals.flush()
    return SimpleNamespace(found=found, told=told, alone=[index for own in found.orders.saves for index in own.alone])


def canonical_of(sides, page):
    (segment,) = segments_of("tiny", [*PAGES[page], *QUESTION], ends=[SIZE])
    return sides.worker.stores.canonical("default", segment.id)


# ---------------------------------------------------------------------------------------------------- which, and what


def test_a_chunk_that_is_met_behind_another_front_becomes_a_canonical(sides):
    assert asked(sides, "first", [0, 1]).alone == []
    assert asked(sides, "again", [0, 1]).alone == [], "behind the same it is served as it was prefilled"
    assert asked(sides, "other", [2, 1]).alone == [2]
    assert sides.worker.canonicals.counts == {"background": 1}
    assert canonical_of(sides, 0) is None
    assert asked(sides, "third", [3, 1]).alone == [], "it is stored"


def test_it_is_what_a_request_of_the_chunk_alone_leaves(sides):
    asked(sides, "first", [0, 1])
    asked(sides, "other", [2, 1])
    found = canonical_of(sides, 1)
    with_nothing = true_kv(list(PAGES[1]))
    local = np.arange(SIZE, dtype=np.float32)
    expected = kvp.to_phase_free(LAYOUT, kvp.core.EngineKV(with_nothing), local, 0)
    for name in "kv":
        np.testing.assert_allclose(found.kv[name], expected[name], rtol=2e-5, atol=2e-5)
    assert (found.span, found.lead, found.backbone) == (SIZE, None, "tiny")


def test_it_is_served_as_a_leading_chunk_bit_for_bit(sides, tmp_path):
    asked(sides, "first", [0, 1])
    asked(sides, "other", [2, 1])
    tokens = [*PAGES[1], *QUESTION]
    own = served(sides, "front", {"segments": [SIZE], "save": False}, tokens, BLOCKS)
    assert own.count == SIZE

    # The same, of another store, whose canonical a request of the chunk alone has left.
    with sides_of(tmp_path / "other") as plain:
        served(plain, "forms", {"segments": [SIZE]}, tokens, BLOCKS)
        other = served(plain, "front", {"segments": [SIZE], "save": False}, tokens, BLOCKS)
        assert (own.loaded[:, :SIZE] == other.loaded[:, :SIZE]).all()


def test_a_patch_is_formed_once_there_is_a_canonical(tmp_path):
    with sides_of(tmp_path, patch_after=1, forming_rate=1e6, survivor_bytes=0) as sides:
        begun(sides)
        asked(sides, "first", [0, 1])
        assert sides.worker.former.counts["patches"] == 0
        asked(sides, "other", [2, 1])
        assert sides.worker.former.counts["patches"] == 1
        told = asked(sides, "again", [2, 1], policy="blind", save=False).told
        assert told["served"][2][0] == "stored"


def test_exact_requests_ask_for_none(tmp_path):
    """They would be served nothing by it, and get patches in place of prefills."""
    with sides_of(tmp_path, patch_after=1, forming_rate=1e6) as sides:
        begun(sides)
        assert asked(sides, "first", [0, 1], policy="exact").alone == []
        assert asked(sides, "other", [0, 1]).alone != []


@pytest.mark.parametrize("given", [{"forming_rate": 0}, {"save": False}])
def test_nothing_is_queued_where_the_config_says_so(tmp_path, given):
    with sides_of(tmp_path, patch_after=1, **{"forming_rate": 1e6, **given}) as sides:
        begun(sides)
        assert asked(sides, "first", [0, 1]).alone == []


def test_requests_that_are_served_approximately_ask_for_canonicals_too(sides):
    asked(sides, "first", [0, 1])
    request = asked(sides, "blind", [1], policy="blind")
    assert not request.told["exact"]
    assert request.alone == [1]
    assert sides.worker.canonicals.counts == {"background": 1}


# --------------------------------------------------------------------------------------------------- only with room


def test_an_engine_with_a_request_forms_nothing(sides):
    asked(sides, "first", [0, 1])
    waits = request_of("waits", None)  # one that asks for no chunks counts as well
    sides.scheduler.add_request(waits)
    asked(sides, "other", [2, 1], finished=False)
    time.sleep(0.1)
    assert sides.model.asked == []
    assert sides.worker.canonicals.jobs == 1
    sides.scheduler.finish(waits)
    time.sleep(0.1)
    assert sides.model.asked == [], "the other one still runs"
    sides.scheduler.finish(request_of("other", None))
    sides.worker.canonicals.flush()
    assert [count for count, _ in sides.model.asked] == [4, 2]


def test_a_request_that_comes_while_one_is_formed_waits_for_one_forward_at_most(sides):
    came = request_of("comes", None)
    asked(sides, "first", [0, 1])

    def comes():
        if len(sides.model.asked) == 1:
            sides.scheduler.add_request(came)

    sides.model.before = comes
    asked(sides, "other", [2, 1], finished=False)
    sides.scheduler.finish(request_of("other", None))
    time.sleep(0.1)
    assert len(sides.model.asked) == 1
    sides.scheduler.finish(came)
    sides.worker.canonicals.flush()
    assert sides.worker.canonicals.counts == {"background": 1}


def test_tokens_of_a_second_are_bounded(tmp_path):
    with sides_of(tmp_path, patch_after=1, forming_rate=40) as sides:
        model = begun(sides)
        asked(sides, "first", [0, 1, 2])
        counts, times = zip(*model.asked, strict=True)
        assert sum(counts) == 3 * SIZE
        # Every slice pays for its own tokens before the next one begins.
        assert times[-1] - times[0] >= sum(counts[:-1]) / 40 * 0.99


def test_forwards_take_a_share_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(canonical_former, "MOST_TIME", 0.2)
    with sides_of(tmp_path, patch_after=1, forming_rate=1e6) as sides:
        model = begun(sides)
        model.before = lambda: time.sleep(0.02) if model.asked else None  # as long as the slice before takes
        asked(sides, "first", [0, 1])
        times = np.diff([at for _, at in model.asked])
        assert (times >= 0.02 * 5 * 0.9).all()


def test_the_backlog_is_bounded_and_what_is_dropped_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(canonical_former, "MAX_BACKLOG", 1)
    with sides_of(tmp_path, patch_after=1, forming_rate=1e6) as sides:
        model, gate, reached = begun(sides), threading.Event(), threading.Event()

        def waiting():
            reached.set()
            gate.wait(30)

        model.before = waiting
        other = request_of("keeps", None)
        sides.scheduler.add_request(other)
        asked(sides, "first", [0, 1, 2, 3], finished=False)
        sides.scheduler.finish(request_of("first", None))
        assert sides.worker.canonicals.jobs <= 2
        gate.set()
        sides.scheduler.finish(other)
        sides.worker.canonicals.flush()
        first = sides.worker.canonicals.counts["background"]
        assert first < 4
        for number in range(4):
            asked(sides, f"again {number}", [0, 1, 2, 3])
        assert sides.worker.canonicals.counts["background"] == 4


# -------------------------------------------------------------------------------------------- once over all processes


def held_lease(tmp_path, page):
    """The lease, for a minute, of a page's canonical, as another process holds it."""
    store = ChunkStore(tmp_path / "store", tenant="default")
    (segment,) = segments_of("tiny", [*PAGES[page], *QUESTION], ends=[SIZE])
    return store, store.lease(segment.id, "tiny", 60.0)


def test_a_chunk_is_left_to_the_process_that_has_its_lease(sides, tmp_path):
    asked(sides, "first", [0, 1])
    store, lease = held_lease(tmp_path, 1)
    asked(sides, "other", [2, 1])
    assert sides.worker.canonicals.counts == {"lease_lost": 1}
    assert canonical_of(sides, 1) is None
    lease.release()
    store.close()
    asked(sides, "third", [3, 1])
    assert sides.worker.canonicals.counts == {"lease_lost": 1, "background": 1}


def test_a_lease_that_its_holder_did_not_live_to_release_ends(sides, tmp_path, monkeypatch):
    asked(sides, "first", [0, 1])
    store, _ = held_lease(tmp_path, 1)
    asked(sides, "other", [2, 1])
    assert sides.worker.canonicals.counts == {"lease_lost": 1}
    is_over = leases.is_over
    monkeypatch.setattr(leases, "is_over", lambda data, now: is_over(data, now + 59))
    asked(sides, "sooner", [3, 1])
    assert sides.worker.canonicals.counts == {"lease_lost": 2}, "clocks of machines differ by seconds"
    monkeypatch.setattr(leases, "is_over", lambda data, now: is_over(data, now + 66))
    asked(sides, "third", [4, 1])
    assert sides.worker.canonicals.counts == {"lease_lost": 2, "background": 1}
    store.close()


def test_two_engines_of_one_store_form_a_chunk_once(tmp_path):
    given = {"patch_after": 1, "forming_rate": 1e6}
    with sides_of(tmp_path, **given) as one, sides_of(tmp_path, **given, readers=3) as other:
        models = [begun(one), begun(other)]
        both = threading.Barrier(2, timeout=30)
        # Both have looked, found nothing, and only then one of them gets the lease.
        take, arrived = ChunkStore.lease, []

        def together(self, *given):
            if len(arrived) < 2:
                arrived.append(self)
                both.wait()
            return take(self, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChunkStore, "lease", together)
            threads = [threading.Thread(target=asked, args=(sides, "first", [0], True)) for sides in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        counts = one.worker.canonicals.counts + other.worker.canonicals.counts
        assert counts["background"] == 1
        assert counts["lease_lost"] + counts["known"] == 1
        assert sum(count for model in models for count, _ in model.asked) == SIZE


def test_machines_of_one_remote_store_form_a_chunk_once(tmp_path):
    """Also before the first one has sent it: until then its lease says so."""
    ChunkStore(tmp_path / "one" / "store", tenant="default").close()
    (tmp_path / "other" / "store").mkdir(parents=True)
    for name in SECRETS:  # by which both name chunks
        shutil.copy(tmp_path / "one" / "store" / name, tmp_path / "other" / "store" / name)
    given = {"patch_after": 1, "forming_rate": 1e6, "remote": f"file://{tmp_path}/remote"}
    with sides_of(tmp_path / "one", **given) as one, sides_of(tmp_path / "other", **given) as other:
        begun(one)
        model = begun(other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CanonicalFormer, "_is_stored", lambda self, chunk: False)  # as if nothing were sent yet
            asked(one, "first", [0])
            asked(other, "first", [0])
        assert one.worker.canonicals.counts == {"background": 1}
        assert other.worker.canonicals.counts == {"lease_lost": 1}
        one.worker.stores.of("default").flush()
        asked(other, "again", [0, 1])
        assert other.worker.canonicals.counts == {"lease_lost": 1, "known": 1, "background": 1}
        assert sum(count for count, _ in model.asked) == SIZE
        assert canonical_of(other, 0) is not None


def test_nothing_is_stored_under_a_lease_that_ended_meanwhile(sides, monkeypatch):
    ended = property(lambda self: len(sides.model.asked) < 2)
    monkeypatch.setattr(Lease, "held", ended)
    asked(sides, "first", [0, 1])
    asked(sides, "other", [2, 1])
    assert len(sides.model.asked) == 2, "all of it was computed"
    assert sides.worker.canonicals.counts == {"lease_lost": 1}
    assert canonical_of(sides, 1) is None


# --------------------------------------------------------------------------------------------------------- failures


def test_a_reset_while_a_chunk_is_formed_leaves_nothing_of_it(sides):
    asked(sides, "first", [0, 1])
    sides.model.before = lambda: sides.scheduler.reset() if sides.model.asked else None
    asked(sides, "other", [2, 1])
    assert sides.worker.canonicals.counts == {"dropped": 1}
    assert canonical_of(sides, 1) is None


def test_an_engine_that_is_not_as_expected_forms_none_and_serves_on(tmp_path, caplog):
    with sides_of(tmp_path, patch_after=1, forming_rate=1e6) as sides:
        model = begun(sides)

        def fails():
            raise TypeError("got an unexpected argument")

        model.before = fails
        assert not asked(sides, "first", [0, 1, 2, 3]).found.failed
        counts = sides.worker.canonicals.counts
        assert (counts["failed"], counts["dropped"]) == (canonical_former.MOST_FAILURES, 1)
        assert "no canonicals are formed in the background any more" in caplog.text
        assert asked(sides, "again", [0, 1, 2, 3]).told["exact"]
        assert sides.worker.former.held_bytes == 0


def test_a_runner_of_another_kind_forms_none(tmp_path, caplog):
    """The stand-in of a runner has no function of the model."""
    with sides_of(tmp_path, patch_after=1, forming_rate=1e6) as sides:
        assert sides.worker.canonicals is None
        assert "no canonicals are formed in the background" in caplog.text
        assert not served(sides, "first", {"segments": [4, 10]}, blocks=BLOCKS).failed


def test_closing_gives_up_what_waits(tmp_path):
    with sides_of(tmp_path, patch_after=1, forming_rate=1e6, patience=120.0) as sides:
        model = begun(sides)
        sides.scheduler.add_request(request_of("keeps", None))
        asked(sides, "first", [0, 1], finished=False)
        began = time.monotonic()
    assert time.monotonic() - began < 60
    assert model.asked == []


# ------------------------------------------------------------------------------------------- settings and metrics


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), True, "fast", None])
def test_the_rate_is_checked(value):
    with pytest.raises(ConfigError, match=r"^connector\.forming_rate: got .*; expected "):
        ConnectorConfig.read({"store": "s", "backbone": "b", "forming_rate": value})


def test_what_is_formed_is_on_the_page(sides):
    asked(sides, "first", [0, 1])
    asked(sides, "other", [2, 1])
    page = Page()
    page.recorder.observe(collect_worker(sides.worker, {}))
    assert page.value("formed", "background") == 1
    assert page.value("formed", "lease_lost") == 0, "there from the start"
    assert page.value("background_jobs") == 0


def test_an_engine_is_idle_once_it_has_had_no_request_for_a_while():
    activity = EngineActivity()
    assert activity.wait_idle(0.0, 0.0)
    activity.begin("one")
    activity.begin("two")
    activity.end("one")
    activity.end("unknown")
    assert not activity.wait_idle(0.0, 0.02)
    ended = []

    def end():
        ended.append(time.monotonic())
        activity.end("two")

    threading.Timer(0.05, end).start()
    assert activity.wait_idle(0.1, 60.0)
    assert time.monotonic() - ended[0] >= 0.1
    assert not activity.wait_idle(60.0, 0.02)
