"""Prefills of chunks without anything in front, by an engine's own model on pages of their own.

tpu-inference's runner calls one function per step: weights, pages (donated), tokens and the attention's metadata in,
pages out. Called on other pages it computes what a request of the chunk alone leaves in the engine's, while blocks,
scheduler and prefix cache know nothing of it.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from ...core import EngineKV, KVLayout
from ...errors import ConfigError, InputError
from ...pool.page_format import PageFormat
from .segments import PromptSegment

SLICE = 128
"""Tokens of one forward: as long as a request may wait that comes while one runs."""
MAX_TOKENS = 4096
"""Tokens of the longest chunk that is prefilled alone."""


class LoneChunk(NamedTuple):
    """A chunk of a request, to be prefilled alone.

    Attributes:
      tenant: owner of the canonical.
      backbone: the name under which it is stored.
      segment: the chunk.
      tokens: its tokens.
      local: their positions, counted from the chunk's start.
      embeddings: the tower's output of its images, in order.
      is_embedded: which tokens have it.
    """

    tenant: str
    backbone: str
    segment: PromptSegment
    tokens: Int[np.ndarray, " T"]
    local: Int[np.ndarray, "*positions"]
    embeddings: tuple[Float[jax.Array, "_ D"], ...]
    is_embedded: Bool[np.ndarray, " T"]


def read_chunk(runner: Any, request: str, tenant: str, backbone: str, segment: PromptSegment, local: Any) -> LoneChunk:
    """Reads a chunk of a request that a runner has just prefilled.

    Args:
      local: positions of the chunk's tokens, counted from its start.

    Raises:
      InputError: the runner has dropped the tower's output of an image, or never had it.
    """
    state = runner.requests[request]
    tokens = np.asarray(state.prompt_token_ids[segment.begin : segment.end], np.int32)
    embeddings, is_embedded = [], np.zeros(len(tokens), bool)
    for feature in getattr(state, "mm_features", None) or ():
        span = feature.mm_position
        if not segment.begin <= span.offset < segment.end:
            continue
        output = runner.encoder_cache.get(feature.identifier)
        if output is None:
            raise InputError(f"chunk {segment.id[:12]}…: got no embeddings of an image; expected those of its prefill")
        embeddings.append(output)
        own = slice(span.offset - segment.begin, span.offset - segment.begin + span.length)
        is_embedded[own] = True if span.is_embed is None else np.asarray(span.is_embed)
    return LoneChunk(tenant, backbone, segment, tokens, local, tuple(embeddings), is_embedded)


class LoneForward:
    """Prefills chunks alone, in slices of `SLICE` tokens. For one thread; the engine's goes on with its own pages.

    Args:
      runner: the engine's runner.
      layout, pages: the layout and format of its pages.
      max_bytes: bytes of pages that may be held while a chunk is prefilled.

    Attributes:
      capacity: tokens of the longest chunk.
      nbytes: bytes of the pages.

    Raises:
      ConfigError: the runner has several devices, whose programs may deadlock if two threads launch them.
      ImportError, AttributeError, TypeError: it is not what tpu-inference 0.32 has.
    """

    def __init__(self, runner: Any, layout: KVLayout, pages: PageFormat, max_bytes: int):
        if runner.mesh.size != 1:
            raise ConfigError(f"forming: got an engine on {runner.mesh.size} devices; expected one")
        self._runner, self._layout, self._format = runner, layout, pages
        module = importlib.import_module("tpu_inference.layers.common.attention_metadata")
        self._metadata: Callable[..., Any] = module.AttentionMetadata

        own = runner.kv_caches
        page_size, page_bytes = own[0].shape[1], len(own) * own[0].nbytes // own[0].shape[0]
        tokens = min(MAX_TOKENS, runner.max_model_len, max_bytes // page_bytes * page_size)
        self._count = max(1, tokens // page_size)
        self.capacity, self.nbytes = self._count * page_size, self._count * page_bytes
        # Not asked for later: the engine donates its pages in every step.
        self._page, self._dtype = own[0].shape[1:], own[0].dtype
        self._shardings = [page.sharding for page in own]

    def compile(self) -> None:
        """Compiles the programs of a slice, of texts and of images, before requests come."""
        tokens = np.zeros(1, np.int32)
        axes = self._layout.rope.axes
        local = np.zeros((1,) if axes is None else (1, 3), np.int32)
        pages = self._slice(self._new_pages(), 0, tokens, local, None, np.zeros(1, bool))
        if self._runner.is_multimodal_model:
            width = self._runner.vllm_config.model_config.get_hidden_size()
            self._slice(pages, 0, tokens, local, np.zeros((1, width), pages[0].dtype), np.ones(1, bool))

    def prefill(self, chunk: LoneChunk, may_go_on: Callable[[int], bool]) -> EngineKV | None:
        """Prefills a chunk.

        Args:
          may_go_on: called with a number of tokens before they are computed; it waits until there is room for them.

        Returns:
          Its KV at start 0, {channel: [L, T, K, H]}; None if `may_go_on` returned False.

        Raises:
          InputError: the chunk is longer than `capacity`.
        """
        count = len(chunk.tokens)
        if count > self.capacity:
            raise InputError(f"chunk {chunk.segment.id[:12]}…: got {count} tokens; expected at most {self.capacity}")
        # On the host, because the number of embeddings differs from slice to slice and each would be a program.
        rows = np.concatenate([np.asarray(own) for own in chunk.embeddings]) if chunk.embeddings else None
        before = np.concatenate([[0], np.cumsum(chunk.is_embedded)])

        pages = self._new_pages()
        for first in range(0, count, SLICE):
            end = min(first + SLICE, count)
            if not may_go_on(end - first):
                return None
            own = None if rows is None or before[first] == before[end] else rows[before[first] : before[end]]
            part = slice(first, end)
            pages = self._slice(pages, first, chunk.tokens[part], chunk.local[part], own, chunk.is_embedded[part])
            jax.block_until_ready(pages)  # what is queued on the device would delay a request as well
        rows_of = self._format.read(self._layout, pages, np.arange(count, dtype=np.int32))
        return EngineKV({name: value.addressable_data(0) for name, value in rows_of.items()})

    def _new_pages(self) -> list[jax.Array]:
        return [jnp.zeros((self._count, *self._page), self._dtype, device=own) for own in self._shardings]

    def _slice(
        self,
        pages: list[jax.Array],
        first: int,
        tokens: Int[np.ndarray, " T"],
        local: Int[np.ndarray, "*positions"],
        embeddings: Float[np.ndarray, "_ D"] | None,
        is_embedded: Bool[np.ndarray, " T"],
    ) -> list[jax.Array]:
        """Prefills some tokens behind the first ones of a chunk, which the pages hold. Donates the pages."""
        runner, count = self._runner, len(tokens)
        place = jax.sharding.NamedSharding(runner.mesh, jax.sharding.PartitionSpec())

        def on_device(values: Sequence[Any] | np.ndarray) -> jax.Array:
            return jax.device_put(np.asarray(values), place)

        # As `_execute_model` of the runner does it for a batch of one request.
        ids = on_device(_padded(tokens))
        positions = on_device(_padded(local.astype(np.int32)).T)
        metadata = self._metadata(
            input_positions=positions,
            block_tables=on_device(np.arange(self._count, dtype=np.int32)),
            seq_lens=on_device(np.asarray([first + count], np.int32)),
            query_start_loc=on_device(np.asarray([0, count], np.int32)),
            request_distribution=on_device(np.asarray([0, 0, 1], np.int32)),
            padded_num_reqs=1,
        )
        layers = tuple(runner.layer_name_to_kvcache_index.items())
        with jax.set_mesh(runner.mesh):
            embedded = None
            if embeddings is not None:
                mask, rows = on_device(_padded(is_embedded)), [on_device(_padded(embeddings))]
                embedded = runner.embed_input_ids_fn(runner.state_leaves, ids, rows, is_multimodal=mask)
            pages, *_ = runner.model_fn(
                runner.state_leaves,
                pages,
                ids if embedded is None else None,
                metadata,
                embedded,
                positions,
                layers,
                None,  # no LoRA
                None,  # no earlier stage of a pipeline
                True,
                True,
                shared_attention_metadata=None,
            )
        return list(pages)


def _padded(values: np.ndarray) -> np.ndarray:
    """Fills up the first axis to a slice, so that one program serves all."""
    return np.pad(values, [(0, SLICE - len(values))] + [(0, 0)] * (values.ndim - 1))
