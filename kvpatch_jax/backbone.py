"""What the cache asks of a model: the Protocol through which `kvpatch_jax` meets a backbone.

Axis letters: B batch, T tokens, S keys (context, then tokens), L layers, K KV heads, H head width, D model width,
V vocabulary. KV travels as {channel: [L,B,T,K,H]}; what a forward returns is phase-free, what it reads as context is in
the engine frame, as an ordinary attention kernel reads it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from .core import AnyArray, EngineKV, KVLayout, Paged, Start, check_paged, expect_frame
from .errors import InputError, LayoutError, PositionError, ShapeError

KV = Mapping[str, Array]
Context = KV | Paged
"""What stands in front of tokens, in the engine frame: {channel: [L,B,S,K,H]}, or pages of a pool."""
Logits = Literal["last", "all"] | Int[AnyArray, "B n"]
"""Of which tokens a forward gives logits: the last, all, or those with these indices in each row.

A vocabulary is large: logits of 16 384 tokens over 152 064 words take 9.3 GiB.
"""


class Tokens(NamedTuple):
    """A prompt, or part of one, ready for the decoder.

    embeddings [B,T,D]: token embeddings with image features in place (or the residual entering `start_layer`).
    positions [B,T] or [B,T,A]: absolute positions, integer or fractional, one per axis where the layout has axes; best
      kept on the host (NumPy), where looking at them costs nothing.
    deepstack [B,T,n,D] or None: what is added to the residual that leaves layers 0 … n-1 (Qwen3-VL's image features).
    """

    embeddings: Array
    positions: Array | np.ndarray
    deepstack: Array | None = None

    def take(self, start: int, stop: int) -> "Tokens":
        """Cuts out tokens start … stop-1."""
        deepstack = None if self.deepstack is None else self.deepstack[:, start:stop]
        return Tokens(self.embeddings[:, start:stop], self.positions[:, start:stop], deepstack)

    def shift(self, start: Start) -> "Tokens":
        """Moves every position by `start`: to ask behind cached chunks.

        Args:
          start: for all rows alike, a scalar or (where the rope has axes) one per axis [A]; or for each row its own,
            [B] without axes and [B,A] with them.

        Raises:
          PositionError: a start of another shape, or not an integer.
        """
        given = start if isinstance(start, jax.Array) else np.asarray(start)
        rows, axes = self.positions.shape[0], self.positions.shape[2:]
        if not jnp.issubdtype(given.dtype, jnp.integer) or given.shape not in ((), axes, (rows, *axes)):
            raise PositionError(
                f"shift: start of dtype {given.dtype} and shape {given.shape}; expected integers, one for all, or of "
                f"shape {(rows, *axes)}" + (f" or {axes}" if axes else "")
            )

        if given.shape == (rows, *axes):
            given = given[:, None]
        positions = self.positions + given
        return self._replace(positions=positions.astype(self.positions.dtype))


class Output(NamedTuple):
    """What a prefill gives: logits [B,n,V] float32, phase-free kv {channel: [L,B,T,K,H]}, hidden {layer: [B,T,D]}.

    Logits are of the tokens that were asked for: n is 1 for "last" and T for "all". A prefill that starts at layer i
    returns KV of the layers from i on. `hidden[i]` is the residual entering layer i.
    """

    logits: Array
    kv: dict[str, Array]
    hidden: dict[int, Array]


class Step(NamedTuple):
    """What decoding or recomputing gives: logits [B,n,V], and the cache with the tokens written in.

    The cache is engine-frame KV, of the kind that was given: {channel: [L,B,S,K,H]}, or `Paged`.
    """

    logits: Array
    cache: Any


class ForwardCosts(NamedTuple):
    """FLOPs of a forward: of all its matrix products, two for each multiplication with its addition.

    Attributes:
      token: per token, by layer; of experts only those that a token takes.
      pair: per query and key that it sees, by layer: scores and weighted values.
      window: by layer, how many keys a query sees at most, its own included; 0 where it sees all.
      logit: per token whose logits are wanted.
    """

    token: tuple[int, ...]
    pair: tuple[int, ...]
    window: tuple[int, ...]
    logit: int

    def flops(self, tokens: int, behind: int = 0, start_layer: int = 0) -> int:
        """Counts FLOPs of a forward over tokens, each seeing those in front and `behind` others; without logits."""
        pairs = Counter[int]()
        for pair, window in zip(self.pair[start_layer:], self.window[start_layer:], strict=True):
            pairs[window] += pair
        seen = sum(pair * seen_pairs(tokens, behind, window) for window, pair in pairs.items())
        return sum(self.token[start_layer:]) * tokens + seen


def seen_pairs(tokens: int, behind: int, window: int = 0) -> int:
    """Counts the keys that tokens see, one after the other behind `behind` others: itself and up to `window` in all."""
    if not window or behind + tokens <= window:
        return tokens * behind + tokens * (tokens + 1) // 2
    growing = min(max(window - behind, 0), tokens)
    return seen_pairs(growing, behind) + (tokens - growing) * window


@runtime_checkable
class Backbone(Protocol):
    """A model that can prepare, embed, prefill, recompute, decode and generate."""

    layout: KVLayout

    @property
    def fingerprint(self) -> str:
        """A digest of the weights, the configuration and the preprocessing: equal means equal KV."""
        ...

    @property
    def forward_costs(self) -> ForwardCosts:
        """FLOPs per token, per query and key, and per logit, which `window.Costs` counts with."""
        ...

    def prepare(self, items: Sequence[Any]) -> dict[str, Any]:
        """Turn texts and images, in order, into the processor's arrays (input_ids, pixel_values, position_ids, …).

        Raises:
          ImageError: an image that cannot be read. InputError: an item of an unknown kind.
        """
        ...

    @property
    def encode(self) -> Callable[..., AnyArray | None]:
        """encode(**prompt): run the vision tower alone; its output [n, E, D], or None for a prompt without images."""
        ...

    @property
    def embed(self) -> Callable[..., Tokens]:
        """embed(**prompt): run the vision tower and look up embeddings; takes what `prepare` returns, by name.

        With `features`, the output of `encode` for this prompt, the tower does not run.
        """
        ...

    def prefill(
        self,
        tokens: Tokens,
        context: Context | None = None,
        mask: Bool[Array, "B 1 T S"] | None = None,
        start_layer: int = 0,
        hidden_at: tuple[int, ...] = (),
        logits: Logits = "last",
        chunk: int | None = None,
    ) -> Output:
        """Run the decoder over tokens, behind an engine-frame context.

        Args:
          context: {channel: [L,B,S,K,H]}, or pages of a pool, which are read where they lie. It has N·O keys then.
          mask: True where a token may look, over [context, tokens]; causal behind the whole context when None.
          start_layer: `tokens.embeddings` is the residual entering this layer.
          hidden_at: layers whose entering residual is returned.
          logits: which tokens' logits are returned.
          chunk: tokens run at a time, which bounds memory; the result is the same within rounding. All when None.

        Raises:
          FrameError: a context that is known to be in another frame. PositionError: tokens that begin at position 0
          behind a context (`Tokens.shift` moves them there). InputError, ShapeError: no tokens, or no batch axis.
        """
        ...

    def recompute(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Int[Array, "B T"],
        keep: Bool[Array, "L B T"] | None = None,
        mask: Bool[Array, "B 1 T S"] | None = None,
        logits: Logits = "last",
    ) -> Step:
        """Recompute tokens in context: run them again and write their KV over the cache at `slots`.

        Args:
          tokens: the tokens to recompute, at their places in the sequence.
          cache: engine-frame KV of the whole sequence, {channel: [L,B,S,K,H]}, or its pages, as `decode` takes them.
          keep: per layer, which of the tokens are written; each layer's set must lie inside the one below.
          mask: True where a token may look, over the cache; slots up to its own when None.
          logits: which tokens' logits are returned.

        Raises:
          ShapeError: sets that are not nested.
        """
        ...

    def decode(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Int[Array, "B T"],
        mask: Bool[Array, "B 1 T S"] | None = None,
        logits: Logits = "last",
    ) -> Step:
        """Run one step (or a few tokens): write them into the cache at `slots` and read the logits behind them.

        A cache in pages has its pool donated, and written in place at these slots of the pool, which may lie in pages
        that its tables do not name yet. The step's cache names them, and counts the tokens that were written: it is
        what the next step takes.

        Raises:
          KernelSlotError: slots outside the pool, or named twice. PoolError: pages that the pool does not have, or a
          pool that was donated.
        """
        ...

    def generate(
        self,
        tokens: Tokens,
        steps: int,
        context: Context | None = None,
        mask: Bool[Array, "B 1 T S"] | None = None,
    ) -> Int[AnyArray, "B n"]:
        """Continue greedily behind tokens (and a context): the next `steps` token ids, or fewer where all rows end."""
        ...


def check_is_backbone(backbone: Any, what: str) -> None:
    """Raises InputError where what is given as a backbone is none."""
    if not all(hasattr(backbone, word) for word in ("fingerprint", "layout", "prepare", "embed", "prefill")):
        raise InputError(f"{what}: backbone {backbone!r:.80}; expected what models.load gives")


def check_tokens(tokens: Tokens, what: str) -> None:
    """Refuses what a forward cannot run over.

    Raises:
      InputError: no `Tokens`, such as a prompt that was not embedded. ShapeError: tokens without a batch axis, or none
      at all.
    """
    if not isinstance(tokens, Tokens):
        found = f"a {type(tokens).__name__}" + (f" of {', '.join(tokens)}" if isinstance(tokens, Mapping) else "")
        raise InputError(f"{what}: {found}; expected Tokens, which backbone.embed(**backbone.prepare(items)) makes")
    shape, places = tuple(tokens.embeddings.shape), tuple(tokens.positions.shape)
    if len(shape) != 3 or places[:2] != shape[:2]:
        raise ShapeError(f"{what}: embeddings {shape} and positions {places}; expected [B, T, D] and [B, T, …]")
    if 0 in shape[:2]:
        raise ShapeError(f"{what}: embeddings {shape}; expected at least one row and one token")


def check_cached(layout: KVLayout, tokens: Tokens, kv: Context, what: str) -> None:
    """Refuses a context or cache that is not engine-frame KV of this layout for these tokens' rows.

    Raises:
      FrameError: another frame. InputError: no KV at all. LayoutError, DtypeError, ShapeError: another model's KV, or
      KV without a batch axis. PoolError: of pages, as `check_paged` says.
    """
    if isinstance(kv, Paged):
        expect_frame(kv.pool, what, "engine")
        check_paged(layout, kv, tokens.embeddings.shape[0], what)
        return
    if not isinstance(kv, Mapping):
        raise InputError(f"{what}: a {type(kv).__name__}; expected KV, {{channel: [L, B, S, K, H]}}")

    expect_frame(kv, what, "engine")
    layout.check(kv, what)
    for name, value in kv.items():
        if value.ndim != 5 or value.shape[1] != tokens.embeddings.shape[0]:
            raise ShapeError(
                f"{what}[{name!r}]: shape {value.shape}; expected [L, B, S, K, H] with the tokens' batch, B = "
                f"{tokens.embeddings.shape[0]} (value[:, None] gives one chunk's KV a batch of one)"
            )


def check_behind(tokens: Tokens, context: Context, mask: AnyArray | None, what: str) -> None:
    """Refuses tokens that were not moved behind their context: a row that begins at position 0 and sees it.

    Positions that the host has (as `embed` and `shift` leave them) are looked at for nothing; those on a device are
    brought here; traced ones pass. Rows that begin with padding at position 0 pass, and so do rows whose first token
    the mask keeps from the whole context.

    Raises:
      PositionError: naming the row.
    """
    paged = isinstance(context, Paged)
    size = context.key_count if paged else next(iter(context.values())).shape[2]
    if size == 0 or isinstance(tokens.positions, Tracer) or (paged and isinstance(context.seen, Tracer)):
        return

    first = np.asarray(tokens.positions)[:, :2]
    at_start = (first == 0).all(axis=tuple(range(2, first.ndim)))  # [B, 2] or [B, 1]
    unmoved = at_start[:, 0] & ~at_start[:, 1:].any(axis=1)
    looks = np.asarray(context.seen) if paged else np.ones((1, size), bool)
    if unmoved.any() and mask is not None and not isinstance(mask, Tracer):
        looks = looks & np.asarray(mask)[:, 0, 0, :size]
    unmoved &= looks.any(axis=-1)
    if unmoved.any():
        raise PositionError(
            f"{what}: row {int(unmoved.argmax())} begins at position 0 behind a context of {size} tokens; expected "
            "positions behind it: tokens.shift(start), start being where the context's span ends"
        )


def joined(*parts: KV) -> EngineKV:
    """Joins chunks in the engine frame, in order, to a context of one row.

    Args:
      parts: {channel: [L, T, K, H]} each, as `apply_patch` and `to_engine` give them, or [L, B, T, K, H] of one batch.

    Returns:
      {channel: [L, B, S, K, H]}, B = 1 for parts without a batch axis: what `prefill` and `generate` read behind.

    Raises:
      InputError: no parts. FrameError: a part in another frame. LayoutError, ShapeError: parts that do not fit.
    """
    if not parts or not all(isinstance(part, Mapping) for part in parts):
        found = [type(part).__name__ for part in parts]
        raise InputError(f"joined: parts {found}; expected KV in the engine frame, {{channel: [L, T, K, H]}}")
    for part in parts:
        expect_frame(part, "joined", "engine")
        if set(part) != set(parts[0]):
            raise LayoutError(f"joined: channels {sorted(part)}; expected {sorted(parts[0])}")
    return EngineKV({name: _joined([part[name] for part in parts], name) for name in parts[0]})


def _joined(values: list[AnyArray], name: str) -> Array:
    with_batch = [value[:, None] if value.ndim == 4 else value for value in values]
    around = lambda value: (*value.shape[:2], *value.shape[3:])
    for given, value in zip(values, with_batch, strict=True):
        if value.ndim != 5 or around(value) != around(with_batch[0]):
            raise ShapeError(f"joined[{name!r}]: shape {given.shape}; expected to go with {values[0].shape}, but for T")
    return jnp.concatenate(with_batch, axis=2)
