"""No exception leaves the connector's hooks, whatever a client sends and whatever fails. vllm is stood in for."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from serving_hooks import BLOCKS, ask, engine_of, imported_connector
from serving_sides import TOKENS, output_of, request_of, true_kv

from kvpatch_jax.serving.vllm.messages import StepCommands


@pytest.fixture(scope="module")
def connector():
    with imported_connector() as module:
        yield module


def assert_nothing_is_kept(engine, request):
    """A finished request is unknown, and nothing is promised to the engine."""
    side = engine.scheduler.scheduler_side
    assert side.finish(request) is None
    assert side.take_promised() == StepCommands()


def assert_exact(found):
    """What was loaded is what a prefill computes."""
    expected = np.concatenate([true_kv(TOKENS)[name][:, : found.count, 0] for name in "kv"], axis=-1)
    np.testing.assert_allclose(found.loaded, expected, rtol=1e-5, atol=1e-5)


def assert_serves(engine):
    """A leading chunk comes from the store as a prefill computes it, and a request that asks for nothing is plain."""
    found = ask(engine, request_of("leading", {"kvpatch": {"segments": [8], "save": False}}))
    assert (found.count, found.invalid) == (8, set())
    assert_exact(found)
    request = request_of("plain", None)
    plain = ask(engine, request)
    assert (plain.count, plain.told, plain.salt) == (0, None, None)
    assert_nothing_is_kept(engine, request)


@pytest.fixture(scope="module")
def engine(connector, tmp_path_factory):
    with engine_of(connector, tmp_path_factory.mktemp("boundary")) as made:
        yield made


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "params",
    [
        [],
        "x",
        10**30,
        {"kvpatch": []},
        {"kvpatch": {"": None}},
        {"kvpatch": {"segments": [[]]}},
        {"kvpatch": {"segments": [-8]}},
        {"kvpatch": {"segments": [8], "kl": 10**400}},
        {"kvpatch": {"segments": [8], "flips": nested(200)}},
        {"kvpatch": {"segments": [8], "policy": nested(5000)}},
        {"kvpatch": {"segments": [8], "tenant": "x" * 10**6}},
        {"kvpatch": {"segments": [8], "save": 1}},
        {"kvpatch": {"segments": [8], "policy": "blind", "tenant": "\ud800"}},
    ],
    ids=lambda params: f"{type(params).__name__}",
)
def test_invalid_parameters_are_served_without_stored_chunks(engine, params):
    request = request_of("fuzzed", params)
    found = ask(engine, request)
    assert (found.count, found.invalid, found.salt) == (0, set(), None)
    assert_nothing_is_kept(engine, request)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.sampled_from(["exact", "approximate", "blind", "default", "kvpatch"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["policy", "tenant", "kl", "flips", "segments", "save", "other"])
PARAMS = st.one_of(
    VALUES,
    st.builds(lambda own: {"kvpatch": own}, VALUES),
    st.builds(lambda own: {"kvpatch": own}, st.dictionaries(FIELDS, VALUES, max_size=4)),
    st.builds(
        lambda ends, more: {"kvpatch": {**more, "segments": ends}},
        st.lists(st.integers(1, 32), max_size=4, unique=True).map(sorted),
        st.dictionaries(st.sampled_from(["policy", "save"]), SCALARS, max_size=2),
    ),
)


@given(PARAMS)
@example({"kvpatch": {"segments": [8, 18], "policy": "blind"}})
@settings(max_examples=20, deadline=None)
def test_no_parameters_affect_another_request(engine, params):
    """Whatever it was served: nothing is kept of it, and what others are served stays as it was."""
    request = request_of("fuzzed", params, TOKENS[:24])
    found = ask(engine, request)
    assert found.invalid == set()
    assert_nothing_is_kept(engine, request)
    if found.count and found.told["kvpatch"]["exact"]:
        assert_exact(found)
    assert_serves(engine)


HOOKS = {
    "add_request": "on_new_request",
    "match": "get_num_new_matched_tokens",
    "order_load": "update_state_after_alloc",
    "build_commands": "build_connector_meta",
    "finish": "request_finished",
}


@pytest.mark.parametrize("work", HOOKS)
def test_a_scheduler_fault_costs_only_one_requests_reuse(engine, work, monkeypatch, caplog):
    """Counted by its type and logged once; a promise that was made is kept, or told to the engine as lost."""
    plan = {"kvpatch": {"segments": [8, 18], "policy": "blind", "save": False}}
    side, failures = engine.scheduler.scheduler_side, engine.scheduler.failures
    failures.clear()
    with monkeypatch.context() as patch:
        patch.setattr(side, work, lambda *_: 1 / 0)
        found = [ask(engine, request_of(f"own {turn}", plan)) for turn in range(2)]
    for own in found:
        if work in ("add_request", "match"):
            assert (own.count, own.invalid, own.told, own.salt) == (0, set(), None, None)
        elif work == "order_load":
            assert (own.count, own.invalid, own.told) == (18, set(BLOCKS[:5]), None)
        else:
            assert (own.count, own.invalid) == (18, set()), "what was promised is loaded all the same"
            assert own.loaded.any()
            assert (own.told is None) == (work == "finish")
    kind = f"{HOOKS[work]}: ZeroDivisionError"
    assert failures[kind] >= 2
    assert caplog.text.count(f"kvpatch: {kind}") == 1
    assert_serves(engine)


def test_a_fault_after_salting_restores_the_salt(engine, monkeypatch):
    """The engine looked into its cache with the plan's salt: it is asked to look again, and the request is plain."""
    side, matched = engine.scheduler.scheduler_side, engine.scheduler.scheduler_side.match
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "blind"}}, cache_salt="mine")

    def fails(given, computed):
        count = matched(given, computed)
        return count if count is None else 1 / 0

    monkeypatch.setattr(side, "match", fails)
    engine.scheduler.on_new_request(request)
    engine.scheduler.failures.clear()
    counts = []
    while not engine.scheduler.failures:
        counts.append(engine.scheduler.get_num_new_matched_tokens(request, 0)[0])
        engine.scheduler.build_connector_meta(output_of({}, {}, {}))
    assert set(counts) == {None}
    assert (request.cache_salt, request.block_hashes) == ("mine", ["with mine"])
    monkeypatch.undo()
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert_serves(engine)


@pytest.mark.parametrize("hook", ["load", "save"])
def test_a_worker_fault_is_reported_by_its_blocks(connector, tmp_path, hook, monkeypatch):
    """What was promised and may not have been written is not read by any forward."""
    plan = {"kvpatch": {"segments": [8], "save": hook == "save", "tenant": "new" if hook == "save" else "default"}}
    with engine_of(connector, tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.worker.worker_side, hook, lambda orders: 1 / 0)
            found = ask(engine, request_of("own", plan))
        if hook == "load":
            assert (found.count, found.invalid) == (8, set(BLOCKS[:2]))
            assert (found.told["kvpatch"]["failed"], found.told["kvpatch"]["served"]) == (True, [])
            assert ask(engine, request_of("again", plan)).count == 0, "that chunk is not planned again"
            other = {"kvpatch": {"segments": [10], "save": False}}
            assert ask(engine, request_of("other", other, TOKENS[8:])).count == 10
        else:
            assert (found.count, found.invalid) == (0, set())
            assert_serves(engine)
        kind = f"{'start_load_kv' if hook == 'load' else 'wait_for_save'}: ZeroDivisionError"
        assert engine.worker.failures[kind] == 1
