"""Orbax beside the store: arrays written once, and read back into given places."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Writes named arrays uncompressed, which reads faster than Orbax's default."""
    context = ocp.Context()
    context.array_options.saving.use_compression = False
    with context:
        ocp.save(str(path), {name: jnp.asarray(value) for name, value in arrays.items()})


def restore(path: Path, arrays: dict[str, Any], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """Reads them back, every array into `sharding`, and waits until they are there."""
    wanted = {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding) for name, value in arrays.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax's own
        return jax.block_until_ready(ocp.load(str(path), wanted))
