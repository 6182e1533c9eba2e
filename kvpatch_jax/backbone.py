"""Protocol of backbones: everything that `kvpatch_jax` requires of a model, and checks of a forward's arguments.

Axis letters: B batch, T tokens, S keys (context, then tokens), L layers, K KV heads, H head width, D model width,
V vocabulary. KV is {channel: [L,B,T,K,H]}. A forward returns phase-free KV; the context that it reads is in the engine
frame, as an ordinary attention kernel reads it.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .core import (
    PARTS,
    AnyArray,
    EngineKV,
    KVLayout,
    Paged,
    Start,
    check_paged,
    cut,
    expect_frame,
    jitted_fold,
    on_device,
    zero_padded,
)
from .errors import InputError, LayoutError, ShapeError

KV = Mapping[str, Array]
Context = Mapping[str, AnyArray] | Paged
"""KV that precedes tokens, in the engine frame: {channel: [L,B,S,K,H]}, or pages of a pool."""
Logits = Literal["last", "all"] | Int[AnyArray, "B n"]
"""Tokens whose logits a forward returns: the last, all, or those with these indices in each row.

Vocabularies are large: logits of 16 384 tokens over 152 064 words take 9.3 GiB.
"""


class Tokens(NamedTuple):
    """Inputs of the decoder for a prompt or a part of one.

    Attributes:
      embeddings: [B,T,D], token embeddings with image features in place (or the residual entering `start_layer`).
      positions: [B,T] or [B,T,A], absolute, integer or fractional, one per axis if the layout has axes; best kept on
        the host (NumPy), where checks do not wait for a device.
      deepstack: [B,T,n,D] or None, added to the residual that leaves layers 0 … n-1 (Qwen3-VL's image features); or
        what every layer takes of the tokens otherwise (Gemma 4).
      ahead: int32 [B,T], how many tokens behind its own a token sees too, as those of an image do that see each other
        (Gemma 3); None: none. A mask that a forward is given says all that is seen, and holds in its place.
    """

    embeddings: Array
    positions: Array | np.ndarray
    deepstack: Array | None = None
    ahead: Array | np.ndarray | None = None

    def take(self, start: int, stop: int) -> "Tokens":
        """Returns tokens start … stop-1."""
        return jax.tree.map(lambda value: cut(value, 1, start, stop), self)

    def pad(self, size: int) -> "Tokens":
        """Pads every row with zeros to `size` tokens, on the host: on a device every length would compile a program."""
        return jax.tree.map(lambda value: zero_padded(np.asarray(value), 1, size), self).on_device()

    def on_host(self) -> "Tokens":
        """Copies all arrays to the host, where no new length compiles a program."""
        return jax.tree.map(np.asarray, self)

    def on_device(self) -> "Tokens":
        """Moves embeddings and features to the device; positions and `ahead` stay where they are."""
        deepstack = None if self.deepstack is None else on_device(self.deepstack)
        return self._replace(embeddings=on_device(self.embeddings), deepstack=deepstack)

    def shift(self, start: Start | float) -> "Tokens":
        """Adds `start` to every position, so that the tokens follow cached chunks.

        Args:
          start: for all rows a scalar or (if the rope has axes) one per axis [A]; or one per row, [B] without axes and
            [B,A] with them. A float for tokens that begin between whole positions, which are float32 then.

        Raises:
          InputError: the start has another shape, or is an array of floats.
        """
        if isinstance(start, float) and np.isfinite(start):
            xp = jnp if isinstance(self.positions, jax.Array) else np
            return self._replace(positions=xp.asarray(self.positions, np.float32) + np.float32(start))
        offset = start if isinstance(start, jax.Array) else np.asarray(start)
        rows, axes = self.positions.shape[0], self.positions.shape[2:]
        if not jnp.issubdtype(offset.dtype, jnp.integer) or offset.shape not in ((), axes, (rows, *axes)):
            shown = f"start of dtype {offset.dtype} and shape {offset.shape}"
            raise InputError(f"shift: got {shown}; expected integers of shape (), {axes} or {(rows, *axes)}")
        offset = offset[:, None] if offset.shape == (rows, *axes) else offset
        return self._replace(positions=(self.positions + offset).astype(self.positions.dtype))


def joined_tokens(parts: Sequence[Tokens], axis: int = 1) -> Tokens:
    """Joins tokens behind one another, or (axis 0) rows of them; parts without features or `ahead` get zeros."""
    fields: list[Any] = []
    for values in zip(*parts, strict=True):
        like = next((value for value in values if value is not None), None)
        if like is None:
            fields.append(None)
            continue
        shapes = [(*part.embeddings.shape[:2], *like.shape[2:]) for part in parts]
        pairs = zip(values, shapes, strict=True)
        arrays = [np.zeros(shape, like.dtype) if value is None else value for value, shape in pairs]
        on_host = all(isinstance(array, np.ndarray) for array in arrays)
        fields.append((np if on_host else jnp).concatenate(arrays, axis=axis))
    return Tokens(*fields)


class Output(NamedTuple):
    """Result of a prefill.

    Attributes:
      logits: [B,n,V] float32, of the requested tokens: n is 1 for "last" and T for "all".
      kv: phase-free, {channel: [L,B,T,K,H]}; a prefill that starts at layer i returns the layers from i on.
      hidden: {layer: [B,T,D]}, the residual entering each requested layer.
    """

    logits: Array
    kv: dict[str, Array]
    hidden: dict[int, Array]


class Step(NamedTuple):
    """Result of running tokens into a cache.

    Attributes:
      logits: [B,n,V], of the requested tokens; n is 0 if the layers end below the last.
      cache: engine-frame KV with the tokens written, of the same type as the input: {channel: [L,B,S,K,H]} or `Paged`.
      hidden: {layer: [B,T,D]}, the residual entering each requested layer.
    """

    logits: Array
    cache: Any
    hidden: dict[int, Array]


class LayerAttention(NamedTuple):
    """What one layer's attention compares, in the engine frame. For MLA: absorbed queries, and one latent key head.

    Attributes:
      query: [B,T,N,H] of the tokens. keys: [B,S,K,H], all that may be seen.
      allowed: bool [B,1,T,S], True where a token may attend. scale: factor of the scores.
    """

    query: Array
    keys: Array
    allowed: Bool[Array, "B 1 T S"]
    scale: float

    def scores(self) -> Float[Array, "B N T S"]:
        """Computes the scores before softmax in float32, −inf where a token may not attend."""
        B, T, N, H = self.query.shape
        heads = self.keys.shape[2]
        grouped = self.query.reshape(B, T, heads, N // heads, H)
        scores = self.scale * jnp.einsum("BTKGH,BSKH->BKGTS", grouped, self.keys, preferred_element_type=jnp.float32)
        return jnp.where(self.allowed, scores.reshape(B, N, T, -1), -jnp.inf)


class ForwardCosts(NamedTuple):
    """FLOPs of a forward: of all its matrix products, two per multiply-add.

    Attributes:
      token: per token, by layer; of experts only those that a token is routed to.
      pair: per query and key that it attends to, by layer: scores and weighted values.
      window: by layer, the maximum number of keys a query attends to, including its own; 0: no limit.
      logit: per token whose logits are requested.
    """

    token: tuple[int, ...]
    pair: tuple[int, ...]
    window: tuple[int, ...]
    logit: int

    def flops(self, tokens: int, behind: int = 0, start_layer: int = 0) -> int:
        """Computes FLOPs of a forward over tokens that follow `behind` others, with causal attention; no logits."""
        token, layers = _layer_sums(self, start_layer)
        total = token * tokens
        for window, pair in layers:
            # Queries see one key more each until the window is full, and then `window` keys each.
            growing = min(max(window - behind, 0), tokens) if window else tokens
            total += pair * (growing * behind + growing * (growing + 1) // 2 + (tokens - growing) * window)
        return total


@functools.lru_cache(maxsize=256)
def _layer_sums(costs: ForwardCosts, start_layer: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Returns FLOPs per token, and (attention window, FLOPs per pair of tokens), summed over layers from one on."""
    pairs = Counter[int]()
    for pair, window in zip(costs.pair[start_layer:], costs.window[start_layer:], strict=True):
        pairs[window] += pair
    return sum(costs.token[start_layer:]), tuple(pairs.items())


@runtime_checkable
class Backbone(Protocol):
    """Model that can prepare, embed, prefill, recompute, decode and generate.

    Arguments and errors of forwards are these.

    Args:
      tokens: as `embed` returns them, with their positions in the sequence.
      context, cache: in the engine frame, {channel: [L,B,S,K,H]}, or pages of a pool, which are read in place and have
        N·O keys. Tokens follow a context, and are written into a cache at `slots`.
      mask: True where a token may attend, over [context, tokens] or the cache. None: the whole context, or slots up to
        a token's own, and causal.
      keep: tokens to write at each layer; the set of a layer must be a subset of that of the layer below.
      logits: tokens whose logits are returned.
      start_layer: layer that `tokens.embeddings` enters as the residual.
      hidden_at: layers whose entering residual is returned.

    Raises:
      LayoutError: a context or cache is in another frame. InputError: tokens start at position 0 after a context
      (`Tokens.shift` moves them). InputError, ShapeError: there are no tokens, or no batch axis; sets of `keep` are not
      nested, or a layer is out of range.
    """

    layout: KVLayout

    @property
    def fingerprint(self) -> str:
        """Digest of the weights, the configuration and the preprocessing: equal digests mean equal KV."""
        ...

    @property
    def forward_costs(self) -> ForwardCosts:
        """FLOPs per token, per query and key, and per logit, from which `window.Costs` are computed."""
        ...

    def prepare(self, items: Sequence[Any]) -> dict[str, Any]:
        """Converts texts and images, in order, to the processor's arrays (input_ids, pixel_values, position_ids, …).

        Raises:
          InputError: an image cannot be read, or an item is of an unknown kind.
        """
        ...

    @property
    def encode(self) -> Callable[..., AnyArray | None]:
        """encode(**prompt): runs only the vision tower; returns [n, E, D], or None for a prompt without images."""
        ...

    @property
    def embed(self) -> Callable[..., Tokens]:
        """embed(**prompt): runs the vision tower and looks up embeddings; takes the arrays of `prepare` by name.

        If `features`, the output of `encode` for this prompt, is passed, the tower does not run.
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
        lengths: Int[AnyArray, " B"] | None = None,
    ) -> Output:
        """Runs the decoder over tokens that follow a context.

        Args:
          chunk: tokens run at a time, which bounds memory; the result is the same within rounding. None: all.
          lengths: how many of each row's tokens count, the first ones: of padding behind them the layers of a hybrid
            model with linear attention leave nothing in its transition. None: all, or those that a mask leaves.
        """
        ...

    def recompute(
        self,
        tokens: Tokens,
        cache: Context,
        slots: Int[AnyArray, "B T"],
        keep: Bool[AnyArray, "L B T"] | None = None,
        mask: Bool[AnyArray, "B 1 T S"] | None = None,
        logits: Logits = "last",
        start_layer: int = 0,
        stop_layer: int | None = None,
        hidden_at: tuple[int, ...] = (),
    ) -> Step:
        """Recomputes tokens in context: runs them again and overwrites their KV in the cache at `slots`.

        Below `stop_layer` the layers end, and those from it on keep their KV; None: all layers run. Raises, and treats
        pages, as `decode`.
        """
        ...

    def attention(
        self,
        tokens: Tokens,
        context: Mapping[str, AnyArray],
        mask: Bool[AnyArray, "B 1 T S"] | None = None,
        *,
        layers: Sequence[int],
        reduce: Callable[[LayerAttention], Any],
        slots: Int[AnyArray, "B T"] | None = None,
        keep: Bool[AnyArray, "L B T"] | None = None,
        start_layer: int = 0,
    ) -> Any:
        """Runs tokens over a context, up to the highest of some layers, and reduces what these layers attend to.

        Args:
          layers: whose attention is reduced, ascending.
          reduce: maps a `LayerAttention` to arrays, the same at every layer, which are returned with a leading axis
            over `layers`. Traced, and compiled once for each function: pass one that is defined once, not a new lambda.
          slots: where the tokens are written into the context; None: they follow it.
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
        """Runs one or a few tokens: writes their KV into the cache at `slots` and returns their logits.

        The pool of a paged cache is donated and written in place. Its slots may lie in pages that are not in the tables
        yet. The returned cache has these pages and marks the written tokens as seen; pass it to the next step.

        Raises:
          KernelError: a slot is outside the pool, or appears twice. PoolError: the pool lacks a page, or was
          donated.
        """
        ...

    def generate(
        self,
        tokens: Tokens,
        steps: int,
        context: Context | None = None,
        mask: Bool[Array, "B 1 T S"] | None = None,
    ) -> Int[AnyArray, "B n"]:
        """Decodes greedily after tokens (and a context); returns up to `steps` token ids, fewer if all rows end."""
        ...


def check_is_backbone(backbone: Any, what: str) -> None:
    """Raises InputError unless an object has the attributes of a `Backbone`."""
    if not all(hasattr(backbone, word) for word in ("fingerprint", "layout", "prepare", "embed", "prefill")):
        raise InputError(f"{what}: got backbone {backbone!r:.80}; expected what models.load gives")


def check_tokens(tokens: Tokens, what: str) -> None:
    """Checks that a forward can run over tokens.

    Raises:
      InputError: `tokens` is not a `Tokens`, but a prompt that was not embedded, for example. ShapeError: there is no
      batch axis, or there are no tokens.
    """
    if not isinstance(tokens, Tokens):
        shown = f"a {type(tokens).__name__}" + (f" of {', '.join(tokens)}" if isinstance(tokens, Mapping) else "")
        raise InputError(f"{what}: got {shown}; expected Tokens, which backbone.embed(**backbone.prepare(items)) makes")
    shape, places = tuple(tokens.embeddings.shape), tuple(tokens.positions.shape)
    if len(shape) != 3 or places[:2] != shape[:2]:
        raise ShapeError(f"{what}: got embeddings {shape} and positions {places}; expected [B, T, D] and [B, T, …]")
    if 0 in shape[:2]:
        raise ShapeError(f"{what}: got embeddings {shape}; expected at least one row and one token")


def check_cached(layout: KVLayout, tokens: Tokens, kv: Context, what: str) -> None:
    """Checks that a context or cache is engine-frame KV of this layout with the tokens' number of rows.

    Raises:
      InputError: it is not KV. LayoutError, ShapeError: it is in another frame, belongs to another model, or has no
      batch axis. PoolError: as `check_paged`.
    """
    rows = tokens.embeddings.shape[0]
    if isinstance(kv, Paged):
        expect_frame(kv.pool, what, "engine")
        return check_paged(layout, kv, rows, what)
    if not isinstance(kv, Mapping):
        raise InputError(f"{what}: got a {type(kv).__name__}; expected KV, {{channel: [L, B, S, K, H]}}")
    expect_frame(kv, what, "engine")
    layout.check(kv, what)
    for name, value in kv.items():
        if value.ndim != 5 or value.shape[1] != rows:
            expected = f"[L, B, S, K, H] with the tokens' batch, B = {rows} (value[:, None] gives a batch of one)"
            raise ShapeError(f"{what}[{name!r}]: got shape {value.shape}; expected {expected}")


def joined(*parts: KV, lengths: Sequence[Int[AnyArray, "..."] | int] | None = None) -> EngineKV:
    """Concatenates chunks in the engine frame, in order, to one context; transitions of hybrid models are composed.

    Args:
      parts: {channel: [L, T, K, H]}, as `apply_patch` and `to_engine` return them, or [L, B, T, K, H] with one B.
      lengths: tokens of each that are not padding, a number or one for each row, which the convolution in front of
        linear attention asks; None: all T.

    Returns:
      {channel: [L, B, S, K, H]}, a context for `prefill` and `generate`; B = 1 for parts without a batch axis. A
      transition is that of all tokens, its map and state in float32.

    Raises:
      InputError: there are no parts, or another number of lengths. LayoutError, ShapeError: a part is in another frame,
      or channels or shapes of parts differ.
    """
    if not parts or not all(isinstance(part, Mapping) for part in parts):
        kinds = [type(part).__name__ for part in parts]
        raise InputError(f"joined: got parts {kinds}; expected KV in the engine frame, {{channel: [L, T, K, H]}}")
    if lengths is not None and len(lengths) != len(parts):
        raise InputError(f"joined: got {len(lengths)} lengths of {len(parts)} parts; expected as many")
    transition = [name for name in PARTS if name in parts[0]]
    is_complete = not transition or (transition[:2] == list(PARTS[:2]) and len(transition) < len(parts[0]))
    for part in parts:
        expect_frame(part, "joined", "engine")
        if set(part) != set(parts[0]) or not is_complete:
            shown = f"channels {sorted(part)} beside {sorted(parts[0])}"
            raise LayoutError(f"joined: got {shown}; expected the same, with rows of tokens, and a map with a state")

    batched = [{name: value[:, None] if value.ndim == 4 else value for name, value in part.items()} for part in parts]
    for name in parts[0]:
        # All axes are equal but that of the tokens, along which parts are joined.
        shapes = [part[name].shape for part in batched]
        if len(shapes[0]) != 5 or len({s if name in transition else (*s[:2], *s[3:]) for s in shapes}) != 1:
            raise ShapeError(f"joined[{name!r}]: got shapes {shapes}; expected [L, B, T, K, H] that differ in T alone")
    rows = [name for name in parts[0] if name not in transition]
    result = {name: jnp.concatenate([part[name] for part in batched], axis=2) for name in rows}
    if transition:
        counts = [part[rows[0]].shape[2] for part in batched] if lengths is None else list(map(jnp.asarray, lengths))
        result |= jitted_fold([{name: part[name] for name in transition} for part in batched], counts)
    return EngineKV({name: result[name] for name in parts[0]})
