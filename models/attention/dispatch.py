"""Chooses how attention is computed: what was asked for, else what the size and the platform call for.

| name | computes |
|---|---|
| "dense" | all scores at once; bit for bit what small models were trained and measured with |
| "blockwise" | blocks of scores, softmax as it goes; memory grows with the tokens |
| "xla" | "dense" up to `DENSE_SCORES` and `DENSE_BYTES`, "blockwise" beyond |
| "cudnn" | cuDNN's flash attention (NVIDIA GPUs) |
| "splash" | jax's splash attention (TPUs) |

No kernel was timed or run on a device by this project: unasked, "xla" is taken. Kernels are asked for by `using`
(around the first call of a program, which traces it), by `pallas_kernels.preferring`, where "gpu" means "cudnn" and
"tpu" means "splash", and by `pallas_kernels.targeting`.
"""

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from kvpatch_jax.errors import KernelUnavailableError, ShapeError
from kvpatch_jax.utils.kinds import expect_kind
from pallas_kernels._dispatch import preferred
from pallas_kernels._target import platform, target

from .blockwise import blockwise
from .dense import dense
from .mask import Mask

IMPLEMENTATIONS = ("xla", "dense", "blockwise", "cudnn", "splash")
KERNELS = {"gpu": "cudnn", "tpu": "splash"}
"""The kernel of each platform."""
DENSE_SCORES = 2**20
"""Queries times keys of one head up to which "xla" holds all scores at once."""
DENSE_BYTES = 2**29
"""Bytes of scores (all rows and heads, float32) beyond which rows of a batch are taken in turns."""


_USED: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar("used", default=None)


@contextlib.contextmanager
def using(*implementations: str) -> Iterator[None]:
    """Makes implementation=None mean these, in order of preference, inside the context.

    It acts while a function is traced: functions that are already compiled stay as they are.

    Raises:
      KernelUnavailableError: an unknown name.
    """
    for name in implementations:
        if name not in IMPLEMENTATIONS:
            raise KernelUnavailableError(f"attention: got {name!r}; expected one of {IMPLEMENTATIONS}")
    token = _USED.set(implementations or None)
    try:
        yield
    finally:
        _USED.reset(token)


def attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K W"],
    mask: Mask,
    *,
    scale: float,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "B T N W"]:
    """Computes softmax(scale · q kᵀ) v over the keys that each query sees, N query heads sharing K KV heads.

    Scores, softmax and sums are float32; the result has the queries' dtype. A query that sees no key gets zeros.

    Args:
      query, key, value: keys and values of other widths are allowed (H and W), N is a multiple of K.
      mask: who sees whom.
      implementation: one of `IMPLEMENTATIONS`, or several in order of preference; None as the module says.

    Raises:
      ShapeError: a mask made for other shapes. KernelUnavailableError: none of the implementations asked for can run;
        it has the reason of each.
    """
    expect_kind(mask, Mask, "attention: mask", "a Mask, such as Mask(allowed=bools)", ShapeError)
    mask.check(query.shape[0], query.shape[1], key.shape[1])
    chosen = what_runs(query, key, value, mask, implementation)
    if chosen in KERNELS.values():
        return _by_kernel(chosen, scale, query, key, value, mask)

    # As many rows of the batch at a time as `DENSE_BYTES` allows, a divisor of their number.
    function, (B, T, N, _) = _dense if chosen == "dense" else blockwise, query.shape
    scores, rows = 4 * N * min(T * key.shape[1], DENSE_SCORES), max(B, 1)
    while rows > 1 and (B % rows or rows * scores > DENSE_BYTES):
        rows -= 1
    if rows >= B:
        return function(query, key, value, mask, scale)

    def turn(start: Array) -> Array:
        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, start, rows, 0)

        return function(cut(query), cut(key), cut(value), mask.take_rows(start, rows), scale)

    # Derivatives compute each turn again, or the scores of all would be held after all.
    mixed = jax.lax.map(jax.checkpoint(turn), jax.numpy.arange(0, B, rows))
    return mixed.reshape(B, T, N, value.shape[-1])


def what_runs(query: Any, key: Any, value: Any, mask: Mask, implementation: str | Sequence[str] | None = None) -> str:
    """Names what `attention` would run for these arrays (or their shapes): one of `IMPLEMENTATIONS` but "xla".

    Raises:
      KernelUnavailableError: as `attention`.
    """
    if isinstance(implementation, str):
        implementation = (implementation,)

    # Unasked: what `using` says, else what the kernels of this platform are asked for by, else plain XLA.
    asked = tuple(implementation or _USED.get() or ())
    if not asked:
        names = preferred()
        if names is None and target() is not None:
            names = (platform(), "xla")
        asked = tuple(KERNELS.get(name, "xla") for name in names or ("xla",))

    refused = []
    for name in asked:
        if name == "xla":
            return "dense" if query.shape[1] * key.shape[1] <= DENSE_SCORES else "blockwise"
        if name not in IMPLEMENTATIONS:
            reason = f"unknown; expected one of {IMPLEMENTATIONS}"
        elif name not in KERNELS.values():
            return name
        elif KERNELS.get(platform()) != name:
            reason = f"the platform is {platform()!r}"
        else:
            reason = _kernel_module(name).unsupported(query, key, value, mask)
            if reason is None:
                return name
        refused.append(f"{name!r}: {reason}")
    raise KernelUnavailableError(
        f"attention: got {asked}; expected an implementation that can run here ({'; '.join(refused)})"
    )


def _kernel_module(name: str) -> Any:
    """Imports a kernel's module when it is asked for, because Pallas takes long to import."""
    return importlib.import_module(f".{name}", __package__)


def _dense(query: Array, key: Array, value: Array, mask: Mask, scale: float) -> Array:
    return dense(query, key, value, mask.dense(query.shape[1], key.shape[1]), scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _by_kernel(name: str, scale: float, query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Returns a platform's kernel, with the derivatives of the blockwise form: a kernel has none of its own here."""
    return _kernel_module(name).kernel(query, key, value, mask, scale)


@_by_kernel.defjvp
def _(name: str, scale: float, primals: Any, tangents: Any):
    query, key, value, mask = primals

    def plain(query, key, value):
        return blockwise(query, key, value, mask, scale)

    return _by_kernel(name, scale, *primals), jax.jvp(plain, (query, key, value), tuple(tangents[:3]))[1]
