"""Plans with gaps, and requests that are served them range by range, as an engine that asks for ranges does."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from serving_hooks import StandIn, engine_of, imported_connector
from serving_sides import PAGE, TOKENS, matched_of, output_of, request_of, served, sides_of, without_rows

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.plan import Certificate, CertifiedLoss, RankChoice
from kvpatch_jax.serving.vllm import ConnectorConfig, RequestOptions, plan_request, segments_of
from kvpatch_jax.serving.vllm.prompt_history import PromptHistory
from kvpatch_jax.serving.vllm.request_plan import StockedPatch, states_of

ENDS = (8, 18, 24)
SETTINGS = ConnectorConfig(store="/nowhere", backbone="tiny", ranges=1)
BLIND = dataclasses.replace(SETTINGS, uncertified=True)
BLOCKS = tuple(range(3, 11))


class Catalog:
    """What is stored of the chunks at some indices: canonicals, exact prefills, and patches."""

    def __init__(self, history, canonicals=(), prefills=(), patches=()):
        ids = [segment.id for segment in history.segments]
        self.history, self.exact = history, prefills
        self.canonicals = {ids[index] for index in canonicals}
        self.kept = {(ids[index], tuple(ids[:index])) for index in patches}

    def has_canonical(self, id):
        return id in self.canonicals

    def patches(self, id, front):
        return [StockedPatch("aa", 4)] if (id, front) in self.kept else []

    def prefills(self, index):
        return {"restored": self.history.front(index)} if index in self.exact else {}

    def survivor(self, index, front):
        return None

    def provide(self, step):
        return True


def history_of(ends=ENDS, tokens=TOKENS):
    return PromptHistory(segments_of("tiny", tokens, ends=ends))


def plan(history, settings=SETTINGS, policy="exact", certificate=None, **stored):
    catalog = Catalog(history, **stored)
    return plan_request(history, catalog, settings, RequestOptions(policy=policy), certificate)


def ways(plan):
    return [(step.segment.begin, step.point) for step in plan.steps]


def certificate():
    """Bounds a patch of rank 4 by .01 nats and one more per chunk behind it, and a bare chunk by 5."""
    rows = [("stored", 4, behind, 0.01 * (behind + 1)) for behind in range(3)]
    rows += [("bare", 0, behind, 5.0) for behind in range(3)]
    made = [CertifiedLoss(*row[:3], "forget", 0.0, 0.0, 0.0, row[3], 1.0, 1.0, 1.0, None, 0.0, 0.1, 10) for row in rows]
    given = {"backbone": "tiny", "model": "m", "made": "2026-01-01", "level": 0.95, "calibration": 30, "held_out": 30}
    given |= {"chunks": 3, "tokens": 99, "content": "c", "asked": "a", "disjoint": True, "modalities": ("text",)}
    return Certificate(**given, rows=tuple(made), recommended=RankChoice(4, "r"))


def test_what_is_stored_behind_a_missing_chunk_is_served_exactly():
    history = history_of()
    planned = plan(history, canonicals=[0], prefills=[2])
    assert ways(planned) == [(0, "leading"), (18, "restored")]
    assert (planned.matched, planned.exact, planned.kl) == (14, True, 0.0)
    assert planned.why == "chunk 2 of 3 is not stored behind those in front of it"
    assert planned.salt(SETTINGS, RequestOptions(), "own") == "own"
    assert states_of(history, planned.steps) == tuple(history.exact(index) for index in range(3))
    # A prompt whose first chunk is missing too.
    assert ways(plan(history, prefills=[1, 2])) == [(8, "restored"), (18, "restored")]


def test_engines_that_do_not_ask_for_ranges_are_given_none():
    settings = dataclasses.replace(SETTINGS, ranges=None)
    assert ways(plan(history_of(), settings, canonicals=[0], prefills=[2])) == [(0, "leading")]


def test_a_range_with_few_tokens_is_not_worth_a_step():
    history = history_of()
    for ranges, expected in ((6, [(0, "leading"), (18, "restored")]), (7, [(0, "leading")])):
        settings = dataclasses.replace(SETTINGS, ranges=ranges)
        assert ways(plan(history, settings, canonicals=[0], prefills=[2])) == expected
    # The prompt's beginning is matched in the step that admits it, however short.
    assert ways(plan(history, dataclasses.replace(SETTINGS, ranges=9), canonicals=[0])) == [(0, "leading")]


def test_an_uncertified_chunk_is_a_gap():
    """Behind a patch everything is approximate, the prefilled chunk in front of it not: .01 nats."""
    stored = {"canonicals": [0, 1, 2], "patches": [2]}
    planned = plan(history_of(), SETTINGS, "approximate", certificate(), **stored)
    assert ways(planned) == [(0, "leading"), (18, "stored")]
    assert (planned.exact, planned.kl) == (False, 0.01)
    tight = dataclasses.replace(SETTINGS, most_kl=0.005)
    assert ways(plan(history_of(), tight, "approximate", certificate(), **stored)) == [(0, "leading")]


def test_a_prefilled_chunk_behind_an_approximate_one_counts_towards_the_loss():
    stored = {"canonicals": [0, 1, 3], "patches": [1, 3]}
    planned = plan(history_of((6, 12, 18, 24)), SETTINGS, "approximate", certificate(), **stored)
    assert ways(planned) == [(0, "leading"), (6, "stored"), (18, "stored")]
    assert planned.kl == pytest.approx(0.03)


def test_exact_chunks_behind_a_gap_are_preferred_if_they_are_more():
    """The second chunk's patch would make the third one, which is stored as it was prefilled, approximate."""
    stored = {"canonicals": [0, 1], "prefills": [2], "patches": [1]}
    long = plan(history_of((8, 12, 24)), SETTINGS, "approximate", certificate(), **stored)
    assert (ways(long), long.exact) == ([(0, "leading"), (12, "restored")], True)
    short = plan(history_of((8, 20, 24)), SETTINGS, "approximate", certificate(), **stored)
    assert (ways(short), short.exact) == ([(0, "leading"), (8, "stored")], False)


def test_a_chunk_that_is_there_twice_has_a_salt_for_each():
    history, options = history_of((4, 8, 12), [1, 2, 3, 4] * 4), RequestOptions(policy="blind")
    whole = plan(history, BLIND, "blind", canonicals=[0, 1])
    first, second = whole.steps[1:]
    plans = [dataclasses.replace(whole, steps=(whole.steps[0], step)) for step in (first, second)]
    salts = [own.salt(BLIND, options, None) for own in plans]
    assert first._replace(segment=second.segment) == second
    assert salts[0] != salts[1]


def test_states_behind_a_gap_depend_on_what_is_in_front_of_it():
    history = history_of((6, 12, 18, 24))
    steps = plan(history, BLIND, "blind", canonicals=[0, 1, 3]).steps
    assert [step.segment.begin for step in steps] == [0, 6, 18]
    states, exact = states_of(history, steps), [history.exact(index) for index in range(4)]
    assert states[0] == exact[0]
    assert all(state != own for state, own in zip(states[1:], exact[1:], strict=True))
    assert states_of(history, steps[:1]) == tuple(exact)


# --------------------------------------------------------------------------------------------- range by range


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path, ranges=1) as made:
        yield made


def form(sides, missing=(1,)):
    """Stores the chunks of a prompt as they are prefilled; those at some indices count as not stored."""
    found = served(sides, "forming", {"segments": list(ENDS)})
    for index in missing:
        sides.scheduler._unplaced["default", history_of().segments[index].id] = None
    return sides.pool.rows(BLOCKS, 0, len(TOKENS)), found


def begin(sides, name="own", blocks=tuple(range(11, 19))):
    """A request until it is allocated blocks."""
    request = request_of(name, {"kvpatch": {"segments": list(ENDS), "save": False}})
    sides.scheduler.add_request(request)
    count = matched_of(sides.scheduler, request)
    assert sides.scheduler.next_range(request, count) == (18, 24), "the engine asks before it allocates"
    sides.scheduler.order_load(request, blocks, count)
    return request, blocks, count


def step(sides, request, blocks, computed, end, broken=False):
    """One step of the engine, that prefills tokens up to `end`; returns the blocks that were not loaded."""
    output = output_of(
        {request.request_id: end - computed}, {request.request_id: computed}, {request.request_id: blocks}
    )
    commands = sides.scheduler.build_commands(output)
    sides.pool.requests[request.request_id] = SimpleNamespace(mrope_positions=None)
    sides.worker.load(without_rows(commands, 0) if broken else commands)
    sides.pool.prefill(request.request_id, TOKENS[:end], blocks, computed)
    failed = sides.worker.take_failed()
    sides.scheduler.mark_failed(failed)
    return failed


def test_ranges_are_loaded_between_steps(sides):
    """The second range begins and ends within blocks."""
    rows, _ = form(sides)
    request, blocks, count = begin(sides)
    assert (count, sides.scheduler.reading) == (8, (0, 1))
    assert step(sides, request, blocks, 8, 18) == set()
    assert sides.scheduler.next_range(request, 18) == (18, 24)
    sides.scheduler.order_range(request, blocks, 18, 24)
    assert sides.scheduler.next_range(request, 24) is None
    assert sides.scheduler.reading == (0, 0), "nothing of it is held any more"
    assert step(sides, request, blocks, 24, len(TOKENS)) == set()
    np.testing.assert_allclose(sides.pool.rows(blocks, 0, len(TOKENS)), rows, atol=1e-5)
    told = sides.scheduler.finish(request)["kvpatch"]
    assert told["served"] == [["leading", 0], ["prefilled", 0], ["restored", 0]]
    assert (told["matched"], told["exact"], told["failed"]) == (14, True, False)


def test_the_engines_own_blocks_may_end_within_a_range(sides):
    form(sides)
    request = request_of("own", {"kvpatch": {"segments": list(ENDS)}})
    sides.scheduler.add_request(request)
    assert matched_of(sides.scheduler, request, 12) == 0
    assert sides.scheduler.next_range(request, 12) == (18, 24)
    assert sides.scheduler.match(request, 20) == 4
    sides.scheduler.order_load(request, BLOCKS, 4)
    (load,) = sides.scheduler.take_promised().loads
    assert (load.first, load.end) == (20, 24)
    assert load.front == tuple(segment.id for segment in history_of().segments[:2])


def test_a_preempted_request_is_planned_again(sides):
    form(sides)
    request, blocks, _ = begin(sides)
    step(sides, request, blocks, 8, 14)  # and then it is preempted
    assert sides.scheduler.match(request, 0) is None
    assert sides.scheduler.next_range(request, 0) is None, "until its chunks are read again"
    assert matched_of(sides.scheduler, request) == 8
    assert sides.scheduler.next_range(request, 8) == (18, 24)


def test_behind_a_range_that_failed_nothing_is_loaded(sides):
    form(sides)
    request, blocks, _ = begin(sides)
    step(sides, request, blocks, 8, 18)
    sides.scheduler.order_range(request, blocks, 18, 24)
    failed = step(sides, request, blocks, 24, len(TOKENS), broken=True)
    assert failed == set(blocks[18 // PAGE : 24 // PAGE])
    assert sides.scheduler.next_range(request, 16) is None
    told = sides.scheduler.finish(request)["kvpatch"]
    assert (told["served"], told["failed"]) == ([["leading", 0]], True)
    assert ("default", history_of().segments[2].id) in sides.scheduler._unplaced


@pytest.mark.parametrize("end", ["finish", "discard", "reset"])
def test_a_request_that_ends_between_ranges_holds_nothing(sides, end):
    form(sides)
    request, blocks, _ = begin(sides)
    step(sides, request, blocks, 8, 14)
    sides.scheduler.reset() if end == "reset" else getattr(sides.scheduler, end)(request)
    assert sides.scheduler.next_range(request, 14) is None
    assert sides.scheduler.reading == (0, 0)


def test_a_range_that_was_promised_and_not_commanded_is_lost(sides):
    form(sides)
    request, blocks, _ = begin(sides)
    step(sides, request, blocks, 8, 18)
    sides.scheduler.mark_range_lost(request, blocks, 18, 24)
    assert sides.scheduler.next_range(request, 18) is None
    assert step(sides, request, blocks, 24, len(TOKENS)) == set(blocks[18 // PAGE : 24 // PAGE])
    assert sides.scheduler.finish(request)["kvpatch"]["failed"]


def test_chunks_that_are_prefilled_in_a_gap_survive(tmp_path):
    """The next request of the agent, without the last chunk's store, has both of them."""
    with sides_of(tmp_path, ranges=1) as sides:
        form(sides)
        sides.scheduler.survivors.clear()
        request = request_of("own", {"kvpatch": {"segments": list(ENDS), "policy": "blind", "agent": "a"}})
        sides.scheduler.add_request(request)
        sides.scheduler.order_load(request, BLOCKS, matched_of(sides.scheduler, request))
        step(sides, request, BLOCKS, 8, 18)
        sides.scheduler.order_range(request, BLOCKS, 18, 24)
        output = output_of({"own": 6}, {"own": 24}, {"own": BLOCKS})
        (save,) = sides.scheduler.build_commands(output).saves
        assert [left.index for left in save.survivors] == [1]
        assert save.survivors[0].window[1] == history_of().exact(1)


def test_a_chunk_that_is_prefilled_in_front_of_all_that_is_approximate_is_stored(tmp_path):
    """Its canonical's neighbour behind it is served bare; what is behind that one is not exact any more."""
    with sides_of(tmp_path, ranges=1) as sides:
        for begin, end in ((0, 8), (14, 18)):
            served(sides, f"at {begin}", {"segments": [end - begin]}, [*TOKENS[begin:end], 5])
        request = request_of("own", {"kvpatch": {"segments": [8, 14, 18, 24], "policy": "blind"}})
        sides.scheduler.add_request(request)
        sides.scheduler.order_load(request, BLOCKS, matched_of(sides.scheduler, request))
        step(sides, request, BLOCKS, 8, 14)
        assert sides.scheduler.next_range(request, 14) == (14, 18)
        sides.scheduler.order_range(request, BLOCKS, 14, 18)
        (save,) = sides.scheduler.build_commands(output_of({"own": 12}, {"own": 18}, {"own": BLOCKS})).saves
        assert (save.wanted, save.prefills) == ((), (1,))
        assert [left.index for left in save.survivors] == [1, 3]


def test_ranges_need_an_engine_that_asks_for_them(monkeypatch):
    with imported_connector() as connector:
        with pytest.raises(ConfigError, match=r"ranges.*no get_next_range"):
            connector._check_ranges(SimpleNamespace(enable_chunked_prefill=True))
        monkeypatch.setattr(StandIn, "get_next_range", lambda self, request, computed: None, raising=False)
        with pytest.raises(ConfigError, match="without chunked prefill"):
            connector._check_ranges(SimpleNamespace(enable_chunked_prefill=False))
        connector._check_ranges(SimpleNamespace(enable_chunked_prefill=True))


def test_a_fault_between_ranges_costs_a_request_what_is_behind(tmp_path, monkeypatch, caplog):
    """Its salt stays, because what is in front may be approximate."""
    tokens, refuse = [*TOKENS[:8], 1, 2, 3, 4, *TOKENS[8:18], 5], {"side_effect": RuntimeError("on purpose")}
    with imported_connector() as connector:
        monkeypatch.setattr(connector, "_check_ranges", lambda scheduler_config: None)
        with engine_of(connector, tmp_path, ranges=1) as engine:
            request = request_of("own", {"kvpatch": {"segments": [8, 12, 22], "policy": "blind"}}, tokens)
            hooks, blocks = engine.scheduler, SimpleNamespace(get_block_ids=lambda: (BLOCKS,))
            hooks.on_new_request(request)
            while (count := hooks.get_num_new_matched_tokens(request, 0)[0]) is None:
                hooks.build_connector_meta(output_of({}, {}, {}))
            hooks.update_state_after_alloc(request, blocks, count)
            assert (count, hooks.get_next_range(request, count)) == (8, (12, 22))
            hooks.build_connector_meta(output_of({"own": 4}, {"own": 8}, {"own": BLOCKS}))

            salt = request.cache_salt
            monkeypatch.setattr(hooks.scheduler_side, "order_range", mock.Mock(**refuse))
            hooks.update_state_after_range_alloc(request, blocks, 12, 22)
            commands = hooks.build_connector_meta(output_of({"own": 1}, {"own": 22}, {"own": BLOCKS})).commands
            assert (commands.loads, commands.lost) == ((), set(BLOCKS[12 // PAGE : -(-22 // PAGE)]))
            assert hooks.get_next_range(request, 12) is None
            assert salt is not None
            assert request.cache_salt == salt
            assert hooks.failures == {"update_state_after_range_alloc: RuntimeError": 1}


@pytest.mark.parametrize("ranges", [0, -1, 1.5, True, "16"])
def test_invalid_ranges_are_refused(ranges, unchecked):
    with pytest.raises(ConfigError, match=r"connector\.ranges"):
        ConnectorConfig(store="s", backbone="tiny", ranges=ranges)
