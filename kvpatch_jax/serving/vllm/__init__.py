"""A KV connector for vLLM with tpu-inference: prompts composed of stored chunks, in the engine's own pool.

    vllm serve … --kv-transfer-config '{"kv_connector": "TPUOffloadConnector",
      "kv_connector_module_path": "kvpatch_jax.serving.vllm.connector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"store": "…", "backbone": "…"}}'

`segments` → `planning` → `scheduling` are plain decisions (`ahead` reads for them, on threads), `loading` and `forming`
work on the pool's arrays; `parallel` says which engines of several devices are served. Of all modules only `connector`
imports vllm (extra `vllm`).
"""

from .request_plan import ChunkStep, RequestPlan, plan_request
from .segments import PromptFeature, PromptSegment, segments_of
from .settings import ConnectorConfig, RequestOptions

__all__ = [
    "ChunkStep",
    "ConnectorConfig",
    "PromptFeature",
    "PromptSegment",
    "RequestOptions",
    "RequestPlan",
    "plan_request",
    "segments_of",
]
