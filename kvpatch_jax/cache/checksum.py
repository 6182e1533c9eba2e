"""Checksums of arrays on their device, to distinguish one KV from another. They detect mistakes, not attacks.

A checksum takes one pass in uint32 arithmetic over an array's shards, and only three words leave the device. The bits
of an element are chained over layers by bijective steps, so two arrays that differ in one number always differ in the
chain. The chains are then mixed with their positions and summed twice, which gives 64 bits per array.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num, UInt32

from ..core import PARTS

_FIRST, _SECOND, _THIRD, _FOURTH = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F


def mixed(bits: Any, place: Any) -> Any:
    """Mixes each element's bits with its place; at one place, different bits always give different words."""
    # Every step is a bijection of 32-bit words: the factors are odd.
    word = bits * np.uint32(_FIRST) + place
    word = (word ^ (word >> np.uint32(16))) * np.uint32(_THIRD)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(_FOURTH)
    return word ^ (word >> np.uint32(16))


def bits_of(value: Array) -> Array:
    """Returns the bits of numbers of at most 32 bits, as uint32."""
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    return bits.astype(jnp.uint32)


@jax.jit
def _words(value: Num[Array, "L T *rest"], length: Array) -> UInt32[Array, "3"]:
    """Computes two sums over the first `length` tokens, and whether any number, including padding, is not finite."""

    def step(carry: tuple[Array, Array], layer: Array) -> tuple[tuple[Array, Array], None]:
        word, wrong = carry
        word = (word ^ bits_of(layer)) * np.uint32(_THIRD)
        return (word ^ (word >> np.uint32(15)), wrong | ~jnp.isfinite(layer)), None

    # A scan does not support layers that are sharded over an Explicit axis.
    sharding = jax.typeof(value).sharding
    if any(sharding.spec[:1]):
        value = jax.sharding.reshard(value, jax.NamedSharding(sharding.mesh, jax.P(None, *sharding.spec[1:])))

    # The carry is derived from a layer, so that it has its sharding.
    first = value[0]
    (word, wrong), _ = jax.lax.scan(step, (jnp.zeros_like(bits_of(first)), jnp.zeros_like(first, bool)), value)

    # Row-major index of every element, wrapping at 32 bits.
    index = jnp.zeros_like(word)
    for axis in range(1, word.ndim):
        index = index * np.uint32(word.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, word.shape, axis)
    token = jax.lax.broadcasted_iota(jnp.uint32, word.shape, 0)
    place = mixed(index, token * np.uint32(_SECOND))
    once = mixed(word, place)
    twice = mixed(once, ~place)

    keep = token < length.astype(jnp.uint32)
    sums = [jnp.sum(jnp.where(keep, words, np.uint32(0)), dtype=jnp.uint32) for words in (once, twice)]
    return jnp.stack([*sums, jnp.any(wrong).astype(jnp.uint32)])


def examine(arrays: Mapping[str, Num[jax.Array | np.ndarray, "..."]], length: int) -> tuple[str, bool]:
    """Computes a checksum of arrays [L, T, ...], 32 hexadecimal digits, and whether all their numbers are finite.

    The checksum covers names, dtypes, shapes and bits. It excludes tokens from `length` on, and their number. The parts
    of a transition have rows in place of tokens, all of which count.
    """
    lengths = {name: value.shape[1] if name in PARTS else length for name, value in arrays.items()}
    # One transfer for all arrays.
    checked = jax.device_get([_words(arrays[name], np.int32(lengths[name])) for name in sorted(arrays)])
    digest = hashlib.blake2b(digest_size=16)
    for name, words in zip(sorted(arrays), checked, strict=True):
        value = arrays[name]
        shape = (value.shape[0], *value.shape[2:])
        digest.update(f"{name}\0{value.dtype}\0{shape}\0{lengths[name]}\0{words[0]:08x}{words[1]:08x}\0".encode())
    return digest.hexdigest(), not any(words[2] for words in checked)
