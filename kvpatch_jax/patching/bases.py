"""The mean of a chunk's KV over antecedents: a base that patches are added to in place of the canonical.

It is a `Chunk` of the same id, content and positions, whose `lead` is a digest of all that it was made from. So stores,
patches and messages tell bases apart, and a patch of one is refused on another. A base in few bits is made first and
encoded then: `encode_chunk(mean_base(...), "k6v6")`, and then patches are formed of it.
"""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..cache import Antecedent, AntecedentLike, Chunk, antecedent_of, digest_of, encoded, examine
from ..core import PARTS, arrays_of, ops
from ..errors import InputError
from ..utils.kinds import expect_kind
from .form import KVArrays, check_conditioned


def mean_base(chunk: Chunk, conditioned: Iterable[KVArrays], antecedents: Iterable[AntecedentLike]) -> Chunk:
    """Computes the mean of KV(B|A) over antecedents as a base, zero on padding; in any order the same base.

    Args:
      chunk: the canonical, one or a batch, not encoded.
      conditioned: KV behind each antecedent, phase-free, which may be made as it is asked for. A KV that comes twice
        counts twice.
      antecedents: as many.

    Returns:
      The mean in the chunk's dtypes, under the digest of what it was made from.

    Raises:
      InputError: none, unequal numbers, or an encoded chunk. Else as `form_patch` of `conditioned` and `antecedent`.
    """
    expect_kind(chunk, Chunk, "mean_base", "a Chunk")
    for word, value in (("conditioned", conditioned), ("antecedents", antecedents)):
        expect_kind(value, Iterable, f"mean_base: {word}", "a sequence")
    if chunk.encoding is not None:
        raise InputError(
            f"mean_base: got chunk {chunk.id!r} encoded as {chunk.encoding}; expected one as prefilled: the base is "
            "encoded after it was made"
        )
    total = {name: jnp.zeros(value.shape, jnp.float32) for name, value in chunk.kv.items()}
    digests: list[str] = []
    behind = [antecedent_of(antecedent) for antecedent in antecedents]
    for number, kv in enumerate(conditioned):
        if number < len(behind):
            check_conditioned(chunk, kv)
            digests.append(_input_digest(chunk, kv, behind[number]))
            total = _jitted_sum(total, arrays_of(kv), jnp.int32(chunk.length))
        else:
            digests.append("")
    if not behind or len(digests) != len(behind):
        raise InputError(
            f"mean_base: got {len(digests)} KV of {len(behind)} antecedents; expected as many, at least one"
        )

    mean = _jitted_mean(total, arrays_of(chunk.kv), jnp.float32(len(digests)))
    lead = [] if chunk.lead is None else [encoded(chunk.lead)]
    # The order in which antecedents were met is no part of the base.
    inputs = [encoded(digest) for digest in sorted(digests)]
    fields = [b"base", encoded("mean"), encoded(chunk.backbone), b"lead", *lead, b"inputs", *inputs]
    return dataclasses.replace(chunk, kv=mean, lead=digest_of(fields, size=16))


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


@jax.jit
def _jitted_sum(total: dict[str, Array], conditioned: dict[str, Array], length: Int[Array, ""]) -> dict[str, Array]:
    result = {}
    for name, value in conditioned.items():
        wide = value.astype(jnp.float32)
        # Parts of a transition have no padding.
        live = wide if name in PARTS else jnp.where(ops.token_mask(wide, length, -3), wide, 0.0)
        result[name] = total[name] + live
    return result


@jax.jit
def _jitted_mean(total: dict[str, Array], like: dict[str, Array], count: Array) -> dict[str, Array]:
    return {name: (value / count).astype(like[name].dtype) for name, value in total.items()}
