"""Bytes of objects before any is made: files on the disk and copies in memory, by a model's layout and the encoding.

The sizes are those of the library's own header and codec, over arrays that take no memory.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..core import PART_DTYPE, KVEncoding, KVLayout, Rope
from ..errors import ConfigError, InputError
from ..utils.kinds import expect_kind, is_whole
from .format.codec import dtype_for, encode
from .format.header import PAGE
from .format.layout_codec import kept_by_layer, layout_body
from .format.naming import Encoding, encoding_word, few_bits
from .format.objects import Blob, planned_header
from .format.packed import kv_forms

_DIGEST = "0" * 64
"""As long as ids and fingerprints are."""


class ObjectBytes(NamedTuple):
    """Bytes of one object, or of several together.

    Attributes:
      file: on the disk and in the remote store, the header included.
      memory: in the host tier.
      objects: the number of objects.
      long_header: whether their headers are longer than a page, for which a remote store is asked once more.
    """

    file: float | int
    memory: float | int
    objects: int = 1
    long_header: bool = False


def canonical_bytes(
    layout: KVLayout, tokens: int, encoding: Encoding | None = None, dtype: str = "bfloat16"
) -> ObjectBytes:
    """Returns the bytes of a stored canonical, a hybrid model's with its transition, which is prefilled in float32.

    Args:
      layout: of the model.
      tokens: of the chunk.
      encoding: as of `ChunkStore.put`; None: unreduced. With a map error the bytes are the most that a chunk takes: all
        of its map whole.
      dtype: of the KV as it was prefilled, of its rows.

    Raises:
      InputError: the encoding is unknown, or there are no tokens.
    """
    expect_kind(layout, KVLayout, "sizing: layout", "a KVLayout")
    if not is_whole(tokens, 1):
        raise InputError(f"sizing: tokens: got {tokens!r:.80}; expected a whole number above 0")
    word = encoding_word(encoding, "sizing: encoding")
    bits = few_bits(word)

    body: dict[str, Any] = {"id": _DIGEST, "backbone": _DIGEST, "span": tokens, "length": tokens}
    body |= {"layout": layout_body(layout), "dtypes": _dtypes(layout, word, dtype)}
    body |= {"hidden": None, "content": _DIGEST}
    if bits is not None:
        body |= {"encoding": word, "groups": _groups(layout, bits, tokens)}

    axes = () if layout.rope.axes is None else (layout.rope.axes,)
    arrays = {"local": np.broadcast_to(np.float32(0), (tokens, *axes))}
    layer = _layer(layout, word, tokens, body["dtypes"], bits)
    if bits is not None:
        layer |= _packed_layer(body, layout, bits, tokens)
    for number, name, _ in kept_by_layer(layout):
        own = {leaf: array for leaf, array in layer.items() if leaf == name or leaf.startswith(f"{name}.")}
        arrays |= {f"layer.{number}.{leaf}": array for leaf, array in own.items()}
    words = ".".join(["kv"] if word is None else ["kv", word])
    header = planned_header(Blob("kv", body, arrays), f"{_DIGEST}.{words}.safetensors")

    # A dtype's encoding is decoded when it is read: in memory it has its original width.
    decoded = 0
    if word is not None and bits is None:
        decoded = tokens * layout.bytes_per_token(dtype) + layout.transition_bytes() + arrays["local"].nbytes
    return ObjectBytes(header.size, max(header.size, decoded), 1, header.start > PAGE)


def _dtypes(layout: KVLayout, word: str | None, dtype: str) -> dict[str, str]:
    """Returns the dtype of each channel as it is decoded; few-bit encodings keep a transition in bfloat16.

    A map in factors is decoded to float32.
    """
    bits = few_bits(word)
    part = "float32" if bits is None else PART_DTYPE.name
    dtypes = {channel.name: dtype if channel.rows is None else part for channel in layout.channels}
    return dtypes | ({"map": "float32"} if bits is not None and bits.map_error is not None and layout.parts else {})


def _layer(
    layout: KVLayout, word: str | None, tokens: int, dtypes: Mapping[str, str], bits: KVEncoding | None
) -> dict[str, np.ndarray]:
    """Returns one layer's leaves, as `codec.chunk_blob` makes them; their values are zeros that take no memory.

    Args:
      bits: of the rows of tokens, whose leaves `_packed_layer` returns; None: they are arrays.
    """
    leaves: dict[str, np.ndarray] = {}
    for channel in layout.channels if bits is None else layout.parts:
        zero = np.zeros((1, channel.heads, channel.width), jnp.dtype(dtypes[channel.name]))
        one, scale = encode(zero, dtype_for(channel, word))
        shape = (channel.rows_for(tokens), channel.heads, channel.width)
        if channel.name == "map" and bits is not None and bits.map_error is not None:
            leaves["map.ranks"] = np.broadcast_to(np.int32(0), (channel.heads,))
            leaves["map.factors"] = np.broadcast_to(np.zeros((), PART_DTYPE), (math.prod(shape),))
            continue
        leaves[channel.name] = np.broadcast_to(one[:, :1, :1], shape)
        if scale is not None:
            leaves[f"{channel.name}.scale"] = scale
    return leaves


def _groups(layout: KVLayout, bits: KVEncoding, tokens: int) -> dict[str, int]:
    groups: dict[str, int] = {}
    for channel in layout.token_channels:
        along = tokens if bits.of_channel(channel)[1] == -2 else channel.features
        groups[channel.name] = along if bits.group is None else min(bits.group, along)
    return groups


def _packed_layer(body: Mapping[str, Any], layout: KVLayout, bits: KVEncoding, tokens: int) -> dict[str, np.ndarray]:
    leaves: dict[str, np.ndarray] = {}
    for name, form in kv_forms(body, layout, bits).items():
        for suffix, shape in form.shapes(tokens).items():
            dtype = np.dtype(jnp.bfloat16) if suffix in ("scale", "least") else np.dtype(np.uint8)
            leaves[f"{name}.{suffix}"] = np.broadcast_to(np.zeros((), dtype), shape)
    return leaves


def patch_bytes(layout: KVLayout, tokens: int, rank: int, dtype: str = "bfloat16") -> ObjectBytes:
    """Returns the bytes of a stored patch of one rank in all layers and channels, with a header of one page or more.

    Its header also has the antecedent, of which a chunk or two are counted.

    Raises:
      InputError: the rank or the tokens are no whole number above 0.
    """
    expect_kind(layout, KVLayout, "sizing: layout", "a KVLayout")
    if not (is_whole(tokens, 1) and is_whole(rank, 1)):
        raise InputError(f"sizing: got {tokens!r:.40} tokens, rank {rank!r:.40}; expected whole numbers above 0")
    zero = np.zeros((), jnp.dtype(dtype))
    arrays: dict[str, np.ndarray] = {}
    for channel in layout.channels:
        layers = layout.depth(channel.name)
        arrays[f"{channel.name}.u"] = np.broadcast_to(zero, (layers, channel.rows_for(tokens), rank))
        arrays[f"{channel.name}.v"] = np.broadcast_to(zero, (layers, rank, channel.features))
    body = {"chunk": _DIGEST, "backbone": _DIGEST, "antecedent": [_DIGEST] * 2, "layout": layout_body(layout)}
    header = planned_header(Blob("patch", body, arrays), f"{_DIGEST}.p.{_DIGEST[:40]}.{_DIGEST[:40]}.safetensors")
    return ObjectBytes(header.size, header.size, 1, header.start > PAGE)


UNLIKE = ("num_global_key_value_heads", "global_head_dim", "num_kv_shared_layers")
"""Fields of models whose layers keep KV of unlike sizes."""


def layout_of_config(config: Mapping[str, Any]) -> KVLayout:
    """Returns the layout of the KV of a model, from its `config.json`, by the fields that all families share.

    For sizes only: the frequencies are not those of the model.

    Raises:
      ConfigError: the configuration does not say how large its KV are, or its layers keep KV of unlike sizes (Gemma 4).
    """
    text: Any = config
    for name in ("thinker_config", "text_config", "language_config", "llm_config"):
        text = text[name] if isinstance(text.get(name), Mapping) else text

    def number(*names: str) -> int:
        for name in names:
            if text.get(name) is not None:
                if not is_whole(text[name], 1):
                    raise ConfigError(f"config.{name}: got {text[name]!r:.80}; expected a whole number above 0")
                return text[name]
        raise ConfigError(f"config: got no {names[0]}; expected one, as the text model of a config.json has it")

    for name in UNLIKE:
        if text.get(name):
            raise ConfigError(
                f"config.{name}: got {text[name]!r:.80}, layers whose KV differ in size; expected layers of one kind: "
                "load the model, and take its layout"
            )

    layers = number("num_hidden_layers")
    if text.get("kv_lora_rank") is not None:
        width = number("qk_rope_head_dim")
        return KVLayout.mla(layers, number("kv_lora_rank"), width, rope=Rope(1e4, width))
    heads = number("num_attention_heads")
    width = text.get("head_dim") or number("hidden_size") // heads
    # Axes of positions are stored with a chunk.
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    sections = scaling.get("mrope_section") if isinstance(scaling, Mapping) else None
    # Of M-RoPE the sections say how much of a head rotates.
    rotary = width if sections is None else 2 * sum(sections)
    sections = None if sections is None else tuple(sections)
    rope = Rope(1e4, rotary, sections=sections, width=None if rotary == width else width)
    return KVLayout.gqa(layers, number("num_key_value_heads", "num_attention_heads"), width, rope)
