"""Gate of stored patches: which may be served after an antecedent, and a ranking of the others.

Kamera App. D. A patch is admitted by the antecedent that it was formed behind. The divergence of two antecedents ranks
candidates and admits none: in the paper a gate by divergence falsely reuses 24 to 47 % at any useful coverage.
`reuse_curve` measures that rate.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from ..cache import Antecedent, AntecedentLike, Chunk, Patch, antecedent_of
from ..core import AnyArray
from ..errors import InputError, ShapeError

Pooled = Mapping[str, Float[AnyArray, " D"]]
"""One vector for each chunk of an antecedent, by its content or its id, as `pooled_canonical` returns them."""


class PatchCandidate(NamedTuple):
    """A stored patch, with the divergence of its antecedent from the wanted one and a description of the difference.

    `differs` is None where the patch may be served; others need `allow_stale`.
    """

    patch: Patch
    divergence: float
    differs: str | None


def candidates(
    patches: Sequence[Patch], wanted: AntecedentLike, *, allow_stale: bool = False, pooled: Pooled | None = None
) -> list[PatchCandidate]:
    """Lists the patches that may be served after an antecedent; the others, ranked, only if allowed.

    Args:
      patches: of one chunk, such as a store's.
      wanted: the antecedent.
      allow_stale: also lists those of other antecedents, by increasing divergence, after all that may be served.
      pooled: as `divergence`.
    """
    wanted = antecedent_of(wanted)
    listed = []
    for patch in patches:
        behind, orbit = patch.metadata.behind, patch.metadata.orbit
        differs = behind.difference(wanted, orbit)
        if differs is None:
            listed.append(PatchCandidate(patch, 0.0, None))
        elif allow_stale:
            listed.append(PatchCandidate(patch, divergence(behind, wanted, orbit=orbit, pooled=pooled), differs))

    # Of equal divergence the larger patch first: it has more directions.
    return sorted(listed, key=lambda item: (item.differs is not None, item.divergence, -item.patch.nbytes))


def divergence(
    stored: AntecedentLike, wanted: AntecedentLike, *, orbit: bool = False, pooled: Pooled | None = None
) -> float:
    """Computes the divergence of two antecedents: 0 for equal ones, 1 where they have nothing in common.

    It is 1 − (1 − c)(1 − o/2)(1 − s/2). Here c is the share of chunks that are not in both (of all of both), o the
    share of pairs of common chunks in another order, s the share of common chunks served otherwise. No KV is read.

    Args:
      orbit: the stored patch serves every order; o is 0.
      pooled: where every chunk of both is in it, c is one minus the cosine of the two means of their vectors instead,
        the paper's divergence: other chunks that look alike are near.
    """
    first, second = antecedent_of(stored), antecedent_of(wanted)

    # Indices of the chunks that are in both, each with the first unpaired one of its id and, where known, its content.
    free, pairs = list(range(len(second.members))), []
    for place, member in enumerate(first.members):
        for index in free:
            other = second.members[index]
            if member.id == other.id and (None in (member.content, other.content) or member.content == other.content):
                free.remove(index)
                pairs.append((place, index))
                break

    both = len(first.members) + len(second.members)
    changed = 1 - 2 * len(pairs) / both if both else 0.0
    if pooled is not None and first.members and second.members:
        one, other = _mean_vector(first, pooled), _mean_vector(second, pooled)
        if one is not None and other is not None:
            if one.shape != other.shape:
                raise ShapeError(f"divergence: got pooled vectors of shape {other.shape}; expected {one.shape}")
            norms = float(np.linalg.norm(one) * np.linalg.norm(other))
            changed = float(np.clip(1 - (one @ other) / norms, 0, 1)) if norms else 0.0

    # The share of pairs of common chunks whose order is reversed.
    reordered = 0.0
    if not orbit and len(pairs) > 1:
        reversed_pairs = 0
        for earlier, later in itertools.combinations(pairs, 2):
            reversed_pairs += earlier[1] > later[1]
        reordered = reversed_pairs / math.comb(len(pairs), 2)

    # Order and state change KV less than another chunk does, so each counts half at most.
    served = sum(first.members[one].state != second.members[other].state for one, other in pairs)
    return 1 - (1 - changed) * (1 - reordered / 2) * (1 - served / max(len(pairs), 1) / 2)


def _mean_vector(antecedent: Antecedent, pooled: Pooled) -> np.ndarray | None:
    """Averages the vectors of an antecedent's chunks, float64 [D]; None where one of them is unknown."""
    vectors = []
    for member in antecedent.members:
        # By content, which tells chunks of one id apart, and only then by id.
        vector = pooled.get(member.id) if member.content is None else pooled.get(member.content, pooled.get(member.id))
        if vector is None:
            return None
        vectors.append(np.asarray(vector, np.float64))
    return np.mean(vectors, axis=0)


def pooled_canonical(chunk: Chunk) -> Float[np.ndarray, " D"]:
    """Averages a canonical over its tokens: its channels without phase, all layers concatenated, float32.

    The transition of a hybrid model's chunk, which is no sum over tokens, is left out.

    Raises:
      ShapeError: a batch of chunks.
    """
    if chunk.batch is not None:
        raise ShapeError(f"pooled: got chunk {chunk.id!r}, a batch of {chunk.batch}; expected one chunk")
    names = [channel.name for channel in chunk.layout.token_channels if not channel.rotates]
    # One transfer for all channels. Padding behind the chunk's length does not count.
    kv = jax.device_get({name: chunk.kv[name] for name in names})
    means = [np.asarray(kv[name], np.float32)[:, : chunk.length].mean(axis=1).ravel() for name in names]
    return np.concatenate(means)


class ReuseCurve(NamedTuple):
    """Coverage and false reuse of a gate at each threshold: rows by increasing threshold, arrays [N'].

    Attributes:
      threshold: patches of at most this divergence are reused.
      coverage: the share of patches that is reused.
      false_reuse: the share of reused patches whose loss exceeds the bound.
      safe, unsafe: medians of the divergence within and beyond the bound; NaN of none.
    """

    threshold: Float[np.ndarray, " N"]
    coverage: Float[np.ndarray, " N"]
    false_reuse: Float[np.ndarray, " N"]
    safe: float
    unsafe: float

    def at(self, coverage: float | int) -> float:
        """Returns the lowest rate of false reuse among thresholds that reuse at least this share.

        Raises:
          InputError: a share that is not above 0 and at most 1.
        """
        if not 0 < coverage <= 1:
            raise InputError(f"gate: got coverage {coverage}; expected above 0 and at most 1")
        return float(self.false_reuse[self.coverage >= coverage].min())


def reuse_curve(divergences: Sequence[float], losses: Sequence[float], bound: float) -> ReuseCurve:
    """Measures a gate on pairs of a divergence and the loss of that reuse, such as the KL divergence to a re-prefill.

    Args:
      divergences, losses: one of each per reuse, in the same order.
      bound: the largest acceptable loss.

    Raises:
      InputError: no pairs, unequal numbers, or numbers that are not finite.
    """
    apart, lost = np.asarray(divergences, np.float64), np.asarray(losses, np.float64)
    if apart.ndim != 1 or apart.shape != lost.shape or not apart.size:
        raise InputError(f"gate: got divergences {apart.shape} and losses {lost.shape}; expected as many, at least one")
    if not (np.isfinite(apart).all() and np.isfinite(lost).all()):
        raise InputError("gate: got divergences or losses that are not finite; expected finite numbers")

    # A gate can only stop at a divergence that occurs.
    wrong = lost > bound
    threshold = np.unique(apart)
    reused = np.array([(apart <= value).sum() for value in threshold])
    false = np.array([wrong[apart <= value].sum() for value in threshold])
    safe, unsafe = (float(np.median(part)) if part.size else math.nan for part in (apart[~wrong], apart[wrong]))
    return ReuseCurve(threshold, reused / apart.size, false / reused, safe, unsafe)
