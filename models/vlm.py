"""A loaded backbone: the house's Protocol (prepare, embed, prefill, recompute, decode, generate) over one model.

The heavy calls are jitted once per backbone over the split parameters; positions, slots, masks and caches are traced,
so neither another prompt of the same shape nor another place recompiles.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from kvpatch_jax.backbone import KV, Output, Step, Tokens
from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from kvpatch_jax.layout import KVLayout, to_engine
from kvpatch_jax.rope import check_positions

from .family import Config, Family, abstract, parameters, with_dtype, with_parameters
from .weights import flatten_params, load_weights, save_weights, tensor_shapes

TOKENIZER_FILE = "tokenizer.json"


class ModelBackbone:
    """A model of any family with its weights, its image settings and (where the directory has one) its tokenizer.

    Attributes:
      layout: the KV layout that follows from the configuration.
      config, image_config: as read from the directory; `image_config` is None for a text family.
      family: what tells this model from others.
    """

    layout: KVLayout

    def __init__(
        self,
        config: Config,
        parameters: Mapping[str, Any],
        image_config: Any = None,
        tokenizer: Any = None,
    ):
        self.config: Any = config
        self.family: Family = config.family
        self.image_config, self.tokenizer = image_config, tokenizer
        self.layout = config.text.layout
        self._fingerprint: str | None = None
        self._graph, self._state = nnx.split(with_parameters(config, dict(parameters)))
        jit = functools.partial(jax.jit, static_argnames=("start_layer", "hidden_at"))
        self._embed = jax.jit(self._embed_core)
        self._prefill = jit(self._prefill_core)
        self._recompute = jax.jit(self._recompute_core)
        self._generate = jax.jit(self._generate_core, static_argnames=("steps",))

    # ------------------------------------------------------------------------------------------ parameters

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters as nested dictionaries of arrays."""
        return nnx.to_pure_dict(self._state)

    @property
    def fingerprint(self) -> str:
        """blake2b over the configuration, the image settings and every parameter's bytes; computed once."""
        if self._fingerprint is None:
            self._fingerprint = self._digest()
        return self._fingerprint

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        rope = self.config.text.rope
        digest.update(rope.angles.encode())
        if rope.scaling is not None:  # which regime is pinned
            digest.update(repr(rope.scaling).encode())
        if self.image_config is not None:
            digest.update(json.dumps(dataclasses.asdict(self.image_config), sort_keys=True).encode())
        for path, leaf in sorted(flatten_params(self.parameters).items()):
            digest.update(".".join(path).encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()

    def replaced(self, parameters: Mapping[str, Any]) -> "ModelBackbone":
        """The same backbone with other parameters."""
        return ModelBackbone(self.config, parameters, self.image_config, self.tokenizer)

    # --------------------------------------------------------------------------------------------- prompts

    def prepare(
        self,
        items: Sequence[Any],
        second_per_grid_ts: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Texts, images and token ids, in order, to one prompt's arrays (batch of one).

        Args:
          items: each a text (needs the directory's tokenizer), a sequence of token ids, or an image: a path
            (`pathlib.Path`), a PIL image, or a uint8 array [H,W] or [H,W,C]. An image stands between its start and end
            tokens.

        Returns:
          input_ids [1,T], position_ids [1,T] or [1,T,A], and where there are images what the family's processor makes
          of them (pixel_values, and sizes or grids).

        Raises:
          ImageError: an image that cannot be read. InputError: an item of another kind, or text without a tokenizer.
        """
        images = [item for item in items if _is_image(item)]
        arrays = self._process(images) if images else {}
        numbers = itertools.count()
        ids: list[int] = []
        for item in items:
            ids += self._image_ids(arrays, next(numbers)) if _is_image(item) else self._text_ids(item)
        input_ids = np.array(ids, np.int32)
        positions = self.family.positions(self.config, input_ids, arrays)
        return {"input_ids": input_ids[None], "position_ids": positions[None], **arrays}

    def _process(self, images: list[Any]) -> dict[str, np.ndarray]:
        if self.family.vision is None:
            raise InputError(f"{len(images)} images for {self.family.architecture}, which takes none; expected text")
        return self.family.vision.process(images, self.image_config)

    def _image_ids(self, arrays: Mapping[str, Any], index: int) -> list[int]:
        assert self.family.vision is not None
        return self.family.vision.tokens(self.config, arrays, index, self.tokenizer)

    def _text_ids(self, item: Any) -> list[int]:
        if isinstance(item, str):
            if self.tokenizer is None:
                raise InputError(
                    f"text {item[:40]!r}: this backbone has no {TOKENIZER_FILE}; expected token ids instead"
                )
            return list(self.tokenizer.encode(item).ids)
        if isinstance(item, list | tuple) and all(isinstance(token, int | np.integer) for token in item):
            return [int(token) for token in item]
        raise InputError(f"prompt item of type {type(item).__name__}; expected text, token ids or an image")

    def text(self, token_ids: Sequence[int] | Int[Array | np.ndarray, " T"]) -> str:
        """Token ids as text."""
        if self.tokenizer is None:
            raise InputError(f"this backbone has no {TOKENIZER_FILE}; expected one in its directory")
        return self.tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=False)

    def embed(
        self,
        input_ids: Int[Array | np.ndarray, "B T"],
        position_ids: Array | np.ndarray | None = None,
        pixel_values: Array | np.ndarray | None = None,
        image_grid_thw: Int[np.ndarray, "n 3"] | None = None,
        video_grid_thw: Int[np.ndarray, "m 3"] | None = None,
        **more: Any,
    ) -> Tokens:
        """Run the tower over the packed patches and put its features at the placeholders.

        With a batch, patches are packed in the order of the placeholders, row by row. M-RoPE's `position_ids` are
        needed for more than one row; else they are derived when absent. `more` are further arrays that the
        family's processor makes.

        Raises:
          InputError: grids that do not match the patches or the placeholders, or images for a text family.
          RopeRegimeError: positions outside the regime that the rope is pinned to.
        """
        input_ids = np.asarray(input_ids, np.int32)
        given = {
            "pixel_values": pixel_values,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            **more,
        }
        arrays = {name: value for name, value in given.items() if value is not None}
        if self.family.vision is None and arrays:
            raise InputError(
                f"{sorted(arrays)} for {self.family.architecture}, which takes no images; expected ids alone"
            )
        plan = None if self.family.vision is None else self.family.vision.plan(self.config, input_ids, arrays)
        if position_ids is None:
            position_ids = self._positions(input_ids, arrays)
        self._check_regime(position_ids)
        embedded = self._embed(self._state, input_ids, arrays.get("pixel_values") if plan else None, plan)
        embeddings, deepstack = embedded if isinstance(embedded, tuple) else (embedded, None)
        return Tokens(embeddings, jnp.asarray(position_ids), deepstack)

    def _positions(self, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
        rows = len(input_ids)
        if rows != 1 and self.layout.rope.axes is not None:
            raise InputError(f"embed: {rows} rows without position_ids; expected position_ids for a batch")
        positions = self.family.positions(self.config, input_ids[0], arrays)
        return np.repeat(positions[None], rows, axis=0)

    def _check_regime(self, positions: Array | np.ndarray, ahead: int = 0) -> None:
        """Refuses positions (and as many more) that a rope pinned to one regime does not serve."""
        scaling = self.layout.rope.scaling
        if scaling is not None and scaling.kind in ("longrope", "dynamic"):
            check_positions(self.layout.rope, positions, np.array(ahead, np.int32))

    # --------------------------------------------------------------------------------------------- forward

    def prefill(
        self,
        tokens: Tokens,
        context: KV | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        start_layer: int = 0,
        hidden_at: tuple[int, ...] = (),
    ) -> Output:
        """See `kvpatch_jax.backbone.Backbone.prefill`."""
        self._check_regime(tokens.positions)
        return self._prefill(self._state, tokens, context, mask, start_layer=start_layer, hidden_at=tuple(hidden_at))

    def recompute(
        self,
        tokens: Tokens,
        cache: KV,
        slots: Int[Array | np.ndarray, "B T"],
        keep: Bool[Array | np.ndarray, "L B T"] | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.recompute`. Tokens of a set that ends at a layer run on, unwritten."""
        if keep is not None and not isinstance(keep, Tracer):
            sets = np.asarray(keep)
            if sets.shape[0] != self.layout.layers or (sets[1:] & ~sets[:-1]).any():
                raise ShapeError(
                    f"keep {sets.shape}: expected one token set per layer ({self.layout.layers}), each inside the one "
                    "below"
                )
        self._check_regime(tokens.positions)
        return self._recompute(self._state, tokens, cache, jnp.asarray(slots), keep, mask)

    def decode(
        self,
        tokens: Tokens,
        cache: KV,
        slots: Int[Array | np.ndarray, "B T"],
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.decode`."""
        self._check_regime(tokens.positions)
        return self._recompute(self._state, tokens, cache, jnp.asarray(slots), None, mask)

    def generate(
        self,
        tokens: Tokens,
        steps: int,
        context: KV | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
    ) -> Int[Array, "B steps"]:
        """Greedy continuation: the next `steps` token ids behind tokens and, where given, an engine-frame context."""
        self._check_regime(tokens.positions, max(steps - 1, 0))
        return self._generate(self._state, tokens, context, mask, steps=steps)

    def _embed_core(self, state, input_ids, pixel_values, plan) -> Array | tuple[Array, Array]:
        return nnx.merge(self._graph, state).embed(input_ids, pixel_values, plan)

    def _prefill_core(self, state, tokens: Tokens, context, mask, *, start_layer: int, hidden_at) -> Output:
        decoder = nnx.merge(self._graph, state).decoder
        B, T, _ = tokens.embeddings.shape
        if mask is None:
            mask = _causal(B, T, 0 if context is None else next(iter(context.values())).shape[2])
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            mask,
            context=context,
            start_layer=start_layer,
            hidden_at=hidden_at,
            deepstack=_by_layer(tokens),
        )
        return Output(decoder.logits(run.hidden), run.kv, run.taps)

    def _recompute_core(self, state, tokens: Tokens, cache, slots, keep, mask) -> Step:
        decoder = nnx.merge(self._graph, state).decoder
        if mask is None:
            size = next(iter(cache.values())).shape[2]
            mask = (jnp.arange(size) <= slots[..., None])[:, None]
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            mask,
            context=cache,
            slots=slots,
            keep=keep,
            deepstack=_by_layer(tokens),
        )
        assert run.cache is not None
        return Step(decoder.logits(run.hidden), run.cache)

    def _generate_core(self, state, tokens: Tokens, context, mask, *, steps: int) -> Array:
        decoder = nnx.merge(self._graph, state).decoder
        B, T, _ = tokens.embeddings.shape
        size = 0 if context is None else next(iter(context.values())).shape[2]
        seen = _causal(B, T, size) if mask is None else mask
        out = self._prefill_core(state, tokens, context, seen, start_layer=0, hidden_at=())
        first, later = jnp.argmax(out.logits[:, -1], axis=-1), max(steps - 1, 0)  # nothing is read behind the last
        cache = self._grow(out.kv, tokens.positions, context, later)
        axes = tuple(range(1, tokens.positions.ndim))
        place = jnp.max(tokens.positions, axis=axes) + 1
        ahead = jnp.arange(size + T + later)

        def body(carry, index):
            token, cache = carry
            at = (place + index).reshape((B,) + (1,) * (tokens.positions.ndim - 1))
            step_tokens = Tokens(
                decoder.embed(token[:, None]), jnp.broadcast_to(at, (B, 1, *tokens.positions.shape[2:]))
            )
            allowed = jnp.pad(seen[:, :, -1:], ((0, 0), (0, 0), (0, 0), (0, later)))
            allowed = allowed | ((ahead >= size + T) & (ahead <= size + T + index))
            slots = jnp.full((B, 1), size + T, jnp.int32) + index
            step = self._recompute_core(state, step_tokens, cache, slots, None, allowed)
            return (jnp.argmax(step.logits[:, -1], axis=-1), step.cache), token

        (last, _), tokens_before = jax.lax.scan(body, (first, cache), jnp.arange(later))
        return jnp.concatenate([tokens_before.T, last[:, None]], axis=1)[:, :steps]

    def _grow(self, kv: KV, positions: Array, context: KV | None, steps: int) -> KV:
        """Engine-frame cache of context and tokens with room for `steps` more."""
        turned = to_engine(self.layout, kv, positions, 0)
        room = lambda new: jnp.pad(new, ((0, 0), (0, 0), (0, steps), (0, 0), (0, 0)))
        if context is None:
            return {name: room(new) for name, new in turned.items()}
        return {name: room(jnp.concatenate([context[name].astype(new.dtype), new], 2)) for name, new in turned.items()}

    # ------------------------------------------------------------------------------------------------ disk

    def save(self, directory: str | os.PathLike[str], dtype: str | None = None) -> Path:
        """Write a Hugging Face directory: config.json, model.safetensors, and (with images) preprocessor_config.json
        and (where there is one) tokenizer.json. Returns it.
        """
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        config, values = self.config, self.parameters
        if dtype is not None:  # what is float32 in every model (a router's correction) stays so
            config = with_dtype(config, dtype)
            values = jax.tree.map(lambda leaf, typed: leaf.astype(typed.dtype), values, parameters(abstract(config)))
        (root / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
        if self.image_config is not None:
            self.image_config.save(root)
        if self.tokenizer is not None:
            self.tokenizer.save(str(root / TOKENIZER_FILE))
        save_weights(root, values, self.family.entries(self.config, {}))
        return root

    @classmethod
    def from_directory(
        cls,
        family: Family,
        directory: str | os.PathLike[str],
        raw: Mapping[str, Any],
        dtype: str | None,
        angles: str,
        regime: str | int | None = None,
    ) -> "ModelBackbone":
        """Read config, image settings, weights and tokenizer. `dtype` None takes the configuration's."""
        config = family.config(raw, angles, regime)
        config = config if dtype is None else with_dtype(config, dtype)
        expected = flatten_params(parameters(abstract(config)))
        entries = family.entries(config, tensor_shapes(directory))
        values = load_weights(directory, entries, expected, ignore=family.ignored(config))
        images = None if family.vision is None else family.vision.settings(directory)
        return cls(config, values, images, _tokenizer(Path(directory)))


QwenVLBackbone = ModelBackbone


def _by_layer(tokens: Tokens) -> Array | None:
    """Deepstack features [n,B,T,D]."""
    return None if tokens.deepstack is None else jnp.moveaxis(tokens.deepstack, 2, 0)


def _tokenizer(root: Path) -> Any:
    path = root / TOKENIZER_FILE
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error


def _is_image(item: Any) -> bool:
    """A path, an array, or a PIL image (told by its `getbands`, so that Pillow need not be there)."""
    return isinstance(item, os.PathLike | np.ndarray) or hasattr(item, "getbands")


def _causal(B: int, T: int, size: int) -> Array:
    """[B,1,T,size+T]: the whole context, and the tokens up to one's own."""
    own = jnp.tril(jnp.ones((T, T), bool))
    return jnp.broadcast_to(jnp.concatenate([jnp.ones((T, size), bool), own], axis=1), (B, 1, T, size + T))
