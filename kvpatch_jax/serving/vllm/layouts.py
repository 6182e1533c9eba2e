"""Cache format of an engine's model: its layout, its dtype, and the page format."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...cache import Antecedent, Chunk, Patch, check_applies, same_storage
from ...core import KVLayout, Rope, Scaling
from ...errors import ConfigError, InputError, LayoutError, PatchMismatchError
from ...pool import JOINED, RAGGED, PageFormat, check_dtype

FAMILIES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Architectures whose keys tpu-inference rotates over the whole head, in halves."""
MODELS = "tpu_inference.models.jax."
"""The module of these models. The caches of vLLM's own torch models, which tpu-inference can also run, are unknown."""
ROPES = ("default", "mrope", "llama3")
"""Supported kinds of ropes. tpu-inference 0.32 computes any other kind of scaling as if it were llama3's."""


def layout_of(text: Mapping[str, Any], architectures: Sequence[str]) -> KVLayout:
    """Returns the layout of a model's cache, from its text configuration.

    Angles are float32, as the engine computes them: cached keys are unrotated by the angles that rotated them.

    Raises:
      ConfigError: the family or the kind of rope is not supported, the rope is partial, or a key is missing.
    """
    if not set(architectures) & set(FAMILIES):
        raise ConfigError(f"connector: got architectures {list(architectures)}; expected one of {FAMILIES}")

    table = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = table.get("rope_type", table.get("type", "default"))
    partial = table.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    if kind not in ROPES or partial not in (None, 1, 1.0):
        raise ConfigError(f"connector: got rope {kind!r} over {partial} of a head; expected one of {ROPES} over all")

    theta = table.get("rope_theta") or text.get("rope_theta")
    scaling = None
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        width = int(text.get("head_dim") or text["hidden_size"] // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        if kind == "llama3":
            # No defaults: the engine has some, which need not be the model's.
            low, high = table["low_freq_factor"], table["high_freq_factor"]
            original = int(table["original_max_position_embeddings"])
            scaling = Scaling("llama3", table["factor"], original, low_freq_factor=low, high_freq_factor=high)
    except KeyError as error:
        raise ConfigError(f"connector: got a model configuration without {error}; expected one with it") from None

    if theta is None:
        raise ConfigError("connector: got a model configuration without 'rope_theta'; expected one with it")

    sections = table.get("mrope_section")
    sections = None if sections is None else tuple(sections)
    rope = Rope(theta, width, sections=sections, scaling=scaling, angles="float32")
    return KVLayout.gqa(layers, kv_heads, width, rope)


class CacheFormat(NamedTuple):
    """Format of an engine's cache, and so of every chunk that can be placed in it.

    Attributes:
      layout: layout of the model.
      dtype: dtype of the pool.
    """

    layout: KVLayout
    dtype: np.dtype

    @classmethod
    def of(cls, model: Any, caches: Any) -> "CacheFormat":
        """Reads the format from a `ModelConfig` and a `KVCacheConfig` of the engine, whose dtypes are torch's.

        Raises:
          ConfigError: as `layout_of`; or the dtype is unknown to JAX.
        """
        layout = layout_of(model.hf_text_config.to_dict(), model.architectures)
        groups = [] if caches is None else caches.kv_cache_groups
        dtype = getattr(groups[0].kv_cache_spec, "dtype", model.dtype) if groups else model.dtype
        try:
            return cls(layout, jnp.dtype(str(dtype).removeprefix("torch.")))
        except TypeError:
            raise ConfigError(f"connector: got a cache of dtype {dtype}; expected one that JAX supports") from None

    def check(self, chunk: Chunk, length: int, lead: str | None = None) -> None:
        """Raises for a chunk that does not fit the engine's pool, whatever name it is stored under.

        Args:
          length: number of tokens that the chunk has to have.
          lead: what it has to have been prefilled behind; None of a canonical.

        Raises:
          LayoutError, DtypeError: it is from another model's cache, or in another dtype.
          InputError: it has another number of tokens, or was prefilled behind another lead.
          InputError: its tokens' positions are not consecutive.
        """
        what = f"chunk {chunk.id[:12]}…"
        if not same_storage(chunk.layout, self.layout):
            raise LayoutError(f"{what}: got layout {chunk.layout}; expected the engine's {self.layout}")

        for channel in self.layout.channels:
            check_dtype(what, channel, np.dtype(chunk.kv[channel.name].dtype), self.dtype)
        if not chunk.length == chunk.tokens == length or chunk.batch is not None:
            raise InputError(f"{what}: got {chunk.length} of {chunk.tokens} tokens; expected {length}")
        if chunk.lead != lead:
            found, expected = ("none" if own is None else f"{own[:12]}…" for own in (chunk.lead, lead))
            raise InputError(f"{what}: got a chunk behind the lead {found}; expected {expected}")

        # With several position axes, only the engine knows the positions of an image's tokens.
        if self.layout.rope.axes is None and not np.array_equal(chunk.local, np.arange(length)):
            raise InputError(f"{what}: got positions {chunk.local}; expected consecutive ones")

    def check_patch(self, patch: Patch, chunk: Chunk, antecedent: tuple[str, ...]) -> None:
        """Raises for a patch that cannot be added to a canonical behind this antecedent.

        Raises:
          PatchMismatchError, StalePatchError, ShapeError: as `apply_patch`.
        """
        if patch.metadata.frame != "phase_free":
            raise PatchMismatchError(
                f"patch of chunk {chunk.id[:12]}…: got frame {patch.metadata.frame!r}; expected 'phase_free'"
            )
        check_applies(patch, chunk, np.zeros((), np.int32), Antecedent.of(*antecedent))


def check_model(model: Any) -> None:
    """Raises for a model that is not tpu-inference's own.

    Raises:
      ConfigError: it is one of vLLM's torch models.
    """
    module = type(model).__module__
    if not module.startswith(MODELS):
        raise ConfigError(
            f"connector: got a model of {module}; expected one of {MODELS}*, as MODEL_IMPL_TYPE=flax_nnx gives"
        )


def page_format(layout: KVLayout) -> PageFormat:
    """Chooses the format that tpu-inference gives pages of a layout: heads of 64 are joined, others interleaved."""
    return JOINED if layout.channel("k").width == 64 else RAGGED
