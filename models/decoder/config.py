"""Configuration of a language tower: sizes and switches of its attention, its experts and the whole decoder."""

import dataclasses
from typing import Literal

from kvpatch_jax.core import KVLayout, Rope
from kvpatch_jax.errors import ConfigError

from .layers import ACTIVATIONS


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

    def __post_init__(self) -> None:
        if self.router not in ("softmax", "sigmoid"):
            raise ConfigError(f"router: got {self.router!r}; expected 'softmax' or 'sigmoid'")
        if not 0 < self.chosen <= self.experts or self.experts % self.groups:
            raise ConfigError(
                f"experts: got {self.chosen} of {self.experts} in {self.groups} groups; expected groups of equal size "
                "and at most all experts"
            )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Everything that tells one language tower from another.

    `rope` holds frequencies, cached layout, partial width and M-RoPE sections. `qk_norm` puts an RMS norm on each
    head before rotation (Qwen3), `post_norms` adds norms after attention and MLP (GLM-4-0414), `attention_bias` puts
    biases on query, key and value (Qwen2; on the downward projections of latent attention), `latent` makes attention
    latent ("mla": `kv_heads` and `head_dim` then play no part), `experts` makes the MLP a mixture. `window` is how many
    tokens a token sees, itself included, in the layers that slide: those in `window_layers`, or all of them.

    Raises:
      ConfigError: a kind of attention that keeps no KV or is not built, or sizes that do not fit.
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
    attention: str = "gqa"
    dtype: str = "float32"
    latent: LatentConfig | None = None
    experts: ExpertConfig | None = None
    window: int | None = None
    window_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.attention not in ("gqa", "mla"):
            raise ConfigError(f"attention: got {self.attention!r}; expected 'gqa' (MHA included) or 'mla'")
        if (self.attention == "mla") != (self.latent is not None):
            raise ConfigError(f"attention {self.attention!r}: got latent {self.latent}; expected both for 'mla'")

        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim", "intermediate"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}: got {value!r}; expected a positive whole number")

        if self.heads % self.kv_heads:
            raise ConfigError(f"query heads: got {self.heads}; expected a multiple of the {self.kv_heads} KV heads")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation: got {self.activation!r}; expected one of {sorted(ACTIVATIONS)}")

    @property
    def layout(self) -> KVLayout:
        """The KV layout that follows from this configuration."""
        if self.latent is not None:
            return KVLayout.mla(self.layers, self.latent.latent, self.latent.rope_dim, rope=self.rope)
        make = KVLayout.mha if self.heads == self.kv_heads else KVLayout.gqa
        heads = {"heads": self.heads} if self.heads == self.kv_heads else {"kv_heads": self.kv_heads}
        return make(layers=self.layers, head_dim=self.head_dim, rope=self.rope, **heads)

    def slides(self, layer: int) -> bool:
        """Returns whether a layer sees no further than the window."""
        return self.window is not None and (self.window_layers is None or layer in self.window_layers)

    @property
    def window_edges(self) -> tuple[int, ...]:
        """Layers that slide where the one below does not, or the reverse."""
        return tuple(layer for layer in range(1, self.layers) if self.slides(layer) != self.slides(layer - 1))

    @property
    def dense_layers(self) -> int:
        """How many layers at the bottom are a stack of their own."""
        return 0 if self.experts is None else min(self.experts.dense_layers, self.layers)
