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
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from kvpatch_jax.backbone import KV, Output, Step, Tokens, check_behind, check_cached, check_tokens
from kvpatch_jax.content import items_of, sort_of
from kvpatch_jax.errors import ConfigError, InputError, ShapeError
from kvpatch_jax.frames import EngineKV, PhaseFreeKV
from kvpatch_jax.layout import KVLayout, to_engine
from kvpatch_jax.rope import check_positions

from .checkpoints import flatten_params, load_weights, same_tensors, save_weights, tensor_shapes
from .decoder.sharding import auto_mesh, cache_shardings, check_parameters, parameter_shardings
from .families.family import Config, Family, abstract, parameters, with_dtype, with_parameters
from .inputs.buckets import Buckets, cut_output, pad_context, pad_ids, pad_images, pad_mask, pad_slots, pad_tokens
from .inputs.chat import ChatTemplate, Message, expand_images, images_of
from .inputs.checks import check_ids, check_mask
from .inputs.texts import ids_of_text, unknown_token

TOKENIZER_FILE = "tokenizer.json"


class ModelBackbone:
    """A model of any family with its weights, its image settings and (where the directory has one) its tokenizer.

    Attributes:
      layout: the KV layout that follows from the configuration.
      config, image_config: as read from the directory; `image_config` is None for a text family.
      family: what tells this model from others.
      chat_template: the directory's, or None.
      buckets: sizes that prompts and images are padded to, or None for their own.
      mesh: the mesh that parameters and KV lie over (`models/sharding.py` says how), or None.
    """

    layout: KVLayout

    def __init__(
        self,
        config: Config,
        parameters: Mapping[str, Any],
        image_config: Any = None,
        tokenizer: Any = None,
        buckets: Buckets | None = None,
        chat_template: ChatTemplate | None = None,
        mesh: Mesh | None = None,
    ):
        self.config: Any = config
        self.buckets, self.chat_template = buckets, chat_template
        self.family: Family = config.family
        self.image_config, self.tokenizer = image_config, tokenizer
        self.layout = config.text.layout
        self.mesh = mesh
        self._kv_shardings = {} if mesh is None else cache_shardings(self.layout, mesh)
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
        """The same backbone (buckets, template and mesh too) with other parameters, which are left where they are."""
        kept: dict[str, Any] = {"buckets": self.buckets, "chat_template": self.chat_template, "mesh": self.mesh}
        return ModelBackbone(self.config, parameters, self.image_config, self.tokenizer, **kept)

    # --------------------------------------------------------------------------------------------- prompts

    def prepare(
        self,
        items: Sequence[Any],
        second_per_grid_ts: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Texts, images and token ids, in order, to one prompt's arrays (batch of one).

        Args:
          items: each a text (needs the directory's tokenizer, whose own start and end tokens then stand around the
            whole prompt), a sequence of token ids, or an image: a path
            (`pathlib.Path`), a PIL image, a uint8 array [H,W] or [H,W,C], or an encoded file's bytes. An image stands
            between its start and end tokens. A str that names a file is refused: `kvpatch_jax.Text` makes it text.
          second_per_grid_ts: Qwen2.5-VL: seconds per temporal patch of each video; `embed` takes it too.

        Returns:
          input_ids [1,T], position_ids [1,T] or [1,T,A], and where there are images what the family's processor makes
          of them (pixel_values, and sizes or grids).

        Raises:
          ImageError: an image that cannot be read. InputError: no items, an item of another kind, text without a
          tokenizer, or text that the tokenizer does not know.
        """
        items = items_of(items, "prompt")
        sorts = [sort_of(item) for item in items]
        images = [item for item, sort in zip(items, sorts, strict=True) if sort == "image"]
        arrays = self._process(images) if images else {}
        if second_per_grid_ts is not None:
            if not hasattr(self.config, "tokens_per_second"):
                name = self.family.architecture
                raise InputError(f"second_per_grid_ts for {name}, whose positions count no seconds; expected None")
            arrays |= {"second_per_grid_ts": np.asarray(second_per_grid_ts, np.float32)}
        numbers = itertools.count()
        ids: list[int] = []
        for item, sort in zip(items, sorts, strict=True):
            ids += self._image_ids(arrays, next(numbers)) if sort == "image" else self._text_ids(item)
        if "text" in sorts:
            before, after = self._own_special_tokens()
            ids = [*before, *ids, *after]
        return self._prompt(ids, arrays)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> dict[str, Any]:
        """Messages to one prompt's arrays (as `prepare` gives them), by the checkpoint's chat template.

        What the tokenizer itself puts around a text (a start token, mostly) is put around the prompt too, as the
        family's processor does, unless the template wrote the start token. A text family's tokenizer adds nothing.

        Args:
          messages: {"role", "content"} each; a content is a text, or a list of {"type": "text", "text"} and
            {"type": "image", "image": a path, PIL image or uint8 array}.
          add_generation_prompt: end with what opens the assistant's answer.
          variables: further names that the template knows.

        Raises:
          InputError: no template or tokenizer, messages that the template refuses, entries of another type than text
          and image, text that the tokenizer does not know, or images that the template did not place.
          ConfigError: a template that cannot be used. ImageError: an image that cannot be read.
        """
        if self.chat_template is None or self.tokenizer is None:
            raise InputError("chat: this backbone has no chat template or no tokenizer; expected both in its directory")
        images = images_of(messages)
        text = self.chat_template.render(messages, add_generation_prompt, **variables)
        own = self.family.vision is not None and not self.chat_template.starts(text)
        ids = ids_of_text(self.tokenizer, text, self._unknown, own)
        arrays = self._process(images) if images else {}
        if self.family.vision is not None:
            expansions = [self._image_ids(arrays, number) for number in range(len(images))]
            ids = expand_images(ids, self.config.image_token, expansions)
        return self._prompt(ids, arrays)

    def _prompt(self, ids: list[int], arrays: Mapping[str, Any]) -> dict[str, Any]:
        input_ids = np.array(ids, np.int32)
        positions = self.family.positions(self.config, input_ids, arrays)
        return {"input_ids": input_ids[None], "position_ids": positions[None], **arrays}

    @functools.cached_property
    def _unknown(self) -> str | None:
        return unknown_token(self.tokenizer)

    def _own_special_tokens(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before and behind a text (a start token, mostly)."""
        bare, whole = (list(self.tokenizer.encode("a", add_special_tokens=flag).ids) for flag in (False, True))
        places = range(len(whole) - len(bare) + 1)
        first = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
        return whole[:first], whole[first + len(bare) :]

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
            return ids_of_text(self.tokenizer, item, self._unknown)
        return [int(token) for token in item]

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
        input_ids = check_ids(input_ids, self.config)
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
        pixels = arrays.get("pixel_values") if plan else None
        length = input_ids.shape[1]
        if self.buckets is not None:
            input_ids, pixels, plan = self._pad_prompt(self.buckets, input_ids, pixels, plan)
        embedded = self._embed(self._state, input_ids, pixels, plan)
        embeddings, deepstack = embedded if isinstance(embedded, tuple) else (embedded, None)
        tokens = Tokens(embeddings, _host_positions(position_ids), deepstack)
        if input_ids.shape[1] == length:
            return tokens
        return Tokens(embeddings[:, :length], tokens.positions, None if deepstack is None else deepstack[:, :length])

    def _pad_prompt(self, buckets: Buckets, input_ids: np.ndarray, pixels: Any, plan: Any) -> tuple[Any, Any, Any]:
        vision = self.family.vision
        if vision is None:
            return pad_ids(buckets, input_ids, ()), pixels, plan
        config = self.config
        pads = (config.image_token, getattr(config, "video_token", config.image_token))
        if pixels is not None:
            pixels, plan = pad_images(buckets, np.asarray(pixels), plan, vision.fills(config))
        return pad_ids(buckets, input_ids, pads), pixels, plan

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
        context = self._check_call(tokens, context, mask, "prefill")
        check_mask(mask)
        self._check_regime(tokens.positions)
        length = tokens.embeddings.shape[1]
        tokens, context, mask = self._pad_call(tokens, context, mask)
        layers = {"start_layer": start_layer, "hidden_at": tuple(hidden_at)}
        out = cut_output(self._prefill(self._state, tokens, context, mask, **layers), length)
        return out._replace(kv=PhaseFreeKV(out.kv))

    def _check_call(self, tokens: Tokens, context: KV | None, mask: Any, what: str) -> dict[str, Any] | None:
        """Refuses what prefill and generate cannot run over; the context as a plain dictionary, one kind of pytree."""
        check_tokens(tokens, what)
        if context is None:
            return None
        check_cached(self.layout, tokens, context, f"{what}: context")
        check_behind(tokens, context, mask, what)
        return dict(context)

    def _pad_call(self, tokens: Tokens, context: KV | None, mask: Any) -> tuple[Tokens, KV | None, Any]:
        """What prefill and generate take, padded to its buckets (as it is without buckets)."""
        if self.buckets is None:
            return tokens, context, mask
        batch, length, _ = tokens.embeddings.shape
        size = 0 if context is None else next(iter(context.values())).shape[2]
        mask = pad_mask(self.buckets, batch, length, size, mask)
        return pad_tokens(self.buckets, tokens), pad_context(self.buckets, context), mask

    def recompute(
        self,
        tokens: Tokens,
        cache: KV,
        slots: Int[Array | np.ndarray, "B T"],
        keep: Bool[Array | np.ndarray, "L B T"] | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.recompute`. Tokens of a set that ends at a layer run on, unwritten."""
        self._check_write(tokens, cache, slots, "recompute")
        if keep is not None and not isinstance(keep, Tracer):
            sets = np.asarray(keep)
            if sets.shape[0] != self.layout.layers or (sets[1:] & ~sets[:-1]).any():
                raise ShapeError(
                    f"keep {sets.shape}: expected one token set per layer ({self.layout.layers}), each inside the one "
                    "below"
                )
        self._check_regime(tokens.positions)
        return self._write(tokens, cache, slots, keep, mask)

    def _check_write(self, tokens: Tokens, cache: KV, slots: Any, what: str) -> None:
        """Refuses what recompute and decode cannot write into."""
        check_tokens(tokens, what)
        check_cached(self.layout, tokens, cache, f"{what}: cache")
        if np.shape(slots) != tokens.embeddings.shape[:2]:
            raise ShapeError(f"{what}: slots of shape {np.shape(slots)}; expected {tokens.embeddings.shape[:2]}")

    def _write(self, tokens: Tokens, cache: KV, slots: Any, keep: Any, mask: Any) -> Step:
        check_mask(mask)
        slots, length = jnp.asarray(slots), tokens.embeddings.shape[1]
        if self.buckets is not None:
            tokens = pad_tokens(self.buckets, tokens)
            size = next(iter(cache.values())).shape[2]
            slots, keep, mask = pad_slots(self.buckets, slots, keep, mask, size)
        step = self._recompute(self._state, tokens, dict(cache), slots, keep, mask)
        written = type(cache)(step.cache) if isinstance(cache, EngineKV) else step.cache  # a loop's carry stays alike
        return Step(step.logits[:, :length] if step.logits.shape[1] != length else step.logits, written)

    def decode(
        self,
        tokens: Tokens,
        cache: KV,
        slots: Int[Array | np.ndarray, "B T"],
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
    ) -> Step:
        """See `kvpatch_jax.backbone.Backbone.decode`."""
        self._check_write(tokens, cache, slots, "decode")
        self._check_regime(tokens.positions)
        return self._write(tokens, cache, slots, None, mask)

    def generate(
        self,
        tokens: Tokens,
        steps: int,
        context: KV | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
    ) -> Int[Array, "B steps"]:
        """Greedy continuation: the next `steps` token ids behind tokens and, where given, an engine-frame context."""
        context = self._check_call(tokens, context, mask, "generate")
        check_mask(mask)
        self._check_regime(tokens.positions, max(steps - 1, 0))
        last = tokens.embeddings.shape[1] - 1
        tokens, context, mask = self._pad_call(tokens, context, mask)
        return self._generate(self._state, tokens, context, mask, last, steps=steps)

    def _embed_core(self, state, input_ids, pixel_values, plan) -> Array | tuple[Array, Array]:
        return nnx.merge(self._graph, state).embed(input_ids, pixel_values, plan)

    def _spread(self, kv: Any) -> Any:
        """A KV pytree laid over the mesh, where there is one (and None where there is no KV)."""
        if kv is None or self.mesh is None:
            return kv
        lay = jax.lax.with_sharding_constraint
        return {name: lay(value, self._kv_shardings[name]) for name, value in kv.items()}

    def _prefill_core(self, state, tokens: Tokens, context, mask, *, start_layer: int, hidden_at) -> Output:
        decoder = nnx.merge(self._graph, state).decoder
        B, T, _ = tokens.embeddings.shape
        if mask is None:
            mask = _causal(B, T, 0 if context is None else next(iter(context.values())).shape[2])
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            mask,
            context=self._spread(context),
            start_layer=start_layer,
            hidden_at=hidden_at,
            deepstack=_by_layer(tokens),
        )
        return Output(decoder.logits(run.hidden), self._spread(run.kv), run.taps)

    def _recompute_core(self, state, tokens: Tokens, cache, slots, keep, mask) -> Step:
        decoder = nnx.merge(self._graph, state).decoder
        if mask is None:
            size = next(iter(cache.values())).shape[2]
            mask = (jnp.arange(size) <= slots[..., None])[:, None]
        run = decoder.run(
            tokens.embeddings,
            tokens.positions,
            mask,
            context=self._spread(cache),
            slots=slots,
            keep=keep,
            deepstack=_by_layer(tokens),
        )
        assert run.cache is not None
        return Step(decoder.logits(run.hidden), self._spread(run.cache))

    def _generate_core(self, state, tokens: Tokens, context, mask, last, *, steps: int) -> Array:
        decoder = nnx.merge(self._graph, state).decoder
        B, T, _ = tokens.embeddings.shape
        size = 0 if context is None else next(iter(context.values())).shape[2]
        seen = _causal(B, T, size) if mask is None else mask
        out = self._prefill_core(state, tokens, context, seen, start_layer=0, hidden_at=())
        first, later = jnp.argmax(out.logits[:, last], axis=-1), max(steps - 1, 0)  # nothing is read behind the last
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
            allowed = jnp.pad(seen[:, :, last, None], ((0, 0), (0, 0), (0, 0), (0, later)))
            allowed = allowed | ((ahead >= size + T) & (ahead <= size + T + index))
            slots = jnp.full((B, 1), size + T, jnp.int32) + index
            step = self._recompute_core(state, step_tokens, cache, slots, None, allowed)
            return (jnp.argmax(step.logits[:, -1], axis=-1), step.cache), token

        (final, _), tokens_before = jax.lax.scan(body, (first, cache), jnp.arange(later))
        return jnp.concatenate([tokens_before.T, final[:, None]], axis=1)[:, :steps]

    def _grow(self, kv: KV, positions: Array | np.ndarray, context: KV | None, steps: int) -> KV:
        """Engine-frame cache of context and tokens with room for `steps` more."""
        turned = to_engine(self.layout, kv, positions, 0)
        room = lambda new: jnp.pad(new, ((0, 0), (0, 0), (0, steps), (0, 0), (0, 0)))
        if context is None:
            return {name: room(new) for name, new in turned.items()}
        return {name: room(jnp.concatenate([context[name].astype(new.dtype), new], 2)) for name, new in turned.items()}

    # ------------------------------------------------------------------------------------------------ disk

    def save(self, directory: str | os.PathLike[str], dtype: str | None = None) -> Path:
        """Write a Hugging Face directory: config.json, model.safetensors, and (with images) preprocessor_config.json
        and (where there are any) tokenizer.json and the chat template. Returns it.
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
        if self.chat_template is not None:
            self.chat_template.save(root)
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
        buckets: Buckets | None = None,
        mesh: Mesh | None = None,
    ) -> "ModelBackbone":
        """Read config, image settings, weights and tokenizer. `dtype` None takes the configuration's.

        Raises:
          ConfigError, WeightsError: as `models.load`.
        """
        config = family.config(raw, angles, regime)
        config = config if dtype is None else with_dtype(config, dtype)
        shapes = tensor_shapes(directory)
        silent = raw.get("tie_word_embeddings") is None
        config = family.settle_ties(config, shapes, functools.partial(same_tensors, directory), silent)
        expected = flatten_params(parameters(abstract(config)))
        entries = family.entries(config, shapes)
        mesh = None if mesh is None else auto_mesh(mesh)
        shardings = None if mesh is None else parameter_shardings(config.text, expected, mesh)
        ignore = family.ignored(config)
        values = load_weights(directory, entries, expected, ignore=ignore, shardings=shardings)
        images = None if family.vision is None else family.vision.settings(directory)
        more: dict[str, Any] = {
            "buckets": buckets,
            "chat_template": ChatTemplate.from_directory(directory),
            "mesh": mesh,
        }
        backbone = cls(config, values, images, _tokenizer(Path(directory)), **more)
        check_parameters(flatten_params(backbone.parameters), expected, shardings)
        return backbone


QwenVLBackbone = ModelBackbone


def _host_positions(positions: Array | np.ndarray) -> Array | np.ndarray:
    """Positions where they are, those of the host in 32 bits as a device would have them."""
    if isinstance(positions, jax.Array):
        return positions
    given = np.asarray(positions)
    return given.astype(np.float32 if given.dtype.kind == "f" else np.int32)


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


def _causal(B: int, T: int, size: int) -> Array:
    """[B,1,T,size+T]: the whole context, and the tokens up to one's own."""
    own = jnp.tril(jnp.ones((T, T), bool))
    return jnp.broadcast_to(jnp.concatenate([jnp.ones((T, size), bool), own], axis=1), (B, 1, T, size + T))
