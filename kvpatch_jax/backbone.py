"""What the cache asks of a model: the Protocol through which `kvpatch_jax` meets a backbone.

Axis letters: B batch, T tokens, S keys (context, then tokens), L layers, K KV heads, H head width, D model width,
V vocabulary. KV travels as {channel: [L,B,T,K,H]}; what a forward returns is phase-free, what it reads as context is in
the engine frame, as an ordinary attention kernel reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Int

from .chunk import Chunk
from .content import items_of, one_form
from .layout import KVLayout

KV = Mapping[str, Array]


class Tokens(NamedTuple):
    """A prompt, or part of one, ready for the decoder.

    embeddings [B,T,D]: token embeddings with image features in place (or the residual entering `start_layer`).
    positions [B,T] or [B,T,A]: absolute positions, integer or fractional, one per axis where the layout has axes.
    deepstack [B,T,n,D] or None: what is added to the residual that leaves layers 0 … n-1 (Qwen3-VL's image features).
    """

    embeddings: Array
    positions: Array
    deepstack: Array | None = None

    def take(self, start: int, stop: int) -> "Tokens":
        """Tokens start … stop-1."""
        deepstack = None if self.deepstack is None else self.deepstack[:, start:stop]
        return Tokens(self.embeddings[:, start:stop], self.positions[:, start:stop], deepstack)


class Output(NamedTuple):
    """What a prefill gives: logits [B,T,V] float32, phase-free kv {channel: [L,B,T,K,H]}, hidden {layer: [B,T,D]}.

    A prefill that starts at layer n returns KV of the layers from n on. `hidden[n]` is the residual entering layer n.
    """

    logits: Array
    kv: dict[str, Array]
    hidden: dict[int, Array]


class Step(NamedTuple):
    """What decoding or recomputing gives: logits [B,T,V], and the engine-frame cache with the tokens written in."""

    logits: Array
    cache: dict[str, Array]


@runtime_checkable
class Backbone(Protocol):
    """A model that can prepare, embed, prefill, recompute, decode and generate."""

    layout: KVLayout

    @property
    def fingerprint(self) -> str:
        """A digest of the weights, the configuration and the preprocessing: equal means equal KV."""
        ...

    def prepare(self, items: Sequence[Any]) -> dict[str, Any]:
        """Texts and images, in order, to the processor's arrays (input_ids, pixel_values, position_ids, …).

        Raises:
          ImageError: an image that cannot be read. InputError: an item of an unknown kind.
        """
        ...

    @property
    def embed(self) -> Callable[..., Tokens]:
        """embed(**prompt): run the vision tower and look up embeddings; takes what `prepare` returns, by name."""
        ...

    def prefill(
        self,
        tokens: Tokens,
        context: KV | None = None,
        mask: Bool[Array, "B 1 T S"] | None = None,
        start_layer: int = 0,
        hidden_at: tuple[int, ...] = (),
    ) -> Output:
        """Run the decoder over tokens, behind an engine-frame context.

        Args:
          mask: True where a token may look, over [context, tokens]; causal behind the whole context when None.
          start_layer: `tokens.embeddings` is the residual entering this layer.
          hidden_at: layers whose entering residual is returned.
        """
        ...

    def recompute(
        self,
        tokens: Tokens,
        cache: KV,
        slots: Int[Array, "B T"],
        keep: Bool[Array, "L B T"] | None = None,
        mask: Bool[Array, "B 1 T S"] | None = None,
    ) -> Step:
        """Recompute tokens in context: run them again and write their KV over the cache at `slots`.

        Args:
          tokens: the tokens to recompute, at their places in the sequence.
          cache: engine-frame KV of the whole sequence, {channel: [L,B,S,K,H]}.
          keep: per layer, which of the tokens are written; each layer's set must lie inside the one below.
          mask: True where a token may look, over the cache; slots up to its own when None.

        Raises:
          ShapeError: sets that are not nested.
        """
        ...

    def decode(
        self,
        tokens: Tokens,
        cache: KV,
        slots: Int[Array, "B T"],
        mask: Bool[Array, "B 1 T S"] | None = None,
    ) -> Step:
        """One step (or a few tokens): write them into the cache at `slots` and read the logits behind them."""
        ...

    def generate(
        self,
        tokens: Tokens,
        steps: int,
        context: KV | None = None,
        mask: Bool[Array, "B 1 T S"] | None = None,
    ) -> Int[Array, "B steps"]:
        """Greedy continuation behind tokens (and a context): the next `steps` token ids."""
        ...


def make_chunk(backbone: Backbone, items: Sequence[Any], id: str | None = None) -> Chunk:
    """Prefill one unit alone and keep its KV position-free: the canonical.

    Args:
      items: texts and images as `backbone.prepare` takes them; an image brings its start and end tokens along.
      id: the chunk's name, which patches are stamped with; None: `store.chunk_id` of the items, as libraries and the
        linker name the same content.

    Returns:
      A Chunk of one unpadded row, whose content is the items' digest; its span is one more than its largest local
      position.

    Raises:
      ImageError, InputError: as `prepare`. NotFiniteError: the forward gave NaN or infinity.
    """
    from .store.ids import chunk_id  # which itself stands on chunks

    items = [one_form(item) for item in items_of(items, "make_chunk")]
    content = chunk_id(backbone.fingerprint, *items)
    tokens = backbone.embed(**backbone.prepare(items))
    local = np.asarray(tokens.positions)[0]
    return Chunk(
        kv={name: value[:, 0] for name, value in backbone.prefill(tokens).kv.items()},
        local=local,
        span=int(local.max()) + 1,
        length=len(local),
        id=content if id is None else id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=content,
    )


def moved(tokens: Tokens, start: int) -> Tokens:
    """The same tokens with every position moved by `start`: to ask behind cached chunks."""
    return tokens._replace(positions=tokens.positions + start)
