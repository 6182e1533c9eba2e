"""factorise_sharded over four host devices, beside factorise on one. Prints what was found as JSON.

Run by `test_factorise.py` as a program of its own: the number of devices is settled once per process.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import factorise
from pallas_kernels.factorise import factorise_sharded

RANK = 5
SPECS = {
    "tokens": (PartitionSpec(None, "parts", None), PartitionSpec()),
    "features": (PartitionSpec(), PartitionSpec(None, None, "parts")),
}


def matrix() -> jax.Array:
    """Three matrices [24, 16] with falling singular values."""
    rng = np.random.default_rng(2)
    left = np.linalg.qr(rng.standard_normal((3, 24, 16)))[0]
    right = np.linalg.qr(rng.standard_normal((3, 16, 16)))[0]
    return jnp.asarray((left * np.exp(-np.arange(16) / 3)) @ right, jnp.float32)


def found(sharded: str, mesh: jax.sharding.Mesh) -> dict:
    """Differences from one device's result, and how many sums over the mesh the program has."""
    whole = matrix()
    u, v = factorise(whole, RANK)
    spec = PartitionSpec(None, "parts", None) if sharded == "tokens" else PartitionSpec(None, None, "parts")
    run = jax.jit(
        jax.shard_map(
            lambda part: factorise_sharded(part, RANK, "parts", sharded=sharded),
            mesh=mesh,
            in_specs=spec,
            out_specs=SPECS[sharded],
            check_vma=False,
        )
    )
    own_u, own_v = run(whole)
    text = run.lower(whole).compile().as_text() or ""
    identity = own_v @ jnp.swapaxes(own_v, -1, -2) - jnp.eye(RANK)
    return {
        "product": float(jnp.abs(own_u @ own_v - u @ v).max()),
        "norms": float(jnp.abs(jnp.linalg.norm(own_u, axis=-2) - jnp.linalg.norm(u, axis=-2)).max()),
        "orthonormal": float(jnp.abs(identity).max()),
        "sums": text.count(" all-reduce("),
        "others": sum(text.count(f" {name}(") for name in ("all-gather", "all-to-all", "collective-permute")),
    }


if __name__ == "__main__":
    devices = jax.make_mesh((4,), ("parts",), axis_types=(AxisType.Auto,))
    print(json.dumps({sharded: found(sharded, devices) for sharded in SPECS}))
