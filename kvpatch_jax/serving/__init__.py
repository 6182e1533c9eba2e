"""Our chunks in engines: caches of JAX programs, groups of rollouts, and vLLM (`kvpatch_jax.serving.vllm`).

Nothing is imported before it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .jax_caches import CacheAxes, chunk_from_cache, place_in_cache
    from .rollouts import RolloutSampler, SamplerOutput

__all__ = ["CacheAxes", "RolloutSampler", "SamplerOutput", "chunk_from_cache", "place_in_cache"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; expected one of {', '.join(__all__)}")
    module = "rollouts" if "ampler" in name else "jax_caches"
    return getattr(importlib.import_module(f".{module}", __name__), name)
