"""The jitted programs of one model: its tower, embedding, prefill, recompute, and the tokens that continue a prompt.

Parameters are an argument of every program, never a constant inside one. Positions, slots, masks and caches are traced,
so that neither another prompt of the same shape nor another place compiles anew.

Axis letters: B batch, T tokens, S keys, E image features, n arrays per feature (itself, then one per deepstack layer).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.answers import AnswerRows, Draws
from kvpatch_jax.backbone import KV, Context, LayerAttention, Output, Recomputed, Step, Tokens
from kvpatch_jax.core import Buckets, KVLayout, Paged, end_position, to_engine

from .attention import Mask, as_mask
from .attention.mask import NOWHERE
from .decoder.cached import read_all_pages, written_into_pages
from .decoder.sharding import auto_mesh, cache_shardings, split_mesh
from .decoder.stacks import unstacked
from .families.family import embed_tokens
from .inputs.masks import causal_mask, paged_mask
from .prefill import by_layer, entering, run_prompt, take_tokens
from .sampling import REFUSED, Draw, choose, choose_rows

STEP_TOKENS = 16
"""Tokens of all rows up to which a forward is bound by reading the weights."""
BLOCK = 32
"""Tokens that one call of `advance` can make."""


class Continuation(NamedTuple):
    """What stands behind a prompt so far, between the blocks that tokens are made in.

    token [B]: the last one chosen, whose KV the cache does not have yet. count []: how many were chosen. done [B]: rows
    whose last token stops them. place [B]: position of the first token that was chosen. seen [B,1,1,S]: keys that the
    next step sees. places [B,S]: where each key stands in the sequence, for windows that slide.
    """

    token: Int[Array, " B"]
    count: Int[Array, ""]
    done: Bool[Array, " B"]
    place: Array
    seen: Bool[Array, "B 1 1 S"]
    places: Int[Array, "B S"]


class Forward:
    """Programs over the parameters of one module.

    Attributes:
      state: the parameters, the first argument of every program.
      step_state: the same for steps of at most `STEP_TOKENS` tokens, from which these copy no weights.
      encode, encode_audio, embed, prefill, recompute, attention, recompute_in_pages, first_in_pages, next_in_pages,
        first, begin, advance, router_load: the programs, jitted.
    """

    def __init__(self, model: Any, pads: tuple[int, ...], layout: KVLayout, mesh: Mesh | None):
        self.graph, self.state = nnx.split(model)
        self.pads, self.layout = pads, layout
        self.window = model.decoder.config.window
        self.mesh = mesh = None if mesh is None else split_mesh(mesh, layout)
        self.kv_shardings = {} if mesh is None else cache_shardings(layout, auto_mesh(mesh))

        # Over a mesh KV comes back as it lies, everything else whole on each device.
        kv: Any = {name: sharding.spec for name, sharding in self.kv_shardings.items()}
        whole: Any = P()
        self.encode = self._program(self._encode, P())
        self.encode_audio = self._program(self._encode_audio, P())
        self.embed = self._program(self._embed, P())
        self.prefill = self._program(self._prefill, Output(whole, kv, whole), "start_layer", "hidden_at", "chunk")
        self.recompute = self._program(
            self._recompute, Recomputed(whole, kv, whole), "start_layer", "stop_layer", "hidden_at"
        )
        self.attention = self._program(self._attention, P(), "layers", "reduce", "start_layer")

        # What is written in place is donated: the pool that came in is gone with the call.
        self.recompute_in_pages = self._program(self._recompute_in_pages, Step(whole, kv), donate="pool")
        self.first_in_pages = self._program(self._first_in_pages, (whole, kv), donate="pool")
        self.next_in_pages = self._program(self._next_in_pages, (whole, kv), donate="pool")

        self.router_load = self._program(self._router_load, P())
        self.first = self._program(self._first, (whole, whole))
        self.begin = self._program(self._begin, (whole, kv, whole), "room", "apart")
        self.advance = self._program(self._advance, (whole, whole, kv), donate="cache")

    def _program(self, function: Callable[..., Any], out: Any, *static: str, donate: str | None = None) -> Any:
        """Returns the function jitted; over a mesh it is traced with that mesh set, for what a layer lays over
        devices itself.

        Inside the forward shardings are the compiler's to find: Explicit axes would want one named at every reshape.
        `out` names those of the results, which are again in the types of arrays on a mesh with Explicit axes.
        """
        if self.mesh is None:
            return jax.jit(function, static_argnames=static, donate_argnames=donate)

        mesh = self.mesh.abstract_mesh

        @functools.wraps(function)
        def inside(*args: Any, **options: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                if not mesh.explicit_axes:
                    return function(*args, **options)
                return jax.sharding.auto_axes(functools.partial(function, **options), out_sharding=out)(*args)

        return jax.jit(inside, static_argnames=static, donate_argnames=donate)

    @functools.cached_property
    def step_state(self) -> Any:
        """The parameters as `decoder.stacks.unstacked` leaves them; no further memory."""
        return unstacked(self.state)

    def state_for(self, tokens: int) -> Any:
        """Returns the parameters in the form that a forward over so many tokens, of all rows, is fastest with."""
        return self.step_state if tokens <= STEP_TOKENS else self.state

    def holding(self, state: Any) -> "Forward":
        """Returns the same programs over other parameters: nothing is traced or compiled again."""
        # The jitted programs are attributes, which the copy shares; what was made of the old parameters is not.
        other = copy.copy(self)
        other.__dict__.pop("step_state", None)
        other.state = state
        return other

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters as nested dictionaries of arrays."""
        return nnx.to_pure_dict(self.state)

    def _encode(self, state: Any, pixel_values: Array, plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        return nnx.merge(self.graph, state).encode(pixel_values, plan)

    def _encode_audio(self, state: Any, input_features: Array, plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        return nnx.merge(self.graph, state).encode_audio(input_features, plan)

    def _embed(
        self, state: Any, input_ids: Int[Array, "B T"], features: Float[Array, "n E D"] | None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T deep _"] | None]:
        return embed_tokens(nnx.merge(self.graph, state).decoder, input_ids, features, self.pads)

    def _prefill(
        self,
        state: Any,
        tokens: Tokens,
        context: Context | None,
        mask: Any,
        rows: Int[Array, "B n"] | None,
        *,
        start_layer: int,
        hidden_at: tuple[int, ...],
        chunk: int | None = None,
    ) -> Output:
        """Runs a prompt; `rows` are the tokens whose logits are wanted, by index, None for all."""
        decoder = nnx.merge(self.graph, state).decoder
        mask = self._mask(tokens, context, mask)
        layers: Any = {"start_layer": start_layer, "hidden_at": hidden_at, "chunk": chunk}
        run = run_prompt(decoder, tokens, mask, rows, context=self._spread(context), **layers)
        return Output(decoder.logits(run.hidden), self._spread(run.kv), run.taps)

    def _router_load(
        self, state: Any, tokens: Tokens, context: Context | None, mask: Any, counted: Bool[Array, "B T"]
    ) -> Int[Array, "L E"]:
        decoder = nnx.merge(self.graph, state).decoder
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            self._mask(tokens, context, mask),
            context=self._spread(context),
            deepstack=by_layer(tokens),
            counted=counted,
        )
        assert run.load is not None
        return run.load

    def _recompute(
        self,
        state: Any,
        tokens: Tokens,
        cache: KV,
        slots: Array,
        keep: Any,
        mask: Any,
        rows: Array | None,
        *,
        start_layer: int = 0,
        stop_layer: int | None = None,
        hidden_at: tuple[int, ...] = (),
    ) -> Recomputed:
        mask = Mask(causal=True, query_places=slots, ahead=tokens.ahead) if mask is None else mask
        layers: Any = {"start_layer": start_layer, "stop_layer": stop_layer, "hidden_at": hidden_at}
        step = self._rewrite(state, tokens, self._spread(cache), slots, keep, mask, rows, **layers)
        return step._replace(cache=self._spread(step.cache))

    def _attention(
        self,
        state: Any,
        tokens: Tokens,
        context: KV,
        mask: Any,
        slots: Array | None,
        keep: Any,
        *,
        layers: tuple[int, ...],
        reduce: Callable[[LayerAttention], Any],
        start_layer: int = 0,
    ) -> Any:
        """Runs the tokens up to the highest of `layers` and returns what `reduce` makes of the attention there."""
        decoder = nnx.merge(self.graph, state).decoder
        if slots is None:
            mask = self._mask(tokens, context, mask)
        elif mask is None:
            mask = Mask(causal=True, query_places=slots, ahead=tokens.ahead)
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            mask,
            context=self._spread(context),
            slots=slots,
            keep=keep,
            start_layer=start_layer,
            stop_layer=layers[-1] + 1,
            deepstack=by_layer(tokens),
            observed=layers,
            observe=reduce,
        )
        return run.observed

    def _recompute_in_pages(
        self,
        state: Any,
        tokens: Tokens,
        pool: KV,
        context: Paged,
        slots: Array,
        written: tuple[Int[Array, "B T"], Int[Array, "B T"]],
        keep: Any,
        mask: Any,
        rows: Array | None,
    ) -> Step:
        """Does what `_recompute` does where the cache is in pages. The pool is an argument of its own: it is donated.

        Args:
          context: the pages, and which of their keys count once the tokens are written.
          slots: of the pool. written: which of the keys that makes the tokens, and their places.
        """
        keys, places = written
        stand = jnp.where(context.seen, context.places_of_keys(), NOWHERE)
        ahead = tokens.ahead if mask is None else None
        found = Mask(causal=mask is None, query_places=places, key_places=stand, ahead=ahead, allowed=mask)
        held = self._spread(pool)
        step = self._rewrite(state, tokens, context._replace(pool=held), keys, keep, found, rows)
        return Step(step.logits, self._spread(written_into_pages(held, self.layout, step.cache, slots, keep)))

    def _first_in_pages(
        self,
        state: Any,
        tokens: Tokens,
        pool: KV,
        context: Paged,
        slots: Array,
        written: tuple[Int[Array, "B T"], Int[Array, "B T"]],
        last: Int[Array, "B 1"],
        draws: Draws,
    ) -> tuple[Int[Array, " B"], KV]:
        """Writes a question into the pool, as `_recompute_in_pages` does, and chooses the first token behind it."""
        step = self._recompute_in_pages(state, tokens, pool, context, slots, written, None, None, last)
        return choose_rows(step.logits[:, 0], draws, jnp.zeros_like(last[:, 0])), step.cache

    def _next_in_pages(
        self, state: Any, pool: KV, rows: AnswerRows, draws: Draws
    ) -> tuple[tuple[Array, Array, Array, Array], KV]:
        """Writes the last token of each row into the pool and chooses the next one.

        Returns:
          Token, place, position and index of each row, one further; and the pool.
        """
        decoder, at = nnx.merge(self.graph, state).decoder, jnp.asarray(rows.place)[:, None]
        _, pages, size, *_ = next(iter(pool.values())).shape
        stand = jnp.where(rows.owned & (rows.places <= at), rows.places, NOWHERE)
        # The key whose place is that of the token to write; a row that stands for none has no page, and writes nowhere.
        key = jnp.argmax(stand == at, axis=1, keepdims=True).astype(jnp.int32)
        page = jnp.take_along_axis(rows.table, key // size, axis=1)
        slots = jnp.where(page < 0, pages * size, page * size + key % size)

        positions = self._on_all_axes(rows.position)
        mask = Mask(causal=True, query_places=at, key_places=stand)
        held = self._spread(pool)
        context = Paged(held, rows.table, stand != NOWHERE, rows.places)
        embeddings, own = entering(decoder, jnp.asarray(rows.token))
        run = decoder.run(embeddings, positions, mask, context=context, slots=key, deepstack=own)

        index = jnp.asarray(rows.index)
        token = choose_rows(decoder.logits(run.hidden)[:, -1], draws, index)
        after = token, at[:, 0] + 1, jnp.asarray(rows.position) + 1, index + 1
        return after, self._spread(written_into_pages(held, self.layout, run.cache, slots, None))

    def _rewrite(
        self,
        state: Any,
        tokens: Tokens,
        cache: Context,
        slots: Array,
        keep: Any,
        mask: Any,
        rows: Array | None,
        **layers: Any,
    ) -> Recomputed:
        decoder = nnx.merge(self.graph, state).decoder
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            mask,
            context=cache,
            slots=slots,
            keep=keep,
            deepstack=by_layer(tokens),
            **layers,
        )
        assert run.cache is not None
        hidden = run.hidden if rows is None else take_tokens(run.hidden, rows)
        return Recomputed(decoder.logits(hidden), run.cache, run.taps)

    def _mask(self, tokens: Tokens, context: Context | None, mask: Any) -> Mask:
        """Returns what tokens see of a context and of each other, by a mask or, without one, all that is in front and
        what they see ahead.
        """
        length = tokens.embeddings.shape[1]
        if isinstance(context, Paged):
            made = paged_mask(length, context, mask, self.window)
        else:
            made = causal_mask(length, key_count(context)) if mask is None else as_mask(mask, length)
        # A mask of bools says all that is seen.
        return dataclasses.replace(made, ahead=tokens.ahead) if made.causal and tokens.ahead is not None else made

    def _first(
        self, state: Any, tokens: Tokens, context: Context | None, mask: Any, last: Int[Array, " B"], draw: Draw
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        """Chooses the token behind a prompt, and keeps no cache. Returns it, and the logits."""
        now, _, logits = self._begin(state, tokens, context, mask, last, draw, room=0, apart=False)
        return now.token, logits

    def _begin(
        self,
        state: Any,
        tokens: Tokens,
        context: Context | None,
        mask: Any,
        last: Int[Array, " B"],
        draw: Draw,
        *,
        room: int,
        apart: bool,
    ) -> tuple[Continuation, Any, Float[Array, "B V"]]:
        """Runs a prompt and chooses the first token of each row. Returns where it stands, its cache and the logits.

        Args:
          last: index of each row's last token: nothing behind it (padding) is read.
          room: tokens to come that the cache has room for.
          apart: the cache as a tuple of layers per channel.
        """
        decoder = nnx.merge(self.graph, state).decoder
        B, T, _ = tokens.embeddings.shape
        size = key_count(context)
        seen = self._mask(tokens, context, mask)
        layers: Any = {"context": self._spread(context), "start_layer": 0, "hidden_at": (), "chunk": None}
        run = run_prompt(decoder, tokens, seen, last[:, None], **layers)
        logits = decoder.logits(run.hidden)[:, 0]
        token = choose(logits, draw, 0)

        # Padding has positions too, which must not move the first token that is made.
        inside = (jnp.arange(T) <= last[:, None]).reshape(B, T, *(1,) * (tokens.positions.ndim - 2))
        positions = jnp.where(inside, tokens.positions, tokens.positions[jnp.arange(B), last][:, None])
        place = end_position(positions) + 1

        # What each row's last token sees; keys made since are added as they are written, and stand behind it.
        def row_of(row: Array) -> Array:
            return seen.take_rows(row, 1).take_queries(last[row], 1, T).dense(1, size + T)[0]

        row = jnp.pad(jax.lax.map(row_of, jnp.arange(len(last))), ((0, 0), (0, 0), (0, 0), (0, room)))
        of_last = jnp.take_along_axis(jnp.broadcast_to(seen.places_of_queries(T), (B, T)), last[:, None], axis=1)
        of_keys = jnp.broadcast_to(seen.places_of_keys(size + T), (B, size + T))
        places = jnp.concatenate([of_keys, of_last + 1 + jnp.arange(room, dtype=jnp.int32)], axis=1)

        # The engine-frame cache of context and tokens, with room for as many more.
        turned, before = to_engine(self.layout, run.kv, tokens.positions, 0), context
        if isinstance(before, Paged):
            before = read_all_pages(before, self.layout)
        cache = {}
        for name, new in turned.items():
            whole = new if before is None else jnp.concatenate([before[name].astype(new.dtype), new], 2)
            cache[name] = jnp.pad(whole, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0)))
        cache = self._spread(cache)
        if apart:
            cache = {name: tuple(value) for name, value in cache.items()}
        return Continuation(token, jnp.int32(1), _stopped(token, draw), place, row, places), cache, logits

    def _advance(
        self, state: Any, now: Continuation, cache: Any, draw: Draw, written: Array, count: Array
    ) -> tuple[Int[Array, "B block"], Continuation, Any]:
        """Makes `count` tokens more, at most `BLOCK`, or fewer where every row is done.

        Args:
          written: how many keys the cache holds of the prompt: the slot of the first token that was chosen.

        Returns:
          The tokens [B, BLOCK], of which the first `count` mean something; a row that is done repeats its last one.
        """
        decoder = nnx.merge(self.graph, state).decoder
        ids = jnp.zeros((len(now.token), BLOCK), jnp.int32)

        def more(carry: tuple[Array, Any, Continuation, Any]) -> Array:
            made, _, now, _ = carry
            return (made < count) & ~jnp.all(now.done)

        def step(carry: tuple[Array, Any, Continuation, Any]):
            made, ids, now, cache = carry
            now, cache = self._step(decoder, now, cache, draw, written)
            return made + 1, ids.at[:, made].set(now.token), now, cache

        made, ids, now, cache = jax.lax.while_loop(more, step, (jnp.int32(0), ids, now, cache))
        return jnp.where(jnp.arange(BLOCK) < made, ids, now.token[:, None]), now, cache

    def _step(
        self, decoder: Any, now: Continuation, cache: Any, draw: Draw, written: Array
    ) -> tuple[Continuation, Any]:
        """Writes each row's last token and chooses the next one; rows that are done keep theirs."""
        # The token that is written now was chosen by the step before.
        slot = written + now.count - 1
        seen = now.seen | (jnp.arange(now.seen.shape[-1]) == slot)
        positions = self._on_all_axes(now.place + (now.count - 1).astype(now.place.dtype))
        slots = jnp.full((len(now.token), 1), slot, jnp.int32)
        at = jax.lax.dynamic_slice_in_dim(now.places, slot, 1, axis=1)
        mask = Mask(query_places=at, key_places=now.places, allowed=seen)
        embeddings, own = entering(decoder, now.token)
        run = decoder.run(embeddings, positions, mask, context=cache, slots=slots, deepstack=own)

        token = choose(decoder.logits(run.hidden)[:, -1], draw, now.count)
        token = jnp.where(now.done, now.token, token)
        now = now._replace(token=token, count=now.count + 1, done=now.done | _stopped(token, draw), seen=seen)
        return now, run.cache

    def _on_all_axes(self, place: Array | np.ndarray) -> Array:
        """Returns positions [B,1] or [B,1,A] of one text token per row: text advances on all axes of M-RoPE alike."""
        axes = () if self.layout.rope.axes is None else (self.layout.rope.axes,)
        return jnp.broadcast_to(place.reshape(-1, 1, *(1 for _ in axes)), (len(place), 1, *axes))

    def _spread(self, kv: Any) -> Any:
        """Returns a KV pytree laid over the mesh, where there is one (and None where there is no KV)."""
        if kv is None or not self.kv_shardings:
            return kv
        if isinstance(kv, Paged):
            return kv._replace(pool=self._spread(kv.pool))
        lay = jax.lax.with_sharding_constraint
        return {name: lay(value, self.kv_shardings[name]) for name, value in kv.items()}


class LoadedModel:
    """What the parts of a backbone (`Encoding`, `Generating`, `Writing`, `Answering`) find in it.

    Attributes:
      config, layout, buckets, programs, stop_tokens: as in `ModelBackbone`.
    """

    config: Any
    layout: KVLayout
    buckets: Buckets | None
    programs: Forward
    stop_tokens: tuple[int, ...]

    @property
    def tokenizer(self) -> Any:
        """Of `tokenizers`, or None."""
        raise NotImplementedError

    def _check_regime(self, positions: Array | np.ndarray, ahead: int = 0) -> None:
        """Refuses positions (and as many more) that the rope does not serve."""
        raise NotImplementedError


def key_count(context: Context | None) -> int:
    """Returns how many keys of a row a context holds, those of its pages that do not count included; 0 for none."""
    if isinstance(context, Paged):
        return context.key_count
    return 0 if context is None else next(iter(context.values())).shape[2]


def _stopped(token: Int[Array, " B"], draw: Draw) -> Bool[Array, " B"]:
    return (token == REFUSED) | jnp.isin(token, draw.stop)
