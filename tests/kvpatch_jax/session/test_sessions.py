"""Many sessions in one pool: the same tokens in company, slots given back, turns, waiting, a lost pool, the end."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import contextlib
import gc
import os
import threading
import time

import jax
import numpy as np
import pytest
from sessions_load import (
    LENGTHS,
    PAGE,
    PAGES,
    Agent,
    backbone_of,
    expect_balanced,
    ids_of,
    on_threads,
    opened,
    question_of,
)

import kvpatch_jax as kvp
from kvpatch_jax.errors import (
    InputError,
    NotFiniteError,
    PoolError,
    PoolLostError,
    SessionBusyError,
    SessionClosedError,
    SessionError,
    WindowError,
)
from kvpatch_jax.sampling import Sampling
from kvpatch_jax.session import SharedConfig
from kvpatch_jax.session.fair_lock import FairLock, WaitQueue
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.window import Entry, ResidentPiece
from tests.compilations import compilations

SLOW = pytest.mark.slow
OTHERS = [pytest.param(name, marks=SLOW) for name in ("mla", "hybrid")]


@pytest.fixture(scope="module")
def backbone():
    return backbone_of("gqa")


@pytest.fixture
def sessions(backbone):
    with opened(backbone, timeout=20.0) as made:
        yield made


def agents_of(sessions, count: int, pieces: int = 2) -> list[Agent]:
    made = [Agent(sessions.shared, number) for number in range(count)]
    for agent in made:
        for piece in range(pieces):
            agent.add(3 * agent.number + piece)
    return made


@contextlib.contextmanager
def hog(sessions, pages: int):
    """Somebody else who holds all but so many free pages."""
    executor, size = sessions.shared.executor, sessions.shared.executor.books.allocator.page_size
    with sessions.shared.locked():
        books = executor.books.copy()
        slots = books.allocate((books.allocator.free_pages - pages) * size, True, "hog")
        books.put("hog", ResidentPiece("all", None, slots, np.zeros(len(slots), np.float32), 0))
        executor.books = books
    yield
    sessions.shared.release("hog")


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("layout", ["gqa", *OTHERS])
def test_tokens_are_the_same_alone_and_in_company(layout: str):
    """Greedy ones and drawn ones; as the executor's own `generate` makes them, over contiguous KV."""
    with opened(backbone_of(layout)) as sessions:
        shared = sessions.shared
        agents = agents_of(sessions, 6)
        sampling = [Sampling(), Sampling(0.9, 0.8), Sampling(1.2, top_k=5)]
        how = [(sampling[n % 3], n if n % 3 else None, ()) for n in range(6)]
        asked = [question_of(shared.backbone, n) for n in range(6)]
        expected = []
        for n, agent in enumerate(agents):
            options = dict(zip(("sampling", "key", "stop"), how[n], strict=True))
            expected.append(shared.executor.generate(agent.window, asked[n], 7, **options)[0].tolist())
        assert len({tuple(each) for each in expected}) > 3

        def ask(n: int) -> list[int]:
            return ids_of(shared.answer(agents[n].window, asked[n], None, 7, *how[n]))

        assert ask(1) == expected[1]
        found: dict[int, list[int]] = {}
        with compilations() as compiled:
            on_threads([lambda n=n: found.update({n: ask(n)}) for n in range(6)])
        assert [found[n] for n in range(6)] == expected
        expect_balanced(shared, {agent.window.branch for agent in agents})
        stats = sessions.stats()
        assert (stats.answers, stats.growing, stats.waiting, stats.cancelled) == (7, 0, 0, 0)
        assert "answers 7" in str(stats)
        # Fewer launches than tokens: they were decoded together, with one program for each shape.
        assert stats.steps < 6 + 6 * 6
        shapes = {shape for shape in shared.decode_loop.batch.shapes if shape[0] == "answers"}
        assert shapes <= {("answers", rows, 8) for rows in (1, 4, 8)}
        assert compiled.count("jit(_next_in_pages)") <= 3


@pytest.mark.usefixtures("unchecked")
def test_invalid_questions_are_refused_at_once(sessions):
    shared, agent = sessions.shared, agents_of(sessions, 1)[0]
    asked = question_of(shared.backbone, 1)
    for steps, sampling, key, stop in (
        (-1, None, None, None),
        (2.5, None, None, None),
        (3, Sampling(0.5), None, None),
        (3, None, None, (10**6,)),
        (3, None, jax.random.key(0, impl="rbg"), None),
    ):
        with pytest.raises(InputError):
            shared.answer(agent.window, asked, None, steps, sampling, key, stop)
    with pytest.raises(WindowError):
        shared.answer(agent.window.evict(agent.window.pieces[-1].id)[0], asked, None, 3, None, None, None)
    with pytest.raises(PoolError, match="pages"):
        ids_of(shared.answer(agent.window, asked, None, PAGES * 8, None, None, ()))
    for wrong in ({"batch": 0}, {"batch": True}, {"waiting": 0}, {"timeout": -1.0}, {"timeout": "long"}):
        with pytest.raises(InputError):
            opened(shared.backbone, **wrong)
    expect_balanced(shared, {agent.window.branch})


def test_dropping_an_answer_releases_its_slots_before_the_next_token(sessions):
    shared, (one, other) = sessions.shared, agents_of(sessions, 2)
    asked = question_of(shared.backbone, 1)
    ask = lambda agent: shared.answer(agent.window, asked, None, 40, None, None, ())
    expected = ids_of(ask(other))
    free = sessions.stats().free
    answers = [ask(one), ask(other)]
    for answer in answers:
        next(answer)
    answers[0].close()
    assert list(answers[0]) == []
    assert [int(piece.ids[0]) for piece in answers[1]] == expected[1:]
    left, unread = ask(one), ask(one)
    next(left)
    del left, unread, answer, answers
    gc.collect()
    deadline = time.monotonic() + 20
    while sessions.stats().free != free and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sessions.stats().cancelled == 3
    expect_balanced(shared, {one.window.branch, other.window.branch})


@pytest.mark.slow
def test_an_answer_ignores_later_edits_of_its_window(sessions):
    """The window slides and is compacted while the answer is decoded: what it reads was copied on write."""
    shared, agent = sessions.shared, agents_of(sessions, 1, pieces=3)[0]
    asked = question_of(shared.backbone, 1)
    ask = lambda: shared.answer(agent.window, asked, None, 40, None, None, ())
    expected = ids_of(ask())
    answer = ask()
    found = [int(next(answer).ids[0])]
    agent.run(agent.window.evict(agent.window.pieces[1].id))
    agent.run(agent.window.compact())
    found.append(int(next(answer).ids[0]))
    moved = ids_of(ask())
    assert moved == shared.executor.generate(agent.window, asked, 40, stop=())[0].tolist() != expected
    assert found + ids_of(answer) == expected
    expect_balanced(shared, {agent.window.branch})


@pytest.mark.slow
def test_a_row_whose_logits_are_not_finite_ends_alone(sessions, monkeypatch):
    shared, (one, other) = sessions.shared, agents_of(sessions, 2)
    asked, batch = question_of(shared.backbone, 1), shared.decode_loop.batch
    expected = ids_of(shared.answer(other.window, asked, None, 12, None, None, ()))
    answers = [shared.answer(agent.window, asked, None, 12, None, None, ()) for agent in (one, other)]
    begun = [int(next(answer).ids[0]) for answer in answers]
    advance = shared.backbone.advance_answers

    def refusing(pool, rows, draws):
        rows, pool = advance(pool, rows, draws)
        first = [place for place, row in enumerate(batch.rows) if row.request.window == one.window.branch]
        token = np.asarray(rows.token).copy()
        token[first] = -1
        return rows._replace(token=jax.numpy.asarray(token)), pool

    monkeypatch.setattr(batch.backbone, "advance_answers", refusing)
    with pytest.raises(NotFiniteError, match="logits with NaN"):
        ids_of(answers[0])
    assert [begun[1], *ids_of(answers[1])] == expected
    expect_balanced(shared, {one.window.branch, other.window.branch})


def test_options_of_sessions_override_those_of_their_config(backbone):
    config = SharedConfig(pages=2, page_size=PAGE)
    with kvp.Sessions(backbone, config=config, pages=PAGES, dtype="float32") as sessions:
        assert sessions.stats().slots == PAGES * PAGE
    with pytest.raises(TypeError, match="pages"):
        kvp.Sessions(backbone)


# --------------------------------------------------------------------------------------------- waiting


def later(act, seconds: float = 0.15) -> threading.Thread:
    def wait() -> None:
        time.sleep(seconds)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_full_pool_makes_edits_and_questions_wait(sessions):
    shared, (one, other) = sessions.shared, agents_of(sessions, 2)
    with hog(sessions, 0):
        given = later(lambda: shared.release("hog"))
        one.add(40)
        given.join()
    with hog(sessions, 1):
        other.add(41, keep=0)  # gives what it takes
        given = later(lambda: other.run(other.window.evict("c41")))
        assert len(one.ask(1, 5)) == 5  # of two pages
        given.join()
    assert sessions.stats().busy == 0
    expect_balanced(shared, {one.window.branch, other.window.branch})


def test_waiting_times_out_and_what_never_fits_does_not_wait(backbone):
    with opened(backbone, timeout=0.1, waiting=1) as sessions:
        shared, agent = sessions.shared, agents_of(sessions, 1)[0]
        window = agent.window
        with hog(sessions, 0):
            with pytest.raises(SessionBusyError, match="room for"):
                agent.add(40)
            with pytest.raises(SessionBusyError, match="others held the pool"):
                agent.ask(1)
            assert isinstance(SessionBusyError(""), PoolError)
            shared.timeout = 60.0
            held = shared.answer(window, question_of(backbone, 1), None, 3, None, None, ())
            shared.timeout = 0.1
            with pytest.raises(SessionBusyError, match="a place among 1 questions"):
                agent.ask(1)
            held.close()
            assert list(held) == []
        assert agent.window is window
        assert sessions.stats().busy == 3
        edits = ()
        for piece in range(50, 50 + PAGES):
            tokens, id = question_of(backbone, piece), f"q{piece}"
            shared.provide(id, tokens, tokens.embeddings.shape[1], None)
            window, more = window.append(Entry.of_tokens(id, tokens))
            edits += more
        with pytest.raises(PoolError) as raised:
            shared.run(window, edits)
        assert not isinstance(raised.value, SessionBusyError)
        assert len(agent.ask(1)) == 5
        expect_balanced(shared, {agent.window.branch})


def test_a_lost_pool_is_allocated_again_and_windows_are_prefilled(sessions, monkeypatch):
    shared, (one, other) = sessions.shared, agents_of(sessions, 2)
    expected = [agent.ask(1, 8) for agent in (one, other)]
    advance = shared.backbone.advance_answers

    def failing(pool, rows, draws):
        jax.block_until_ready(advance(pool, rows, draws))  # which donates it
        raise RuntimeError("no memory left")

    monkeypatch.setattr(shared.decode_loop.batch.backbone, "advance_answers", failing)
    with pytest.raises(PoolLostError) as raised:
        one.ask(1, 8)
    assert "no memory left" in str(raised.value.__cause__)
    monkeypatch.setattr(shared.decode_loop.batch.backbone, "advance_answers", advance)
    window = other.window
    with pytest.raises(PoolLostError, match="expected `reprefill`"):
        other.add(40)
    with pytest.raises(PoolLostError, match="expected `reprefill`"):
        one.ask(1, 8)
    assert other.window is window
    for agent, said in zip((one, other), expected, strict=True):
        agent.window = shared.reprefill(agent.window)
        assert agent.ask(1, 8) == said
        assert shared.reprefill(agent.window) is agent.window
    assert sessions.stats().renewed == 1
    expect_balanced(shared, {one.window.branch, other.window.branch})


def test_closing_ends_answers_and_waits(backbone, monkeypatch):
    sessions = opened(backbone)
    shared, (one, other) = sessions.shared, agents_of(sessions, 2)
    advance = backbone.advance_answers
    monkeypatch.setattr(backbone, "advance_answers", lambda *given: (time.sleep(0.2), advance(*given))[1])
    answer = shared.answer(one.window, question_of(backbone, 1), None, 40, None, None, ())
    next(answer)
    ended: list[BaseException] = []

    def waiting() -> None:
        try:
            other.add(40)
        except SessionClosedError as error:
            ended.append(error)

    with hog(sessions, 0):
        thread = threading.Thread(target=waiting)
        thread.start()
        deadline = time.monotonic() + 20
        while not sessions.stats().in_line and time.monotonic() < deadline:
            time.sleep(0.01)
        sessions.close()
        thread.join()
    assert len(ended) == 1
    with pytest.raises(SessionClosedError):
        ids_of(answer)
    for use in (lambda: one.add(41), lambda: one.ask(1), lambda: shared.reprefill(one.window)):
        with pytest.raises(SessionClosedError):
            use()
    shared.release(one.window.branch)
    sessions.close()
    assert not any(thread.name == "sessions" for thread in threading.enumerate())


def test_in_a_forked_process_nothing_waits_for_ever(sessions, monkeypatch):
    shared, agent = sessions.shared, agents_of(sessions, 1)[0]
    answer = shared.answer(agent.window, question_of(shared.backbone, 1), None, 3, None, None, ())
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    for use in (lambda: next(answer), lambda: agent.add(40), lambda: agent.ask(1), sessions.stats):
        with pytest.raises(SessionClosedError, match="forked off"):
            use()
    sessions.close()
    monkeypatch.undo()


def test_the_lock_is_handed_on_in_the_order_of_requests():
    turns, order = FairLock(), []

    def take(name: str, first: bool = False) -> threading.Thread:
        def work() -> None:
            turns.acquire(first)
            order.append(name)
            turns.release()

        thread = threading.Thread(target=work)
        thread.start()
        while turns.queued <= len(started):
            time.sleep(0.001)
        started.append(name)
        return thread

    started: list[str] = []
    with turns, turns:
        threads = [take("a"), take("b"), take("driver", first=True), take("c")]
        assert turns.held
        depth = turns.pause()
        assert not turns.held
        turns.acquire(depth=depth)
        assert order[0] == "driver"
    for thread in threads:
        thread.join()
    assert order == ["driver", "a", "b", "c"]
    assert not turns.held
    line = WaitQueue(turns)
    with turns:
        place = line.enter()
        with pytest.raises(SessionBusyError, match="tea"):
            line.wait(place, time.monotonic(), "tea")
        line.leave(place)
        assert len(line) == 0


# ---------------------------------------------------------------------------------------------- under load


@pytest.mark.slow
def test_32_agents_on_threads(backbone):
    """No slot leaks, no call waits for ever, and every answer equals that of an agent alone in its pool."""
    with opened(backbone, timeout=120.0) as sessions:
        agents = [Agent(sessions.shared, number) for number in range(32)]
        on_threads([lambda agent=agent: agent.live(6) for agent in agents])
        expect_balanced(sessions.shared, {agent.window.branch for agent in agents})
        stats = sessions.stats()
        assert (stats.busy, stats.renewed) == (0, 0)
        for agent in agents:
            sessions.shared.release(agent.window.branch)
        assert sessions.stats().free == stats.slots

    for number in range(0, 32, 8):
        with opened(backbone, batch=1) as alone:
            agent = Agent(alone.shared, number)
            agent.live(min(agents[number].done, 200))
            assert agent.said == agents[number].said[: len(agent.said)]
            assert len(agent.said) > 1


# ------------------------------------------------------------------------------------------------- sessions


def shots_of(count: int) -> list[list[int]]:
    """What sessions are shown: token ids, as chunks."""
    return [np.random.default_rng(number).integers(3, 40, LENGTHS[number % 3]).tolist() for number in range(count)]


def test_sessions_share_pool_and_store_and_outlive_a_lost_pool(backbone, tmp_path):
    shots, question = shots_of(4), [5, 6]
    with kvp.Session(backbone, keep=2, pages=PAGES, page_size=PAGE) as alone:
        expected = []
        for number, shot in enumerate(shots[:3]):
            alone.add(shot, kind="chunk")
            if number:  # windows of one size, whose programs are the dear part
                expected.append(alone.ask(question, steps=3, stop=()).ids)

    def agent(said: list) -> None:
        session = sessions.open(keep=2)
        for number, shot in enumerate(shots[:3]):
            session.add(shot, kind="chunk")
            if number:
                said.append(session.ask(question, steps=3, stop=()).ids)
        opened.append(session)

    store = ChunkStore(tmp_path / "store")
    with kvp.Sessions(backbone, store, pages=PAGES, page_size=PAGE, rank=0) as sessions:
        opened: list[kvp.Session] = []
        said: list[list] = [[], [], []]
        on_threads([lambda each=each: agent(each) for each in said])
        assert said == [expected] * 3
        first, second, third = opened
        branch = first.fork()
        assert branch.ask(question, steps=3, stop=()).ids == expected[-1]
        branch.close()
        third.save(tmp_path / "third")
        third.close()
        third = sessions.restore(tmp_path / "third")
        assert third.ask(question, steps=3, stop=()).ids == expected[-1]
        third.close()
        with pytest.raises(SessionError, match="beside a runtime"):
            kvp.Session(backbone, ChunkStore(tmp_path / "other"), runtime=sessions.shared)

        executor, fork = sessions.shared.executor, first.fork()
        for value in jax.tree.leaves(executor.pool.vectors):
            value.delete()
        assert [len(fork.ask(question, steps=3, stop=()).ids) for _ in range(2)] == [3, 3]  # its parent is not there
        first.add(shots[3], kind="chunk")
        fork.close()
        assert len(second.ask(question, steps=3, stop=()).ids) == 3
        assert sessions.stats().renewed == 1
        expect_balanced(sessions.shared, {session.window.branch for session in (first, second)})
    with pytest.raises(SessionClosedError):
        first.add(shots[0])
    with pytest.raises(SessionClosedError):
        sessions.open()
    first.close()
    store.close()
