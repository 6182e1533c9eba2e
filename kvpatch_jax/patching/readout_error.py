"""Readout error: how far what is read of a chunk differs from its conditioned KV, by which a patch knows its error.

The chunk's own keys stand for the queries: they read as a query does that looks for what the chunk says, need no
forward, and predict measured KL as well as queries of the model do (docs/results.md).
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..cache import Chunk
from ..core import PARTS, AnyArray, Factors, KVLayout, arrays_of, ops

HIGHEST = jax.lax.Precision.HIGHEST
PROBES = 64
"""Keys of a chunk that read, at most, evenly spread."""


def readout_errors(
    chunk: Chunk, conditioned: Mapping[str, Any], factors: Factors, layers: tuple[int, ...]
) -> tuple[float, float]:
    """Measures how far readouts of a patched chunk, and of the chunk as it is, differ from those of its conditioned KV.

    Positions play no part, as they play none in a patch. Of a hybrid model a transition's part counts as a layer, by
    its numbers.

    Args:
      conditioned: phase-free, of the chunk's shapes. factors: for `layers`.

    Returns:
      ‖o − o(conditioned)‖ / ‖o(conditioned)‖, the mean over layers (and chunks of a batch): patched, and blind.
    """
    count = min(PROBES, chunk.length)
    rows = np.arange(PROBES) * chunk.length // PROBES if count == PROBES else np.arange(PROBES) % count
    covered = None if len(layers) == chunk.layout.layers else layers
    arrays = arrays_of(conditioned), arrays_of(chunk.kv), factors
    patched, blind = _errors(
        *arrays, np.int32(chunk.length), rows.astype(np.int32), layout=chunk.layout, layers=covered
    )
    return float(patched), float(blind)


@functools.partial(jax.jit, static_argnames=("layout", "layers"))
def _errors(
    conditioned: dict[str, Array],
    base: dict[str, Array],
    factors: Factors,
    length: Int[Array, ""],
    rows: Int[AnyArray, " P"],
    *,
    layout: KVLayout,
    layers: tuple[int, ...] | None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the mean errors of the patched and of the bare base."""
    correction, errors = ops.correction(layout, factors, layers=layers), list[Array]()
    forms = dict[str, Array]()
    for name, value in base.items():
        truth, bare = (kv.astype(jnp.float32) for kv in (conditioned[name], value))
        # Conditioned, patched, blind: [L, 3, *B, T, K, H].
        forms[name] = jnp.stack([truth, bare + correction.get(name, 0.0), bare], axis=1)

    for keys, values in _attended(layout):

        def of_layer(kv: dict[str, Array], keys: tuple[str, ...] = keys, values: str = values) -> Array:
            joined = kv[keys[0]] if len(keys) == 1 else jnp.concatenate([kv[name] for name in keys], axis=-1)
            queries = jnp.take(joined[0], rows, axis=-3) * joined.shape[-1] ** -0.5
            scores = jnp.einsum("...pkh,f...skh->f...kps", queries, joined, precision=HIGHEST)
            seen = jnp.arange(scores.shape[-1]) < length
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            # Values of padding may be anything.
            value = jnp.where(seen[:, None, None], kv[values], 0.0)
            return _relative(jnp.einsum("f...kps,f...ske->f...pke", weights, value, precision=HIGHEST))

        errors.append(jax.lax.map(of_layer, {name: forms[name] for name in {*keys, values}}))
    errors += [jax.vmap(_relative)(forms[name]) for name in PARTS if name in forms]
    patched, blind = (jnp.concatenate([own[:, place].reshape(-1) for own in errors]).mean() for place in range(2))
    return patched, blind


def _relative(forms: Float[Array, "3 ..."]) -> Float[Array, "2 ..."]:
    """Returns how far the second and third of three arrays are from the first, over its norm."""
    norm = jnp.sqrt(jnp.square(forms[0]).sum((-3, -2, -1)))
    rest = jnp.sqrt(jnp.square(forms[1:] - forms[0]).sum((-3, -2, -1)))
    return rest / jnp.where(norm > 0, norm, 1.0)


def _attended(layout: KVLayout) -> list[tuple[tuple[str, ...], str]]:
    """Returns the channels that attention takes for keys, and the one for values, of layers of each kind."""
    names = [channel.name for channel in layout.token_channels]
    if layout.kind == "mla":
        # A latent is both: the keys' part without phase, and what is read.
        return [(("ckv", "kpe"), "ckv")]
    # Keys and values alternate, kind by kind of layers.
    return [((key,), value) for key, value in zip(names[::2], names[1::2], strict=True)]
