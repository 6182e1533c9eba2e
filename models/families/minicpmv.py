"""MiniCPM-V 2.6, 4.0 and 4.5: SigLIP on slices of any size, a resampler of learned queries; Qwen2, Llama or Qwen3.

Sources: OpenBMB's `modeling_minicpmv.py`, `modeling_navit_siglip.py`, `resampler.py`, `image_processing_minicpmv.py`
and `processing_minicpmv.py` of each release. transformers has no such class, but the language models and SigLIP.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.decoder import Decoder
from ..decoder.hf_config import Regime, need
from ..decoder.key_tables.minicpm import ONLY_OWN, OWN
from ..decoder.known_keys import complete
from ..decoder.weights import decoder_entries
from ..inputs.minicpm_images import minicpmv_settings, process_minicpmv
from ..towers.common import patch_places, segment_table
from ..towers.resampler import Resampler, ResamplerConfig, resampler_entries
from ..towers.vit import ViT, ViTConfig, range_positions
from ..towers.weights import clip_entries
from .deepseek_vl import read_siglip
from .family import Family, Shapes, Vision
from .image_family import check_placeholders, freeze, thaw
from .text_families import read_llama, read_qwen2, read_qwen3

ARCHITECTURE = "MiniCPMV"
PAD = "<unk>"
"""What stands for an embedding of an image in the authors' vocabularies."""
SO400M = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
"""The tower of a configuration that has none."""
_PARTS = (
    "{%- macro text_of(content) -%}"
    "{%- if content is string -%}{{ content }}"
    "{%- else -%}{%- for part in content -%}"
    "{{ '' if loop.first else '\n' }}{{ '" + PAD + "' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
)
_TURN = "{{ '<|im_start|>' + message['role'] + '\n' + text_of(message['content']) + '<|im_end|>\n' }}"
_ANSWER = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
TEMPLATE_40 = _PARTS + "{%- for message in messages -%}" + _TURN + "{%- endfor -%}" + _ANSWER + "{%- endif -%}"
"""The authors' template of 4.0, with what their `chat` makes of a message's images and texts: one a line."""
TEMPLATE_26 = TEMPLATE_40.replace(
    _TURN,
    "{%- if loop.first and message['role'] != 'system' -%}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif -%}" + _TURN,
)
TEMPLATE_45 = (
    _PARTS + "{%- if tools -%}{{ raise_exception('tools are not written for MiniCPM-V-4.5') }}{%- endif -%}"
    "{%- set asked = namespace(last=messages | length - 1) -%}"
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}{%- set asked.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- set said = text_of(message['content']) -%}{%- set thought = '' -%}"
    "{%- if '</think>' in said -%}"
    "{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}"
    "{%- set said = said.split('</think>')[-1].lstrip('\n') -%}"
    "{%- endif -%}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > asked.last and (loop.last or thought) -%}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}"
    "{%- else -%}{{ said }}{%- endif -%}{{ '<|im_end|>\n' }}"
    "{%- else -%}" + _TURN + "{%- endif -%}"
    "{%- endfor -%}" + _ANSWER + "{{ '<think>\n' }}{{ '' if enable_thinking else '\n</think>\n\n' }}{%- endif -%}"
)
"""4.5's, which writes an empty thought unless `enable_thinking` is true, as the authors' `chat` has it by default."""


@dataclasses.dataclass(frozen=True)
class Release:
    """What tells one release from another: its language model, what its tables of keys are called, the placeholder's
    id in its vocabulary.
    """

    read: Callable[..., DecoderConfig]
    keys: str
    pad: int


RELEASES = {
    2.6: Release(read_qwen2, "minicpmv2.6", 128244),
    4.0: Release(read_llama, "minicpmv4.0", 0),
    4.5: Release(read_qwen3, "minicpmv4.5", 128244),
}
"""By the `version` that `config.json` names."""


@dataclasses.dataclass(frozen=True)
class MiniCPMVConfig:
    """The whole backbone; `raw` is config.json as it was read."""

    version: float
    text: DecoderConfig
    vision: ViTConfig
    resampler: ResamplerConfig
    image_token: int
    raw: str

    @property
    def family(self) -> Family:
        """The family of this release."""
        return FAMILIES[self.version]

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, ARCHITECTURE, self.text.dtype)


class MiniCPMVModel(nnx.Module):
    """Tower, resampler and decoder with their parameters."""

    def __init__(self, config: MiniCPMVConfig, rngs: nnx.Rngs):
        self.visual = ViT(config.vision, rngs)
        self.resampler = Resampler(config.resampler, rngs)
        self.decoder = Decoder(config.text, rngs)

    def encode(self, pixel_values: Float[Array, " P *patch"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns embeddings of packed patches [P, channels, patch, patch], slice by slice, n = 1."""
        features = self.visual.packed(pixel_values, plan["positions"], plan["slices"])
        return self.resampler(features, plan["rows"], plan["columns"], plan["slices"])[None]


def _read(raw: Mapping[str, Any], angles: str, regime: Regime) -> MiniCPMVConfig:
    version: Any = raw.get("version")
    if not isinstance(version, int | float) or version not in RELEASES:
        raise ConfigError(f"config.json: got version {version!r} of MiniCPM-V; expected one of {sorted(RELEASES)}")
    release = RELEASES[version]

    model = complete(raw, release.keys)
    text = release.read({key: value for key, value in raw.items() if key not in {*OWN, *ONLY_OWN}}, angles, regime)
    part = model["vision_config"]
    part = SO400M if part is None else part
    if not isinstance(part, Mapping) or part.get("model_type", "siglip") not in ("siglip", "siglip_vision_model"):
        raise ConfigError(f"vision_config: got {part!r:.80}; expected a table of SigLIP's sizes")
    tower = read_siglip(complete(part, "siglip_vision_model", "vision_config"), text.dtype)
    if model["drop_vision_last_layer"]:
        tower = dataclasses.replace(tower, depth=tower.depth - 1)
    resampler = ResamplerConfig(tower.width, text.width, need(model, "query_num"), text.dtype)
    pad = release.pad if model["image_token_id"] is None else model["image_token_id"]
    return MiniCPMVConfig(float(version), text, tower, resampler, pad, freeze(raw))


def _entries(config: MiniCPMVConfig, shapes: Shapes) -> list[TensorEntry]:
    entries = decoder_entries(config.text, prefix="llm.model.", head="llm.lm_head")
    entries += clip_entries(config.vision, "vpm")
    return entries + resampler_entries(config.resampler, "resampler", ("resampler",))


def _plan(config: MiniCPMVConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Plans slices, each of which has its own grid of patches.

    Raises:
      InputError: grids that are none, or placeholders or pixels that do not match them.
    """
    given = arrays.get("tgt_sizes")
    if given is None and arrays.get("pixel_values") is None:
        return None
    sizes: np.ndarray = np.asarray(() if given is None else given)
    if sizes.ndim != 2 or sizes.shape[1] != 2 or not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 1:
        raise InputError(f"tgt_sizes: got {sizes.tolist()!r:.80}; expected rows and columns of patches, one or more")

    grids: list[tuple[int, int]] = [(int(height), int(width)) for height, width in sizes]
    vision = config.vision
    counts = [height * width for height, width in grids]
    shape = (sum(counts), vision.channels, vision.patch, vision.patch)
    features = len(grids) * config.resampler.queries
    check_placeholders(input_ids, (config.image_token,), features, arrays.get("pixel_values"), shape)
    rows, columns = zip(*(patch_places(height, width, 1) for height, width in grids), strict=True)
    return {
        "rows": np.concatenate(rows),
        "columns": np.concatenate(columns),
        "positions": np.concatenate([range_positions(height, width, vision.side) for height, width in grids]),
        "slices": segment_table(counts),
    }


def _tokens(config: MiniCPMVConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns an image's number, the whole, and its slices row by row; without a tokenizer the placeholders alone."""
    columns, rows = (int(number) for number in arrays["slice_grids"][index])
    pads = [config.image_token] * config.resampler.queries
    if tokenizer is None:
        return pads * (1 + columns * rows)

    def encode(text):
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    opening, closing = encode("<slice>"), encode("</slice>")
    ids = [*encode(f"<image_id>{index}</image_id><image>"), *pads, *encode("</image>")]
    for row in range(rows):
        ids += encode("\n") if row else []
        ids += [*opening, *pads, *closing] * columns
    return ids


def _family(template: str) -> Family:
    return Family(
        architecture=ARCHITECTURE,
        config=_read,
        module=MiniCPMVModel,
        entries=_entries,
        vision=Vision(minicpmv_settings, process_minicpmv, _tokens, _plan, fills=lambda config: {"slices": 1}),
        ignore=(r".*\.rotary_emb\.inv_freq", r"resampler\.pos_embed", r"vpm\.embeddings\.position_ids"),
        model_type="minicpmv",
        template=template,
    )


FAMILIES = {version: _family(text) for version, text in ((2.6, TEMPLATE_26), (4.0, TEMPLATE_40), (4.5, TEMPLATE_45))}
"""By the `version` that `config.json` names: they differ in the chat template."""
