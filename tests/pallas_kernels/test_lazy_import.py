"""Pallas is imported when a kernel is wanted, and not before: most processes never run one, and it takes long."""

import subprocess
import sys

import pytest

BEFORE = """
import sys

import jax.numpy as jnp

import pallas_kernels

pallas = lambda: sorted(name for name in sys.modules if name.startswith(("jax.experimental.pallas", "jax._src.pallas")))
assert not pallas(), pallas()
"""
XLA = """
x = jnp.ones((1, 2, 1, 4))
pallas_kernels.rotate_patch(x)
pallas_kernels.splice(jnp.zeros((1, 2, 2, 1, 4)), jnp.arange(2), x)
pallas_kernels.factorise(jnp.ones((4, 4)), 1)
try:
    pallas_kernels.rotate_patch(x, implementation="tpu")
except pallas_kernels.KernelUnavailableError:
    pass
assert not pallas(), pallas()
"""
KERNEL = """
with pallas_kernels.targeting("{platform}"):
    pool, x = jnp.zeros((1, 2, 16, 1, 4), jnp.bfloat16), jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    pallas_kernels.splice(pool, jnp.arange(2), x, implementation=("{platform}", "xla"))
assert "jax.experimental.pallas" in pallas()
assert "pallas_kernels.splice.{platform}" in sys.modules
"""


def run(program: str) -> None:
    """Runs a program in a process that has imported nothing."""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_neither_the_import_nor_the_xla_path_imports_pallas():
    run(BEFORE + XLA)


@pytest.mark.parametrize("platform", [pytest.param("gpu", marks=pytest.mark.nightly), "tpu"])
def test_a_kernel_that_is_asked_for_is_imported(platform: str):
    # It takes no arrays so narrow, which it has to be imported to say.
    run(BEFORE + KERNEL.format(platform=platform))
