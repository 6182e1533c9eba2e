"""A hybrid that begins as a trained transformer: what both have is taken over, and linear attention adds nothing yet.

As in "The Mamba in the Llama" (Wang et al. 2024, arXiv 2408.15237) the layers that stay full keep their attention, and
the others all but theirs.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.decoder.linear_attention import LinearAttention

from ..small_task.training import start_linear


def take_weights(model: Any, text: Any, other: Mapping[str, Any]) -> None:
    """Puts a transformer's weights into a hybrid of as many layers, heads and widths.

    Args:
      model: Qwen3.5's module. text: its text configuration.
      other: the parameters of a Qwen3-VL, as `models.load` gives them. What its tower sends to later layers is lost.
    """
    weights = nnx.to_pure_dict(nnx.state(model))
    for name in weights["visual"]:
        weights["visual"][name] = other["visual"][name]

    decoder, theirs = weights["decoder"], other["decoder"]
    decoder["embedding"], decoder["head"] = theirs["embedding"], theirs["head"]
    decoder["norm"] = _about_one(theirs["norm"])
    for stack in text.stacks:
        own, layers = decoder[stack.name], jnp.asarray(stack.layers)
        layer = jax.tree.map(lambda value, layers=layers: value[layers], theirs["layers"])
        own["mlp"] = layer["mlp"]
        own["input_norm"], own["mlp_norm"] = _about_one(layer["input_norm"]), _about_one(layer["mlp_norm"])

        if isinstance(getattr(model.decoder, stack.name).attention, LinearAttention):
            continue
        attention, taken = own["attention"], layer["attention"]
        attention["key"], attention["value"] = taken["key"], taken["value"]
        # A head's gate lies beside its query. Zeros let half of its output through, which is then doubled.
        query = taken["query"]["kernel"].reshape(len(layers), -1, text.heads, text.head_dim)
        both = jnp.concatenate([query, jnp.zeros_like(query)], axis=-1)
        attention["query"]["kernel"] = both.reshape(attention["query"]["kernel"].shape)
        attention["output"]["kernel"] = 2 * taken["output"]["kernel"]
        for name in ("query_norm", "key_norm"):
            attention[name] = _about_one(taken[name])

    nnx.update(model, nnx.State(weights))
    for stack in text.stacks:
        attention = getattr(model.decoder, stack.name).attention
        if isinstance(attention, LinearAttention):
            start_linear(attention)
            attention.output.kernel[...] = jnp.zeros_like(attention.output.kernel[...])


def _about_one(norm: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a norm's weight as Qwen3.5 keeps it: less one."""
    return {"weight": norm["weight"] - 1}
