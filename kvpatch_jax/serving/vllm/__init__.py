"""KV connector for vLLM with tpu-inference: composes prompts from stored chunks in the engine's own pool.

    vllm serve … --kv-transfer-config '{"kv_connector": "TPUOffloadConnector",
      "kv_connector_module_path": "kvpatch_jax.serving.vllm.connector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"store": "…", "backbone": "…"}}'

`segments` divides a prompt, `catalog` has what is stored of it, and `plan` asks the one choice how it is served.
`scheduler_side` keeps requests, `prefetch` reads for it on threads, and `admission` says what is worth storing.
`worker_side` writes into the pool and `forming` makes chunks from it. `engine` is what is known of the engine.
`encoder` serves towers' outputs. Only it and `connector` import vllm (extra `vllm`).
"""

from .config import ConnectorConfig, RequestOptions, StoreOptions
from .plan import ChunkStep, RequestPlan, plan_request
from .segments import ChunkingOptions, PromptFeature, PromptSegment, segments_of

__all__ = [
    "ChunkStep",
    "ChunkingOptions",
    "ConnectorConfig",
    "PromptFeature",
    "PromptSegment",
    "RequestOptions",
    "RequestPlan",
    "StoreOptions",
    "plan_request",
    "segments_of",
]
