"""The jitted programs of one model: its tower, embedding, prefill, recompute, and the tokens that continue a prompt.

Parameters are an argument of every program, never a constant inside one. Positions, slots, masks and caches are traced,
so that neither another prompt of the same shape nor another place compiles anew.

Axis letters: B batch, T tokens, E image features, n arrays per feature (itself, then one per deepstack layer).
"""

import copy
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

from kvpatch_jax.backbone import Context, Output, Step, Tokens
from kvpatch_jax.core import Buckets, KVLayout, Paged
from kvpatch_jax.utils.compiling import describe_program

from ..decoder.sharding import auto_mesh, cache_shardings, split_mesh
from ..families.family import embed_tokens
from .cache_writes import observe_attention, recompute
from .continuing import advance, begin, first, first_in_pages, next_in_pages
from .prompt import by_layer, run_prompt
from .traced import TracedModel

WORDS = {
    "encode": "the image tower for {} patches",
    "encode_audio": "the sound tower for {} frames",
    "prefill": "prefill of {} tokens",
    "recompute": "recomputation of {} tokens",
    "first": "the answer to {} tokens",
    "begin": "the answer to {} tokens",
    "first_in_pages": "the answer to {} tokens",
    "advance": "decoding",
    "next_in_pages": "decoding of several answers",
}
"""What is said of programs that compile for long, with the rows or tokens that they are compiled for."""


class Forward:
    """Programs over the parameters of one module.

    Attributes:
      state: the parameters, the first argument of every program.
      encode, encode_audio, embed, prefill, router_load: the programs of prompts, jitted.
      recompute, recompute_in_pages, attention: those of a cache.
      first, begin, advance, first_in_pages, next_in_pages: those of answers.
    """

    def __init__(self, model: Any, pads: tuple[int, ...], layout: KVLayout, mesh: Mesh | None):
        self.graph, self.state = nnx.split(model)
        self.mesh = mesh = None if mesh is None else split_mesh(mesh, layout)
        kv_shardings = {} if mesh is None else cache_shardings(layout, auto_mesh(mesh))
        self._model = TracedModel(self.graph, pads, layout, model.decoder.config.window, kv_shardings)

        # Over a mesh KV comes back as it lies, everything else whole on each device.
        kv: Any = {name: sharding.spec for name, sharding in kv_shardings.items()}
        whole: Any = P()
        self.encode = self._program(encode, whole)
        self.encode_audio = self._program(encode_audio, whole)
        self.embed = self._program(embed, whole)
        self.prefill = self._program(prefill, Output(whole, kv, whole), "start_layer", "hidden_at", "chunk")
        self.router_load = self._program(router_load, whole)

        # A pool is written in place: what came in is gone with the call. A contiguous cache stays the caller's.
        written, layers = Step(whole, kv, whole), ("start_layer", "stop_layer", "hidden_at")
        self.recompute = self._program(recompute, written, *layers)
        self.recompute_in_pages = self._program(recompute, written, *layers, donate="pool")
        self.attention = self._program(observe_attention, whole, "layers", "reduce", "start_layer")

        self.first = self._program(first, whole)
        self.begin = self._program(begin, (whole, kv), "room")
        self.advance = self._program(advance, (whole, whole, kv), donate="cache")
        self.first_in_pages = self._program(first_in_pages, (whole, kv), donate="pool")
        self.next_in_pages = self._program(next_in_pages, (whole, kv), donate="pool")

    def _program(self, function: Callable[..., Any], out: Any, *static: str, donate: str | None = None) -> Any:
        """Returns a function of the model jitted; over a mesh it is traced with that mesh set, for what a layer lays
        over devices itself.

        Inside the forward shardings are the compiler's to find: Explicit axes would want one named at every reshape.
        `out` names those of the results, which are again in the types of arrays on a mesh with Explicit axes.
        """
        bound = functools.partial(_described(function), self._model)
        how: Any = {"static_argnames": static, "donate_argnames": donate}
        if self.mesh is None:
            return jax.jit(bound, **how)
        mesh = self.mesh.abstract_mesh

        @functools.wraps(bound)
        def inside(*args: Any, **options: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                if not mesh.explicit_axes:
                    return bound(*args, **options)
                return jax.sharding.auto_axes(functools.partial(bound, **options), out_sharding=out)(*args)

        return jax.jit(inside, **how)

    def holding(self, state: Any) -> "Forward":
        """Returns the same programs over other parameters: nothing is traced or compiled again."""
        # The jitted programs are attributes, which the copy shares.
        other = copy.copy(self)
        other.state = state
        return other

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters as nested dictionaries of arrays."""
        return nnx.to_pure_dict(self.state)


class LoadedModel:
    """What the parts of a backbone (`Prompting`, `Encoding`, `Generating`, `Writing`, `Answering`) find in it.

    Attributes:
      config, layout, buckets, programs, tokenizer, stop_tokens: as in `ModelBackbone`.
    """

    config: Any
    layout: KVLayout
    buckets: Buckets | None
    programs: Forward
    tokenizer: Any
    stop_tokens: tuple[int, ...]

    def _check_regime(self, positions: Array | np.ndarray, ahead: int = 0) -> None:
        """Refuses positions (and as many more) that the rope does not serve."""
        raise NotImplementedError


def _described(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the model that, when it is traced, says what is about to be compiled, and of what size."""
    words = WORDS.get(function.__name__)
    if words is None:
        return function

    @functools.wraps(function)
    def traced(model: TracedModel, state: Any, *args: Any, **options: Any) -> Any:
        tokens = next((value for value in args if isinstance(value, Tokens)), None)
        keys = next((value.seen.shape[-1] for value in args if isinstance(value, Paged)), 0)
        size = len(args[0]) if tokens is None else int(np.prod(tokens.embeddings.shape[:2]))
        describe_program(function.__name__, words.format(size) + (f" behind {keys}" if keys else ""))
        return function(model, state, *args, **options)

    return traced


def encode(model: TracedModel, state: Any, pixel_values: Array, plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
    """Runs the tower over patches."""
    return nnx.merge(model.graph, state).encode(pixel_values, plan)


def encode_audio(
    model: TracedModel, state: Any, input_features: Array, plan: Mapping[str, Array]
) -> Float[Array, "n E D"]:
    """Runs the audio tower over log-mel features."""
    return nnx.merge(model.graph, state).encode_audio(input_features, plan)


def embed(
    model: TracedModel, state: Any, input_ids: Int[Array, "B T"], features: Float[Array, "n E D"] | None
) -> tuple[Float[Array, "B T D"], Float[Array, "B T deep _"] | None]:
    """Embeds token ids, with features where the placeholders stand."""
    return embed_tokens(model.decoder(state), input_ids, features, model.pads)


def prefill(
    model: TracedModel,
    state: Any,
    tokens: Tokens,
    context: Context | None,
    mask: Any,
    rows: Int[Array, "B n"] | None,
    filled: Bool[Array, "B T"] | None = None,
    *,
    start_layer: int,
    hidden_at: tuple[int, ...],
    chunk: int | None = None,
) -> Output:
    """Runs a prompt; `rows` are the tokens whose logits are wanted, by index, None for all.

    `filled` are those that are no padding, for layers with linear attention; None: all.
    """
    decoder = model.decoder(state)
    mask = model.mask(tokens, context, mask)
    layers: Any = {"start_layer": start_layer, "hidden_at": hidden_at, "chunk": chunk, "filled": filled}
    run = run_prompt(decoder, tokens, mask, rows, context=model.spread(context), **layers)
    return Output(decoder.logits(run.hidden), model.spread(run.kv), run.taps)


def router_load(
    model: TracedModel, state: Any, tokens: Tokens, context: Context | None, mask: Any, counted: Bool[Array, "B T"]
) -> Int[Array, "L E"]:
    """Counts how many of the counted tokens choose each expert, by layer."""
    decoder = model.decoder(state)
    run = decoder.run(
        tokens.embeddings,
        jnp.asarray(tokens.positions),
        model.mask(tokens, context, mask),
        context=model.spread(context),
        deepstack=by_layer(tokens),
        counted=counted,
        filled=counted if model.layout.parts else None,
    )
    assert run.load is not None
    return run.load
