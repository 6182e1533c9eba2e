"""Arrays for tests, made without compiling: `jnp.asarray` of a NumPy array compiles a program for every shape."""

import jax
import numpy as np


def placed(value, dtype=None) -> jax.Array:
    """Puts an array on the device, converted to `dtype` on the host."""
    return jax.device_put(np.asarray(value, dtype))
