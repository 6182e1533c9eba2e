"""All repairs by name."""

from .deviation import cacheblend, cacheblend_gradual, kvshare, oracle_delta, random_tokens
from .encoded_corrections import block_differences, encoded_deficit, encoded_patch
from .entropy_coding import cachegen
from .leading_tokens import attention_sink, first_k, vlcache
from .prompts import mpic, two_step_reuse
from .question_attention import infoflow, prcr, prophetkv, quest
from .references import blind, encoder_cached_reprefill, full_reprefill, layer_reprefill, prefix_caching
from .rounding_error import gear
from .shared_forms import anchored, averaged, joint_pair
from .spliced_cache import Repair
from .stored_forms import kv_adaquant, low_rank, patched, polykv, quantised, shadowkv, sixteen_bits

TOKEN_REPAIRS: dict[str, Repair] = {
    "first_k": first_k,
    "vlcache": vlcache,
    "cacheblend": cacheblend,
    "cacheblend_gradual": cacheblend_gradual,
    "kvshare": kvshare,
    "infoflow": infoflow,
    "prophetkv": prophetkv,
    "quest": quest,
    "oracle_delta": oracle_delta,
    "random_tokens": random_tokens,
}
"""Repairs that recompute a number of tokens, of which every budget in tokens can be asked."""

STORED_FORMS: dict[str, Repair] = {
    "patched": patched,
    "quantised": quantised,
    "low_rank": low_rank,
    "shadowkv": shadowkv,
    "sixteen_bits": sixteen_bits,
    "polykv": polykv,
    "kv_adaquant": kv_adaquant,
    "encoded_patch": encoded_patch,
    "encoded_deficit": encoded_deficit,
    "block_differences": block_differences,
    "cachegen": cachegen,
    "gear": gear,
}
"""Repairs that store something of KV in context; their budget is bytes."""

SHARED_FORMS: dict[str, Repair] = {
    "averaged": averaged,
    "anchored": anchored,
    "joint_pair": joint_pair,
}
"""Repairs that keep one form for many antecedents, or a chunk with its antecedent; their budget is bytes.

They read `splice.others`, or `front`.
"""

REPAIRS: dict[str, Repair] = {
    "blind": blind,
    "attention_sink": attention_sink,
    **TOKEN_REPAIRS,
    "prcr": prcr,
    "layer_reprefill": layer_reprefill,
    **STORED_FORMS,
    **SHARED_FORMS,
    "mpic": mpic,
    "two_step_reuse": two_step_reuse,
    "prefix_caching": prefix_caching,
    "encoder_cached_reprefill": encoder_cached_reprefill,
    "full_reprefill": full_reprefill,
}
"""Every published repair, all of one signature; oracles are named so."""

METHODS = REPAIRS
