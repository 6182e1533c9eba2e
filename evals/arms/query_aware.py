"""Arms that choose tokens by the question: its own attention over the blind cache says which tokens are run again.

What is chosen is chosen for one question, so that every question pays for its own. How a data set packs its questions
decides how they are read; `QuestionReader` is what these arms need of it. Axis letters: B contexts, Q questions of one
group, N chosen tokens, T tokens of the page, S keys, L layers, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax import KVLayout
from kvpatch_jax.backbone import LayerAttention
from kvpatch_jax.repair import fraction_to_count

from ..results.costs import ArmCost
from ..rules import RULES
from .reused_page import KV, ReusedPage

QUESTION_TOKENS = 2
"""Tokens of the question that costs are counted for."""


@runtime_checkable
class QuestionReader(Protocol):
    """A data set's questions about a reused page, in groups that are read together.

    Attributes:
      page: the reused page.
      groups: whatever names a group of questions of one length.
    """

    @property
    def page(self) -> ReusedPage: ...

    @property
    def groups(self) -> Sequence[Any]: ...

    def attention(self, group: Any, cache: KV) -> Float[np.ndarray, "L B Q T"]:
        """Measures what attention the page's tokens receive from each question, summed over its tokens."""
        ...

    def read_entries(self, group: Any, cache: KV, index: Int[np.ndarray, "B Q N"]) -> np.ndarray:
        """Answers every question from the other chunks and its own entries of the page alone."""
        ...

    def read_recomputed(self, group: Any, cache: KV, index: Int[np.ndarray, "B Q N"]) -> np.ndarray:
        """Answers every question over the cache with its own chosen tokens recomputed in context."""
        ...

    def joined_answers(self, parts: Sequence[np.ndarray]) -> Any:
        """Puts the answers of all groups together."""
        ...

    def rerun_flops(self, index: Int[np.ndarray, "B Q N"]) -> int | float:
        """Counts the FLOPs of recomputing one question's tokens."""
        ...


class QueryAwareArm(NamedTuple):
    """An arm that answers each question from a cache of its own: what it costs, and what it answers."""

    name: str
    cost: ArmCost
    answers: Any


def query_aware_names(layout: KVLayout) -> list[str]:
    """Lists the arms by name, in the order of tables; none of a hybrid model, which reads no token by itself."""
    if layout.parts:
        return []
    arms = RULES.arms
    names = [f"query_attention.budget={share:g}" for share in arms.query_budgets]
    names += [f"prophetkv.budget={share:g}" for share in arms.query_budgets]
    return [*names, f"prcr.budget={max(arms.query_budgets):g}"]


def make_query_aware(reader: QuestionReader, names: Collection[str]) -> Iterator[QueryAwareArm]:
    """Yields the arms of these names.

    * `query_attention`: InfoFlow KV (arXiv 2603.05353, section 4.2): the tokens that receive most attention from the
      question, summed over its tokens and over heads, with context and question at the places they have in the whole
      sequence (its GLOBAL geometry). It takes layers 22 to 25 of 40; here `RULES.arms.query_layers` of the depth.
      Recomputed at all layers (its appendix B).
    * `prophetkv`: ProphetKV (arXiv 2602.02579). What is public describes tokens ranked by their relevance to the user's
      query and "a dual-stage recomputation pipeline to fuse layer-wise attention metrics into a high-utility set", at a
      ratio of 20 %. Our reading: first stage, the question's pass over the blind cache through all layers; each
      layer's attention over the page is divided by its sum, so that layers weigh alike, and the mean over layers ranks
      the tokens; second stage, these are recomputed.
    * `prcr`: Position Rebinding Cache Reuse (arXiv 2606.26631). What is public describes raw visual KV kept with its
      spatial coordinates, of which selected entries are given places that suit the text that is being decoded, their
      keys rebound to these, and put into the decoder's cache; nothing is run again. Our reading: of the page's
      canonical, rotated to its new place, the question reads the entries that its own attention selects, and no others.
    """
    if not names:
        return

    page, costs = reader.page, reader.page.costs
    blind = page.cache()
    ranked = [rankings(reader.attention(group, blind)) for group in reader.groups]

    for name in names:
        method, _, share = name.partition(".budget=")
        count = max(1, fraction_to_count(float(share), page.page.tokens))
        chosen = [best(ranking[method][0], count) for ranking in ranked]
        choosing = costs.reading(QUESTION_TOKENS, page.slots.stop, ranked[0][method][1])

        if method == "prcr":
            read, inputs, again = reader.read_entries, 0, 0.0
        else:
            read, inputs, again = reader.read_recomputed, costs.tokens, reader.rerun_flops(chosen[0])

        cost = ArmCost(inputs=inputs, serving=costs.rotation, question=choosing + again, forming=costs.alone)
        parts = [read(group, blind, index) for group, index in zip(reader.groups, chosen, strict=True)]
        yield QueryAwareArm(name, cost, reader.joined_answers(parts))


def rankings(attended: Float[np.ndarray, "L B Q T"]) -> dict[str, tuple[Float[np.ndarray, "B Q T"], int]]:
    """Ranks tokens by the attention they receive, by method, and says how many layers the choosing pass runs through.

    The methods are those of `make_query_aware`.
    """
    depth = len(attended)
    first, last = (round(share * depth) for share in RULES.arms.query_layers)
    band = slice(min(first, depth - 1), max(last, first) + 1)
    middle = attended[band].sum(axis=0), min(band.stop, depth)
    alike = (attended / attended.sum(axis=-1, keepdims=True)).mean(axis=0), depth
    return {"query_attention": middle, "prophetkv": alike, "prcr": middle}


def best(ranked: Float[np.ndarray, "B Q T"], count: int) -> Int[np.ndarray, "B Q N"]:
    """Finds the `count` tokens that are ranked highest, in their order on the page."""
    return np.sort(np.argsort(-ranked, axis=-1, kind="stable")[..., :count], axis=-1)


def marks_of(index: Int[np.ndarray, "B Q N"], tokens: int) -> Bool[np.ndarray, "B Q T"]:
    """Marks, among so many tokens, those that an index names."""
    marks = np.zeros((*index.shape[:2], tokens), bool)
    np.put_along_axis(marks, index, True, axis=-1)
    return marks


def mean_over_heads(layer: LayerAttention) -> Float[Array, "B T S"]:
    """Computes the attention weights' mean over heads."""
    return layer.weights().mean(1)
