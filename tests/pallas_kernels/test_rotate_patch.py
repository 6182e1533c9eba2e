"""rotate_patch: the XLA path against float64, its layouts, and what it refuses."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import KernelShapeError, KernelUnavailableError, rotate_patch
from pallas_kernels.rotate_patch.shapes import SMALL, Shape


@pytest.fixture
def unchecked():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def arrays(shape: Shape, per_head: bool = False) -> dict:
    rng = np.random.default_rng(0)
    draw = lambda *sizes: jnp.asarray(rng.standard_normal(sizes), jnp.float32)
    angle = rng.standard_normal((shape.tokens, shape.rotary // 2))
    middle = (shape.heads,) if per_head else ()
    columns = shape.width if per_head else shape.heads * shape.width
    return {
        "x": draw(*shape.leading, shape.tokens, shape.heads, shape.width),
        "cos": jnp.asarray(np.cos(angle), jnp.float32),
        "sin": jnp.asarray(np.sin(angle), jnp.float32),
        "u": draw(*shape.leading, *middle, shape.tokens, shape.rank),
        "v": draw(*shape.leading, *middle, shape.rank, columns),
    }


def expected(shape: Shape, given: dict, per_head: bool) -> np.ndarray:
    x, cos, sin, u, v = (np.asarray(given[name], np.float64) for name in ("x", "cos", "sin", "u", "v"))
    delta = np.swapaxes(u @ v, -3, -2) if per_head else (u @ v).reshape(x.shape)
    x = x + delta
    half = shape.rotary // 2
    pairs = [(i, i + half) if shape.layout == "half" else (2 * i, 2 * i + 1) for i in range(half)]
    result = x.copy()
    for i, (a, b) in enumerate(pairs):
        c, s = cos[:, None, i], sin[:, None, i]
        result[..., a] = x[..., a] * c - x[..., b] * s
        result[..., b] = x[..., b] * c + x[..., a] * s
    return result


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
