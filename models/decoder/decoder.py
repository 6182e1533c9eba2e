"""One decoder for every language tower with a KV cache: kinds of attention and of MLP behind switches.

Layers are stacked on a leading axis and scanned, in runs of one kind (the dense layers below a mixture of experts are a
stack of their own).
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
from kvpatch_jax.core import Channel, Paged, Rope, compose, rope_tables, rotate
from kvpatch_jax.errors import ShapeError

from ..attention import Mask, as_mask, attention
from .attention import Attend
from .cached import KV, among, behind, keys_of
from .config import DecoderConfig
from .decoder_layer import DecoderLayer
from .layers import ACTIVATIONS, TABLE_SCALE, Linear, RMSNorm, in_blocks, normal, product
from .linear_attention import LinearAttention
from .moe import ExpertParam, Experts
from .stacks import layers_to_scan

TURNING = ("k", "kpe")
"""Channels that carry rotary phase."""


class LayerState(NamedTuple):
    """What a run over some layers leaves behind.

    hidden [B,T,D]: the residual after the last layer run. kv: phase-free KV of the tokens, per channel
    [L,B,T,K,H] over the layers run, and the transition of these tokens alone, [L,B,R,K,W] by part (of no layers where
    `slots` are given: the composed one is `written`). written: their engine-frame KV, alike, where `slots` are given:
    what `cached.written_into` writes into the context.
    taps: {layer: residual [B,T,D] as it enters that layer}. load: how many of the counted tokens chose each expert,
    int32 [L,E] over the layers run that have experts; None
    where nothing is counted or there are none.
    observed: what `observe` made of the attention of the layers it was asked for, with a leading axis over them.
    """

    hidden: Array
    kv: KV
    written: dict[str, Any] | None
    taps: dict[int, Array]
    load: Array | None = None
    observed: Any = None


class Earlier(NamedTuple):
    """A prompt's tokens of which a run is one stretch: those in front of it are read, whatever stands at the others.

    kv: phase-free KV, per channel [L,B,P,K,H] over all layers of the decoder, and the transition of the tokens in front
    alone. positions: of all P tokens. start: index of the run's first token, may be traced. count: how many of those in
    front are no padding, int32 [B], for layers with linear attention.
    """

    kv: Mapping[str, Array]
    positions: Array
    start: Array
    count: Array | None = None


class _Step(NamedTuple):
    rope: Rope
    tables: tuple[Array, Array]  # cosines and sines of the tokens
    mask: Mask
    slots: Array | None
    counted: Array | None
    whole: tuple[Array, Array, Array] | None  # cosines and sines of a prompt's tokens, and where the run starts
    channels: dict[str, Channel]  # of the layers' KV, as attention calls it, those of the layout
    context: Mapping[str, Any] | Paged | None  # one in pages or written into: every layer looks it up for itself
    observe: Callable[[LayerAttention], Any] | None = None  # in the layers whose attention is asked for
    shared: KV | None = None  # engine-frame KV of the layer that these ones read, with its context
    attend: Attend = attention  # how queries attend over keys
    filled: Array | None = None  # which tokens are no padding, for layers with linear attention
    front_count: Array | None = None  # how many are in front of the run, where it is a stretch of a prompt


class Decoder(nnx.Module):
    """Token embedding, stacked layers, final norm and (tied or own) output head.

    `layers` is the stack of all layers, or of those above `dense_layers` where the bottom ones are of another kind;
    layers of unlike shapes are stacks of their own (`DecoderConfig.stacks`).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.embedding = nnx.Param(normal(rngs, (config.vocabulary, config.width), TABLE_SCALE, dtype))
        made = {}
        for name, layers in config.stacks:
            dense, kind = name == "dense_layers" or config.experts is None, config.layer_kinds[layers[0]]
            made[name] = DecoderLayer(config, rngs, lead=(len(layers),), dense=dense, kind=kind)
        self.dense_layers = made.pop("dense_layers", None)
        for name, stack in made.items():
            setattr(self, name, stack)
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, weight=config.norm_weight)

        linear: dict[str, Any] = {"bias": False, "rngs": rngs, "dtype": dtype}
        self.head = None if config.tied_embeddings else Linear(config.width, config.vocabulary, **linear)
        width, own = config.layers * (config.per_layer or 0), config.per_layer is not None
        table, norm = (config.per_layer_vocabulary, width), {"epsilon": config.norm_epsilon, "dtype": dtype}
        self.token_table = nnx.Param(normal(rngs, table, TABLE_SCALE, dtype)) if own else None
        self.token_map = Linear(config.width, width, **linear) if own else None
        self.token_norm = RMSNorm(config.per_layer or 0, **norm, weight=config.norm_weight) if own else None
        self.config = config

    def embed(self, input_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns token embeddings."""
        found = jnp.take(self.embedding[...], input_ids, axis=0)
        # Rounded to the embeddings' type, as those who trained with it did.
        scale = self.config.embedding_scale
        return found if scale is None else found * jnp.asarray(scale, found.dtype)

    def of_tokens(
        self, input_ids: Int[Array, "B T"], embeddings: Float[Array, "B T D"], pads: tuple[int, ...] = ()
    ) -> Array | None:
        """Returns what every layer takes of each token beside its embedding, [B,T,L,P]; None of decoders without.

        The tokens `pads`, in whose place features stand, have the vectors of the configuration's `blank`.

        Source: `get_per_layer_inputs` and `project_per_layer_inputs` of transformers' Gemma4TextModel.
        """
        if self.token_table is None or self.token_map is None or self.token_norm is None:
            return None
        config, shape = self.config, (*input_ids.shape, self.config.layers, -1)
        assert config.per_layer is not None
        input_ids = jnp.where(jnp.isin(input_ids, jnp.array(pads)), config.blank, input_ids) if pads else input_ids
        found = jnp.take(self.token_table[...], input_ids, axis=0)
        own = (found * jnp.asarray(config.per_layer**0.5, found.dtype)).reshape(shape)
        mapped = (self.token_map(embeddings) * config.width**-0.5).reshape(shape)
        return (self.token_norm(mapped) + own) * 2.0**-0.5

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Applies the final norm, the output head and, where there is one, the cap on logits, in float32."""
        hidden = self.norm(hidden)
        kernel = self.embedding[...] if self.head is None else self.head.kernel[...]
        found, cap = product(hidden, kernel, transposed=self.head is None), self.config.logit_cap
        return found if cap is None else cap * jnp.tanh(found / cap)

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
        deepstack: Float[Array, "n B T _"] | None = None,
        counted: Bool[Array, "B T"] | None = None,
        filled: Bool[Array, "B T"] | None = None,
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
            zero. It is only read: what is to be written is returned.
          slots: the key of the context that each token becomes; one past the last is nowhere.
          earlier: the prompt that the tokens are a stretch of, where it is run stretch by stretch.
          keep: which tokens are written at which layer (all of them when None).
          hidden_at: layers whose entering residual is to be returned (up to stop_layer, which taps the output).
          deepstack: added to the residual that leaves layers 0 … n-1 (Qwen3-VL: zero where there is no image); of a
            decoder with `per_layer`, what each layer takes of the tokens (`of_tokens`).
          counted: the tokens whose experts are counted (not padding); None counts none.
          filled: the tokens that are no padding, for layers with linear attention, which know of no mask; None: all.
          observed: layers, ascending, whose attention `observe` reduces.
          attend: how queries attend over keys, in every layer; where keys lie over a mesh, another than `attention`.

        Raises:
          ShapeError: a layer range or tap outside the decoder; layers that read the KV of one below them that is not
            run, where no cache holds it.
        """
        stop = self.config.layers if stop_layer is None else stop_layer
        if not 0 <= start_layer <= stop <= self.config.layers:
            raise ShapeError(
                f"layers: got {start_layer}…{stop}; expected layers of this decoder, 0…{self.config.layers}"
            )
        if any(not start_layer <= tap <= stop for tap in hidden_at):
            raise ShapeError(f"hidden_at: got {hidden_at}; expected layers of {start_layer}…{stop}")

        # Made once for all layers that turn alike. A prompt that is run in stretches rotates its keys all together.
        config, mask = self.config, as_mask(mask, hidden.shape[1], slots)
        # What is contiguous and only read is scanned over: looking it up has dear derivatives.
        looked_up = context if slots is not None or isinstance(context, Paged) else None
        cached: Any = context if looked_up is None else None
        steps: dict[Rope, _Step] = {}
        for rope in dict.fromkeys(kind.rope for kind in config.layer_kinds[start_layer:stop] or config.layer_kinds[:1]):
            tables = rope_tables(rope, positions)
            whole = None if earlier is None else (*rope_tables(rope, earlier.positions), earlier.start)
            steps[rope] = _Step(rope, tables, mask, slots, counted, whole, {}, looked_up, attend=attend, filled=filled)
            steps[rope] = steps[rope]._replace(front_count=None if earlier is None else earlier.count)
        deep = 0 if deepstack is None else deepstack.shape[0]
        taps = {start_layer: hidden} if start_layer in hidden_at else {}
        front, edges = None if earlier is None else earlier.kv, (config.dense_layers, deep)
        pieces, loads, owns, seen, latest = [], [], [], [], dict[str, KV]()

        # One scan goes through layers of one kind: it ends at taps and where the kind changes.
        around = {layer + after for layer in observed for after in (0, 1) if (layer - 1 + 2 * after) not in observed}
        inner = (edge for edge in (*edges, *config.kind_edges, *around) if start_layer < edge < stop)
        bounds = sorted({start_layer, stop, *hidden_at, *inner})
        for first, last in itertools.pairwise(bounds):
            kind = config.layer_kinds[first]
            channels = {name: config.layout.channel(theirs) for name, theirs in config.channels_of(first).items()}
            own = steps[kind.rope]._replace(channels=channels, observe=observe if first in observed else None)
            if kind.window is not None:
                own = own._replace(mask=dataclasses.replace(mask, window=kind.window))
            elif config.ahead_in_windows and mask.ahead is not None:
                own = own._replace(mask=dataclasses.replace(mask, ahead=None))
            # Keys of the layers, which lie where these do along their channels; all else goes by the layer's number.
            row = slice(config.rows[first], config.rows[first] + last - first)
            keys = tuple(None if kv is None else _renamed(kv, channels, row) for kv in (cached, front))
            if kind.reads:
                own = own._replace(shared=self._read(own, (cached, keep, front), latest.get(kind.name), first))
                keys = (None, None)
            per_layer = (keys, (keep, deepstack if first < deep else None))
            hidden, (kv, load, found, written) = self._run_layers(hidden, own, per_layer, first, last)
            pieces.append({channels[name].name: value for name, value in kv.items()})
            owns.append({channels[name].name: value for name, value in (written or {}).items()})
            own_rows = not kind.reads and kind.linear is None
            latest |= {} if not own_rows else {kind.name: {name: value[-1] for name, value in kv.items()}}
            seen += [found] if first in observed else []
            loads += [] if load is None else [load]
            if last in hidden_at:
                taps[last] = hidden

        written = None if slots is None else self._by_channel(owns, hidden)
        load = jnp.concatenate(loads) if loads else None
        return LayerState(hidden, self._by_channel(pieces, hidden), written, taps, load, _join(seen) if seen else None)

    def _read(self, step: _Step, around: Any, tokens: KV | None, layer: int) -> KV:
        """Returns what layers attend over that read another's KV: that one's context, and the tokens' KV in it."""
        (cached, keep, front), source = around, self.config.sources[layer]
        row = self.config.rows[layer]
        if tokens is None and step.slots is None:
            raise ShapeError(
                f"start_layer: got a layer above {source}, whose KV layer {layer} reads; expected {source} or a layer "
                "below, or a cache that holds its KV"
            )
        if tokens is None:
            # The tokens were written before.
            context: Any = step.context
            keys = keys_of(context, step.channels, row)
            return {name: value.astype(self.embedding.dtype) for name, value in keys.items()}

        def of_source(kv):
            return None if kv is None else {name: kv[theirs.name][row] for name, theirs in step.channels.items()}

        kept = None if keep is None else keep[source]
        gather = self._gathering(step, (of_source(cached), kept, of_source(front)), row)
        return gather(tokens, _turn(tokens, step.rope, step.tables))[0]

    def _by_channel(self, pieces: list[Any], hidden: Array) -> dict[str, Any]:
        """Joins the KV of runs of layers, channel by channel; of one that no layer keeps, an array of no layers."""
        if self.config.layout.uniform:
            return _join(pieces)
        joined = {}
        for channel in self.config.layout.channels:
            own = [piece[channel.name] for piece in pieces if channel.name in piece]
            rows = hidden.shape[1] if channel.rows is None else channel.rows
            none = jnp.zeros((0, hidden.shape[0], rows, channel.heads, channel.width), hidden.dtype)
            joined[channel.name] = _join(own) if own else none
        return joined

    def _run_layers(self, hidden: Array, step: _Step, per_layer: Any, first: int, last: int) -> tuple[Array, Any]:
        """Runs layers first … last-1, which are all of one kind; of `per_layer` the first is theirs alone, and the
        rest, of all layers, is cut to them.
        """
        name, place = self.config.place(first)
        graph, experts, state = nnx.split(getattr(self, name), ExpertParam, ...)
        offset = first - place
        above, (keys, others) = self.config.rows[first] - first, per_layer
        per_layer = (keys, jax.tree.map(lambda leaf: leaf[first:last], others))

        def body(
            hidden: Array,
            at: tuple[Any, Any, Any],
        ):
            state, ((cached, front), (kept, added)), layer = at
            # Where the layer's KV lies along its channels; as far from its number in all of the run.
            row = layer + above if above else layer
            linear = self.config.layer_kinds[first].linear is not None
            gather: Any
            if linear:
                gather = self._transition_before(step, cached, front, row)
            else:
                gather = self._gathering(step, (cached, kept, front), row)
            # The experts of a whole stack are not cut: that would copy all of a layer's, to use a few.
            own_input = None if self.config.per_layer is None else added
            layer_of = nnx.merge(graph, experts, state)
            hidden, out = self._layer(layer_of, layer - offset, hidden, own_input, step, gather)
            if added is not None and own_input is None:
                hidden = hidden + added.astype(hidden.dtype)
            return hidden, out

        entries, taken = layers_to_scan(state, first - offset, last - offset, hidden.shape[0] * hidden.shape[1])

        def one(hidden, at):
            own, rest, layer = at
            return body(hidden, (taken(own, layer - offset), rest, layer))

        return jax.lax.scan(one, hidden, (entries, per_layer, jnp.arange(first, last)))

    def _gathering(self, step: _Step, own: Any, row: Any) -> Callable[[KV, KV], tuple[KV, Any]]:
        """Returns what a layer attends over, and writes, as a function of its tokens' KV, phase-free and turned.

        `row` is the layer's place along its channels.
        """
        cached, kept, front = own
        if step.shared is not None:
            return lambda kv, turned: (step.shared or {}, {})
        if step.context is not None and step.slots is not None:
            return functools.partial(among, step.context, step.channels, row, step.slots, kept)
        if step.context is not None:
            cached = keys_of(step.context, step.channels, row)
        if front is not None:
            return functools.partial(self._behind_earlier, cached, front, step)
        return functools.partial(behind, cached)

    def _transition_before(self, step: _Step, cached: KV | None, front: KV | None, row: Any) -> KV | None:
        """Returns the transition of what is in front of a layer's tokens: its context, and the prompt's tokens before
        the run's; None where nothing is.
        """
        if step.context is not None:
            cached = keys_of(step.context, step.channels, row)
        if cached is None or front is None:
            return front if cached is None else cached
        return compose(cached, front, step.front_count)

    def _layer(
        self,
        layer: Any,
        number: Array | None,
        hidden: Array,
        own_input: Array | None,
        step: _Step,
        gather: Any,
    ):
        """Runs one layer; returns its residual, and the tokens' phase-free KV, the experts' load, what was observed of
        its attention, and what is to be written.

        `gather` is as `_gathering` gives it; of linear attention the transition in front.
        """
        seen, normed = None, layer.input_norm(hidden)
        if isinstance(layer.attention, LinearAttention):
            composed = step.slots is not None
            mixed, transition = layer.attention(normed, gather, step.filled, composed)
            kv, written = ({}, transition) if composed else (transition, None)
        else:
            query, kv = layer.attention.project(normed)

            # Keys leave the layer phase-free, and are attended over in the engine frame.
            turned = _turn({**kv, "query": query["turning"]}, step.rope, step.tables)
            turning = turned.pop("query")
            keys, written = gather(kv, turned)
            query = {**query, "turning": turning}
            mixed = layer.attention.mix(query, keys, step.mask, step.attend)
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
        if layer.experts is not None:
            mixed = layer.experts(layer.experts_norm(hidden), number, chosen_by=hidden)
            update = layer.mlp_inner_norm(update) + layer.experts_post_norm(mixed)
            load = None if step.counted is None else layer.experts.load(hidden, step.counted)

        if layer.mlp_post_norm is not None:
            update = layer.mlp_post_norm(update)
        hidden = hidden + update
        if layer.token_gate is not None:
            assert own_input is not None
            gated = ACTIVATIONS[layer.activation](layer.token_gate(hidden)) * own_input
            hidden = hidden + layer.token_norm(layer.token_output(gated.astype(hidden.dtype)))
        hidden = hidden if layer.scale is None else hidden * layer.scale[...].astype(hidden.dtype)
        return hidden, (kv, load, seen, written)

    def _behind_earlier(self, cached: KV | None, front: KV, step: _Step, kv: KV, _: KV) -> tuple[KV, None]:
        """Returns engine-frame KV to attend over: a layer's context, and the whole prompt with the tokens written
        into it.
        """
        assert step.whole is not None
        *tables, start = step.whole

        def write(name, new):
            return jax.lax.dynamic_update_slice_in_dim(front[name], new, start, axis=1)

        whole = {name: write(name, new) for name, new in kv.items()}
        return behind(cached, whole, _turn(whole, step.rope, tables))


def _turn(kv: KV, rope: Rope, tables: Sequence[Array]) -> KV:
    """Returns KV with the channels that carry phase rotated by these cosines and sines."""
    cos, sin = tables

    def turn(x):
        return rotate(x, cos, sin, rope.cached, rope.attention_scaling)

    return {name: turn(value) if name in (*TURNING, "query") else value for name, value in kv.items()}


def _renamed(kv: Mapping[str, Any], channels: Mapping[str, Channel], rows: slice) -> KV:
    """Returns some layers' KV of all that there is, by the names that attention has for it."""
    return {name: kv[theirs.name][rows] for name, theirs in channels.items()}


def _join(pieces: list):
    """Joins arrays over layers."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *pieces) if pieces else {}
