"""KV connector for vLLM with tpu-inference: composes prompts from stored chunks in the engine's own pool.

    vllm serve … --kv-transfer-config '{"kv_connector": "TPUOffloadConnector",
      "kv_connector_module_path": "kvpatch_jax.serving.vllm.connector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"store": "…", "backbone": "…"}}'

`segments` divides a prompt, and texts by `chunking`; `request_plan` decides, `scheduler_side` keeps requests;
`prefetcher` reads for it on threads. `worker_side` writes into the pool and `forming` makes chunks from it. `parallel`
checks the engine's parallelism. Only `connector` imports vllm (extra `vllm`).
"""

from .chunking import ChunkingOptions
from .request_plan import ChunkStep, RequestPlan, plan_request
from .segments import PromptFeature, PromptSegment, segments_of
from .settings import ConnectorConfig, RequestOptions

__all__ = [
    "ChunkStep",
    "ChunkingOptions",
    "ConnectorConfig",
    "PromptFeature",
    "PromptSegment",
    "RequestOptions",
    "RequestPlan",
    "plan_request",
    "segments_of",
]
