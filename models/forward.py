"""The jitted programs of one model: its tower, embedding, prefill, recompute and greedy generation.

Parameters are an argument of every program, never a constant inside one. Positions, slots, masks and caches are traced,
so that neither another prompt of the same shape nor another place compiles anew.

Axis letters: B batch, T tokens, S keys, E image features, n arrays per feature (itself, then one per deepstack layer).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.backbone import KV, Output, Step, Tokens
from kvpatch_jax.layout import KVLayout, to_engine

from .attention import Mask, as_mask
from .decoder.sharding import auto_mesh, cache_shardings
from .decoder.stacks import unstacked
from .families.family import embed_tokens
from .inputs.masks import causal_mask
from .prefill import by_layer, run_prompt, take_tokens

STEP_TOKENS = 16
"""Tokens of all rows up to which a forward is bound by reading the weights."""


class Forward:
    """Programs over the parameters of one module.

    Attributes:
      state: the parameters, the first argument of every program.
      step_state: the same for steps of at most `STEP_TOKENS` tokens, from which these copy no weights.
      encode, embed, prefill, recompute, generate, router_load: the programs, jitted.
    """

    def __init__(self, model: Any, pads: tuple[int, ...], layout: KVLayout, mesh: Mesh | None):
        self.graph, self.state = nnx.split(model)
        self.pads, self.layout = pads, layout
        self.mesh = mesh
        self.kv_shardings = {} if mesh is None else cache_shardings(layout, auto_mesh(mesh))
        kv: Any = {name: sharding.spec for name, sharding in self.kv_shardings.items()}
        self.encode = self._program(self._encode, P())
        self.embed = self._program(self._embed, P())
        whole: Any = P()
        self.prefill = self._program(self._prefill, Output(whole, kv, whole), "start_layer", "hidden_at", "chunk")
        self.recompute = self._program(self._recompute, Step(whole, kv))
        self.generate = self._program(self._generate, P(), "steps")
        self.router_load = self._program(self._router_load, P())

    def _program(self, function: Callable[..., Any], out: Any, *static: str) -> Any:
        """The function jitted; over a mesh it is traced with that mesh set, for what a layer lays over devices itself.

        Inside the forward shardings are the compiler's to find: Explicit axes would want one named at every reshape.
        `out` names those of the results, which are again in the types of arrays on a mesh with Explicit axes.
        """
        if self.mesh is None:
            return jax.jit(function, static_argnames=static)
        mesh = self.mesh.abstract_mesh

        @functools.wraps(function)
        def inside(*args: Any, **options: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                if not mesh.explicit_axes:
                    return function(*args, **options)
                return jax.sharding.auto_axes(functools.partial(function, **options), out_sharding=out)(*args)

        return jax.jit(inside, static_argnames=static)

    @functools.cached_property
    def step_state(self) -> Any:
        """The parameters as `decoder.stacks.unstacked` leaves them; no further memory."""
        return unstacked(self.state)

    def state_for(self, tokens: Tokens) -> Any:
        """The parameters in the form that a forward over so many tokens is fastest with."""
        batch, length, _ = tokens.embeddings.shape
        return self.step_state if batch * length <= STEP_TOKENS else self.state

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters as nested dictionaries of arrays."""
        return nnx.to_pure_dict(self.state)

    def _encode(self, state: Any, pixel_values: Array, plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        return nnx.merge(self.graph, state).encode(pixel_values, plan)

    def _embed(
        self, state: Any, input_ids: Int[Array, "B T"], features: Float[Array, "n E D"] | None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T n-1 D"] | None]:
        return embed_tokens(nnx.merge(self.graph, state).decoder, input_ids, features, self.pads)

    def _prefill(
        self,
        state: Any,
        tokens: Tokens,
        context: KV | None,
        mask: Any,
        rows: Int[Array, "B n"] | None,
        *,
        start_layer: int,
        hidden_at: tuple[int, ...],
        chunk: int | None = None,
    ) -> Output:
        """`rows` are the tokens whose logits are wanted, by index; None for all."""
        decoder, length = nnx.merge(self.graph, state).decoder, tokens.embeddings.shape[1]
        mask = causal_mask(length, key_count(context)) if mask is None else as_mask(mask, length)
        layers: Any = {"start_layer": start_layer, "hidden_at": hidden_at, "chunk": chunk}
        run = run_prompt(decoder, tokens, mask, rows, context=self._spread(context), **layers)
        return Output(decoder.logits(run.hidden), self._spread(run.kv), run.taps)

    def _router_load(
        self, state: Any, tokens: Tokens, context: KV | None, mask: Any, counted: Bool[Array, "B T"]
    ) -> Int[Array, "L E"]:
        decoder = nnx.merge(self.graph, state).decoder
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            causal_mask(tokens.embeddings.shape[1], key_count(context)) if mask is None else mask,
            context=self._spread(context),
            deepstack=by_layer(tokens),
            counted=counted,
        )
        assert run.load is not None
        return run.load

    def _recompute(
        self, state: Any, tokens: Tokens, cache: KV, slots: Array, keep: Any, mask: Any, rows: Array | None
    ) -> Step:
        decoder = nnx.merge(self.graph, state).decoder
        if mask is None:
            mask = Mask(causal=True, query_places=slots)
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            mask,
            context=self._spread(cache),
            slots=slots,
            keep=keep,
            deepstack=by_layer(tokens),
        )
        assert run.cache is not None
        hidden = run.hidden if rows is None else take_tokens(run.hidden, rows)
        return Step(decoder.logits(hidden), self._spread(run.cache))

    def _generate(
        self, state: Any, tokens: Tokens, context: KV | None, mask: Any, last: Array, *, steps: int
    ) -> Int[Array, "B steps"]:
        """`last` is the last token's index: nothing behind it (padding) is read."""
        decoder = nnx.merge(self.graph, state).decoder
        B, T, _ = tokens.embeddings.shape
        size = key_count(context)
        seen = causal_mask(T, size) if mask is None else as_mask(mask, T)
        out = self._prefill(state, tokens, context, seen, jnp.full((B, 1), last), start_layer=0, hidden_at=())
        first, later = jnp.argmax(out.logits[:, 0], axis=-1), max(steps - 1, 0)
        cache = self._grow(out.kv, tokens.positions, context, later)

        axes = tuple(range(1, tokens.positions.ndim))
        place = jnp.max(tokens.positions, axis=axes) + 1
        # Where generated tokens stand among the keys that the last token sees; padding has no place there.
        row = jnp.pad(seen.take_queries(last, 1, T).dense(1, size + T), ((0, 0), (0, 0), (0, 0), (0, later)))
        next_place = seen.places_of_queries(T)[:, last, None] + 1
        behind = next_place + jnp.arange(later, dtype=jnp.int32)
        before = jnp.broadcast_to(seen.places_of_keys(size + T), (len(behind), size + T))
        key_places, ahead = jnp.concatenate([before, behind], axis=1), jnp.arange(size + T + later)

        def body(carry, index):
            token, cache = carry
            at = (place + index).reshape((B,) + (1,) * (tokens.positions.ndim - 1))
            embeddings = decoder.embed(token[:, None])
            step_tokens = Tokens(embeddings, jnp.broadcast_to(at, (B, 1, *tokens.positions.shape[2:])))
            # The last token's own keys, and those that were generated since.
            allowed = row | ((ahead >= size + T) & (ahead <= size + T + index))
            mask = Mask(query_places=next_place + index, key_places=key_places, allowed=allowed)
            slots = jnp.full((B, 1), size + T, jnp.int32) + index
            step = self._recompute(state, step_tokens, cache, slots, None, mask, None)
            return (jnp.argmax(step.logits[:, -1], axis=-1), step.cache), token

        (final, _), tokens_before = jax.lax.scan(body, (first, cache), jnp.arange(later))
        return jnp.concatenate([tokens_before.T, final[:, None]], axis=1)[:, :steps]

    def _grow(self, kv: KV, positions: Array | np.ndarray, context: KV | None, steps: int) -> KV:
        """Engine-frame cache of context and tokens with room for `steps` more."""
        turned = to_engine(self.layout, kv, positions, 0)
        grown = {}
        for name, new in turned.items():
            whole = new if context is None else jnp.concatenate([context[name].astype(new.dtype), new], 2)
            grown[name] = jnp.pad(whole, ((0, 0), (0, 0), (0, steps), (0, 0), (0, 0)))
        return grown

    def _spread(self, kv: Any) -> Any:
        """A KV pytree laid over the mesh, where there is one (and None where there is no KV)."""
        if kv is None or not self.kv_shardings:
            return kv
        lay = jax.lax.with_sharding_constraint
        return {name: lay(value, self.kv_shardings[name]) for name, value in kv.items()}


def key_count(context: KV | None) -> int:
    """How many keys [L,B,S,K,H] a context holds; 0 for none."""
    return 0 if context is None else next(iter(context.values())).shape[2]
