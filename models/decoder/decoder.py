"""One decoder for every language tower with a KV cache: kinds of attention and of MLP behind switches.

Layers are stacked on a leading axis and scanned, in runs of one kind (the dense layers below a mixture of experts are a
stack of their own); where parameters are tuples with an array per layer (`unstacked`), a plain loop goes over them.
The decoder works on embeddings and positions; it never sees token
ids or images. Its KV comes out phase-free (after bias and qk-norm, before rotation); its cached context comes in in
the engine frame, as an ordinary attention kernel reads it.

Axis letters: B batch, T tokens, S keys, L layers, N query heads, K KV heads, H head width, D model width, V vocabulary.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.backbone import LayerAttention
from kvpatch_jax.core import Paged, rope_tables, rotate
from kvpatch_jax.errors import ShapeError

from ..attention import Mask, as_mask, attention
from .attention import Attend, GroupedAttention, LatentAttention
from .cached import KV, behind, read_pages, written_into, written_into_keys
from .config import DecoderConfig
from .layers import TABLE_SCALE, GatedMLP, Linear, RMSNorm, in_blocks, normal, product
from .moe import ExpertParam, Experts
from .stacks import layers_to_scan

TURNING = ("k", "kpe")
"""Channels that carry rotary phase."""


class DecoderLayer(nnx.Module):
    """One layer, or with `lead=(L,)` a stack of layers to scan over."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, lead: tuple[int, ...] = (), dense: bool = True):
        dtype = jnp.dtype(config.dtype)
        norm: dict[str, Any] = {"epsilon": config.norm_epsilon, "lead": lead, "dtype": dtype}
        mlp: dict[str, Any] = {"rngs": rngs, "activation": config.activation, "lead": lead, "dtype": dtype}
        self.input_norm = RMSNorm(config.width, **norm)
        kind = GroupedAttention if config.latent is None else LatentAttention
        self.attention = kind(config, rngs, lead, dtype)
        self.mlp_norm = RMSNorm(config.width, **norm)

        if config.experts is None or dense:
            self.mlp = GatedMLP(config.width, config.intermediate, bias=config.mlp_bias, **mlp)
        else:
            self.mlp = Experts(config.experts, config.width, **mlp)

        self.attention_post_norm = RMSNorm(config.width, **norm) if config.post_norms else None
        self.mlp_post_norm = RMSNorm(config.width, **norm) if config.post_norms else None


class LayerState(NamedTuple):
    """What a run over some layers leaves behind.

    hidden [B,T,D]: the residual after the last layer run. kv: phase-free KV of the tokens, per channel
    [L,B,T,K,H] over the layers run. cache: the context with the tokens written into it (engine frame), or None; of one
    in pages the tokens' own alone, [L,B,T,K,H], which are to be written into the pool.
    taps: {layer: residual [B,T,D] as it enters that layer}. load: how many of the counted tokens chose each expert,
    int32 [L,E] over the layers run that have experts; None where nothing is counted or there are none.
    observed: what `observe` made of the attention of the layers it was asked for, with a leading axis over them.
    """

    hidden: Array
    kv: KV
    cache: KV | None
    taps: dict[int, Array]
    load: Array | None = None
    observed: Any = None


class Earlier(NamedTuple):
    """A prompt's tokens of which a run is one stretch: those in front of it are read, whatever stands at the others.

    kv: phase-free KV, per channel [L,B,P,K,H] over all layers of the decoder. positions: of all P tokens. start: index
    of the run's first token, may be traced.
    """

    kv: Mapping[str, Array]
    positions: Array
    start: Array


class _Step(NamedTuple):
    cos: Array
    sin: Array
    mask: Mask
    slots: Array | None
    counted: Array | None
    whole: tuple[Array, Array, Array] | None  # cosines and sines of a prompt's tokens, and where the run starts
    paged: Paged | None  # a context in pages, which every layer looks up for itself
    observe: Callable[[LayerAttention], Any] | None = None  # in the layers whose attention is asked for
    attend: Attend = attention  # how queries attend over keys


class Decoder(nnx.Module):
    """Token embedding, stacked layers, final norm and (tied or own) output head.

    `layers` is the stack of all layers, or of those above `dense_layers` where the bottom ones are of another kind.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.embedding = nnx.Param(normal(rngs, (config.vocabulary, config.width), TABLE_SCALE, dtype))
        dense = config.dense_layers
        self.dense_layers = DecoderLayer(config, rngs, lead=(dense,)) if dense else None
        self.layers = DecoderLayer(config, rngs, lead=(config.layers - dense,), dense=config.experts is None)
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)

        linear: dict[str, Any] = {"bias": False, "rngs": rngs, "dtype": dtype}
        self.head = None if config.tied_embeddings else Linear(config.width, config.vocabulary, **linear)
        self.config = config

    def embed(self, input_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns token embeddings."""
        return jnp.take(self.embedding[...], input_ids, axis=0)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Applies the final norm and the output head, in float32."""
        hidden = self.norm(hidden)
        if self.head is None:
            return product(hidden, self.embedding[...], transposed=True)
        return product(hidden, self.head.kernel[...])

    def run(
        self,
        hidden: Float[Array, "B T D"],
        positions: Array,
        mask: Mask | Bool[Array, "B 1 T S"],
        *,
        context: Mapping[str, Any] | Paged | None = None,
        slots: Int[Array, "B T"] | None = None,
        earlier: Earlier | None = None,
        keep: Bool[Array, "L B T"] | None = None,
        start_layer: int = 0,
        stop_layer: int | None = None,
        hidden_at: tuple[int, ...] = (),
        deepstack: Float[Array, "n B T D"] | None = None,
        counted: Bool[Array, "B T"] | None = None,
        observed: tuple[int, ...] = (),
        observe: Callable[[LayerAttention], Any] | None = None,
        attend: Attend = attention,
    ) -> LayerState:
        """Runs layers start_layer … stop_layer-1 over the tokens.

        Args:
          hidden: residual entering `start_layer` (the embeddings when it is 0).
          positions: int or float positions [B,T] or [B,T,3] (M-RoPE: time, height, width).
          mask: where a token may look, within the window in layers that slide. Keys are [context, tokens] in that
            order without `slots`; with `slots` they are the context alone, into which the tokens are written first;
            with `earlier` [context, all P tokens of the prompt].
          context: engine-frame KV per channel, [L,B,S,K,H], over all layers of the decoder; with `slots` it may also be
            a tuple of L arrays [B,S,K,H]. Or pages of a pool, whose keys are [B,N·O,K,H]; those that do not count are
            zero. The pool is only read.
          slots: where in the context each token is written; out of range means nowhere.
          earlier: the prompt that the tokens are a stretch of, where it is run stretch by stretch.
          keep: which tokens are written at which layer (all of them when None).
          hidden_at: layers whose entering residual is to be returned (up to stop_layer, which taps the output).
          deepstack: added to the residual that leaves layers 0 … n-1 (Qwen3-VL: zero where there is no image).
          counted: the tokens whose experts are counted (not padding); None counts none.
          observed: layers, ascending, whose attention `observe` reduces.
          attend: how queries attend over keys, in every layer; where keys lie over a mesh, another than `attention`.

        Raises:
          ShapeError: a layer range or tap outside the decoder.
        """
        stop = self.config.layers if stop_layer is None else stop_layer
        if not 0 <= start_layer <= stop <= self.config.layers:
            raise ShapeError(
                f"layers: got {start_layer}…{stop}; expected layers of this decoder, 0…{self.config.layers}"
            )
        if any(not start_layer <= tap <= stop for tap in hidden_at):
            raise ShapeError(f"hidden_at: got {hidden_at}; expected layers of {start_layer}…{stop}")

        # Made once for all layers. A prompt that is run in stretches rotates its keys all together.
        cos, sin = rope_tables(self.config.rope, positions)
        whole = None if earlier is None else (*rope_tables(self.config.rope, earlier.positions), earlier.start)
        paged = context if isinstance(context, Paged) else None
        step = _Step(cos, sin, as_mask(mask, hidden.shape[1], slots), slots, counted, whole, paged, attend=attend)
        sliding = dataclasses.replace(step.mask, window=self.config.window)
        deep = 0 if deepstack is None else deepstack.shape[0]
        taps = {start_layer: hidden} if start_layer in hidden_at else {}
        contiguous = None if isinstance(context, Paged) or context is None else dict(context)
        cache, cached = (None, contiguous) if slots is None else (contiguous, None)
        front, edges = None if earlier is None else earlier.kv, (self.config.dense_layers, deep)
        pieces, loads, owns, seen = [], [], [], []

        # One scan goes through layers of one kind: it ends at taps and where the kind changes.
        around = {layer + after for layer in observed for after in (0, 1) if (layer - 1 + 2 * after) not in observed}
        inner = (edge for edge in (*edges, *self.config.window_edges, *around) if start_layer < edge < stop)
        bounds = sorted({start_layer, stop, *hidden_at, *inner})
        for first, last in itertools.pairwise(bounds):
            own = step._replace(mask=sliding) if self.config.slides(first) else step
            own = own._replace(observe=observe) if first in observed else own
            per_layer = (cached, keep, deepstack if first < deep else None, front)
            hidden, cache, (kv, load, found, turned) = self._run_layers((hidden, cache), own, per_layer, first, last)
            pieces.append(kv)
            owns.append(turned)
            seen += [found] if first in observed else []
            loads += [] if load is None else [load]
            if last in hidden_at:
                taps[last] = hidden

        cache = cache if paged is None or slots is None else _join(owns)
        load = jnp.concatenate(loads) if loads else None
        return LayerState(hidden, _join(pieces), cache, taps, load, _join(seen) if seen else None)

    def _run_layers(self, carry: tuple[Array, Any], step: _Step, per_layer: Any, first: int, last: int):
        """Returns layers first … last-1, which are all of one kind; `per_layer` is cut to them.

        A cache that is written into is carried along whole, so that a step writes its tokens and copies nothing else.
        """
        below = self.config.dense_layers
        stack, offset = (self.layers, below) if first >= below else (self.dense_layers, 0)
        graph, experts, state = nnx.split(stack, ExpertParam, ...)

        def body(carry: tuple[Array, Any], at: tuple[Any, Any, Any], experts: Any = experts, own: bool = False):
            state, (cached, kept, added, front), layer = at
            gather = self._gathering(carry[1], step, (cached, kept, front), layer)
            # The experts of a whole stack are not cut: that would copy all of a layer's, to use a few.
            number = None if own else layer - offset
            hidden, cache, out = self._layer(nnx.merge(graph, experts, state), number, carry[0], step, gather)
            hidden = hidden if added is None else hidden + added.astype(hidden.dtype)
            return (hidden, None if carry[1] is None else cache), (*out, cache if carry[1] is None else None)

        # Parameters in an array per layer: a loop that is unrolled, for steps on a CPU (`stacks`).
        if any(isinstance(leaf, tuple) for leaf in jax.tree.leaves(state, is_leaf=_unstacked)):
            pieces = []
            for layer in range(first, last):

                def pick(tree, at=layer - offset):
                    return jax.tree.map(lambda leaf: leaf[at], tree, is_leaf=_unstacked)

                rest = jax.tree.map(lambda leaf, at=layer: leaf[at], per_layer)
                carry, out = body(carry, (pick(state), rest, layer), pick(experts), own=True)
                pieces.append(out)
            return *carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *pieces)

        entries, taken = layers_to_scan(state, first - offset, last - offset)
        cut = jax.tree.map(lambda leaf: leaf[first:last], per_layer)

        def one(carry, at):
            return body(carry, (taken(at[0]), *at[1:]))

        carry, out = jax.lax.scan(one, carry, (entries, cut, jnp.arange(first, last)))
        return *carry, out

    def _gathering(self, cache: Any, step: _Step, own: Any, layer: Any) -> Callable[[KV, KV], tuple[KV, Any]]:
        """Returns what a layer attends over, as a function of its tokens' KV, phase-free and turned."""
        cached, kept, front = own
        if cache is not None:
            return functools.partial(written_into, cache, layer, step.slots, kept)
        if step.paged is not None and step.slots is not None:
            return functools.partial(written_into_keys, step.paged, self.config.layout, layer, step.slots, kept)

        if step.paged is not None:
            cached = read_pages(step.paged, self.config.layout, layer)
        if front is not None:
            return functools.partial(self._behind_earlier, cached, front, step)
        return functools.partial(behind, cached)

    def _layer(
        self, layer: Any, number: Array | None, hidden: Array, step: _Step, gather: Callable[[KV, KV], tuple[KV, Any]]
    ):
        """Runs one layer; returns its residual, the cache, and the tokens' phase-free KV, the experts' load, and what
        was observed of its attention.
        """
        query, kv = layer.attention.project(layer.input_norm(hidden))

        # Keys leave the layer phase-free, and are attended over in the engine frame.
        turned = self._turn({**kv, "query": query["turning"]}, (step.cos, step.sin))
        turning = turned.pop("query")
        keys, cache = gather(kv, turned)
        query = {**query, "turning": turning}
        mixed = layer.attention.mix(query, keys, step.mask, step.attend)
        seen = None
        if step.observe is not None:
            seen = step.observe(layer.attention.compared(query, keys, step.mask))
        # GLM-4-0414 norms what attention and MLP add as well.
        if layer.attention_post_norm is not None:
            mixed = layer.attention_post_norm(mixed)
        hidden = hidden + mixed
        inner, load = layer.mlp_norm(hidden), None

        if isinstance(layer.mlp, Experts):
            update = layer.mlp(inner, number)
            load = None if step.counted is None else layer.mlp.load(inner, step.counted)
        else:
            update = in_blocks(layer.mlp, inner)

        if layer.mlp_post_norm is not None:
            update = layer.mlp_post_norm(update)
        return hidden + update, cache, (kv, load, seen)

    def _turn(self, kv: KV, tables: Sequence[Array]) -> KV:
        """Returns KV with the channels that carry phase rotated by these cosines and sines."""
        rope, (cos, sin) = self.config.rope, tables

        def turn(x):
            return rotate(x, cos, sin, rope.cached, rope.attention_scaling)

        return {name: turn(value) if name in (*TURNING, "query") else value for name, value in kv.items()}

    def _behind_earlier(self, cached: KV | None, front: KV, step: _Step, kv: KV, _: KV) -> tuple[KV, None]:
        """Returns engine-frame KV to attend over: a layer's context, and the whole prompt with the tokens written
        into it.
        """
        assert step.whole is not None
        *tables, start = step.whole

        def write(name, new):
            return jax.lax.dynamic_update_slice_in_dim(front[name], new, start, axis=1)

        whole = {name: write(name, new) for name, new in kv.items()}
        return behind(cached, whole, self._turn(whole, tables))


def _unstacked(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def _join(pieces: list):
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *pieces) if pieces else {}
