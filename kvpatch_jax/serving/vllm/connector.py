"""`KVPatchConnector`: the engine's hooks, delegated to `scheduler_side` and `worker_side`. Imports vllm.

An exception that leaves a hook ends the engine, and every request with it. So `KVPatchConnector._guarded` catches
whatever fails for one request, which is then served without stored chunks. Errors at the engine's start are raised.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # pyright: ignore[reportMissingImports]
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ...errors import ConfigError
from ...plan import Certificate
from .config import ConnectorConfig
from .engine import CacheFormat, check_groups, check_model, check_parallel, check_versions, layout_of, weights_digest
from .events import BlocksStored
from .messages import StepCommands
from .metrics import PrometheusRecorder, collect_scheduler, collect_worker, flattened, merged
from .scheduler_side import SchedulerSide
from .worker_side import WorkerSide

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class StepCommandsMetadata(KVConnectorMetadata):
    """Commands of one step, in the container that the engine carries from scheduler to worker."""

    commands: StepCommands = dataclasses.field(default_factory=StepCommands)


class KVPatchStats(KVConnectorStats):
    """What the connector counted in some steps: `data` is a payload of `metrics`."""

    def reset(self) -> None:
        """Forgets it."""
        self.data = {}

    def is_empty(self) -> bool:
        """Returns whether nothing was counted."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds later counts, and returns itself."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the numbers by readable names, for the engine's log."""
        return flattened(self.data)


class KVPatchPromMetrics(KVConnectorPromMetrics):
    """The connector's metrics on the page of the engine's server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._recorder = PrometheusRecorder(self._counter_cls, self._gauge_cls, labelnames, per_engine_labelvalues)
        self._failed = False

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Records what an engine sent. An error, which would end the server's loop, is logged once instead."""
        try:
            self._recorder.observe(transfer_stats_data, engine_idx)
        except Exception:
            if not self._failed:
                logger.warning("kvpatch: metrics could not be recorded", exc_info=True)
            self._failed = True


class KVPatchConnector(KVConnectorBase_V1):
    """Composes prompts from stored chunks in tpu-inference's pool, and forms chunks from its prefills.

    Attributes:
      failures: exceptions that were caught in hooks, counted as "HOOK: TYPE".
      scheduler_side, worker_side: the side that this role has, the other one is None. Their `counts` say what became
        of requests.

    Raises:
      ConfigError: the settings, the model, the cache or the mesh are not supported, or the failure policy is not safe.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:  # once per engine
            check_versions()
        transfer = vllm_config.kv_transfer_config
        if vllm_config.scheduler_config.async_scheduling:
            _check_async(transfer.kv_load_failure_policy)
        check_parallel(vllm_config.parallel_config, getattr(vllm_config, "sharding_config", None))
        check_groups(vllm_config.model_config.model, kv_cache_config)

        config = ConnectorConfig.read(transfer.kv_connector_extra_config)
        page_size = vllm_config.cache_config.block_size
        model, weights = vllm_config.model_config, weights_digest(vllm_config)

        self.failures: collections.Counter[str] = collections.Counter()
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None

        if role == KVConnectorRole.SCHEDULER:
            path = config.certificate
            certificate = None if path is None else Certificate.read(path, backbone=config.backbone)
            cache = CacheFormat.of(model, kv_cache_config)
            self.scheduler_side = SchedulerSide(config, page_size, cache, certificate, weights)
            events = getattr(vllm_config, "kv_events_config", None)
            self.scheduler_side.events.enabled = events is not None and bool(events.enable_kv_cache_events)
        else:
            layout = layout_of(model.hf_text_config.to_dict(), model.architectures)
            self.worker_side = WorkerSide(config, layout, page_size, weights)

    def _guarded[Result](
        self,
        hook: str,
        work: Callable[[], Result],
        fallback: Callable[[], Result],
        consequence: str = "the request is served without stored chunks",
    ) -> Result:
        """Runs a hook's work; counts any exception, logs the first of its kind, and returns the fallback's result."""
        try:
            return work()
        except Exception as error:
            kind = f"{hook}: {type(error).__name__}"
            self.failures[kind] += 1
            if self.failures[kind] == 1:
                logger.warning("kvpatch: %s: %s", kind, consequence, exc_info=True)
            return fallback()

    # --------------------------------------------------------------------------------------------- the scheduler

    def on_new_request(self, request: Any) -> None:
        """Starts to plan a request, and to read its chunks."""
        params = request.kv_transfer_params
        self._guarded("on_new_request", lambda: self._scheduler.add_request(request), lambda: self._discard(request))

        # After this hook vLLM 0.32 itself treats the parameters as a mapping, whatever a client sent.
        if params is not None and not isinstance(params, Mapping):
            request.kv_transfer_params = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Counts the tokens to load before the next forward; None while chunks are read, so that others go first."""

        def decline() -> int | None:
            # If the plan's salt is taken back, the engine has to look into its cache again.
            return None if self._discard(request) and not request.skip_reading_prefix_cache else 0

        hook = "get_num_new_matched_tokens"
        return self._guarded(hook, lambda: self._scheduler.match(request, num_computed_tokens), decline), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Commands the load of a request's chunks, if there are any."""
        # Not guarded: without the blocks, nobody could be notified that they hold nothing.
        ids = tuple(blocks.get_block_ids()[0])

        def lose() -> None:
            self._scheduler.mark_lost(request, ids, num_external_tokens)
            self._discard(request, placed=True)

        def order():
            return self._scheduler.order_load(request, ids, num_external_tokens)

        self._guarded("update_state_after_alloc", order, lose)

    def build_connector_meta(self, scheduler_output: Any) -> StepCommandsMetadata:
        """Returns the commands of the next step. Those that the engine relies on are sent whatever else fails."""

        def build():
            return self._scheduler.build_commands(scheduler_output)

        return StepCommandsMetadata(self._guarded("build_connector_meta", build, self._scheduler.take_promised))

    def update_connector_output(self, connector_output: Any) -> None:
        """Registers blocks that were not loaded, and evicts them before another request finds them in the cache."""
        invalid: set[int] = set(connector_output.invalid_block_ids or ())
        if invalid:
            if self._kv_cache_manager is not None:
                self._kv_cache_manager.evict_blocks(invalid)
            self._guarded("update_connector_output", lambda: self._scheduler.mark_failed(invalid), lambda: None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns the report of how a request was served; its blocks may be freed."""

        def forget() -> None:
            self._discard(request)

        return False, self._guarded("request_finished", lambda: self._scheduler.finish(request), forget)

    def take_events(self) -> list[Any]:
        """Returns vLLM's events of blocks that can be loaded, or no longer, since the last call."""
        return self._guarded(
            "take_events", lambda: _engine_events(self._scheduler.events.take()), list, "events are lost"
        )

    def reset_cache(self) -> bool:
        """Has everything that was stored so far count as not stored. Returns False if that failed."""

        def reset() -> bool:
            self._scheduler.reset()
            logger.warning(
                "kvpatch: the cache was reset: what was stored before is not served by this engine any more, and until "
                "it is started again nothing approximate is certified. Nothing was deleted"
            )
            return True

        return self._guarded("reset_cache", reset, lambda: False, "what was stored may still be served")

    def _discard(self, request: Any, placed: bool = False) -> bool:
        return self._guarded("discard", lambda: self._scheduler.discard(request, placed), lambda: False)

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None
        return self.scheduler_side

    # ------------------------------------------------------------------------------------------------- metrics

    def get_kv_connector_stats(self) -> KVPatchStats | None:
        """Returns what this side counted since the last call; None if nothing. The engine asks in every step."""

        def collect() -> dict[str, Any]:
            if self.scheduler_side is not None:
                return collect_scheduler(self.scheduler_side, self.failures)
            return collect_worker(self._worker, self.failures)

        data = self._guarded("get_kv_connector_stats", collect, dict, "counts are reported later")
        return KVPatchStats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPatchStats:
        """Returns stats of a payload that an engine sent."""
        return KVPatchStats({} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVPatchPromMetrics:
        """Returns the metrics of the engine's server, in whose process it is called."""
        return KVPatchPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------------------------------------------ the worker

    def register_runner(self, runner: Any) -> None:
        """Registers the runner, which holds the pool. tpu-inference calls it."""
        check_model(runner.model)
        self._worker.register(runner)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads the chunks that the next forward reads."""
        commands = self._commands
        self._guarded("start_load_kv", lambda: self._worker.load(commands), lambda: self._worker.fail(commands))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all layers are written before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: pages are read after the forward."""

    def wait_for_save(self) -> None:
        """Reads the chunks to be formed from the pages that the forward has filled."""
        self._guarded("wait_for_save", lambda: self._worker.save(self._commands), lambda: None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns blocks that the engine has to compute itself."""
        return self._worker.take_failed()

    def shutdown(self) -> None:
        """Finishes forming and closes the stores."""
        if self.worker_side is not None:
            self.worker_side.close()
        if self.scheduler_side is not None:
            self.scheduler_side.close()

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None
        return self.worker_side

    @property
    def _commands(self) -> StepCommands:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepCommandsMetadata)
        return metadata.commands


def _engine_events(events: list[Any]) -> list[Any]:
    """Converts events to vLLM's."""
    if not events:
        return []
    from vllm.distributed.kv_events import (  # pyright: ignore[reportMissingImports]
        MEDIUM_STORAGE,
        BlockRemoved,
        BlockStored,
    )
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # pyright: ignore[reportMissingImports]

    converted = []
    for event in events:
        hashes = [maybe_convert_block_hash(block) for block in event.hashes]
        if isinstance(event, BlocksStored):
            stored = BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if event.parent is None else maybe_convert_block_hash(event.parent),
                token_ids=list(event.tokens),
                block_size=event.block_size,
                lora_id=None,
                lora_name=None,
                medium=MEDIUM_STORAGE,
                extra_keys=list(event.extra_keys),
            )
            converted.append(stored)
        else:
            converted.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_STORAGE))
    return converted


def _check_async(policy: str) -> None:
    """Warns of tpu-inference 0.32's errors under async scheduling; refuses the policy that always triggers them.

    Raises:
      ConfigError: the policy is "recompute".
    """
    if policy == "recompute":
        # Measured: 0 of 8 tokens right. The scheduler keeps its count of tokens that are under way, and the runner the
        # token that it sampled behind empty blocks.
        raise ConfigError(
            "kv_load_failure_policy: got 'recompute' with async scheduling, under which tpu-inference 0.32 answers "
            "incorrectly; expected 'fail', or --no-async-scheduling"
        )
    # Measured without a connector too: `tests/engine`, scenario "preempted".
    logger.warning(
        "kvpatch: under async scheduling tpu-inference 0.32 loses the last token of a request that it preempts, with "
        "or without this connector; if the pool may run out of blocks, use --no-async-scheduling"
    )


TPUOffloadConnector = KVPatchConnector
"""The same class under one of the four class names that tpu-inference 0.32 accepts, from any module."""
