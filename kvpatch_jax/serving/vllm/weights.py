"""Identity of an engine's weights: the digest of their checkpoint, and its record in a tenant's store."""

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

logger = logging.getLogger(__name__)

FORMATS = ("auto", "hf", "safetensors")
"""Load formats that read the checkpoint's safetensors files. Others draw weights, or fetch them from elsewhere."""
RECORD = "weights of the engines that this name is for"
"""Id of the encoder output that records the digest next to the chunks."""
SAMPLE = 4096
"""Bytes read at the middle and at the end of a tensor: a page, which costs as much to read as one byte of it."""
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format


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


def expect_weights(store: ChunkStore, backbone: str, digest: str) -> None:
    """Raises if a tenant's chunks under a backbone's name are of other weights. Records the digest if there is none.

    Of several engines that record a digest at once, one succeeds. A store that cannot be written is not checked.

    Raises:
      WeightsError: the store records other weights. As `ChunkStore.get_encoder` and `amend_encoder`.
    """
    record = store.get_encoder(RECORD, backbone)
    if record is None:
        engines = np.frombuffer(bytes.fromhex(digest), np.uint8)
        try:
            # Kept if there is one meanwhile: with `put_encoder` the last engine would win, unnoticed by the others.
            store.amend_encoder(RECORD, backbone, lambda records: records[0] if records else engines)
        except (StoreReadOnlyError, StoreFullError):
            return
        record = store.get_encoder(RECORD, backbone)

    if record is not None and record.tobytes().hex() != digest:
        raise WeightsError(
            f"store, backbone {backbone!r:.80}: got chunks of weights {record.tobytes().hex()[:12]}…; expected the "
            f"engine's, {digest[:12]}…: give each checkpoint a name of its own"
        )
