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

_METHODS = (
    # Nothing is repaired, or everything is computed.
    *(blind, full_reprefill, encoder_cached_reprefill, prefix_caching, layer_reprefill),
    # A patch beside the canonical.
    *(patch, pooled),
    # Tokens run again.
    *(first_k, attention_sink, vlcache, cacheblend, cacheblend_gradual, kvshare),
    *(infoflow, prophetkv, quest, prcr, oracle_delta, random_tokens),
    # A form of the KV in context.
    *(quantised, low_rank, shadowkv, cachegen, gear, block_differences, anchored, joint_pair),
    # Prompts in which chunks and new text alternate.
    *(mpic, two_step_reuse),
)
METHODS: dict[str, Callable[..., Repaired]] = {function.__name__: function for function in _METHODS}
"""Every method of reuse, this library's and published ones, of one signature; oracles are named so.

Settings are keyword arguments with defaults. A budget is a `RepairBudget`, or a float: a share of the cached tokens; of
stored forms, of the bytes of the chunk's KV. All methods raise InputError for a budget or setting that is out of range
or of a kind that they do not take (InputError for a rank), and for a splice that lacks what they read (a question,
recorded KV, other antecedents, …); ShapeError, LayoutError and LayoutError for arrays that do not match the
backbone. Those that keep bytes take a splice of one chunk. `patch`, `pooled`, `cachegen` and `block_differences` choose
by values, and refuse KV inside a trace. What else they raise, each one says.
"""
