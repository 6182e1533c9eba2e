"""The identity of an engine's weights: a digest of their checkpoint, and what a tenant's store says of it."""

import glob
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...cache import digest_of, encoded
from ...errors import StoreFullError, StoreReadOnlyError, WeightsError
from ...store import ChunkStore
from ...store.format.codec import encoder_blob

logger = logging.getLogger(__name__)

FORMATS = ("auto", "hf", "safetensors")
"""Load formats that read the checkpoint's safetensors files. Others make weights up, or fetch them from elsewhere."""
RECORD = "weights of the engines that this name is for"
"""Id of the object, of the kind of encoder outputs, that keeps a digest next to the chunks."""
SAMPLE = 4096
"""Bytes read at the middle and at the end of a tensor: a page, which costs as much to read as one byte of it."""
_LONGEST_HEADER = 100_000_000  # bytes; the format's own bound


def weights_digest(config: Any) -> str | None:
    """Digests the checkpoint that an engine loads: every tensor's name, dtype, shape and a sample of its bytes.

    How tensors lie in files does not count, and neither does the checkpoint's path. How the weights are quantised when
    they are loaded counts.

    Args:
      config: a `VllmConfig`. A model that is no directory is looked for in the hub's cache, as tpu-inference does.

    Returns:
      64 hexadecimal digits; None, said in the log, for weights that do not come from safetensors files here.
    """
    try:
        folder = _folder_of(config)
        model, more = config.model_config, getattr(config, "additional_config", None) or {}
        loaded = [repr(getattr(model, "quantization", None)), repr(more.get("quantization"))]
        tensors = set[tuple[bytes, ...]]()
        for path in glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):
            tensors.update(_tensors(path))
        if not tensors:
            raise WeightsError(f"{folder}: no tensors; expected some in files *.safetensors")
        fields = [encoded(own) for own in loaded] + [field for tensor in sorted(tensors) for field in tensor]
        return digest_of([b"weights", *fields])
    except Exception as error:  # whatever it is, the engine can do without
        logger.warning(
            "kvpatch: the engine's weights could not be told from others: %s: %s. Chunks are served as far as their "
            "names go: engines of one store and one backbone must have the same weights",
            type(error).__name__,
            error,
        )
        return None


def _folder_of(config: Any) -> str:
    """The directory that weights are loaded from.

    Raises:
      WeightsError: they are not loaded from one. Whatever the hub's cache raises.
    """
    model, load = config.model_config, config.load_config
    if load.load_format not in FORMATS or getattr(model, "model_weights", ""):
        raise WeightsError(
            f"weights of load format {str(load.load_format)!r}; expected a checkpoint, as one of {FORMATS}"
        )
    if os.path.isdir(model.model):
        return model.model
    from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]  # vllm brings it

    # The revision is left out, for tpu-inference 0.32 leaves it out too.
    return snapshot_download(
        model.model, cache_dir=load.download_dir, allow_patterns="*.safetensors", local_files_only=True
    )


def _tensors(path: str) -> Iterator[tuple[bytes, ...]]:
    """Yields of every tensor of a file its name, dtype, shape and sample.

    Raises:
      WeightsError: bytes missing of it. ValueError, KeyError, TypeError, OSError: no safetensors file.
    """
    with open(path, "rb") as file:
        size = int.from_bytes(_read(file.fileno(), 8, 0), "little")
        if size > _LONGEST_HEADER:
            raise WeightsError(f"{path}: a header of {size} bytes; expected at most {_LONGEST_HEADER}")
        header = json.loads(_read(file.fileno(), size, 8))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + int(offset) for offset in about["data_offsets"])
            if end - begin <= 2 * SAMPLE:
                sample = _read(file.fileno(), end - begin, begin)
            else:
                places = ((begin + end - SAMPLE) // 2, end - SAMPLE)
                sample = b"".join(_read(file.fileno(), SAMPLE, place) for place in places)
            yield encoded(name), encoded(about["dtype"]), encoded(str(about["shape"])), sample


def _read(fd: int, size: int, offset: int) -> bytes:
    read = os.pread(fd, size, offset)
    if len(read) < size:
        raise WeightsError(f"checkpoint: {len(read)} bytes at {offset}; expected {size}")
    return read


def expect_weights(store: ChunkStore, backbone: str, digest: str) -> None:
    """Refuses a tenant's store whose chunks under a name are of other weights. One that says nothing is claimed.

    Of several engines that claim a store at once one does. A store that cannot be written is taken at its name.

    Raises:
      WeightsError: it was claimed by an engine of other weights. As `ChunkStore.get_encoder` and `put_encoder`.
    """
    name = store.names.encoder(backbone, RECORD)
    before = store.disk.name_state(name)
    found = store.get_encoder(RECORD, backbone)
    if found is None:
        blob = encoder_blob(RECORD, backbone, np.frombuffer(bytes.fromhex(digest), np.uint8))
        try:
            # Not `put_encoder`, by which the last one would win, and those before it would not know.
            store.tenant_disk.copy(name, store.tenant_disk.sealed(name, blob), before)
        except (StoreReadOnlyError, StoreFullError):
            return
        found = store.get_encoder(RECORD, backbone)
    if found is not None and found.tobytes().hex() != digest:
        raise WeightsError(
            f"store, backbone {backbone!r:.80}: chunks of weights {found.tobytes().hex()[:12]}…; expected the "
            f"engine's, {digest[:12]}…: give each checkpoint a name of its own"
        )
