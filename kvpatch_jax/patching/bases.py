"""The mean of a chunk's KV over antecedents: a base that patches are added to in place of the canonical.

It is a `Chunk` of the same id, content and positions, whose `lead` is a digest of all that it was made from. So stores,
patches and messages tell bases apart, and a patch of one is refused on another. A base in few bits is made first and
encoded then: `encode_chunk(mean_base(...), "k6v6")`, and then patches are formed of it.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..cache import Antecedent, AntecedentLike, Chunk, antecedent_of, digest_of, encoded, examine
from ..core import PARTS, AnyArray, arrays_of, ops
from ..errors import InputError
from ..utils.kinds import expect_kind
from .factors import KVArrays, check_conditioned


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MeanBase:
    """Running mean of a chunk's KV over the antecedents that it was met behind, from which `base` makes a chunk.

    Attributes:
      chunk: the canonical.
      total: {channel: float32 [L, T, K, H]}, or [L, B, T, K, H] of a batch of chunks: the sum so far; None of none.
      inputs: digests of the antecedents so far, sorted: the order in which they were met is no part of the base.

    Raises:
      InputError: not a chunk, or an encoded one: bases are made before they are encoded.
    """

    chunk: Chunk
    total: Mapping[str, Float[AnyArray, "L *B T _ _"]] | None = None
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_plain(self.chunk, "MeanBase")

    def __repr__(self) -> str:
        return f"MeanBase({len(self.inputs)} antecedents of {self.chunk!r})"

    def add(self, conditioned: KVArrays, antecedent: AntecedentLike) -> "MeanBase":
        """Adds the KV behind one more antecedent. Adding one twice counts it twice.

        Args:
          conditioned: KV(B|A), phase-free, of the chunk's shapes.
          antecedent: A, as `form_patch` takes it.

        Raises:
          As `form_patch` of `conditioned` and `antecedent`.
        """
        check_conditioned(self.chunk, conditioned)
        inputs = tuple(sorted([*self.inputs, _input_digest(self.chunk, conditioned, antecedent_of(antecedent))]))
        arrays, length = arrays_of(conditioned), jnp.int32(self.chunk.length)
        if self.total is None:
            total = {name: jnp.zeros(value.shape, jnp.float32) for name, value in arrays.items()}
        else:
            total = dict(self.total)
        return MeanBase(self.chunk, _jitted_sum(total, arrays, length), inputs)

    def base(self) -> Chunk:
        """Returns the mean as a base, in the chunk's dtypes.

        Raises:
          InputError: no antecedent was added.
        """
        if self.total is None:
            raise InputError(f"MeanBase: got no antecedents of chunk {self.chunk.id!r}; expected at least one")
        kv = _jitted_mean(dict(self.total), arrays_of(self.chunk.kv), jnp.float32(len(self.inputs)))
        return _based(self.chunk, kv, *map(encoded, self.inputs))


@jax.jit
def _jitted_sum(total: dict[str, Array], conditioned: dict[str, Array], length: Int[Array, ""]) -> dict[str, Array]:
    result = {}
    for name, value in conditioned.items():
        wide = value.astype(jnp.float32)
        # Parts of a transition have no padding.
        kept = wide if name in PARTS else jnp.where(ops.token_mask(wide, length, -3), wide, 0.0)
        result[name] = total[name] + kept
    return result


@jax.jit
def _jitted_mean(total: dict[str, Array], like: dict[str, Array], count: Array) -> dict[str, Array]:
    return {name: (value / count).astype(like[name].dtype) for name, value in total.items()}


def mean_base(chunk: Chunk, conditioned: Iterable[KVArrays], antecedents: Iterable[AntecedentLike]) -> Chunk:
    """Computes the mean of KV(B|A) over antecedents as a base, zero on padding; in any order the same base.

    `MeanBase` adds antecedents as they come.

    Args:
      chunk: the canonical, one or a batch, not encoded.
      conditioned: KV behind each antecedent, phase-free. antecedents: as many.

    Raises:
      InputError: none, or unequal numbers; else as `MeanBase`.
    """
    running = MeanBase(chunk)
    listed, behind = list(conditioned), list(antecedents)
    if not listed or len(listed) != len(behind):
        raise InputError(
            f"mean_base: got {len(listed)} KV of {len(behind)} antecedents; expected as many, at least one"
        )
    for kv, antecedent in zip(listed, behind, strict=True):
        running = running.add(kv, antecedent)
    return running.base()


def _check_plain(chunk: Chunk, what: str) -> None:
    expect_kind(chunk, Chunk, what, "a Chunk")
    if chunk.encoding is not None:
        raise InputError(
            f"{what}: got chunk {chunk.id!r} encoded as {chunk.encoding}; expected one as prefilled: the base is "
            "encoded after it was made"
        )


def _input_digest(chunk: Chunk, conditioned: KVArrays, antecedent: Antecedent) -> str:
    """Digests what a base takes from behind one antecedent."""
    if all(member.content is not None for member in antecedent.members):
        return antecedent.digest
    # Ids alone do not say what was read, so the numbers do.
    kv = arrays_of(conditioned)
    if chunk.batch is not None:
        # `examine` takes tokens on the second axis.
        kv = {name: jnp.moveaxis(value, 1, 2) for name, value in kv.items()}
    return digest_of([encoded(antecedent.digest), encoded(examine(kv, chunk.length)[0])], size=16)


def _based(chunk: Chunk, kv: Mapping[str, Array], *inputs: bytes) -> Chunk:
    """Returns a chunk's mean of some KV under the digest of what it was made from."""
    own = [] if chunk.lead is None else [encoded(chunk.lead)]
    fields = [b"base", encoded("mean"), encoded(chunk.backbone), b"lead", *own, b"inputs", *inputs]
    # Residuals are those of the canonical's own forward.
    return dataclasses.replace(chunk, kv=kv, lead=digest_of(fields, size=16), hidden=None)
