"""What an engine's model caches, as a layout, and in which of our forms its pages are."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...cache import Chunk, Patch, check_factor_shapes, check_stamp, same_storage
from ...core import KVLayout, Rope, Scaling
from ...errors import ConfigError, InputError, LayoutError, PatchMismatchError, PositionError
from ...pool import JOINED, RAGGED, PageFormat, check_dtype

FAMILIES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Architectures whose keys tpu-inference keeps as a rope of the whole head leaves them, in halves."""
MODELS = "tpu_inference.models.jax."
"""Where they are. What vLLM's own torch models cache, which tpu-inference runs in other cases, was not looked at."""
ROPES = ("default", "mrope", "llama3")
"""Kinds of ropes. tpu-inference 0.32 computes any other kind of scaling as if it were llama3's."""


def layout_of(text: Mapping[str, Any], architectures: Sequence[str]) -> KVLayout:
    """Describes what a model caches, from its text configuration.

    Angles are float32, as the engine computes them: what it cached is turned back by the angles that it was turned by.

    Raises:
      ConfigError: a family that was not looked at, a rope of another kind or a partial one, or a key that is missing.
    """
    if not set(architectures) & set(FAMILIES):
        raise ConfigError(f"connector: architectures {list(architectures)}; expected one of {FAMILIES}")
    table = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = table.get("rope_type", table.get("type", "default"))
    partial = table.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    if kind not in ROPES or partial not in (None, 1, 1.0):
        raise ConfigError(f"connector: rope {kind!r}, of which {partial} rotates; expected a whole one of {ROPES}")
    theta = table.get("rope_theta") or text.get("rope_theta")
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        width = int(text.get("head_dim") or text["hidden_size"] // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        scaling = _llama3(table) if kind == "llama3" else None
    except KeyError as error:
        raise ConfigError(f"connector: the model's configuration lacks {error}") from None
    if theta is None:
        raise ConfigError("connector: the model's configuration lacks 'rope_theta'")
    sections = table.get("mrope_section")
    sections = None if sections is None else tuple(sections)
    rope = Rope(theta, width, sections=sections, scaling=scaling, angles="float32")
    return KVLayout.gqa(layers, kv_heads, width, rope)


def _llama3(table: Mapping[str, Any]) -> Scaling:
    """Raises KeyError for a key that is missing: the engine has defaults, which need not be the model's."""
    low, high = table["low_freq_factor"], table["high_freq_factor"]
    original = int(table["original_max_position_embeddings"])
    return Scaling("llama3", table["factor"], original, low_freq_factor=low, high_freq_factor=high)


class CacheFormat(NamedTuple):
    """Format of what an engine caches, and so of every chunk that can be placed there.

    Attributes:
      layout: of the model. dtype: of the pool.
    """

    layout: KVLayout
    dtype: np.dtype

    @classmethod
    def of(cls, model: Any, caches: Any) -> "CacheFormat":
        """Reads it from a `ModelConfig` and a `KVCacheConfig` of the engine, whose dtypes are torch's.

        Raises:
          ConfigError: as `layout_of`; or a dtype that jax does not know.
        """
        layout = layout_of(model.hf_text_config.to_dict(), model.architectures)
        groups = [] if caches is None else caches.kv_cache_groups
        found = getattr(groups[0].kv_cache_spec, "dtype", model.dtype) if groups else model.dtype
        try:
            return cls(layout, jnp.dtype(str(found).removeprefix("torch.")))
        except TypeError:
            raise ConfigError(f"connector: a cache of dtype {found}; expected one that jax has") from None

    def check(self, chunk: Chunk, length: int) -> None:
        """Refuses a canonical that could not be placed, or would be the wrong one, whatever name it is stored under.

        Raises:
          LayoutError, DtypeError: of another model's cache, or in another dtype. InputError: of another number of
            tokens, or prefilled behind a lead. PositionError: its tokens do not stand one behind the other.
        """
        what = f"chunk {chunk.id[:12]}…"
        if not same_storage(chunk.layout, self.layout):
            raise LayoutError(f"{what}: layout {chunk.layout}; expected the engine's {self.layout}")
        for channel in self.layout.channels:
            check_dtype(what, channel, np.dtype(chunk.kv[channel.name].dtype), self.dtype)
        if not chunk.length == chunk.tokens == length or chunk.batch is not None:
            raise InputError(f"{what}: {chunk.length} of {chunk.tokens} tokens; expected {length}")
        if chunk.lead is not None:
            raise InputError(f"{what}: prefilled behind the lead {chunk.lead[:12]}…; expected it prefilled alone")
        # Of several axes the engine alone knows where an image's tokens stand.
        if self.layout.rope.axes is None and not np.array_equal(chunk.local, np.arange(length)):
            raise PositionError(f"{what}: positions {chunk.local}; expected one token behind the other")

    def check_patch(self, patch: Patch, chunk: Chunk, front: tuple[str, ...]) -> None:
        """Refuses a patch that could not be added to a canonical behind these chunks.

        Raises:
          PatchMismatchError, StalePatchError, ShapeError: as `apply_patch`.
        """
        if patch.metadata.frame != "phase_free":
            raise PatchMismatchError(f"patch of chunk {chunk.id[:12]}…: frame {patch.metadata.frame!r}")
        check_stamp(patch, chunk, np.zeros((), np.int32), front, None, False)
        check_factor_shapes(patch, chunk)


def check_model(model: Any) -> None:
    """Refuses a model that is not tpu-inference's own.

    Raises:
      ConfigError: one of vLLM's torch models.
    """
    module = type(model).__module__
    if not module.startswith(MODELS):
        raise ConfigError(
            f"connector: a model of {module}; expected one of {MODELS}*, as MODEL_IMPL_TYPE=flax_nnx gives"
        )


def page_format(layout: KVLayout) -> PageFormat:
    """Chooses the format that tpu-inference gives pages of a layout: heads of 64 are joined, others interleaved."""
    return JOINED if layout.channel("k").width == 64 else RAGGED
