"""The connector's hooks as an engine calls them. vllm is stood in for."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import contextlib
import dataclasses
import enum
import importlib
import sys
import time
from types import ModuleType, SimpleNamespace

import jaxtyping
import numpy as np
import pytest
from serving_sides import EVERYTHING, LAYOUT, PAGE, TOKENS, Pool, output_of, request_of

from kvpatch_jax.serving.vllm.engine import UNSUPPORTED_SIZES

BASE = "vllm__distributed__kv_transfer__kv_connector__v1"
BLOCKS = tuple(range(3, 11))
TEXT = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "rope_theta": 1e4}


class StandIn:
    """What of `KVConnectorBase_V1` the connector uses."""

    def __init__(self, config, role, caches=None):
        self._kv_cache_manager = SimpleNamespace(evict_blocks=lambda blocks: None)

    def bind_connector_metadata(self, metadata):
        self.metadata = metadata

    def _get_connector_metadata(self):
        return self.metadata


@dataclasses.dataclass
class StatsStandIn:
    """What of `KVConnectorStats` the connector uses."""

    data: dict = dataclasses.field(default_factory=dict)

    def to_dict(self):
        return self.data


class PromStandIn:
    """What of `KVConnectorPromMetrics` the connector uses; the classes of metrics by their names."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._counter_cls, self._gauge_cls = metric_types["Counter"], metric_types["Gauge"]


def stand_in(patch, **modules):
    """Stands in for modules that are not installed, by their names with "__" for a dot; `members` are what is used."""
    for name, members in modules.items():
        parts = name.split("__")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            patch.setitem(sys.modules, path, sys.modules.get(path, ModuleType(path)))
        vars(sys.modules[path]).update(members)


@contextlib.contextmanager
def imported(name, **modules):
    """A module of the connector, imported with stand-ins; without the shape hook, which clients do not meet either."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch, **modules)
        patch.delitem(sys.modules, name, raising=False)
        jaxtyping.config.update("jaxtyping_disable", True)
        yield importlib.import_module(name)
        jaxtyping.config.update("jaxtyping_disable", False)
    sys.modules.pop(name, None)


def imported_connector():
    """The connector's module."""
    base = {"KVConnectorBase_V1": StandIn, "KVConnectorMetadata": type("KVConnectorMetadata", (), {})}
    base["KVConnectorRole"] = enum.Enum("KVConnectorRole", ["SCHEDULER", "WORKER"])
    metrics = {"KVConnectorStats": StatsStandIn, "KVConnectorPromMetrics": PromStandIn}
    return imported("kvpatch_jax.serving.vllm.connector", **{f"{BASE}__base": base, f"{BASE}__metrics": metrics})


@contextlib.contextmanager
def engine_of(connector, folder):
    """Both roles of the connector, as an engine that publishes events makes them; a pool; and two canonicals stored."""
    extra = {"store": str(folder / "store"), "backbone": "tiny", "rank": 10, "allow": list(EVERYTHING)}
    spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(dtype="torch.float32"))
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute", kv_connector_extra_config=extra),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, distributed_executor_backend="uni", **dict.fromkeys(UNSUPPORTED_SIZES, 1)
        ),
        cache_config=SimpleNamespace(block_size=PAGE),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        model_config=SimpleNamespace(
            model="a model",
            dtype="torch.bfloat16",
            architectures=["LlamaForCausalLM"],
            hf_text_config=SimpleNamespace(to_dict=lambda: TEXT),
        ),
    )
    caches = SimpleNamespace(kv_cache_groups=[spec])
    scheduler = connector.KVPatchConnector(config, connector.KVConnectorRole.SCHEDULER, caches)
    worker = connector.KVPatchConnector(config, connector.KVConnectorRole.WORKER, caches)
    pool = Pool()
    worker.worker_side.register(pool)
    assert scheduler.scheduler_side.cache == (LAYOUT, np.float32), "the pool's dtype, not the model's"
    engine = SimpleNamespace(scheduler=scheduler, worker=worker, pool=pool)
    ask(engine, request_of("second", {"kvpatch": {"segments": [10]}}, TOKENS[8:]))
    ask(engine, request_of("first", {"kvpatch": {"segments": [8]}}))
    yield engine
    scheduler.shutdown()
    worker.shutdown()


def ask(engine, request):
    """Serves a request as vLLM 0.32 calls the hooks; returns what it counted on, what is in the pool, and the rest."""
    scheduler, worker, name, tokens = engine.scheduler, engine.worker, request.request_id, request.prompt_token_ids
    scheduler.on_new_request(request)
    if request.kv_transfer_params:
        request.kv_transfer_params.get("do_remote_prefill")  # as its scheduler goes on

    deadline = time.monotonic() + 60
    while (count := scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        assert time.monotonic() < deadline, "its chunks are never read"
        scheduler.build_connector_meta(output_of({}, {}, {}))

    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (BLOCKS,)), count)
    output = output_of({name: len(tokens) - count}, {name: count}, {name: BLOCKS})
    worker.bind_connector_metadata(scheduler.build_connector_meta(output))
    engine.pool.requests[name] = SimpleNamespace(mrope_positions=None)
    worker.start_load_kv(None)
    loaded = engine.pool.rows(BLOCKS, 0, count) if count else None
    engine.pool.prefill(name, tokens, BLOCKS, count)
    worker.wait_for_save()
    worker.worker_side.former.flush()
    invalid = worker.get_block_ids_with_load_errors()
    scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=invalid))
    report = (scheduler.request_finished(request, list(BLOCKS))[1] or {}).get("kvpatch")
    return SimpleNamespace(count=count, loaded=loaded, invalid=invalid, report=report, salt=request.cache_salt)
