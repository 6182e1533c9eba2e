"""DeepSeek-OCR-2: SAM with a compressor, a Qwen2 encoder whose queries read its features, one map, experts with
multi-head attention.

Source: transformers' DeepseekOcr2ForConditionalGeneration.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry, module_entries
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.layers import Linear
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.pictures import TILES
from ..inputs.processors import process_images, processor
from ..towers.query_encoder import FEW, MANY, QueryEncoder, query_count, query_encoder_entries
from ..towers.sam import SamConfig, SamDownsampling, SamEncoder, SamNeck
from ..towers.sam_weights import sam_downsampling_entries, sam_encoder_entries, sam_neck_entries
from .config_file import ConfigFile, FamilyConfig
from .deepseek_vl import read_sam
from .family import Family, Shapes, Vision
from .view_packing import SEPARATOR, pack_views, view_fills, view_plan, view_tokens

ARCHITECTURE = "DeepseekOcr2ForConditionalGeneration"
SHRINK = 4
"""Patches along the side of the square that becomes one feature."""
TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{{ '<image>\n' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endfor -%}"
)
"""The authors' format "plain": texts one behind the other, and no roles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekOcr2Config(FamilyConfig):
    """The whole backbone."""

    vision: SamConfig
    compressor: tuple[int, int]
    encoder: DecoderConfig
    image_token: int

    def __post_init__(self) -> None:
        if self.compressor[1] != self.encoder.width:
            raise ConfigError(
                f"downsample_channels: got {self.compressor}; expected to end in the encoder's {self.encoder.width}"
            )

    @property
    def newline(self) -> bool:
        """Whether a learned vector stands behind each row of features."""
        return False

    @property
    def view_first(self) -> bool:
        """Whether an image's view stands before its tiles."""
        return False

    def side_of(self, pixels: int, name: str) -> int:
        """Returns the features along a side of an image, as if its queries were a square.

        Raises:
          InputError: a size at which there are not as many features as queries.
        """
        sides = {count: round(count**0.5) * SHRINK * self.vision.patch for count in (FEW, MANY)}
        if pixels not in sides.values():
            raise InputError(f"{name}: got {pixels} pixels a side; expected one of {sorted(sides.values())}")
        return round(query_count((pixels // (SHRINK * self.vision.patch)) ** 2) ** 0.5)


class DeepseekOcr2Model(nnx.Module):
    """Towers, projector and decoder with their parameters."""

    def __init__(self, config: DeepseekOcr2Config, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.text.dtype)
        self.visual, self.neck = SamEncoder(config.vision, rngs), SamNeck(config.vision, rngs)
        self.downsampling = SamDownsampling(config.vision, rngs, config.compressor)
        self.encoder = QueryEncoder(config.encoder, rngs)
        self.projection = Linear(config.encoder.width, config.text.width, bias=True, rngs=rngs, dtype=dtype)
        self.separator = nnx.Param(jnp.zeros((config.text.width,), dtype))
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, "B C H W"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features in the plan's order, n = 1; the plan has the tiles' pixels."""
        views, tiles = self._queries(pixel_values), plan.get(TILES)
        tiles = None if tiles is None else self._queries(tiles)
        return pack_views(views, tiles, {SEPARATOR: self.separator[...]}, plan)

    def _queries(self, pixel_values: Float[Array, "B C H W"]) -> Float[Array, "B Q D"]:
        features = self.downsampling(self.neck(self.visual(pixel_values)[0]))
        return self.projection(self.encoder(features.reshape(len(features), -1, features.shape[-1])))


def _read(file: ConfigFile) -> DeepseekOcr2Config:
    text, vision = file.text("deepseek_ocr2_text"), file.part("vision_config")
    inner = file.decoder(vision["encoder_config"] | {"model_type": "qwen2"})
    encoder = dataclasses.replace(inner, dtype=text.dtype, tied_embeddings=True)
    if encoder.window is not None:
        raise ConfigError(f"encoder_config: got a sliding window of {encoder.window}; expected none")
    sam = dataclasses.replace(read_sam(vision["sam_config"], text.dtype), interpolate=True)
    middle, outer = vision["sam_config"]["downsample_channels"]
    return file.config(
        DeepseekOcr2Config, text, vision=sam, compressor=(middle, outer), encoder=encoder, **file.tokens("image_token")
    )


def _entries(config: DeepseekOcr2Config, shapes: Shapes) -> list[TensorEntry]:
    # transformers writes the authors' names by default, and its own modules' where it is asked to.
    own = "model.sam_model.pos_embed" in shapes
    sam = "model.sam_model" if own else "model.vision_tower.sam_encoder"
    first, second = ("net_2", "net_3") if own else ("proj.conv1", "proj.conv2")
    encoder = "model.qwen2_model.model.model" if own else "model.vision_tower.vision_encoder"
    few, many = (
        f"model.qwen2_model.query_{size}" if own else f"model.vision_tower.query_{size}_resolution"
        for size in (768, 1024)
    )
    text = "model." if own else "model.language_model."
    layout = expert_layout(config.text, shapes, text, default="rows")
    return [
        *decoder_entries(config.text, prefix=text, fused_experts=layout),
        *sam_encoder_entries(config.vision, sam, ("visual",), own),
        *sam_neck_entries(config.vision, f"{sam}.neck", ("neck",), own),
        *sam_downsampling_entries(f"{sam}.{first}", f"{sam}.{second}", ("downsampling",)),
        *query_encoder_entries(config.encoder, f"{encoder}.", few, many, ("encoder",)),
        *module_entries("model", (), {"projection": "projector.layers" if own else "multi_modal_projector"}),
        TensorEntry("model.view_seperator" if own else "model.view_separator", ("separator",)),
    ]


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=DeepseekOcr2Model,
    entries=_entries,
    vision=Vision(processor("deepseek_ocr2.DeepseekOcr2"), process_images, view_tokens, view_plan, view_fills),
    model_type="deepseek_ocr2",
    template=TEMPLATE,
)
