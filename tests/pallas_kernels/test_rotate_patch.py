"""rotate_patch: the XLA path against float64, its layouts, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import arrays, expected

from pallas_kernels import KernelShapeError, KernelUnavailableError, rotate_patch
from pallas_kernels.rotate_patch.shapes import SMALL, Shape


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_agrees_with_float64(shape: Shape, per_head: bool):
    given = arrays(shape, per_head)
    found = rotate_patch(**given, layout=shape.layout, per_head=per_head)
    np.testing.assert_allclose(found, expected(shape, given, per_head), atol=2e-5)


def test_dense_correction_is_factors_multiplied_out():
    given = arrays(SMALL[0])
    dense = (given["u"] @ given["v"]).reshape(given["x"].shape)
    found = rotate_patch(given["x"], given["cos"], given["sin"], dense=dense)
    np.testing.assert_allclose(found, rotate_patch(**given), atol=1e-5)


def test_rounds_once_to_the_dtype_of_x():
    given = arrays(SMALL[0])
    stored = given["x"].astype(jnp.bfloat16)
    wide = rotate_patch(**(given | {"x": stored.astype(jnp.float32)}))
    found = rotate_patch(**(given | {"x": stored}))
    assert found.dtype == jnp.bfloat16
    assert (found == wide.astype(jnp.bfloat16)).all()


def test_refuses_unknown_implementation():
    with pytest.raises(KernelUnavailableError, match="'cuda'"):
        rotate_patch(**arrays(SMALL[0]), implementation="cuda")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "quarter"},
        {"sin": None},
        {"v": None},
        {"cos": jnp.zeros((5, 8)), "sin": jnp.zeros((5, 8))},
        {"v": jnp.zeros((2, 4, 31))},
        {"dense": jnp.zeros((2, 12, 2, 15))},
    ],
)
def test_refuses_what_does_not_fit(unchecked, change):
    with pytest.raises(KernelShapeError, match="rotate_patch"):
        rotate_patch(**(arrays(SMALL[0]) | change))


@pytest.mark.parametrize("length", [0, 1, 7, 12])
def test_tokens_from_the_length_on_are_zero(length: int):
    given = arrays(SMALL[0])
    found = jax.jit(rotate_patch)(**given, length=jnp.int32(length))
    assert (found[:, length:] == 0).all()
    np.testing.assert_allclose(found[:, :length], rotate_patch(**given)[:, :length], rtol=1e-6, atol=1e-6)
