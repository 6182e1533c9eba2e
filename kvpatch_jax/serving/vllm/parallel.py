"""Over which devices an engine is spread, and which ways of that are served: asked before anything is planned."""

from typing import Any

from ...errors import ConfigError

ALONE = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def check_parallel(parallel: Any, sharding: Any, groups: int) -> None:
    """Refuses an engine that is spread otherwise than by tensor parallelism, in one process.

    Args:
      parallel: vLLM's `parallel_config`.
      sharding: tpu-inference's `sharding_config`, or None. It says what vLLM's no longer does: tpu-inference sets the
        data parallel size there to 1, and makes an axis of its mesh of it.
      groups: of caches.

    Raises:
      ConfigError: naming each size that is not 1; or an executor in other processes.
    """
    sizes = {name: getattr(parallel, name) for name in ALONE} | {"groups of caches": groups}
    if sharding is not None:
        strategy = vars(sharding.sharding_strategy)
        sizes |= {name: size for name, size in strategy.items() if name != "tensor_parallelism"}
    found = {name: size for name, size in sizes.items() if size != 1}
    if found:
        raise ConfigError(f"connector: {found}; expected 1 of each (tensor parallelism alone is served)")
    backend = parallel.distributed_executor_backend
    if backend != "uni":  # orders hold the chunks themselves, and a request's place in the engine's own objects
        raise ConfigError(f"connector: executor {backend!r}; expected 'uni', scheduler and worker in one process")
