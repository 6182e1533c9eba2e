"""What the connector has to know of an engine: its model's cache, its weights, its parallelism and its versions.

Engines that are not supported are refused at the start, before anything is planned.
"""

import glob
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...cache import Antecedent, Chunk, Patch, check_applies, digest_of, encoded, same_storage
from ...core import KVLayout, Rope, Scaling
from ...errors import ConfigError, InputError, LayoutError, WeightsError
from ...pool import JOINED, RAGGED, PageFormat, check_dtype

logger = logging.getLogger(__name__)

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
UNSUPPORTED_SIZES = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Fields of vLLM's `parallel_config` that have to be 1."""
TRIED: Mapping[str, str] = {"vllm-tpu": "0.32.0", "tpu-inference": "0.32.0", "jax": "0.11.2"}
"""Packages and the version of each that the connector was run with. The extra `vllm` installs the first two."""
FORMATS = ("auto", "hf", "safetensors")
"""Load formats that read the checkpoint's safetensors files. Others draw weights, or fetch them from elsewhere."""
SAMPLE = 4096
"""Bytes read at the middle and at the end of a tensor: a page, which costs as much to read as one byte of it."""
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format


# --------------------------------------------------------------------------------------------------- the model's cache


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
          LayoutError, ShapeError: it is from another model's cache, or in another dtype.
          InputError: it has another number of tokens, or was prefilled behind another lead;
          its tokens' positions are not consecutive.
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
        check_applies(patch, chunk, Antecedent.of(*antecedent))


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


def check_groups(model: str, caches: Any) -> None:
    """Raises for a model whose KV is in several groups of caches, such as layers with a window or a recurrent state.

    Args:
      model: name of the model.
      caches: the engine's `KVCacheConfig`, or None.

    Raises:
      ConfigError: there is more than one group; the error names the model and the kinds of its groups.
    """
    kinds = [type(group.kv_cache_spec).__name__ for group in (() if caches is None else caches.kv_cache_groups)]
    if len(kinds) > 1:
        raise ConfigError(
            f"connector: got model {model!r:.200} with {len(kinds)} groups of KV caches, {', '.join(kinds)}; expected "
            "a model with one group, whose blocks hold all of its KV"
        )


# -------------------------------------------------------------------------------------------- parallelism and versions


def check_parallel(parallel: Any, sharding: Any) -> None:
    """Raises for an engine with any parallelism other than tensor parallelism in one process.

    Args:
      parallel: vLLM's `parallel_config`.
      sharding: tpu-inference's `sharding_config`, or None. vLLM's configuration alone is not sufficient: tpu-inference
        resets the data parallel size there to 1, and makes it an axis of its mesh.

    Raises:
      ConfigError: a size is not 1 (each is named), or the executor runs in other processes.
    """
    sizes = {name: getattr(parallel, name) for name in UNSUPPORTED_SIZES}
    if sharding is not None:
        strategy = vars(sharding.sharding_strategy)
        sizes |= {name: size for name, size in strategy.items() if name != "tensor_parallelism"}

    unsupported = {name: size for name, size in sizes.items() if size != 1}
    if unsupported:
        raise ConfigError(f"connector: got {unsupported}; expected 1 of each (only tensor parallelism is supported)")

    # Commands carry chunks, and hooks change the engine's own request objects, so both sides share a process.
    backend = parallel.distributed_executor_backend
    if backend != "uni":
        raise ConfigError(f"connector: got executor {backend!r}; expected 'uni', scheduler and worker in one process")


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(version_of: Callable[[str], str | None] = installed_version) -> dict[str, str]:
    """Warns in the log of packages whose version was not tried, and returns those, with "none" for one that is lacking.

    No version is known to break, so none is refused: what the connector relies on is checked where it is used.
    """
    differing = {}
    for package, tried in TRIED.items():
        version = version_of(package)
        if version is None and package == "vllm-tpu":
            package, version = "vllm", version_of("vllm")  # another build of it
        # What follows a "+" names a build of the same version.
        if version is None or version.partition("+")[0] != tried:
            differing[package] = version or "none"

    if differing:
        logger.warning(
            "kvpatch: found %s; tried with %s: answers of other versions were compared with nothing",
            ", ".join(f"{name} {found}" for name, found in differing.items()),
            ", ".join(f"{name} {tried}" for name, tried in TRIED.items()),
        )
    return differing


# ------------------------------------------------------------------------------------------------------------- weights


def weights_digest(config: Any) -> str | None:
    """Digests the checkpoint that an engine loads: every tensor's name, dtype, shape and a sample of its bytes.

    The division of tensors into files and the checkpoint's path do not count; quantisation at load time does.

    Args:
      config: a `VllmConfig`. A model that is no directory is looked up in the hub's cache, as tpu-inference does.

    Returns:
      64 hexadecimal digits; None, with a warning in the log, for weights that do not come from local safetensors files.
    """
    try:
        folder = _checkpoint_folder(config)
        model, additional = config.model_config, getattr(config, "additional_config", None) or {}
        quantisation = [repr(getattr(model, "quantization", None)), repr(additional.get("quantization"))]

        tensors = set[tuple[bytes, ...]]()
        for path in glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):
            tensors.update(_tensors(path))
        if not tensors:
            raise WeightsError(f"{folder}: got no tensors; expected some in files *.safetensors")

        fields = [b"weights", *(encoded(word) for word in quantisation)]
        for tensor in sorted(tensors):
            fields += tensor
        return digest_of(fields)
    except Exception as error:  # the engine can run without the check, whatever failed
        logger.warning(
            "kvpatch: the engine's weights could not be identified: %s: %s. Chunks are served by their backbone's name "
            "alone: engines that share a store and a backbone must have the same weights",
            type(error).__name__,
            error,
        )
        return None


def _checkpoint_folder(config: Any) -> str:
    """Returns the directory that weights are loaded from.

    Raises:
      WeightsError: they are not loaded from a directory. Any exception of the hub's cache.
    """
    model, load = config.model_config, config.load_config
    if load.load_format not in FORMATS or getattr(model, "model_weights", ""):
        raise WeightsError(f"weights: got load format {str(load.load_format)!r}; expected one of {FORMATS}")
    if os.path.isdir(model.model):
        return model.model

    from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]  # vllm brings it

    # The revision is left out, because tpu-inference 0.32 leaves it out too.
    return snapshot_download(
        model.model, cache_dir=load.download_dir, allow_patterns="*.safetensors", local_files_only=True
    )


def _tensors(path: str) -> Iterator[tuple[bytes, ...]]:
    """Yields the name, dtype, shape and sample of every tensor of a file.

    Raises:
      WeightsError: the file is too short.
      ValueError, KeyError, TypeError, OSError: it is no safetensors file.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(_read(file.fileno(), 8, 0), "little")
        if size > _MAX_HEADER:
            raise WeightsError(f"{path}: got a header of {size} bytes; expected at most {_MAX_HEADER}")

        header = json.loads(_read(file.fileno(), size, 8))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue

            begin, end = (8 + size + int(offset) for offset in tensor["data_offsets"])
            if end - begin <= 2 * SAMPLE:
                sample = _read(file.fileno(), end - begin, begin)
            else:
                middle = _read(file.fileno(), SAMPLE, (begin + end - SAMPLE) // 2)
                sample = middle + _read(file.fileno(), SAMPLE, end - SAMPLE)

            yield encoded(name), encoded(tensor["dtype"]), encoded(str(tensor["shape"])), sample


def _read(fd: int, size: int, offset: int) -> bytes:
    content = os.pread(fd, size, offset)
    if len(content) < size:
        raise WeightsError(f"checkpoint: got {len(content)} bytes at {offset}; expected {size}")
    return content
