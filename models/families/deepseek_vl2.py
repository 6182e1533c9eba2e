"""DeepSeek-VL2 (tiny, small, base): SigLIP over an image's view and tiles, 2×2 features through two maps, experts with
latent attention, or (tiny) with multi-head attention.

Source: DeepSeek's `modeling_deepseek_vl_v2.py`, `siglip_vit.py`, `modeling_deepseek.py` and
`processing_deepseek_vl_v2.py`; transformers has no such class.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry, fused_entries, module_entries, read_table
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import need, read_decoder, read_deepseek_experts, read_latent, read_rope
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.pictures import HALVES, TILES, process_vl2
from ..inputs.processors import PROCESSOR_FILE, own_settings
from ..inputs.tokenizer_files import token_id
from ..towers.projectors import Projector
from ..towers.vit import ViT, ViTConfig
from ..towers.weights import TIMM, blocks, patch_entries, projector_entries
from .config_file import ConfigFile, FamilyConfig, dtype_of, expect, one_size
from .family import Family, Shapes, Vision
from .parsed import Table, parse
from .view_packing import NEWLINE, SEPARATOR, grids_of, pack_views, view_fills, view_plan, view_tokens

ARCHITECTURE = "DeepseekVLV2ForCausalLM"
MODEL_TYPE = "deepseek_vl_v2"
PLACEHOLDER = "<image>"
IMAGE_TOKEN = 128815
"""Of the placeholder, where neither `config.json` nor the tokenizer's files name it."""
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_TEXT: dict[str, Any] = {"num_hidden_layers": 30, "num_key_value_heads": 32, "scoring_func": "softmax"}
_TEXT |= {"n_routed_experts": 0, "n_shared_experts": 0}
_VISION = {"image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4}
_GLUE = {"input_dim": 1152, "n_embed": 2048, "mlp_ratio": 1, "downsample_ratio": 2}
"""Where the authors' classes default otherwise than transformers' DeepSeek-V2, and of the parts without a class."""
_BUILT = {"global_view_pos": ("head", None), "tile_tag": ("2D", None)}
_BUILT_GLUE = {"projector_type": ("downsample_mlp_gelu", None), "depth": (2, None), "token_pooling": (False, None)}
_BUILT_VISION = {"class_token": (False, None), "global_pool": ("map", None), "ignore_head": (True, None)}
_BUILT_TEXT = {"lm_head": (True, None), "rm_head": (False, None), "moe_layer_freq": (1, None)}
"""Of keys that may be absent, the values that are built."""
TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- set said = namespace(text='') -%}"
    "{%- if message['content'] is string -%}{%- set said.text = message['content'] -%}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- set said.text = said.text + ('<image>\n' if part['type'] == 'image' else part['text']) -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'system' and loop.first -%}{{ said.text | trim }}"
    "{%- elif message['role'] == 'user' -%}{{ '<|User|>: ' + said.text | trim + '\n\n<|Assistant|>:' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ said.text | trim + eos_token }}"
    "{%- else -%}{{ raise_exception('no role ' + message['role'] + ' here') }}{%- endif -%}"
    "{%- endfor -%}"
)
"""The format "deepseek" of `conversation.py`, as `format_messages_v2` puts it: a question ends where its answer begins.
An image is written as in the authors' examples, on the end of a line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekVL2Config(FamilyConfig):
    """The whole backbone.

    Attributes:
      fold: features along the side of the square that becomes one. inner: width between the projector's maps.
    """

    vision: ViTConfig
    fold: int
    inner: int
    image_token: int

    def __post_init__(self) -> None:
        if not 0 <= self.image_token < self.text.vocabulary:
            raise ConfigError(
                f"image_token_id: got {self.image_token}; expected one of {self.text.vocabulary} tokens, in "
                f"config.json or as {PLACEHOLDER!r} in the tokenizer's files"
            )

    @property
    def newline(self) -> bool:
        """Whether a learned vector stands behind each row of features."""
        return True

    @property
    def view_first(self) -> bool:
        """Whether an image's view stands before its tiles."""
        return True

    def side_of(self, pixels: int, name: str) -> int:
        """Returns the features along a side of an image.

        Raises:
          InputError: another size than the tower's positions are for.
        """
        if pixels != self.vision.image:
            raise InputError(f"{name}: got {pixels} pixels a side; expected {self.vision.image}")
        return -(-self.vision.side // self.fold)


class DeepseekVL2Model(nnx.Module):
    """Tower, projector, learned vectors and decoder with their parameters."""

    def __init__(self, config: DeepseekVL2Config, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.text.dtype), config.text.width
        self.visual = ViT(config.vision, rngs)
        self.projector = Projector(
            config.vision.width * config.fold**2, config.inner, width, rngs=rngs, activation="gelu", dtype=dtype
        )
        self.newline, self.separator = (nnx.Param(jnp.zeros((width,), dtype)) for _ in range(2))
        self.decoder = Decoder(config.text, rngs)
        self.config = config

    def encode(self, pixel_values: Float[Array, "B C H W"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features in the plan's order, n = 1; the plan has the tiles' pixels."""
        views, fold = len(pixel_values), self.config.fold
        features = self.visual(jnp.concatenate([pixel_values, plan[TILES].astype(pixel_values.dtype)]))
        side = self.config.vision.side
        square = features.reshape(len(features), side, side, -1)
        # Odd sides get zeros at the end; of a square the channel is the slowest, as torch's `unfold` has it.
        more = -side % fold
        square = jnp.pad(square, ((0, 0), (0, more), (0, more), (0, 0)))
        folded = self.projector(rearrange(square, "B (h y) (w x) D -> B (h w) (D y x)", y=fold, x=fold))
        learned = {NEWLINE: self.newline[...], SEPARATOR: self.separator[...]}
        return pack_views(folded[:views], folded[views:], learned, plan)


def _read_text(file: ConfigFile, given: Table) -> DecoderConfig:
    """Reads the decoder: DeepSeek-V2's or -V3's experts, with V3's latent attention or Llama's."""
    expect(given, **_BUILT_TEXT)
    latent = given.get("use_mla", True)
    # Files without latent attention have its keys as 0 or null.
    others = {*_BUILT_TEXT, "use_mla", *(() if latent else LATENT)}
    kept = {key: value for key, value in given.items() if key not in others and (value is not None or key not in _TEXT)}
    raw = parse(_TEXT | kept, "deepseek_v2", "config.json: language_config")
    bias, heads = raw["attention_bias"], raw["num_attention_heads"]
    if raw["n_routed_experts"]:
        need(given, "topk_method")
    switches: dict[str, Any] = {
        "attention_bias": bias,
        "output_bias": bias,
        "experts": read_deepseek_experts(raw, need(raw, "scoring_func")),
        "dtype": dtype_of(file.raw) or dtype_of(given) or "float32",
    }
    regime, angles = file.regime, file.angles
    if not latent:
        width = raw["hidden_size"] // heads
        return read_decoder(raw, read_rope(raw, width, angles=angles, regime=regime), head_dim=width, **switches)
    # Pairs are read side by side and cached in halves, as V3 does.
    rope = read_rope(raw, raw["qk_rope_head_dim"], angles=angles, regime=regime, cached="half")
    switches |= {"kv_heads": heads, "latent": read_latent(raw, rope, reads_pairs=True)}
    return read_decoder(raw, rope, **switches)


def _read(file: ConfigFile) -> DeepseekVL2Config:
    model = file.model
    expect(model, **_BUILT)
    expect(file.part("projector_config"), **_BUILT_GLUE)
    expect(file.part("vision_config"), **_BUILT_VISION)
    text, vision = _read_text(file, file.part("language_config")), Table(_VISION | file.part("vision_config"))
    glue = Table(_GLUE | file.part("projector_config"))
    tower = ViTConfig(
        depth=one_size(vision, "layers"),
        width=one_size(vision, "width"),
        heads=one_size(vision, "heads"),
        intermediate=int(vision["width"] * vision["mlp_ratio"]),
        image=one_size(vision, "image_size"),
        patch=one_size(vision, "patch_size"),
        activation="gelu_pytorch_tanh",
        norm_epsilon=1e-6,
        final_norm="applied",
        dtype=text.dtype,
    )
    for name, width in (("input_dim", tower.width), ("n_embed", text.width)):
        if glue[name] != width:
            raise ConfigError(f"projector_config: got {name} {glue[name]!r}; expected {width}")
    return file.config(
        DeepseekVL2Config,
        text,
        vision=tower,
        fold=one_size(glue, "downsample_ratio"),
        inner=one_size(glue, "mlp_ratio") * text.width,
        image_token=model.get("image_token_id", IMAGE_TOKEN),
    )


def _entries(config: DeepseekVL2Config, shapes: Shapes) -> list[TensorEntry]:
    tower, text, place = config.vision, "language.model.", ("visual",)
    shape = (tower.width, tower.channels, tower.patch, tower.patch)
    rows, layout = {part: tower.width for part in ("query", "key", "value")}, expert_layout(config.text, shapes, text)
    return [
        *decoder_entries(config.text, prefix=text, head="language.lm_head", fused_experts=layout),
        *patch_entries("vision.patch_embed.proj", place, *shape),
        TensorEntry("vision.pos_embed", (*place, "position_embedding"), file_shape=(1, tower.tokens, tower.width)),
        *module_entries("vision", place, blocks("blocks", TIMM) | {"final_norm": "norm"}),
        *fused_entries("vision.blocks.{layer}.attn.qkv", (*place, "blocks"), rows),
        *projector_entries("projector.layers.0", "projector.layers.2"),
        TensorEntry("image_newline", ("newline",)),
        TensorEntry("view_seperator", ("separator",)),
    ]


def _plan(config: DeepseekVL2Config, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, Any] | None:
    """Plans views and tiles, of which each image has some."""
    if arrays.get("pixel_values") is not None and not all(rows * columns for rows, columns in grids_of(arrays)):
        raise InputError(f"tiles: got {grids_of(arrays)}; expected at least one row and column for each image")
    return view_plan(config, input_ids, arrays)


def _options(given: dict[str, Any], root: Path) -> dict[str, Any]:
    """Returns a directory's image settings: those of the authors' `processor_config.json`, whose resolutions may stand
    in `config.json`.

    Raises:
      ConfigError: resolutions that are no multiples of the first one's width, or none.
    """
    name, given = "candidate_resolutions", given or read_table(root / PROCESSOR_FILE)
    points = given.get(name) or read_table(root / "config.json").get(name)
    pairs: list[Any] = (
        [pair if isinstance(pair, list | tuple) else () for pair in points] if isinstance(points, list) else []
    )
    if not pairs or not all(len(pair) == 2 and all(type(side) is int and side > 0 for side in pair) for pair in pairs):
        raise ConfigError(f"{name}: got {points!r:.80}; expected pairs of widths and heights")
    side = pairs[0][0]
    if any(edge % side for pair in pairs for edge in pair):
        raise ConfigError(f"{name}: got {points!r:.80}; expected multiples of {side}")
    return {"do_normalize": given.get("normalize", True)} | given | {name: points, "size": side}


def _amend(raw: Mapping[str, Any], root: Path) -> Mapping[str, Any]:
    """Names the placeholder, which only the tokenizer's files do."""
    token = token_id(root, PLACEHOLDER) if raw.get("image_token_id") is None else None
    return raw if token is None else {**raw, "image_token_id": token}


_SETTINGS = own_settings("image", _options, image_mean=HALVES, image_std=HALVES, resample=3)
FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=DeepseekVL2Model,
    entries=_entries,
    vision=Vision(_SETTINGS, process_vl2, view_tokens, _plan, view_fills),
    model_type=MODEL_TYPE,
    template=TEMPLATE,
    amend=_amend,
)
