"""Bases that patches are added to in place of the canonical: nearer to what antecedents make of a chunk.

Each is a `Chunk` of the same id, content and positions, whose `lead` is a digest of the kind of base and of all that it
was made from. So stores, patches and messages tell bases apart, and a patch of one is refused on another. A base in few
bits is made first and encoded then: `encode_chunk(mean_base(...), "k6v6")`, and then patches are formed of it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..backbone import Backbone, Tokens, check_is_backbone
from ..cache import Antecedent, AntecedentLike, Chunk, Text, antecedent_of, digest_of, encoded, examine
from ..core import PARTS, AnyArray, arrays_of, ops
from ..errors import InputError, PatchMismatchError, ShapeError
from ..utils.kinds import expect_kind, is_whole
from .canonical import conditioned as conditioned_kv
from .canonical import lead_digest, lead_tokens, unit_tokens
from .factors import KVArrays, check_conditioned

DEFAULT_LEAD = "What follows is one part of a longer context.\n"
"""Text of `default_lead`: a few tokens that say nothing about any chunk."""
_LEAD_IDS = 7
_MOST_SPECIAL = 64
"""Ids of small vocabularies that may stand for images and the like."""


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
        return _based(self.chunk, kv, "mean", *map(encoded, self.inputs))


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


def first_history_base(chunk: Chunk, conditioned: KVArrays, antecedent: AntecedentLike) -> Chunk:
    """Returns the KV behind one antecedent, such as the first history that a chunk is met in, as a base: no forward.

    Args:
      chunk: gives all but the KV; its own KV is not read. conditioned: KV(B|A), phase-free. antecedent: A.

    Raises:
      InputError: an encoded chunk. Else as `form_patch`.
    """
    _check_plain(chunk, "first_history_base")
    check_conditioned(chunk, conditioned)
    digest = _input_digest(chunk, conditioned, antecedent_of(antecedent))
    own, rest = arrays_of(conditioned), arrays_of(chunk.kv)
    kv = _jitted_leading(own, rest, jnp.int32(chunk.length))
    kv |= {channel.name: own[channel.name].astype(rest[channel.name].dtype) for channel in chunk.layout.parts}
    return _based(chunk, kv, "history", encoded(digest))


def first_tokens_base(chunk: Chunk, conditioned: KVArrays, antecedent: AntecedentLike, count: int = 1) -> Chunk:
    """Returns the canonical with its first tokens' KV taken from behind an antecedent, as a base.

    A chunk that is prefilled alone makes an attention sink of its first token, which has no antecedent. The transition
    of a hybrid model's chunk, which cannot be cut into tokens, stays the canonical's; so too in `first_token_rerun`.

    Args:
      conditioned: KV(B|A), phase-free, of the chunk's shapes; its first `count` tokens are read.
      antecedent: A.

    Raises:
      InputError: an encoded chunk, or a count out of range. Else as `form_patch`.
    """
    _check_count(chunk, count, "first_tokens_base")
    check_conditioned(chunk, conditioned)
    digest = _input_digest(chunk, conditioned, antecedent_of(antecedent))
    kv = _jitted_leading(arrays_of(conditioned), arrays_of(chunk.kv), jnp.int32(count))
    return _based(chunk, kv, "first tokens", encoded(digest), str(count).encode())


def first_token_rerun(
    backbone: Backbone,
    chunk: Chunk,
    unit: Sequence[Any] | Tokens,
    *,
    lead: Sequence[Any] | Tokens | None = None,
    count: int = 1,
) -> Chunk:
    """Runs a chunk's first tokens again behind a lead, and returns the canonical with their KV, as a base.

    A forward over the lead and these tokens; the others keep the KV of the canonical.

    Args:
      unit: what the chunk was made of, as `conditioned` takes it. count: how many tokens.
      lead: None: `default_lead`.

    Raises:
      InputError: an encoded chunk, one of another backbone, or a count out of range. ShapeError: a unit of another
      number of tokens or rows. Else as `conditioned`.
    """
    check_is_backbone(backbone, "first_token_rerun")
    _check_count(chunk, count, "first_token_rerun")
    if chunk.backbone != backbone.fingerprint:
        raise PatchMismatchError(
            f"first_token_rerun: got chunk {chunk.id!r} of backbone {chunk.backbone!r:.40}; expected "
            f"{backbone.fingerprint!r:.40}"
        )
    tokens = unit_tokens(backbone, unit, "first_token_rerun")
    shape = tokens.embeddings.shape[:2]
    if shape != (1 if chunk.batch is None else chunk.batch, chunk.length):
        raise ShapeError(
            f"first_token_rerun: got a unit of {shape[0]} rows and {shape[1]} tokens; expected those of chunk "
            f"{chunk.id!r}, {chunk.length} tokens"
        )

    before = default_lead(backbone) if lead is None else lead_tokens(backbone, lead)
    found = conditioned_kv(backbone, [tokens.take(0, count)], lead=before)[0]
    kv = arrays_of(chunk.kv)
    for name, value in [pair for pair in kv.items() if pair[0] not in PARTS]:
        own = found[name] if chunk.batch is not None else found[name][:, 0]
        kv[name] = jax.lax.dynamic_update_slice_in_dim(value, own.astype(value.dtype), 0, axis=value.ndim - 3)
    digest = lead_digest(backbone.fingerprint, before)
    return _based(chunk, kv, "first tokens behind a lead", encoded(digest), str(count).encode())


def default_lead(backbone: Backbone) -> Tokens:
    """Embeds a short neutral text that chunks are prefilled behind: the `lead` of `make_chunk`.

    Its first token takes the part of the attention sink, so that the chunk's first token need not. A backbone that
    reads no text gets the first seven ids of its vocabulary.
    """
    check_is_backbone(backbone, "default_lead")
    try:
        prompt = backbone.prepare([Text(DEFAULT_LEAD)])
    except InputError:
        # There is no tokenizer. What the ids stand for does not matter; that every chunk has the same does.
        prompt = _first_accepted(backbone)
    return backbone.embed(**prompt)


def _first_accepted(backbone: Backbone) -> Any:
    """Returns a prompt of one id again and again, the first that is no pad of an image or the like.

    Raises:
      InputError: as `prepare` of the last id that was tried.
    """
    for number in range(_MOST_SPECIAL):
        try:
            return backbone.prepare([[number] * _LEAD_IDS])
        except InputError:
            continue
    return backbone.prepare([[_MOST_SPECIAL] * _LEAD_IDS])


@jax.jit
def _jitted_leading(own: dict[str, Array], rest: dict[str, Array], count: Int[Array, ""]) -> dict[str, Array]:
    """Returns the first `count` tokens of one KV, and the others of another, with its transition."""
    result = dict(rest)
    for name, value in rest.items():
        if name in PARTS:
            continue
        result[name] = jnp.where(ops.token_mask(value, count, -3), own[name].astype(value.dtype), value)
    return result


def _check_plain(chunk: Chunk, what: str) -> None:
    expect_kind(chunk, Chunk, what, "a Chunk")
    if chunk.encoding is not None:
        raise InputError(
            f"{what}: got chunk {chunk.id!r} encoded as {chunk.encoding}; expected one as prefilled: the base is "
            "encoded after it was made"
        )


def _check_count(chunk: Chunk, count: int, what: str) -> None:
    _check_plain(chunk, what)
    if not is_whole(count, 1) or count > chunk.length:
        raise InputError(f"{what}.count: got {count!r:.80}; expected 1 to {chunk.length} tokens of chunk {chunk.id!r}")


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


def _based(chunk: Chunk, kv: Mapping[str, Array], kind: str, *inputs: bytes) -> Chunk:
    """Returns a chunk's base of some KV under the digest of its kind and inputs."""
    own = [] if chunk.lead is None else [encoded(chunk.lead)]
    fields = [b"base", encoded(kind), encoded(chunk.backbone), b"lead", *own, b"inputs", *inputs]
    # Residuals are those of the canonical's own forward.
    return dataclasses.replace(chunk, kv=kv, lead=digest_of(fields, size=16), hidden=None)
