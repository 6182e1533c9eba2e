"""Checksums of arrays where they lie, so that one KV is told from another. They find mistakes, not attackers.

One pass in uint32 arithmetic, over whatever shards or device an array is on; only three words leave it. The layers of a
token's number are chained, each step being one to one, so that two arrays that differ in one number always differ in
the chain; the chains are then mixed with their places and summed twice, which leaves 64 bits for each array.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num, UInt32

_FIRST, _SECOND, _THIRD, _FOURTH = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F


def mixed(bits: Any, place: Any) -> Any:
    """Mixes each element's bits with its place; for a given place different bits give different words."""
    number = lambda value: np.uint32(value)
    word = bits * number(_FIRST) + place
    word = (word ^ (word >> number(16))) * number(_THIRD)
    word = (word ^ (word >> number(13))) * number(_FOURTH)
    return word ^ (word >> number(16))


def bits_of(value: Array) -> Array:
    """Reads the bits of each number, of at most 32, as uint32."""
    bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
    return bits.astype(jnp.uint32)


@jax.jit
def _words(value: Num[Array, "L T *rest"], length: Array) -> UInt32[Array, "3"]:
    """Two sums over the first `length` tokens, and whether any number, padding included, is not finite."""

    def step(carry: tuple[Array, Array], layer: Array) -> tuple[tuple[Array, Array], None]:
        word, wrong = carry
        word = (word ^ bits_of(layer)) * np.uint32(_THIRD)
        return (word ^ (word >> np.uint32(15)), wrong | ~jnp.isfinite(layer)), None

    held = jax.typeof(value).sharding
    if any(held.spec[:1]):  # layers over an explicit mesh, which a scan does not go through
        value = jax.sharding.reshard(value, jax.NamedSharding(held.mesh, jax.P(None, *held.spec[1:])))
    first = value[0]  # made from it, so that the sums keep to its sharding
    (word, wrong), _ = jax.lax.scan(step, (jnp.zeros_like(bits_of(first)), jnp.zeros_like(first, bool)), value)
    index = jnp.zeros_like(word)
    for axis in range(1, word.ndim):
        index = index * np.uint32(word.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, word.shape, axis)
    token = jax.lax.broadcasted_iota(jnp.uint32, word.shape, 0)
    place = mixed(index, token * np.uint32(_SECOND))
    one = mixed(word, place)
    keep = token < length.astype(jnp.uint32)
    sums = (jnp.sum(jnp.where(keep, each, np.uint32(0)), dtype=jnp.uint32) for each in (one, mixed(one, ~place)))
    return jnp.stack([*sums, jnp.any(wrong).astype(jnp.uint32)])


def examine(arrays: Mapping[str, Num[jax.Array | np.ndarray, "..."]], length: int) -> tuple[str, bool]:
    """Computes a checksum of arrays [L, T, ...], 32 hexadecimal digits, and whether all their numbers are finite.

    Names, dtypes, shapes and bits count; tokens from `length` on do not, nor does how many they are.
    """
    found = jax.device_get([_words(arrays[name], np.int32(length)) for name in sorted(arrays)])
    digest = hashlib.blake2b(digest_size=16)
    for name, words in zip(sorted(arrays), found, strict=True):
        value = arrays[name]
        shape = (value.shape[0], *value.shape[2:])
        digest.update(f"{name}\0{value.dtype}\0{shape}\0{length}\0{words[0]:08x}{words[1]:08x}\0".encode())
    return digest.hexdigest(), not any(words[2] for words in found)
