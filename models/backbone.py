"""`ModelBackbone`: the `kvpatch_jax.backbone.Backbone` protocol over one loaded model.

Prompts are made by `prompts.py`, arrays computed by the jitted programs of `decoding/`; here is what lies between:
checks on the host, before anything is traced, and padding to buckets.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from kvpatch_jax.backbone import Context, ForwardCosts, Logits, Output, Tokens, check_cached, check_tokens
from kvpatch_jax.core import Buckets, KVLayout, Paged, PhaseFreeKV, check_mask, check_positions
from kvpatch_jax.errors import InputError, ShapeError

from .decoder.costs import forward_costs
from .decoder.sharding import cache_shardings
from .decoding import Answering, Forward, Generating, Writing, in_pages, key_count, last_tokens
from .encoding import Encoding, Features
from .families.family import (
    Config,
    Family,
    placeholders,
    with_parameters,
)
from .fingerprint import fingerprint_of
from .inputs.buckets import (
    cut_output,
    embedding_blocks,
    pad_context,
    pad_ids,
    pad_mask,
    pad_own_mask,
    pad_tokens,
)
from .inputs.chat import ChatTemplate
from .inputs.masks import causal_mask, check_behind, check_chunk, check_mask_over, counted_tokens
from .inputs.rows import logit_rows
from .inputs.texts import check_ids
from .prompts import NO_TOKENIZER, Prompting


class ModelBackbone(Prompting, Encoding, Generating, Writing, Answering):
    """A model of any family with its weights, its image settings and (where the directory has one) its tokenizer.

    Attributes:
      layout: the KV layout that follows from the configuration.
      config, image_config, video_config, audio_config: as read from the directory; settings are None where the family
        takes no such input.
      family: what tells this model from others.
      tokenizer: of `tokenizers`, or None; another one may be set. without_tokenizer: why there is none, for messages.
      chat_template: the directory's, or None; another one may be set.
      buckets: sizes that prompts and images are padded to, or None for their own.
      mesh: the mesh that parameters and KV lie over (`models/decoder/sharding.py` says how), or None. Where devices
        outnumber KV heads, its axis "tensor" is split in two.
      stop_tokens: ids that end an answer unless a call says otherwise.
      answer_tokens: tokens of an answer at most where a session is not told; None where the checkpoint does not say.
      programs: the jitted programs.
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
        without_tokenizer: str = NO_TOKENIZER,
        stop_tokens: Sequence[int] = (),
        answer_tokens: int | None = None,
        video_config: Any = None,
        audio_config: Any = None,
    ):
        self.config: Any = config
        self.buckets = buckets
        self.family: Family = config.family
        self.image_config, self.video_config, self.audio_config = image_config, video_config, audio_config
        self.layout = config.text.layout
        self.stop_tokens = tuple(stop_tokens)
        self.answer_tokens = answer_tokens
        self.programs = Forward(
            with_parameters(config, dict(parameters)), placeholders(config), layout=self.layout, mesh=mesh
        )
        self.mesh = self.programs.mesh
        self.tokenizer, self.chat_template, self.without_tokenizer = tokenizer, chat_template, without_tokenizer
        self._fingerprint: str | None = None

    # ------------------------------------------------------------------------------------------ parameters

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters as nested dictionaries of arrays."""
        return self.programs.parameters

    @property
    def fingerprint(self) -> str:
        """A digest of the configuration, the rope's regime, the image settings and every parameter's bytes.

        Computed when it is first asked for, from the parameters where they lie; the files are not read again.
        Tokenizer, chat template, buckets and mesh are not in it: they change no number.
        """
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(self._settings(), self.parameters)
        return self._fingerprint

    @property
    def kv_shardings(self) -> dict[str, jax.sharding.NamedSharding] | None:
        """How each channel's KV [L,B,T,K,H], and a pool of it [L,P,O,K,H], lies over the mesh; None without one."""
        return None if self.mesh is None else cache_shardings(self.layout, self.mesh)

    @property
    def forward_costs(self) -> ForwardCosts:
        """See `kvpatch_jax.backbone.Backbone.forward_costs`. The tower is not in it."""
        return forward_costs(self.config.text)

    def _settings(self) -> Iterator[bytes]:
        """Yields what the numbers depend on beside the parameters."""
        yield json.dumps(self.config.to_dict(), sort_keys=True).encode()
        rope = self.config.text.rope
        yield rope.angles.encode()
        # Which regime is pinned is in no configuration.
        yield b"" if rope.scaling is None else repr(rope.scaling).encode()
        for settings in (self.image_config, self.video_config, self.audio_config):
            yield json.dumps(None if settings is None else dataclasses.asdict(settings), sort_keys=True).encode()
        # A rule of positions that no file names.
        rule = getattr(self.config, "video_rule", "max")
        if rule != "max":
            yield rule.encode()

    def replaced(self, parameters: Mapping[str, Any]) -> "ModelBackbone":
        """Returns the same backbone (buckets, template and mesh too) with other parameters, which are left where
        they are.

        Both run the same programs, each compiled once for the two.
        """
        _, state = nnx.split(with_parameters(self.config, dict(parameters)))
        other = copy.copy(self)
        other.programs, other._fingerprint = self.programs.holding(state), None
        return other

    def with_buckets(self, buckets: Buckets | None) -> "ModelBackbone":
        """Returns the same backbone over the same arrays, with other buckets."""
        other = copy.copy(self)
        other.buckets = buckets
        return other

    # ----------------------------------------------------------------------------------------- embeddings

    def embed(
        self,
        input_ids: Int[Array | np.ndarray, "B T"],
        position_ids: Array | np.ndarray | None = None,
        pixel_values: Array | np.ndarray | None = None,
        image_grid_thw: Int[np.ndarray, "images 3"] | None = None,
        video_grid_thw: Int[np.ndarray, "videos 3"] | None = None,
        features: Features | None = None,
        **more: Any,
    ) -> Tokens:
        """Runs the tower over the packed patches and puts its features at the placeholders.

        With a batch, patches are packed in the order of the placeholders, row by row. M-RoPE's `position_ids` are
        needed for more than one row; else they are derived when absent. `more` are further arrays that the
        family's processor makes.

        Args:
          features: the tower's output for this prompt, as `encode` gives it: the tower does not run, and
            `pixel_values` are not looked at.

        Raises:
          InputError: grids or features that do not match the patches or the placeholders, or images for a text family.
          ShapeError: no rows, and no `position_ids` for them. InputError: positions outside the regime that the
          rope is pinned to.
        """
        given = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
        tokens, length = self._embed(input_ids, position_ids, features, given | more)
        return tokens if tokens.embeddings.shape[1] == length else tokens.take(0, length)

    def embed_padded(self, input_ids: Int[Array | np.ndarray, "B T"], **arrays: Any) -> tuple[Tokens, int]:
        """Embeds a prompt and leaves it at its bucket's size, with how many of the tokens count: the first ones.

        Cutting them to their length, as `embed` does, compiles a small program for every length. Takes and raises what
        `embed` does.
        """
        return self._embed(input_ids, arrays.pop("position_ids", None), arrays.pop("features", None), arrays)

    def _embed(
        self,
        input_ids: Array | np.ndarray,
        position_ids: Array | np.ndarray | None,
        features: Features | None,
        given: Mapping[str, Any],
    ) -> tuple[Tokens, int]:
        input_ids = check_ids(input_ids, self.config.text.vocabulary, placeholders(self.config))
        arrays = {name: value for name, value in given.items() if value is not None}
        if features is None:
            features = self._encode(input_ids, arrays)
        else:
            self._check_features(input_ids, features)

        if position_ids is None:
            position_ids = self._positions(input_ids, arrays)
        self._check_regime(position_ids)

        length = input_ids.shape[1]
        if self.buckets is not None:
            input_ids = pad_ids(self.buckets, input_ids, placeholders(self.config))
            embeddings, deepstack = self._embed_in_blocks(input_ids, features)
        else:
            embeddings, deepstack = self.programs.embed(self.programs.state, input_ids, features)
        # Positions of the host stay there, in 32 bits as a device would have them.
        positions = position_ids
        if not isinstance(positions, jax.Array):
            positions = np.asarray(positions)
            positions = positions.astype(np.float32 if positions.dtype.kind == "f" else np.int32)
        if input_ids.shape[1] != length:
            room = [(0, input_ids.shape[1] - length if axis == 1 else 0) for axis in range(positions.ndim)]
            positions = np.pad(np.asarray(positions), room)
        # Of the padded ids, whose padding is no image.
        ahead = None if self.family.ahead is None else self.family.ahead(self.config, input_ids)
        return Tokens(embeddings, positions, deepstack, ahead), length

    def _embed_in_blocks(self, input_ids: np.ndarray, features: Features | None) -> tuple[Any, Any]:
        """Embeds ids [B,T] with their features; no number of tokens compiles a program. Joined on the host."""
        blocks = embedding_blocks(input_ids, features, placeholders(self.config))
        parts = jax.device_get([self.programs.embed(self.programs.state, *block) for block in blocks])

        def joined(*values: np.ndarray) -> jax.Array:
            value = np.concatenate(values, axis=1)[:, : input_ids.size]
            return jax.device_put(value.reshape(*input_ids.shape, *value.shape[2:]))

        return jax.tree.map(joined, *parts)

    def _positions(self, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
        rows = len(input_ids)
        if not rows:
            raise ShapeError(f"embed: got token ids {input_ids.shape}; expected at least one row")
        if rows != 1 and self.layout.rope.axes is not None:
            raise InputError(f"embed: got {rows} rows without position_ids; expected position_ids for a batch")
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
        context: Context | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
        start_layer: int = 0,
        hidden_at: tuple[int, ...] = (),
        logits: Logits = "last",
        chunk: int | None = None,
        lengths: Int[Array | np.ndarray, " B"] | None = None,
    ) -> Output:
        """See `kvpatch_jax.backbone.Backbone.prefill`."""
        context = self._check_read(tokens, context, mask, "prefill")
        check_chunk(chunk, mask, key_count(context), tokens.ahead)
        self._check_regime(tokens.positions)
        length, rows = tokens.embeddings.shape[1], logit_rows(tokens, logits, "prefill")
        filled = self._filled(tokens, context, mask, "prefill", lengths)
        tokens, context, mask = self._pad_read(tokens, context, mask)
        how = {"start_layer": start_layer, "hidden_at": tuple(hidden_at), "chunk": chunk}
        out = self.programs.prefill(self.programs.state, tokens, context, mask, rows, filled, **how)
        out = cut_output(out, length, every=rows is None)
        return out._replace(kv=PhaseFreeKV(out.kv))

    def prefill_padded(self, tokens: Tokens, context: Context | None = None, logits: Logits = "last") -> Output:
        """Runs tokens that have all the padding they are to have: as `prefill`, but as many run as are given.

        What stands behind the tokens that count is seen by none of them, and its KV comes back too. Contexts are padded
        as ever. A transition is that of all of them.
        """
        context = self._check_read(tokens, context, None, "prefill_padded")
        self._check_regime(tokens.positions)
        rows, mask = logit_rows(tokens, logits, "prefill_padded"), None

        if self.buckets is not None and context is not None and not isinstance(context, Paged):
            size = key_count(context)
            keys, window = self.buckets.round_up(size), self.config.text.window
            mask = causal_mask(tokens.embeddings.shape[1], keys, size, window)
            context = pad_context(self.buckets, context)

        how: dict[str, Any] = {"start_layer": 0, "hidden_at": (), "chunk": None}
        out = self.programs.prefill(self.programs.state, tokens, context, mask, rows, None, **how)
        return out._replace(kv=PhaseFreeKV(out.kv))

    def router_load(
        self,
        tokens: Tokens,
        context: Context | None = None,
        mask: Bool[Array | np.ndarray, "B 1 T S"] | None = None,
    ) -> Int[Array, "L E"]:
        """Counts the tokens that each expert takes in each layer: how evenly the routers spread a prompt.

        The layers run as in `prefill`, without the output head; no other call counts anything.

        Args:
          tokens, context, mask: as `prefill` takes them. Padding is not counted.

        Returns:
          int32 [L,E], the layers that have experts from the bottom up; a row sums to B·T times the experts per token.

        Raises:
          InputError: a model without experts. Else as `prefill`.
        """
        if self.config.text.experts is None:
            raise InputError(f"router_load: got {self.family.architecture}, which has no experts; expected a mixture")
        context = self._check_read(tokens, context, mask, "router_load")
        self._check_regime(tokens.positions)
        batch, length, _ = tokens.embeddings.shape
        tokens, context, mask = self._pad_read(tokens, context, mask)

        # Of what runs, only the tokens as they were given count: padding chooses experts as well.
        counted = np.broadcast_to(np.arange(tokens.embeddings.shape[1]) < length, (batch, tokens.embeddings.shape[1]))
        return self.programs.router_load(self.programs.state, tokens, context, mask, jnp.asarray(counted))

    def _check_read(
        self, tokens: Tokens, context: Context | None, mask: Any, what: str
    ) -> dict[str, Any] | Paged | None:
        """Refuses what prefill and generate cannot run over; the context in plain dictionaries, one kind of pytree."""
        check_tokens(tokens, what)
        check_mask(mask, f"{what}: mask")
        if context is None:
            return None

        check_cached(self.layout, tokens, context, f"{what}: context")
        if isinstance(context, Paged):
            length = tokens.embeddings.shape[1]
            check_mask_over(mask, (len(tokens.embeddings), length, context.key_count + length), what)

        check_behind(tokens, context, mask, what)
        return in_pages(self.config.text.window, context) if isinstance(context, Paged) else dict(context)

    def _filled(self, tokens: Tokens, context: Context | None, mask: Any, what: str, lengths: Any = None) -> Any:
        """Returns which of the tokens, padded to their bucket, layers with linear attention run over; None for all, and
        of models without such layers.
        """
        if not self.layout.parts or (mask is None and self.buckets is None and lengths is None):
            return None
        rows, length, _ = tokens.embeddings.shape
        size = length if self.buckets is None else self.buckets.round_up(length)
        if lengths is not None:
            if mask is not None:
                raise InputError(f"{what}: got lengths and a mask; expected one of them, which says what tokens count")
            # On the host, where no number of tokens compiles a program.
            return np.arange(size) <= last_tokens(tokens, lengths)[:, None]
        filled = np.ones((rows, length), bool) if mask is None else counted_tokens(mask, key_count(context), what)
        return jnp.pad(jnp.broadcast_to(filled, (rows, length)), ((0, 0), (0, size - length)))

    def _read_of(
        self, tokens: Tokens, context: Context | None, mask: Any, steps: int
    ) -> tuple[Tokens, Context | None, Any, Any]:
        context = self._check_read(tokens, context, mask, "generate")
        self._check_regime(tokens.positions, max(steps - 1, 0))
        filled = None if mask is None else self._filled(tokens, context, mask, "generate")
        return *self._pad_read(tokens, context, mask), filled

    def _pad_read(self, tokens: Tokens, context: Context | None, mask: Any) -> tuple[Tokens, Context | None, Any]:
        """Returns what prefill and generate take, padded to its buckets (as it is without buckets)."""
        if self.buckets is None:
            return tokens, context, mask
        length, window = tokens.embeddings.shape[1], self.config.text.window
        if isinstance(context, Paged):
            return pad_tokens(self.buckets, tokens), context, pad_own_mask(self.buckets, mask, length)
        mask = pad_mask(self.buckets, length, key_count(context), mask, window)
        return pad_tokens(self.buckets, tokens), pad_context(self.buckets, context), mask
