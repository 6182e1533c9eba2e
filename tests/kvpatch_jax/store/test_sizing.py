"""Sizing: bytes against files, stack distances against a plain LRU, curves against logs, and fleets by hand."""

import collections
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_cases import AXES, BACKBONE, LAYOUT, MLA, chunk_of, file_of, patch_of

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.object_bytes import ObjectBytes, canonical_bytes, layout_of_config, patch_bytes
from kvpatch_jax.store.reuse import DAY, RequestLog, RevisitCurve, previous_uses, stack_distances
from kvpatch_jax.store.sizing import RequestCosts, TierSettings, Workload, size_fleet
from kvpatch_jax.traces import Event, Trace
from models import FAMILIES

RELEASED = Path(__file__).parents[3] / "evals/bench/released_configs.json"
MB = ObjectBytes(1_000_000, 1_000_000)


@pytest.mark.parametrize("encoding", [None, "float16", "int8", "float8_e5m2", "k4v4", "k8v2g16"])
@pytest.mark.parametrize("layout", [LAYOUT, MLA, AXES], ids=["gqa", "mla", "axes"])
def test_sizes_are_those_of_files_and_of_memory(tmp_path: Path, layout, encoding: str | None):
    for tokens in (3, 70):
        with ChunkStore(tmp_path / str(tokens)) as store:
            chunk = chunk_of("0" * 64, layout=layout, tokens=tokens, dtype=jnp.bfloat16)
            store.put(chunk, encoding=encoding)
            file = file_of(store, chunk, encoding).stat().st_size
            store.get(chunk.id, BACKBONE, encoding=encoding)
            sizes = canonical_bytes(layout, tokens, encoding)
            assert sizes[:2] == (file, store.statistics().held["host"])


def test_a_patch_s_size_is_its_file_s_within_a_page(tmp_path: Path):
    chunk = chunk_of(tokens=70, dtype=jnp.bfloat16)
    with ChunkStore(tmp_path) as store:
        store.put_patches([patch_of(chunk, rank=5)])
        (entry,) = store.disk.scan()
    assert abs(patch_bytes(LAYOUT, 70, 5).file - entry.size) <= 4096
    assert entry.size > 4096


def test_layouts_of_released_configurations_have_the_models_bytes():
    released = json.loads(RELEASED.read_text())
    known = 0
    for fields in released.values():
        config = fields["config"]
        try:
            layout = layout_of_config(config)
        except ConfigError as error:
            if "layers whose KV differ in size" in str(error):
                assert not FAMILIES[config["architectures"][0]].config(config, "exact", None).text.layout.uniform
                continue
            # llava's say only how they differ from defaults
            assert "num_attention_heads" not in json.dumps(config["text_config"])
            continue
        known += 1
        family = FAMILIES[config["architectures"][0]]
        expected = family.config(config, "exact", None).text.layout
        assert layout.bytes_per_token() == expected.bytes_per_token()
        assert canonical_bytes(layout, 100).file == pytest.approx(canonical_bytes(expected, 100).file, abs=4096)
    assert known > 25


@pytest.mark.parametrize("text", [{}, {"num_hidden_layers": "2"}, {"num_hidden_layers": 2, "num_attention_heads": 0}])
def test_a_configuration_without_sizes_is_refused(text: dict):
    with pytest.raises(ConfigError, match="expected"):
        layout_of_config({"text_config": text})


def lru_hits(keys: list[int], sizes: dict[int, int], budget: int) -> list[bool]:
    """A plain LRU of bytes for chunks of one size, request by request."""
    held: collections.OrderedDict[int, int] = collections.OrderedDict()
    hits = []
    for key in keys:
        hits.append(key in held)
        held.pop(key, None)
        held[key] = sizes[key]
        while sum(held.values()) > budget:
            held.popitem(last=False)
    return hits


@given(st.lists(st.integers(0, 9), min_size=1, max_size=70), st.lists(st.integers(1, 50), min_size=10, max_size=10))
def test_stack_distances_are_the_bytes_of_distinct_chunks_since(keys: list[int], sizes: list[int]):
    found = stack_distances(np.array(keys), np.array([float(sizes[key]) for key in keys]))
    for place, key in enumerate(keys):
        before = [other for other in range(place) if keys[other] == key]
        if not before:
            assert found[place] == math.inf
            continue
        assert found[place] == sum(sizes[other] for other in set(keys[before[-1] : place + 1]))
    assert list(previous_uses(np.array(keys))) == [max([-1, *(j for j in range(i) if keys[j] == keys[i])]) for i in
                                                   range(len(keys))]  # fmt: skip


@given(st.lists(st.integers(0, 9), min_size=1, max_size=70), st.integers(1, 9))
def test_a_distance_within_the_budget_is_a_hit_of_lru(keys: list[int], budget: int):
    found = stack_distances(np.array(keys), np.ones(len(keys))) <= budget
    assert found.tolist() == lru_hits(keys, dict.fromkeys(range(10), 1), budget)


def test_distances_of_a_long_log_take_no_quadratic_memory():
    keys = np.random.default_rng(0).integers(0, 5000, 200_000)
    found = stack_distances(keys, np.ones(len(keys)))
    assert np.nanmax(found[np.isfinite(found)]) <= 5000
    # In a uniform sequence every depth is as likely as any other.
    assert np.mean(found[100_000:] <= 2500) == pytest.approx(0.5, abs=0.01)


def trace(*events: dict) -> Trace:
    made = [Event.of({"at": float(number), "session": "s", **event}) for number, event in enumerate(events)]
    return Trace(tuple(made))


def test_a_trace_is_read_as_requests_by_content():
    log = RequestLog.of(
        trace(
            {"op": "add", "chunk": "a", "content": "same", "tokens": 5, "span": 5},
            {"op": "add", "chunk": "t", "kind": "text", "text": "words"},
            {"op": "add", "chunk": "b", "content": "same", "tokens": 5, "span": 5},
            {"op": "add", "chunk": "c", "tokens": 7, "span": 7},
            {"op": "evict", "chunk": "c"},
            {"op": "fork", "branch": "f"},
            {"op": "recall", "chunk": "c", "session": "f"},
            {"op": "recall", "chunk": "t"},
        )
    )
    assert log.keys.tolist() == [0, 0, 1, 1]
    assert log.tokens.tolist() == [5, 5, 7, 7]
    assert log.gaps.tolist() == [math.inf, 2, math.inf, 3]
    assert [log.revisits().share(seconds) for seconds in (1.0, 2.01, 3.01)] == pytest.approx(
        [0.17, 0.25, 0.5], abs=0.01
    )
    assert log.at_rate(2 * log.rate).seconds.tolist() == pytest.approx([0, 1, 1.5, 3])
    with pytest.raises(InputError, match="unknown length"):
        RequestLog.of(trace({"op": "add", "chunk": "a"}))
    with pytest.raises(InputError, match="without a chunk"):
        RequestLog.of(trace({"op": "close"}))


def test_a_curve_s_working_set_is_that_of_a_log():
    """Uniform requests for 200 chunks: the chunks of a time are 200 (1 − e^(−t/200)), by another route."""
    keys = np.random.default_rng(1).integers(0, 200, 60_000)
    log = RequestLog(keys, np.arange(60_000.0), np.ones(60_000, int))
    curve = log.revisits()
    for seconds in (20, 100, 400):
        assert curve.fresh(seconds) == pytest.approx(200 * (1 - math.exp(-seconds / 200)), rel=0.03)
        assert curve.residence(curve.fresh(seconds)) == pytest.approx(seconds, rel=0.01)
    workload = Workload(1.0, curve)
    for share in (0.25, 0.5):
        sized = size_fleet(workload, MB, TierSettings(host=0, disk=int(200e6 * share), low_water=1, remote=False))
        assert sized.hits.disk == pytest.approx(share, abs=0.02)


def test_a_fleet_s_requests_and_bytes_are_those_worked_out_by_hand():
    # Half of all requests come back, all within a minute; a disk of 1000 chunks keeps them for longer.
    curve = RevisitCurve(np.array([59.0, 60.0]), np.array([0.0, 0.5]))
    workload = Workload(1.0, curve, stay=0.8, deleted=0.2)
    parts = (MB._replace(long_header=True), ObjectBytes(100_000, 100_000, 2))
    settings = TierSettings(host=0, disk=1_100_000_000, low_water=1, retention=3600)
    one = size_fleet(workload, parts, settings, 1)
    assert one.hits == pytest.approx((0, 0.5, 0, 0.5))
    assert one.remote_gets == pytest.approx(0.5 * (1 + 3 * 1))
    ten = size_fleet(workload, parts, settings, 10)
    assert ten.hits == pytest.approx((0, 0.4, 0.1, 0.5))
    assert (ten.sent, ten.received) == (pytest.approx(10 * 0.5 * 1.1e6), pytest.approx(10 * 0.1 * 1.1e6))
    assert ten.remote_puts == pytest.approx(10 * 0.5 * (3 + 0.2))
    assert ten.remote_deletes == pytest.approx(10 * 0.5 * 0.2 * 3)
    assert ten.remote_gets == pytest.approx(10 * 0.5 * 4 + 10 * 0.1 * (4 + 2 * 3))
    assert ten.remote_lists == pytest.approx(10 + 10 * 0.5 * 0.2)
    assert ten.disk_bytes == pytest.approx(10 * 1.1e9)
    assert ten.remote_bytes == pytest.approx(10 * 1.1e6 * (60 + 0.5 * 3540), rel=0.01)
    forever = size_fleet(workload, parts, TierSettings(disk=None, remote=True), 10, RequestCosts(put_gets=0))
    assert forever.remote_growth == pytest.approx(10 * 0.5 * 1.1e6 * DAY)
    assert forever.remote_bytes is None
    assert forever.disk_growth == pytest.approx(10 * 0.6 * 1.1e6 * DAY)
    alone = size_fleet(workload, parts, TierSettings(remote=False), 10)
    assert (alone.sent, alone.received, alone.remote_puts, alone.remote_gets) == (0, 0, 0, 0)
    assert sum(alone.hits) == pytest.approx(1)


def test_the_host_tier_has_what_was_read():
    log = RequestLog(np.array([0, 0, 0, 1, 1, 1]), np.arange(6.0), np.full(6, 10))
    sized = size_fleet(Workload.of_log(log), MB, TierSettings(host=1_000_000, disk=10_000_000, remote=False))
    assert sized.hits == pytest.approx((2 / 6, 2 / 6, 0, 2 / 6))
    assert (sized.host_bytes, sized.disk_bytes) == (1_000_000, 2_000_000)


def test_bad_arguments_are_refused(unchecked: None):
    ramp = RevisitCurve(np.array([1.0]), np.array([0.5]))
    for curve in (([2.0, 1.0], [0.1, 0.2]), ([1.0], [1.5]), ([1.0, 2.0], [0.2, 0.1]), ([1.0], [])):
        with pytest.raises(InputError, match="expected times"):
            RevisitCurve(*map(np.array, curve))
    for rate, stay in ((0, 1), (math.nan, 1), (1, 1.5)):
        with pytest.raises(InputError, match="expected chunks a second above 0"):
            Workload(rate, ramp, None, stay)
    with pytest.raises(InputError, match="shares from 0 to 1"):
        Workload(1, ramp, deleted=-1)
    wrong: list[dict[str, Any]] = [{"host": -1}, {"disk": -1}, {"low_water": 0}, {"retention": -1}]
    for settings in wrong:
        with pytest.raises(InputError, match="expected sizes"):
            TierSettings(**settings)
    with pytest.raises(InputError, match="engines"):
        size_fleet(Workload(1.0, ramp), MB, engines=0)
    with pytest.raises(InputError, match="tokens"):
        canonical_bytes(LAYOUT, 0)
    with pytest.raises(InputError, match="encoding"):
        canonical_bytes(LAYOUT, 5, "int3")
    with pytest.raises(InputError, match="rank"):
        patch_bytes(LAYOUT, 5, 0)
    with pytest.raises(InputError, match="as many of each"):
        RequestLog(np.array([1]), np.array([0.0, 1.0]), np.array([1]))
