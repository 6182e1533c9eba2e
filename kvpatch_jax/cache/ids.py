"""Ids made of content, and checksums of arrays on their device.

A digest is blake2b over fields framed by their lengths, so that no two lists of fields give the same bytes. A checksum
distinguishes one KV from another; it detects mistakes, not attacks. It takes one pass in uint32 arithmetic over an
array's shards, and only three words leave the device.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num, UInt32

from ..core import PARTS, host_view, zero_padded
from ..errors import InputError
from .inputs import Audio, Template, Video, check_text, decoded, is_encoded, one_form

_FIRST, _SECOND, _THIRD, _FOURTH = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F
BLOCK = 256
"""Tokens that a checksum takes at a time of an array on the host."""


def digest_of(fields: Iterable[bytes], key: bytes = b"", size: int = 32) -> str:
    """Digests fields, each framed by its length: blake2b of `size` bytes in hexadecimal, keyed by a non-empty `key`."""
    digest = hashlib.blake2b(digest_size=size, key=key)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()


def encoded(text: str) -> bytes:
    """Encodes a text in UTF-8. Errors do not reveal the text, which may be private.

    Raises:
      InputError: `text` is not a str, or contains a lone surrogate.
    """
    try:
        return str.encode(text)
    except TypeError:
        raise InputError(f"text or name: got type {type(text).__name__}; expected a str") from None
    except UnicodeEncodeError as error:
        raise InputError(f"text: got a lone surrogate at place {error.start}; expected text in UTF-8") from None


def fingerprint_of(backbone: str, what: str) -> str:
    """Checks that a backbone is given by its fingerprint, and returns it.

    Raises:
      InputError: `backbone` is not a str (the backbone itself, for example), or is empty.
    """
    if isinstance(backbone, str) and backbone:
        return backbone
    shown = repr(backbone) if isinstance(backbone, str) else f"a {type(backbone).__name__}"
    raise InputError(f"{what}: got backbone {shown}; expected its fingerprint, the str `backbone.fingerprint`")


def _fields(content: Any) -> list[bytes]:
    """Returns the fields to digest: the kind of content, then its bytes; of arrays also dtype and shape."""
    if isinstance(content, str):
        return [b"template" if isinstance(content, Template) else b"text", encoded(content)]
    if isinstance(content, bytes):
        return [b"bytes", content]
    if isinstance(content, Video | Audio):
        name = type(content).__name__.lower().encode()
        return [name, json.dumps(content.options, sort_keys=True).encode(), *_fields(content.source)]

    value = np.asarray(content)
    if value.dtype == object or value.dtype.kind in "USV":
        raise InputError(f"id: got content of dtype {value.dtype}; expected numbers, text or bytes")
    # Ids depend neither on the platform's integer type for a list of token ids nor on the byte order.
    if value.dtype.kind in "iu" and not isinstance(content, np.ndarray | jax.Array):
        value = value.astype(np.int64)
    dtype = value.dtype.newbyteorder("<")
    shape = ",".join(map(str, value.shape))
    return [b"array", dtype.str.encode(), shape.encode(), value.astype(dtype, copy=False).tobytes()]


def chunk_id(backbone: str, *content: Any) -> str:
    """Computes the id of a chunk: 64 hexadecimal digits over its content and the backbone's fingerprint.

    Args:
      backbone: the fingerprint (`Backbone.fingerprint`: weights, configuration, preprocessing, rope regime).
      content: in order, images, token ids (a list or an integer array), text, or other arrays. An image is digested by
        its pixels, so a path, an encoded file's bytes, a PIL image and an array of the same pixels have the same id; a
        `Video` or `Audio` by its file's bytes, or frames or samples, and its options. Other arrays include dtype and
        shape; a list of token ids is digested as int64.

    Raises:
      InputError: there is no content or no fingerprint, a str looks like a file (use `Text`), an array does not hold
      numbers, or an image cannot be read.
    """
    fingerprint_of(backbone, "chunk_id")
    if not content:
        raise InputError("chunk_id: got no content; expected some")

    # Every part is checked and decoded before any is digested.
    parts: list[Any] = []
    for part in content:
        if isinstance(part, str):
            check_text(part, "chunk_id")
        elif not isinstance(part, bytes):
            part = one_form(part)
        elif is_encoded(part):
            # Bytes that begin like an image but cannot be decoded are treated as bytes.
            with contextlib.suppress(InputError):
                part = decoded(part)
        parts.append(part)
    return digest_of([b"chunk", encoded(backbone), *(field for part in parts for field in _fields(part))])


def content_digest(content: Any) -> str:
    """Digests content without decoding it, independent of any backbone: an encoded image is digested by its bytes."""
    return digest_of([b"chunk", b"content", *_fields(content)])


@jax.jit
def _words(value: Num[Array, "L T *rest"], first: Array, length: Array) -> UInt32[Array, "3"]:
    """Computes two sums over the first `length` tokens, and whether any number, including padding, is not finite.

    The array's own tokens are those from `first` on, so that sums over blocks of tokens add up, modulo 2^32.

    The bits of an element are chained over layers by bijective steps, so two arrays that differ in one number always
    differ in the chain. The chains are mixed with their positions and summed twice, which gives 64 bits per array.
    """

    def step(carry: tuple[Array, Array], layer: Array) -> tuple[tuple[Array, Array], None]:
        word, wrong = carry
        bits = jax.lax.bitcast_convert_type(layer, jnp.dtype(f"uint{8 * layer.dtype.itemsize}"))
        word = (word ^ bits.astype(jnp.uint32)) * np.uint32(_THIRD)
        return (word ^ (word >> np.uint32(15)), wrong | ~jnp.isfinite(layer)), None

    def mixed(bits: Array, place: Array) -> Array:
        # Every step is a bijection of 32-bit words: the factors are odd. So at one place, different bits always differ.
        word = bits * np.uint32(_FIRST) + place
        word = (word ^ (word >> np.uint32(16))) * np.uint32(_THIRD)
        word = (word ^ (word >> np.uint32(13))) * np.uint32(_FOURTH)
        return word ^ (word >> np.uint32(16))

    # A scan does not support layers that are sharded over an Explicit axis.
    sharding = jax.typeof(value).sharding
    if any(sharding.spec[:1]):
        value = jax.sharding.reshard(value, jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec[1:])))

    # The carry is derived from a layer, so that it has its sharding.
    start = jnp.zeros_like(value[0], jnp.uint32), jnp.zeros_like(value[0], bool)
    (word, wrong), _ = jax.lax.scan(step, start, value)

    # Row-major index of every element of a token, wrapping at 32 bits.
    index = jnp.zeros_like(word)
    for axis in range(1, word.ndim):
        index = index * np.uint32(word.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, word.shape, axis)
    token = first.astype(jnp.uint32) + jax.lax.broadcasted_iota(jnp.uint32, word.shape, 0)
    place = mixed(index, token * np.uint32(_SECOND))
    once = mixed(word, place)
    twice = mixed(once, ~place)

    counted = token < length.astype(jnp.uint32)
    sums = [jnp.sum(jnp.where(counted, words, np.uint32(0)), dtype=jnp.uint32) for words in (once, twice)]
    return jnp.stack([*sums, jnp.any(wrong).astype(jnp.uint32)])


def _blocks(name: str, value: jax.Array | np.ndarray) -> Iterator[tuple[jax.Array | np.ndarray, np.int32]]:
    """Yields an array in parts of equal size, each with the number of its first token.

    An array of the host is padded, so that one program serves all lengths; one of a device is examined where it lies.
    """
    if name in PARTS or not isinstance(value, np.ndarray):
        yield value, np.int32(0)
        return
    for first in range(0, max(value.shape[1], 1), BLOCK):
        yield zero_padded(value[:, first : first + BLOCK], 1, BLOCK), np.int32(first)


def examine(arrays: Mapping[str, Num[jax.Array | np.ndarray, "..."]], length: int) -> tuple[str, bool]:
    """Computes a checksum of arrays [L, T, ...], 32 hexadecimal digits, and whether all their numbers are finite.

    The checksum covers names, dtypes, shapes and bits. It excludes tokens from `length` on, and their number. The parts
    of a transition have rows in place of tokens, all of which count.
    """
    arrays = {name: host_view(value) for name, value in arrays.items()}
    names = sorted(arrays)
    lengths = {name: arrays[name].shape[1] if name in PARTS else length for name in names}
    launched = {}
    for name in names:
        # Blocks of the host are padded: what is behind the array's last token does not count.
        counted = np.int32(min(lengths[name], arrays[name].shape[1]))
        launched[name] = [_words(*block, counted) for block in _blocks(name, arrays[name])]
    # One transfer for all arrays.
    checked = [np.sum(words, axis=0, dtype=np.uint32) for words in jax.device_get(launched).values()]
    digest = hashlib.blake2b(digest_size=16)
    for name, words in zip(names, checked, strict=True):
        value = arrays[name]
        shape = (value.shape[0], *value.shape[2:])
        digest.update(f"{name}\0{value.dtype}\0{shape}\0{lengths[name]}\0{words[0]:08x}{words[1]:08x}\0".encode())
    return digest.hexdigest(), not any(words[2] for words in checked)
