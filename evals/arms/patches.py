"""Arms that patch the page: every rank, parts of a patch, after the rotation, in 8 bits, in directions all pages share.

Axis letters: B contexts, T tokens of the page, L layers, F features of a channel, M rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.core import KVEncoding, flatten_heads

from ..results.costs import NUMBER_BITS, ArmCost
from ..rules import RULES
from .arm import AlternativeArm, ArmFactory, ArmMaker


def patch_makers(layout: kvp.KVLayout) -> dict[str, ArmMaker]:
    """Lists the patches: all ranks; at one rank the deeper half, each channel, and of every chunk; rotated."""
    arms = RULES.arms
    # All ranks are slices of one SVD, so a rank costs an application and no factorising.
    makers: dict[str, ArmMaker] = {}
    for rank in arms.ranks:
        makers[f"patch.rank={rank}"] = functools.partial(make_patch, rank=rank)

    deepest = range(layout.layers // 2, layout.layers)
    makers[f"patch.deepest_half.rank={arms.shown_rank}"] = functools.partial(
        make_patch, rank=arms.shown_rank, part=functools.partial(kvp.keep_layers, layers=deepest)
    )

    for name in layout.names:
        part = functools.partial(some_channels, names=(name,))
        makers[f"patch.{name}_only.rank={arms.shown_rank}"] = functools.partial(
            make_patch, rank=arms.shown_rank, part=part
        )

    for rank in arms.ranks:
        makers[f"patch.every_chunk.rank={rank}"] = functools.partial(_every_chunk, rank=rank)
    for rank in arms.rotated_ranks:
        makers[f"patch.rotated_frame.rank={rank}"] = functools.partial(make_patch, rank=rank, rotated=True)
    return makers | (transition_makers(layout) if layout.parts else {})


def transition_makers(layout: kvp.KVLayout) -> dict[str, ArmMaker]:
    """Lists what hybrid models add: patches of the rows alone and of the transition alone, and a whole transition."""
    rows = tuple(channel.name for channel in layout.token_channels)
    parts = tuple(channel.name for channel in layout.parts)
    makers: dict[str, ArmMaker] = {}
    for kind, names in (("rows", rows), ("transition", parts)):
        for rank in RULES.arms.ranks:
            part = functools.partial(some_channels, names=names)
            makers[f"patch.{kind}_only.rank={rank}"] = functools.partial(make_patch, rank=rank, part=part)
    makers["patch.transition_only.whole"] = functools.partial(_whole_transition, rank=0)
    for rank in RULES.arms.ranks:
        makers[f"patch.whole_transition.rank={rank}"] = functools.partial(_whole_transition, rank=rank)
    return makers


def compressed_patch_makers() -> dict[str, ArmMaker]:
    """Lists the patches in fewer bytes: in 8 bits, in 4 bits of an encoded canonical, in a pooled basis."""
    arms = RULES.arms
    encoded: dict[str, ArmMaker] = {}
    for word in arms.encodings:
        for rank in arms.encoded_ranks:
            encoded[f"patch.{word}.int4.rank={rank}"] = functools.partial(_encoded, word=word, rank=rank)
    pooled = {f"pooled.rank={rank}": functools.partial(_pooled, rank=rank) for rank in arms.pooled_ranks}
    return {**int8_makers(), **encoded, **pooled}


def int8_makers() -> dict[str, ArmMaker]:
    """Lists the patches in 8 bits."""
    return {f"patch.int8.rank={rank}": functools.partial(_int8, rank=rank) for rank in RULES.arms.int8_ranks}


def make_patch(
    factory: ArmFactory, rank: int, *, rotated: bool = False, part: Callable[[kvp.Patch], kvp.Patch] | None = None
) -> AlternativeArm:
    """Makes the canonical with a patch of it, or with the part of that patch that `part` leaves."""
    page = factory.page
    patch = page.patch(rank, rotated=rotated)
    if part is not None:
        patch = part(patch)
    return AlternativeArm(factory.costs.of_patch(patch), page.cache(patch), patch.nbytes / page.page.nbytes)


def some_channels(patch: kvp.Patch, names: Collection[str]) -> kvp.Patch:
    """Keeps of a patch what it adds to some channels."""
    return kvp.Patch({name: own for name, own in patch.factors.items() if name in names}, patch.metadata)


def _whole_transition(factory: ArmFactory, rank: int) -> AlternativeArm:
    """Makes the canonical with its transition's whole deficit, and with that of its rows at a rank (0: none of it)."""
    page = factory.page
    parts = tuple(channel.name for channel in page.page.layout.parts)
    factors: dict[str, Any] = {name: page.delta[name] for name in parts}
    patch = page.patch(max(rank, 1))
    factors |= {name: own for name, own in patch.factors.items() if rank and name not in parts}
    patch = kvp.Patch(factors, patch.metadata)
    return AlternativeArm(factory.costs.of_patch(patch), page.cache(patch), patch.nbytes / page.page.nbytes)


def _every_chunk(factory: ArmFactory, rank: int) -> AlternativeArm:
    """Returns patches of all chunks, for the chunks in front of the page depend on each other too."""
    page, last = factory.page, len(factory.page.chunks) - 1
    patches = {place: page.patch(rank, place) for place in range(1, last + 1)}
    others = [(patches[place], page.form.sizes[place]) for place in range(1, last)]
    return AlternativeArm(factory.costs.of_patch(patches[last], others), page.cache_of_chunks(patches))


def _int8(factory: ArmFactory, rank: int) -> AlternativeArm:
    """Returns the patch with its factors in 8 bits, a float32 scale per direction."""
    patch = kvp.quantise(factory.page.patch(rank), jnp.int8)
    return AlternativeArm(factory.costs.of_patch(patch), factory.page.cache(patch))


def _encoded(factory: ArmFactory, word: str, rank: int) -> AlternativeArm:
    """Returns the canonical in few bits and a patch of what it decodes to, its factors in 4 bits, groups of 32."""
    page, costs = factory.page, factory.costs
    patch = kvp.quantise(page.patch(rank, encoding=word), "int4")
    cost = costs.of_patch(patch)
    # Two FLOPs a number: its product with the scale, and the least value added.
    share = 8 * KVEncoding.of(word).nbytes(costs.layout, costs.tokens) / (NUMBER_BITS * costs.numbers)
    cost = dataclasses.replace(cost, canonical=share, serving=cost.serving + 2 * costs.numbers)
    return AlternativeArm(cost, page.cache(patch), patch.nbytes / page.page.nbytes)


def _pooled(factory: ArmFactory, rank: int) -> AlternativeArm:
    """Returns the deficit in directions that all pages share, fitted on the contexts in the other half of the batch.

    What is kept of a page are its coefficients, as `kvp.form_in_basis` makes them; the directions are kept once.
    """
    page, costs = factory.page, factory.costs
    served, coefficients, shared, adding = {}, 0, 0, 0
    for channel in page.page.layout.channels:
        name, own = channel.name, min(rank, channel.features)
        odd, even = (basis[name][:, :own] for basis in factory.half_bases)
        served[name] = jnp.asarray(page.page.kv[name]) + project_in_halves(page.delta[name], odd, even)
        coefficients += own * costs.tokens * costs.layout.layers
        shared += own * channel.features * costs.layout.layers
        adding += 2 * own * channel.features * costs.tokens * costs.layout.layers

    cost = ArmCost(
        stored=NUMBER_BITS * coefficients,
        shared=NUMBER_BITS * shared,
        serving=costs.rotation + adding,
        forming=costs.alone + costs.prefill + adding,
    )
    return AlternativeArm(cost, page.served(served))


@jax.jit
def project_in_halves(
    delta: Float[Array, "L B T K H"], odd: Float[Array, "L M F"], even: Float[Array, "L M F"]
) -> Float[Array, "L B T K H"]:
    """Projects even contexts on the odd ones' directions, and odd contexts on the even ones'."""
    flat = flatten_heads(delta)
    is_even = (jnp.arange(flat.shape[1]) % 2 == 0)[None, :, None, None]

    def project(v: Array) -> Array:
        return jnp.einsum("lbtf,lmf,lmg->lbtg", flat, v, v, precision=jax.lax.Precision.HIGHEST)

    return jnp.where(is_even, project(odd), project(even)).reshape(delta.shape)
