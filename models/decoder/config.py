"""Configuration of a language tower: sizes and switches of its attention, its experts and the whole decoder."""

import dataclasses
import functools
from typing import Literal, NamedTuple

from kvpatch_jax.core import PARTS, Channel, KVLayout, Rope
from kvpatch_jax.errors import ConfigError

from .layers import check_activation


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Widths of multi-head latent attention.

    Attributes:
      latent: width of the cached latent (`kv_lora_rank`).
      rope_dim: width of the decoupled key (`qk_rope_head_dim`).
      plain_dim: width of a head's part without position (`qk_nope_head_dim`).
      value_dim: width of a head's value (`v_head_dim`).
      query_rank: width of the queries' own latent (`q_lora_rank`), or None.
      reads_pairs: the projections give rotary pairs side by side, halves are rotated and cached (DeepSeek-V3, Kimi).
      scale_factor: multiplies the softmax scale (YaRN's mscale², 1 without).
    """

    latent: int = 512
    rope_dim: int = 64
    plain_dim: int = 128
    value_dim: int = 128
    query_rank: int | None = None
    reads_pairs: bool = False
    scale_factor: float = 1.0

    @property
    def scale(self) -> float:
        """What the scores are multiplied by."""
        return (self.plain_dim + self.rope_dim) ** -0.5 * self.scale_factor


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """How tokens choose experts.

    Attributes:
      experts, chosen: how many there are, and how many each token takes (`num_experts_per_tok`).
      intermediate: width inside an expert.
      router: "softmax" over all experts (Qwen3-MoE, DeepSeek-V2), or "sigmoid" of each, chosen with a correction bias
        and weighted without it (DeepSeek-V3, Kimi; arXiv:2412.19437, section 2.1.2).
      renormalise: the chosen weights are divided by their sum.
      scaling: multiplies the weights (`routed_scaling_factor`).
      groups, chosen_groups: experts are first limited to the best groups: by their best expert (softmax) or by the sum
        of their best two (sigmoid).
      shared: width inside the MLP that every token takes as well; 0 for none.
      dense_layers: how many layers at the bottom have an ordinary MLP (`first_k_dense_replace`).
      beside: they stand beside an ordinary MLP, with norms of their own, and the router has a norm and a factor for
        each expert (Gemma 4).
      shared_gate: what the shared MLP gives is multiplied by the sigmoid of a number per token (Qwen3-Next, Qwen3.5).
    """

    experts: int
    chosen: int
    intermediate: int
    router: Literal["softmax", "sigmoid"]
    renormalise: bool
    scaling: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    shared: int = 0
    dense_layers: int = 0
    beside: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.router not in ("softmax", "sigmoid"):
            raise ConfigError(f"router: got {self.router!r}; expected 'softmax' or 'sigmoid'")
        if not 0 < self.chosen <= self.experts or self.experts % self.groups:
            raise ConfigError(
                f"experts: got {self.chosen} of {self.experts} in {self.groups} groups; expected groups of equal size "
                "and at most all experts"
            )


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """Sizes of linear attention by the gated delta rule: what a layer keeps is a transition, not a row per token.

    Attributes:
      key_heads, value_heads: a key head serves as many value heads as there are to each, neighbours of one another.
      key_width, value_width: of a head; the state is [key_width, value_width] for each value head.
      convolution: tokens that the causal convolution in front reads, its own included.
      fused: query, key, value and gate are one map, key head by key head, and so are the two rates (Qwen3-Next).

    Raises:
      ConfigError: sizes that do not fit.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    convolution: int = 4
    fused: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads or self.convolution < 2:
            raise ConfigError(
                f"linear attention: got {self.key_heads} key heads, {self.value_heads} value heads, a convolution over "
                f"{self.convolution} tokens; expected a multiple of the key heads, and at least 2 tokens"
            )

    @property
    def widths(self) -> dict[str, int]:
        """What the convolution reads of a token, in this order: all heads of query, key and value."""
        keys = self.key_heads * self.key_width
        return {"query": keys, "key": keys, "value": self.value_heads * self.value_width}


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What tells layers of one decoder from its others.

    Attributes:
      name: of the channels that these layers keep: "" for k and v, "local" for k_local and v_local.
      rope: of their keys and queries. head_dim, kv_heads: of their attention. window: how many tokens a token sees,
        itself included; None for all.
      reads: they keep no KV, and read that of the last layer below with channels of this name that keeps its own.
      keys_are_values: their values are their keys' projection, before its norm.
      intermediate: width inside their MLP; None: the decoder's.
      linear: they have linear attention of these sizes, and none of the fields before `intermediate` but the name says
        anything of them; None: attention.
    """

    name: str
    rope: Rope
    head_dim: int
    kv_heads: int
    window: int | None = None
    reads: bool = False
    keys_are_values: bool = False
    intermediate: int | None = None
    linear: LinearConfig | None = None

    @property
    def channels(self) -> dict[str, str]:
        """What attention calls what it keeps, and the channels of the layout that these layers keep."""
        if self.linear is not None:
            return {part: part for part in PARTS}
        suffix = f"_{self.name}" if self.name else ""
        return {part: f"{part}{suffix}" for part in ("k", "v")}


class LayerStack(NamedTuple):
    """Layers whose parameters have one shape each, on a leading axis: its name in the decoder, and their numbers."""

    name: str
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that tells one language tower from another.

    `rope` holds frequencies, cached layout, partial width and M-RoPE sections. `qk_norm` puts an RMS norm on each
    head before rotation (Qwen3), `post_norms` adds norms after attention and MLP (GLM-4-0414), `attention_bias` puts
    biases on query, key and value (Qwen2; on the downward projections of latent attention), `latent` makes attention
    latent (`kv_heads` and `head_dim` then play no part), `experts` makes the MLP a mixture. `window` is how many
    tokens a token sees, itself included, in the layers that slide: those in `window_layers`, or all of them.

    Where layers are of unlike kinds, `kinds` lists these and `kind_of` says, layer by layer, which it is; `rope`,
    `head_dim` and `kv_heads` are then those of the first kind, and windows are the kinds' own.

    `norm_weight` says how RMS norms take their weight: "after" the cast back from float32 (Llama), or in float32 before
    it: the weight itself ("wide", Gemma 4) or 1 + weight ("offset", Gemma 3). `value_norm` puts one without a weight on
    each head's values. `layer_scale` multiplies what leaves a layer by a number of its own. `per_layer` is the width of
    what every layer takes of each token beside the residual (Gemma 4), looked up in a table of `per_layer_vocabulary`;
    tokens in whose place features stand have that of the token `blank`. With `ahead_in_windows` tokens that see some
    behind their own (`Tokens.ahead`) do so in layers that slide alone.
    `embedding_scale` multiplies token embeddings, rounded to their dtype.
    `attention_gate` multiplies each head's output by the sigmoid of a second query (Qwen3-Next).
    `attention_scale` multiplies scores in place of head_dim^-0.5. `logit_cap` c bounds logits softly: c·tanh(x/c).

    Raises:
      ConfigError: sizes that do not fit.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope: Rope
    norm_epsilon: float = 1e-6
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    tied_embeddings: bool = False
    dtype: str = "float32"
    latent: LatentConfig | None = None
    experts: ExpertConfig | None = None
    window: int | None = None
    window_layers: tuple[int, ...] | None = None
    kinds: tuple[LayerKind, ...] = ()
    kind_of: tuple[int, ...] = ()
    norm_weight: Literal["after", "wide", "offset"] = "after"
    value_norm: bool = False
    layer_scale: bool = False
    per_layer: int | None = None
    per_layer_vocabulary: int = 0
    blank: int = 0
    ahead_in_windows: bool = False
    embedding_scale: float | None = None
    attention_gate: bool = False
    attention_scale: float | None = None
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim", "intermediate"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}: got {value!r}; expected a positive whole number")

        if self.heads % self.kv_heads:
            raise ConfigError(f"query heads: got {self.heads}; expected a multiple of the {self.kv_heads} KV heads")
        check_activation(self.activation, "hidden_act")
        if self.kinds:
            self._check_kinds()

    def _check_kinds(self) -> None:
        """Refuses kinds that do not fit the decoder, and takes windows from them."""
        kept = set[str]()
        for layer, kind in enumerate(self.layer_kinds):
            if kind.kv_heads < 1 or self.heads % kind.kv_heads or kind.rope.head_width != kind.head_dim:
                raise ConfigError(
                    f"layers of kind {kind.name!r}: got {kind.kv_heads} KV heads of width {kind.head_dim}; expected a "
                    f"divisor of the {self.heads} query heads, and the rope's width {kind.rope.head_width}"
                )
            if kind.reads and kind.name not in kept:
                raise ConfigError(
                    f"layer {layer}: got one that reads the KV of no layer below; expected one that keeps it"
                )
            kept |= {kind.name} if not kind.reads else set()
        # What asks whether anything slides reads the widest window.
        windows = [kind.window for kind in self.kinds if kind.window is not None]
        object.__setattr__(self, "window", max(windows, default=None))

    @functools.cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        if self.kinds:
            return tuple(self.kinds[number] for number in self.kind_of)
        every = self.window_layers is None
        kinds = []
        for layer in range(self.layers):
            window = self.window if every or layer in (self.window_layers or ()) else None
            kinds.append(LayerKind("", self.rope, self.head_dim, self.kv_heads, window))
        return tuple(kinds)

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """Where each layer's KV is along the first axis of its channels."""
        rows, counts = [], dict[str, int]()
        for kind in self.layer_kinds:
            if not kind.reads:
                counts[kind.name] = counts.get(kind.name, 0) + 1
            rows.append(counts[kind.name] - 1)
        return tuple(rows)

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """The layer whose KV each one attends over: itself, or the one whose KV it reads."""
        sources, latest = [], dict[str, int]()
        for layer, kind in enumerate(self.layer_kinds):
            if not kind.reads:
                latest[kind.name] = layer
            sources.append(latest[kind.name])
        return tuple(sources)

    def channels_of(self, layer: int) -> dict[str, str]:
        """Returns what attention calls its KV, and the channels of the layout that a layer keeps of it."""
        if self.latent is not None:
            return {"ckv": "ckv", "kpe": "kpe"}
        return self.layer_kinds[layer].channels

    @property
    def layout(self) -> KVLayout:
        """The KV layout that follows from this configuration."""
        linear = tuple(layer for layer, kind in enumerate(self.layer_kinds) if kind.linear is not None)
        unlike = len({(kind.name, kind.rope) for kind in self.layer_kinds}) > 1 or any(
            kind.reads for kind in self.kinds
        )
        if unlike and not linear:
            return self._unlike_layout()
        if self.latent is not None:
            return KVLayout.mla(self.layers, self.latent.latent, self.latent.rope_dim, rope=self.rope)
        make = KVLayout.mha if self.heads == self.kv_heads else KVLayout.gqa
        heads = {"heads": self.heads} if self.heads == self.kv_heads else {"kv_heads": self.kv_heads}
        rows = make(layers=self.layers, head_dim=self.head_dim, rope=self.rope, **heads)
        if not linear:
            return rows
        own = self.layer_kinds[linear[0]].linear
        assert own is not None
        tail = (own.convolution - 1, sum(own.widths.values()))
        return rows.with_transitions(linear, own.value_heads, own.key_width, own.value_width, tail=tail)

    def _unlike_layout(self) -> KVLayout:
        """Returns the layout of layers of unlike kinds: channels of each kind, on its layers."""
        channels = []
        for name in dict.fromkeys(kind.name for kind in self.kinds):
            named = [layer for layer, kind in enumerate(self.layer_kinds) if kind.name == name]
            layers = tuple(layer for layer in named if not self.layer_kinds[layer].reads)
            kind = self.layer_kinds[layers[0]]
            key, value = kind.channels.values()
            rope = None if kind.rope == self.rope else kind.rope
            channels.append(Channel(key, kind.kv_heads, kind.head_dim, kind.rope.dim, rope, layers))
            channels.append(Channel(value, kind.kv_heads, kind.head_dim, layers=layers))
        return KVLayout("mha" if self.heads == self.kv_heads else "gqa", self.layers, tuple(channels), self.rope)

    def slides(self, layer: int) -> bool:
        """Returns whether a layer sees no further than a window."""
        return self.layer_kinds[layer].window is not None

    @functools.cached_property
    def kind_edges(self) -> tuple[int, ...]:
        """Layers that are of another kind than the one below."""
        kinds = self.layer_kinds
        return tuple(layer for layer in range(1, self.layers) if kinds[layer] != kinds[layer - 1])

    @functools.cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """Stacks of layers whose parameters have one shape: dense layers below experts are one of their own."""
        forms: dict[tuple, list[int]] = {}
        for layer, kind in enumerate(self.layer_kinds if self.kinds else ()):
            form = (kind.reads, kind.head_dim, kind.kv_heads, kind.keys_are_values, kind.intermediate, kind.linear)
            forms.setdefault(form, []).append(layer)
        if len(forms) > 1:
            return tuple(LayerStack(f"layers_{number}", tuple(own)) for number, own in enumerate(forms.values()))

        below = self.dense_layers
        stacks = (
            LayerStack("dense_layers", tuple(range(below))),
            LayerStack("layers", tuple(range(below, self.layers))),
        )
        return tuple(stack for stack in stacks if stack.layers)

    def place(self, layer: int) -> tuple[str, int]:
        """Returns the stack of a layer, and where it is in it."""
        stack = next(stack for stack in self.stacks if layer in stack.layers)
        return stack.name, stack.layers.index(layer)

    @property
    def dense_layers(self) -> int:
        """How many layers at the bottom are a stack of their own."""
        return 0 if self.experts is None else min(self.experts.dense_layers, self.layers)
