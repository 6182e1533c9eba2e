"""What an arm costs, on two axes that are never added: bytes that lie stored, and work that is done while serving.

Every arm of the main comparison has these rows (probe "repair.visible" and "repair.evicted", metric as named), all of
them shares, none with an interval:

* `stored_bytes`: what is kept of the chunk for one antecedent, over the chunk's KV: beside the canonical (a patch), or
  in its place (KV(B|A) in fewer bits). 0 for ways that keep nothing but the canonical, and for re-prefill.
* `canonical_bytes`: what is read of the canonical, which is kept once for all antecedents: 1 or 0, or its lower layers.
  A way that is kept in the canonical's place has 0 here.
* `input_bytes`: what tokens that may be run again while serving start from, kept once too: their embeddings (of an
  image, whose tower would have to run again otherwise, which no FLOPs here count), or the residual that enters a
  layer. 0 for a chunk of text, whose ids are nothing beside its KV.
* `stored_bytes.antecedents=N`: all that lies stored, for each of N antecedents that the chunk is met behind: what is
  kept for each, and an N-th of the canonical and of the inputs, which are kept once. With one antecedent a patch costs
  its canonical too, and KV(B|A) only itself. What a backbone's chunks share is in none of these.
* `moved_bytes`: what is read of all this for one reuse, over the chunk's KV: the canonical's part and what is kept for
  the antecedent, or of tokens that are run again the embeddings of these.
* `shared_bytes`: what one backbone's chunks share (a pooled basis), over one chunk's KV.
* `serving_flops`: FLOPs of one reuse that is asked one question, over re-prefilling the chunk behind the same context:
  tokens run again, layer by layer (CacheBlend's check layer with all tokens), the question's own pass that chooses
  tokens, a patch's thin product, rotation, bringing back from fewer bits.
* `question_flops`: the part of it that every further question costs again. 0 but for ways that choose by the question.
* `forming_flops`: FLOPs before the first reuse, over re-prefilling the chunk: the canonical's own prefill, the prefill
  in context that a patch or KV(B|A) is made of, and factorising.
* `serving_flops.reuses=N`: the same with what was computed once, ahead, spread over N reuses.

Bytes count numbers at 16 bits, as KV is served; fewer bits count with their scales. FLOPs are two for each
multiplication with its addition, of forwards by the backbone's own `forward_costs`. Softmax, norms and the question's
answer itself, which every arm pays alike, are not counted.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Int

from kvpatch_jax import KVLayout, Patch
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.core import PackedArray, Quantised
from kvpatch_jax.window import ROTATION, adding_flops, composing_flops, transition_adding_flops

REUSES = (1, 3, 10)
NUMBER_BITS = 16
SCALE_BITS = 32
AMORTISED = tuple(f"serving_flops.reuses={count}" for count in REUSES)
ANTECEDENTS = (1, 4, 16)
TOGETHER = tuple(f"stored_bytes.antecedents={count}" for count in ANTECEDENTS)
AXES = (*TOGETHER, "serving_flops")
"""What an arm is judged by: all that lies stored, by the number of antecedents, and work."""
BESIDE = ("moved_bytes", "forming_flops")
"""What tables show beside the axes."""
METRICS = (
    *("stored_bytes", *AXES, "canonical_bytes", "input_bytes", "shared_bytes", "question_flops"),
    *(*BESIDE, *AMORTISED),
)


@dataclasses.dataclass(frozen=True)
class ArmCost:
    """What one arm costs; FLOPs and bits are of one chunk and one antecedent.

    Attributes:
      stored: bits kept for this antecedent. canonical: share of the canonical that is read. inputs: tokens whose
        embeddings are kept, or numbers that stand for them; moved_inputs: those that one reuse reads, None for all.
        shared: bits that a backbone's chunks share.
      serving: FLOPs of placing the chunk once. question: FLOPs that every question adds to it.
      forming: FLOPs before the first reuse.
    """

    stored: int | float = 0.0
    canonical: int | float = 1.0
    inputs: int | float = 0.0
    shared: int | float = 0.0
    serving: int | float = 0.0
    question: int | float = 0.0
    forming: int | float = 0.0
    moved_inputs: int | float | None = None


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """The one chunk that shares are of.

    Attributes:
      forward: FLOPs of the backbone's forwards. layout: of its KV.
      tokens: of the chunk. behind: in front of it where it is reused.
      input_width: numbers of one token's embedding, those of deeper layers included.
    """

    forward: ForwardCosts
    layout: KVLayout
    tokens: int
    behind: int
    input_width: int

    @property
    def prefill(self) -> int:
        """FLOPs of re-prefilling the chunk behind its context."""
        return self.forward.flops(self.tokens, self.behind)

    @property
    def alone(self) -> int:
        """FLOPs of prefilling it alone."""
        return self.forward.flops(self.tokens)

    @property
    def numbers(self) -> int:
        """How many numbers its KV has, its transition included."""
        return sum(self.numbers_of(channel.name) for channel in self.layout.channels)

    def numbers_of(self, name: str) -> int:
        """Returns how many numbers one channel has, over all layers that keep it."""
        channel = self.layout.channel(name)
        return self.layout.depth(name) * channel.rows_for(self.tokens) * channel.features

    def share_below(self, layer: int) -> float:
        """Computes the share of its numbers that the layers below one keep."""
        below = 0
        for channel in self.layout.channels:
            depth = sum(own < layer for own in self.layout.layers_of(channel.name))
            below += depth * channel.rows_for(self.tokens) * channel.features
        return below / self.numbers

    @property
    def rotation(self) -> int:
        """FLOPs of placing it: of turning its keys, and of composing its transition with that of what is in front."""
        turning = 0
        for channel in self.layout.channels:
            if channel.rotates:
                turning += self.layout.depth(channel.name) * channel.heads * channel.rotary
        return ROTATION * self.tokens * turning + composing_flops(self.layout)

    def factorising(self, names: tuple[str, ...] | None = None) -> int:
        """Returns FLOPs of full thin SVDs of the chunk's channels, layer by layer.

        Counted as in Golub and Van Loan, Matrix Computations, 4th edition, section 8.6: the lesser of 14 m n² + 8 n³
        and 6 m n² + 20 n³ for U, Σ and V of m × n. No compiler sees into LAPACK.
        """
        total = 0
        for channel in self.layout.channels:
            if names is None or channel.name in names:
                rows = channel.rows_for(self.tokens)
                m, n = max(rows, channel.features), min(rows, channel.features)
                total += self.layout.depth(channel.name) * min(14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3)
        return total

    def rerun(self, chosen: Bool[np.ndarray, "L B T"], slots: Int[np.ndarray, "B T"]) -> float:
        """Returns FLOPs of running tokens again in context, the mean over rows.

        Args:
          chosen: which tokens at which layer, as `repair.Repaired` has them. slots: where they stand in the sequence.
        """
        chosen = np.asarray(chosen)
        seen = np.asarray(slots)[None] + 1
        windows = np.asarray(self.forward.window)[:, None, None]
        pairs = np.where(windows > 0, np.minimum(seen, windows), seen)
        pair, token = (np.asarray(values, float) for values in (self.forward.pair, self.forward.token))
        by_layer = token * chosen.sum(axis=(1, 2)) + pair * (pairs * chosen).sum(axis=(1, 2))
        return float(by_layer.sum() / chosen.shape[1])

    def reading(self, tokens: int, behind: int, layers: int | None = None) -> int:
        """Returns FLOPs of a question of some tokens through the lowest `layers`, each seeing all that is in front."""
        whole = self.forward.flops(tokens, behind)
        return whole if layers is None else whole - self.forward.flops(tokens, behind, layers)

    def shares(self, cost: ArmCost) -> dict[str, float]:
        """Computes the rows of an arm, {metric: share}."""
        bits = NUMBER_BITS * self.numbers
        inputs = NUMBER_BITS * self.input_width * cost.inputs / bits
        read = inputs if cost.moved_inputs is None else NUMBER_BITS * self.input_width * cost.moved_inputs / bits
        serving = (cost.serving + cost.question) / self.prefill
        spread = {
            metric: serving + cost.forming / count / self.prefill
            for metric, count in zip(AMORTISED, REUSES, strict=True)
        }
        together = {
            metric: cost.stored / bits + (cost.canonical + inputs) / count
            for metric, count in zip(TOGETHER, ANTECEDENTS, strict=True)
        }
        return {
            "stored_bytes": cost.stored / bits,
            "serving_flops": serving,
            "canonical_bytes": cost.canonical,
            "input_bytes": inputs,
            "shared_bytes": cost.shared / bits,
            "question_flops": cost.question / self.prefill,
            "moved_bytes": cost.stored / bits + cost.canonical + read,
            "forming_flops": cost.forming / self.prefill,
            **together,
            **spread,
        }

    # ------------------------------------------------------------------------------------------- kinds of arms

    def of_reprefill(self) -> ArmCost:
        """Returns re-prefill's cost: nothing of the chunk is kept but what goes into the decoder."""
        return ArmCost(canonical=0.0, inputs=self.tokens, serving=self.prefill)

    def of_blind(self) -> ArmCost:
        """Returns the cost of the canonical, rotated."""
        return ArmCost(serving=self.rotation, forming=self.alone)

    def of_patch(self, patch: Patch, others: Sequence[tuple[Patch, int]] = ()) -> ArmCost:
        """Returns the canonical and a patch of it, or of a batch of such chunks.

        Args:
          others: patches of other chunks, each with its chunk's tokens. Shares stay those of the one chunk: what the
            others keep and add counts whole beside it. Their canonicals are there in every arm, and counted in none.
        """
        every = [(patch, self.tokens), *others]
        stored = sum(stored_bits(own) / (own.batch or 1) for own, _ in every)
        adding = sum(adding_flops(own) * tokens + transition_adding_flops(own) for own, tokens in every)
        factorising = sum(
            dataclasses.replace(self, tokens=tokens).factorising(tuple(own.factors)) for own, tokens in every
        )
        forming = self.alone + self.prefill + factorising
        return ArmCost(stored=stored, serving=self.rotation + adding, forming=forming)

    def of_tokens(
        self, chosen: Bool[np.ndarray, "L B T"], slots: Int[np.ndarray, "B T"], inputs: int | None = None
    ) -> ArmCost:
        """Returns the canonical, some of whose tokens are run again.

        inputs: how many tokens' embeddings are kept; None: all of them, for any may be chosen.
        """
        serving = self.rotation + self.rerun(chosen, slots)
        # A token that any layer runs again is read once.
        moved = float(np.asarray(chosen).any(axis=0).sum(axis=-1).mean())
        kept = self.tokens if inputs is None else inputs
        return ArmCost(inputs=kept, serving=serving, forming=self.alone, moved_inputs=min(moved, kept))

    def of_conditioned(
        self, stored: int | float, bringing_back: int | float, factorised: tuple[str, ...] = ()
    ) -> ArmCost:
        """Returns KV(B|A) kept in the canonical's place.

        Args:
          stored: bits. bringing_back: FLOPs of making numbers of them. factorised: channels that are kept as factors.
        """
        forming = self.prefill + self.factorising(factorised)
        return ArmCost(stored=stored, canonical=0.0, serving=self.rotation + bringing_back, forming=forming)


def input_width(tokens: Tokens) -> int:
    """Counts the numbers that one token is run again from: its embedding, and what deeper layers add."""
    deeper = 0 if tokens.deepstack is None else tokens.deepstack.shape[2]
    return tokens.embeddings.shape[-1] * (1 + deeper)


def stored_bits(patch: Patch) -> int:
    """Counts the bits of a patch's factors: 16 a number, those of 8 bits and fewer with their scales."""
    bits = 0
    for leaf in jax.tree.leaves(dict(patch.factors), is_leaf=lambda leaf: isinstance(leaf, Quantised | PackedArray)):
        if isinstance(leaf, PackedArray):
            bits += 8 * leaf.nbytes
        elif isinstance(leaf, Quantised):
            bits += 8 * leaf.values.size + SCALE_BITS * leaf.scale.size
        else:
            bits += NUMBER_BITS * leaf.size
    return bits
