"""All methods of reuse by name."""

from collections.abc import Callable

from .deviation import cacheblend, cacheblend_gradual, kvshare, oracle_delta, random_tokens
from .differences import anchored, block_differences
from .entropy_coding import cachegen
from .leading_tokens import attention_sink, first_k, vlcache
from .patches import patch, pooled
from .prompts import mpic, two_step_reuse
from .question_attention import infoflow, prcr, prophetkv, quest
from .references import blind, encoder_cached_reprefill, full_reprefill, layer_reprefill, prefix_caching
from .repaired import Repaired
from .rounding_error import gear
from .stored_forms import joint_pair, low_rank, quantised, shadowkv

METHODS: dict[str, Callable[..., Repaired]] = {
    # Nothing is repaired, or everything is computed.
    "blind": blind,
    "full_reprefill": full_reprefill,
    "encoder_cached_reprefill": encoder_cached_reprefill,
    "prefix_caching": prefix_caching,
    "layer_reprefill": layer_reprefill,
    # A patch beside the canonical.
    "patch": patch,
    "pooled": pooled,
    # Tokens run again.
    "first_k": first_k,
    "attention_sink": attention_sink,
    "vlcache": vlcache,
    "cacheblend": cacheblend,
    "cacheblend_gradual": cacheblend_gradual,
    "kvshare": kvshare,
    "infoflow": infoflow,
    "prophetkv": prophetkv,
    "quest": quest,
    "prcr": prcr,
    "oracle_delta": oracle_delta,
    "random_tokens": random_tokens,
    # A form of the KV in context.
    "quantised": quantised,
    "low_rank": low_rank,
    "shadowkv": shadowkv,
    "cachegen": cachegen,
    "gear": gear,
    "block_differences": block_differences,
    "anchored": anchored,
    "joint_pair": joint_pair,
    # Prompts in which chunks and new text alternate.
    "mpic": mpic,
    "two_step_reuse": two_step_reuse,
}
"""Every method of reuse, this library's and published ones, of one signature; oracles are named so.

Settings are keyword arguments with defaults. A budget that is a float is a share of the cached tokens; of stored forms,
of the bytes of the chunk's KV. All methods raise InputError for a budget that is out of range or of a kind that they
do not take, and for a splice that lacks what they read (a question, recorded KV, other antecedents, …); ShapeError,
LayoutError, ShapeError and LayoutError for arrays that do not match the backbone. What else they raise, each one says.
"""
