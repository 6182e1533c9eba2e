"""`KVPatchEncoderConnector`: towers' outputs in a chunk store, for vLLM's encoder cache. Imports vllm.

    vllm serve … --ec-transfer-config '{"ec_connector": "KVPatchEncoderConnector", "ec_role": "ec_both",
      "ec_connector_module_path": "kvpatch_jax.serving.vllm.encoder",
      "ec_connector_extra_config": {"store": "…", "backbone": "…"}}'

Where an output is announced, vLLM does not run the tower, and a worker that then lacks it ends the engine. So the
scheduler's side reads an output before it announces it, and sends it to the workers with the step's metadata.
"""

import collections
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import (  # pyright: ignore[reportMissingImports]
    ECConnectorBase,
    ECConnectorMetadata,
)

from ...utils.background import JobQueue
from .config import ConnectorConfig
from .engine import weights_digest
from .stores import Stores

logger = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that a request waits for its outputs, which the tower computes in less."""
PENDING = 32
"""Outputs that are read, or wait for their step; as many wait to be stored."""


@dataclasses.dataclass
class EncoderOutputs(ECConnectorMetadata):
    """Outputs for the engine's encoder cache, by their images' identifiers."""

    outputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Read:
    deadline: float
    done: bool = False
    output: np.ndarray | None = None


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method: an exception is counted, the first of its kind is logged, and None is returned."""

    @functools.wraps(hook)
    def run(self: "KVPatchEncoderConnector", *arguments: Any, **options: Any) -> Any:
        try:
            return hook(self, *arguments, **options)
        except Exception as error:
            kind = f"{hook.__name__}: {type(error).__name__}"
            self.counts[kind] += 1
            if self.counts[kind] == 1:
                logger.warning("kvpatch: %s: the tower runs instead", kind, exc_info=True)
            return None

    return run


class KVPatchEncoderConnector(ECConnectorBase):
    """Stores and serves towers' outputs under a backbone's name and an engine's dtype.

    Attributes:
      counts: "hits", "misses", "saved", "dropped" (too many waited to be stored), and exceptions as "HOOK: TYPE".

    Raises:
      ConfigError: invalid settings, which are those of the KV connector.
    """

    def __init__(self, vllm_config: Any, role: Any, patience: float = PATIENCE):
        super().__init__(vllm_config=vllm_config, role=role)
        config = ConnectorConfig.read(vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._stores, self._patience = Stores(config, weights_digest(vllm_config)), patience
        self._dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        self._device = vllm_config.device_config.device_type
        self.counts: collections.Counter[str] = collections.Counter()
        self._reads, self._next = dict[str, _Read](), EncoderOutputs()
        self._reader: JobQueue[tuple[str, _Read]] = JobQueue(self._read, PENDING, "kvpatch-read-encoder", patience=1.0)
        self._writer: JobQueue[tuple[str, np.ndarray]] = JobQueue(self._write, PENDING, "kvpatch-encoder", patience=1.0)

    # --------------------------------------------------------------------------------------------- the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Starts to read a request's outputs; returns whether it need not wait, as it does for a patience at most."""
        return self._is_ready(request, num_computed_tokens) is not False

    @_guarded
    def _is_ready(self, request: Any, computed: int) -> bool:
        ready = True
        for item in request.mm_features:
            if item.mm_position.offset + item.mm_position.length <= computed:
                self._reads.pop(item.identifier, None)
            elif item.identifier not in self._reads:
                read = self._reads[item.identifier] = _Read(time.monotonic() + self._patience)
                if len(self._reads) > PENDING or not self._reader.add((item.identifier, read)):
                    read.done = True
            read = self._reads.get(item.identifier)
            ready = ready and (read is None or read.done or time.monotonic() >= read.deadline)
        return ready

    def has_cache_item(self, identifier: str) -> bool:
        """Returns whether an output was read."""
        return identifier in self._reads and self._reads[identifier].output is not None

    @_guarded
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Sends an output that was read with the next step. Until the image is computed, it is not read again."""
        identifier = request.mm_features[index].identifier
        output = self._reads[identifier].output if identifier in self._reads else None
        self._reads[identifier] = _Read(0.0, done=True)
        self.counts["misses" if output is None else "hits"] += 1
        if output is not None and self.is_consumer:
            self._next.outputs[identifier] = output

    def build_connector_meta(self, scheduler_output: Any) -> EncoderOutputs:
        """Returns the outputs of the next step."""
        outputs, self._next = self._next, EncoderOutputs()
        return outputs

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forgets what was read for a request."""
        for item in request.mm_features:
            self._reads.pop(item.identifier, None)
        return False, None

    def _read(self, job: tuple[str, _Read]) -> None:
        identifier, read = job
        read.output = self._stored(identifier)
        read.done = True

    # ------------------------------------------------------------------------------------------------ the worker

    @_guarded
    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Puts the step's outputs into the engine's encoder cache."""
        import torch  # pyright: ignore[reportMissingImports]  # vllm brings it

        for identifier, output in self._get_connector_metadata().outputs.items():
            bits = torch.from_numpy(output.view(np.uint8).copy())
            encoder_cache.setdefault(identifier, bits.view(getattr(torch, output.dtype.name)).to(self._device))

    @_guarded
    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Stores an output that the tower has just computed, in the background."""
        import torch  # pyright: ignore[reportMissingImports]

        if not self.is_producer:
            return
        # torch converts no bfloat16 to numpy, so bits are passed on.
        tensor = encoder_cache[mm_hash].detach().cpu().contiguous()
        output = tensor.view(torch.uint8).numpy().view(np.dtype(str(tensor.dtype).removeprefix("torch.")))
        self.counts["dropped"] += not self._writer.add((mm_hash, output))

    @_guarded
    def shutdown(self) -> None:
        """Stores what waits, for a patience at most, and closes the stores."""
        self._reader.close(self._patience)
        self._writer.close(self._patience)
        self._stores.close(self._patience)

    @_guarded
    def _write(self, job: tuple[str, np.ndarray]) -> None:
        # An image that left the engine's cache is computed again, and each worker of a group has the same output.
        identifier, output = job
        if self._stored(identifier) is None:
            self._stores.of("default").put_encoder(self._id(identifier), self._stores.backbone, output)
            self.counts["saved"] += 1

    @_guarded
    def _stored(self, identifier: str) -> np.ndarray | None:
        # vLLM's encoder cache knows no tenants: all requests share it, whatever their cache_salt.
        return self._stores.of("default").get_encoder(self._id(identifier), self._stores.backbone)

    def _id(self, identifier: str) -> str:
        return f"{identifier} in {self._dtype}"
