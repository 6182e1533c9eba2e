"""Arms that run some of the page again: chosen tokens at every layer, random tokens, all tokens from a layer up."""

import functools

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.repair import METHODS, RepairBudget, count_of_equal_bytes, fraction_to_count, repair_everywhere
from kvpatch_jax.window import composing_flops

from ..results.costs import ArmCost
from ..rules import RULES
from .arm import AlternativeArm, ArmFactory, ArmMaker
from .reused_page import joined

TRIED = ("first_k", "cacheblend", "oracle_delta")
"""Repairs that are tried at every budget; `--suite=repairs` tries all."""


def token_repair_makers() -> dict[str, ArmMaker]:
    """Lists the published token repairs at every budget: shares of the tokens, and the bytes of a patch."""
    makers: dict[str, ArmMaker] = {}
    for method in TRIED:
        for share in RULES.arms.budgets:
            makers[f"{method}.budget={share:g}"] = functools.partial(make_repaired, method=method, share=share)
        for rank in RULES.arms.byte_ranks:
            makers[f"{method}.bytes_of_rank={rank}"] = functools.partial(make_repaired, method=method, rank=rank)
    return makers


def rerun_makers(layout: kvp.KVLayout) -> dict[str, ArmMaker]:
    """Lists the page run again from a layer up, and random tokens; of a hybrid model its first tokens, as first-k.

    What a linear layer made of one token stands in no cache, so that no other tokens can be run again there.
    """
    makers: dict[str, ArmMaker] = {
        f"residual.layer={layer}": functools.partial(make_residual, layer=layer) for layer in residual_layers(layout)
    }
    if layout.parts:
        shares = RULES.arms.budgets
        return makers | {
            f"first_k.budget={share:g}": functools.partial(make_first_tokens, share=share) for share in shares
        }
    return {**makers, f"random_tokens.budget={RULES.arms.random_budget:g}": _random_tokens}


def residual_layers(layout: kvp.KVLayout) -> list[int]:
    """Lists the layers that the page is run again from."""
    return sorted({max(1, round(depth * layout.layers)) for depth in RULES.arms.residual_depths})


def make_repaired(factory: ArmFactory, method: str, share: float = 0.0, rank: int = 0) -> AlternativeArm:
    """Returns the blind cache with some tokens recomputed: a share of them, or as many as take the bytes of a rank."""
    page, splice = factory.page, factory.splice
    tokens, backbone = page.page.tokens, page.backbone
    if rank:
        count = min(tokens, count_of_equal_bytes(page.page.layout, rank, tokens))
    else:
        count = fraction_to_count(share, tokens)

    repaired = METHODS[method](backbone, splice, RepairBudget(tokens=count))

    # Which tokens come first is known ahead; other methods may choose any token, so all inputs are kept.
    inputs = count if method == "first_k" else None
    cost = factory.costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots), inputs)
    return AlternativeArm(cost, dict(repaired.cache), count / tokens)


def _random_tokens(factory: ArmFactory) -> AlternativeArm:
    """Returns tokens drawn at random and recomputed in context at every layer: what choosing has to beat."""
    page, splice = factory.page, factory.splice
    rows, tokens = splice.slots.shape
    count = fraction_to_count(RULES.arms.random_budget, tokens)
    drawn = [np.random.default_rng([int(seed), 1]).permutation(tokens)[:count] for seed in page.contexts.ink_seed]
    repaired = repair_everywhere(page.backbone, splice, jnp.asarray(np.sort(drawn, axis=1).reshape(rows, count)))
    cost = factory.costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots))
    return AlternativeArm(cost, dict(repaired.cache))


def make_residual(factory: ArmFactory, layer: int) -> AlternativeArm:
    """Runs the page again from a layer up, behind its true context, from the residual that entered the layer
    alone.

    The layers below keep the canonical's KV. In place of the layers above, the residual is kept: `input_bytes`.
    """
    page, costs, layout = factory.page, factory.costs, factory.costs.layout
    tokens = page.tokens.take(page.slots.start, page.slots.stop)._replace(embeddings=factory.hidden[layer])
    upper = page.backbone.prefill(tokens, page.context_in_front, start_layer=layer).kv
    served = {}
    for name, value in page.page.kv.items():
        # Layers of unlike kinds keep unlike channels: some may lie below alone, or above.
        below = sum(own < layer for own in layout.layers_of(name))
        above = upper.get(name)
        kept = jnp.asarray(value)[:below]
        served[name] = kept if above is None else jnp.concatenate([kept, above])
    cost = ArmCost(
        canonical=costs.share_below(layer),
        inputs=costs.tokens,
        serving=costs.rotation + costs.forward.flops(costs.tokens, costs.behind, layer),
        forming=costs.alone,
    )
    return AlternativeArm(cost, page.served(served))


def make_first_tokens(factory: ArmFactory, share: float) -> AlternativeArm:
    """Runs the first tokens of the page again, a share of it, and keeps the rest as it is alone: first-k of a hybrid.

    The rest needs a transition of its own, of its tokens behind the first ones. It is kept beside the canonical's, so
    that the page can be placed either way.
    """
    page, costs = factory.page, factory.costs
    count = fraction_to_count(share, costs.tokens)
    first, rest = page.alone.take(0, count), page.alone.take(count, costs.tokens)
    # The canonical in two pieces; positions are the page's own in both.
    alone = page.backbone.prefill(first).kv
    in_place = dict(kvp.to_engine(costs.layout, alone, first.positions, 0))
    after = page.backbone.prefill(rest, in_place).kv

    begin = page.slots.start
    moved = page.tokens.take(begin, begin + count)
    again = page.backbone.prefill(moved, page.context_in_front).kv
    placed = kvp.to_engine(costs.layout, dict(again), moved.positions, 0)
    kept = kvp.to_engine(costs.layout, dict(after), page.tokens.take(begin + count, page.slots.stop).positions, 0)
    cost = ArmCost(
        # The transition of the rest is kept once too, and read in place of the canonical's.
        inputs=count + costs.layout.transition_numbers / costs.input_width,
        moved_inputs=count,
        serving=costs.rotation + composing_flops(costs.layout) + costs.forward.flops(count, costs.behind),
        forming=costs.alone,
    )
    return AlternativeArm(cost, joined([page.context_in_front, dict(placed), dict(kept)]))
