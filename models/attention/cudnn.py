"""cuDNN's flash attention (`jax.nn.dot_product_attention`) behind our masks, for NVIDIA GPUs.

It is lowered, and compiled ahead of time for an H200, in tests; nobody ran it, which needs cuDNN and a GPU, here.

Axis letters: B batch, T queries, S keys, N query heads, K KV heads, H width.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .mask import Mask

WIDEST = 128
EIGHTH = 8
"""Widths of heads are multiples of this."""
SIXTEEN_BITS = (jnp.bfloat16, jnp.float16)


def unsupported(query: Any, key: Any, value: Any, mask: Mask) -> str | None:
    """Returns why the kernel cannot take these arrays (or shapes); None if it can."""
    if mask.ahead is not None:
        return "the mask has tokens that see others behind their own; expected causal order"
    if mask.allowed is not None or mask.query_places is not None or mask.key_places is not None:
        return "the mask has arrays of places or of bools; expected causal order and a window alone"
    if mask.query_segments is not None:
        return "the mask has segments"
    if mask.causal and (mask.offset != 0 or query.shape[1] != key.shape[1]):
        return f"{query.shape[1]} causal queries behind {mask.offset} of {key.shape[1]} keys; expected no context"
    if mask.window is not None and not mask.causal:
        return "a window without causal order"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in SIXTEEN_BITS:
        return f"types {query.dtype}, {key.dtype} and {value.dtype}; expected one of 16 bits"
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > WIDEST or query.shape[-1] % EIGHTH:
        return f"widths {query.shape[-1]} and {value.shape[-1]}; expected one multiple of {EIGHTH} up to {WIDEST}"

    # jax tells the version of cuDNN nowhere else.
    try:
        importlib.import_module("jax._src.cudnn.fused_attention_stablehlo").check_cudnn_version()
    except Exception as error:
        return f"cuDNN cannot be used: {error}"
    return None


def kernel(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Mask,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Attends as `attention` says, for the masks that `unsupported` lets pass."""
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
    )
