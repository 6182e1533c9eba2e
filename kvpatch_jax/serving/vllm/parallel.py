"""Check that an engine's parallelism is supported, made before anything is planned."""

from typing import Any

from ...errors import ConfigError

UNSUPPORTED_SIZES = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Fields of vLLM's `parallel_config` that have to be 1."""


def check_parallel(parallel: Any, sharding: Any, groups: int) -> None:
    """Raises for an engine with any parallelism other than tensor parallelism in one process.

    Args:
      parallel: vLLM's `parallel_config`.
      sharding: tpu-inference's `sharding_config`, or None. vLLM's configuration alone is not sufficient: tpu-inference
        resets the data parallel size there to 1, and makes it an axis of its mesh.
      groups: number of groups of caches.

    Raises:
      ConfigError: a size is not 1 (each is named), or the executor runs in other processes.
    """
    sizes = {name: getattr(parallel, name) for name in UNSUPPORTED_SIZES} | {"groups of caches": groups}
    if sharding is not None:
        strategy = vars(sharding.sharding_strategy)
        sizes |= {name: size for name, size in strategy.items() if name != "tensor_parallelism"}

    unsupported = {name: size for name, size in sizes.items() if size != 1}
    if unsupported:
        raise ConfigError(f"connector: got {unsupported}; expected 1 of each (only tensor parallelism is supported)")

    # Commands carry chunks, and hooks change the engine's own request objects, so both sides share a process.
    backend = parallel.distributed_executor_backend
    if backend != "uni":
        raise ConfigError(f"connector: got executor {backend!r}; expected 'uni', scheduler and worker in one process")
