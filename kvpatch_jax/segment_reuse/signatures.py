"""MinHash signatures of segments and of their left contexts, by the library `datasketch` (extra `segments`).

Segment reuse (proposal, §3.1): shingles of k = 6 … 10, and an auxiliary signature of the W tokens to the left.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Num

from ..utils.optional_packages import require
from .canonical_text import CanonicalRules, canonical_units
from .segmentation import SegmentPrompt, TokenRange

Signature = Num[np.ndarray, " permutations"]
"""Hash values of a MinHash."""


def shingles(units: Sequence[str], k: int) -> set[bytes]:
    """Returns all runs of k units; fewer units are one shingle, and no units are the empty one."""
    starts = range(max(len(units) - k, 0) + 1)
    return {"\x1f".join(units[start : start + k]).encode() for start in starts}


def units_of(prompt: SegmentPrompt, tokens: TokenRange, rules: CanonicalRules) -> list[str]:
    """Returns what a range of a prompt is shingled by: units of its canonical text, or its ids if it has no text."""
    if prompt.text is None:
        return [str(token) for token in prompt.ids[tokens.start : tokens.stop].tolist()]
    return canonical_units(prompt.characters(*tokens), rules)


class SignatureMaker:
    """Factory of MinHashes that can be compared: of one number of permutations, one seed and one k.

    Raises:
      MissingExtraError: `datasketch` is not installed.
    """

    def __init__(self, k: int, permutations: int, seed: int):
        self.k, self.permutations, self.seed = k, permutations, seed
        self.datasketch = require("datasketch", "datasketch", "segments")
        # Drawing the permutations takes longer than hashing a segment.
        self._empty = self.datasketch.MinHash(num_perm=permutations, seed=seed)

    def minhash(self, units: Sequence[str]) -> Any:
        """Computes the `datasketch.MinHash` of a sequence's shingles."""
        found = self._empty.copy()
        found.update_batch(sorted(shingles(units, self.k)))
        return found


def jaccard(first: Signature, second: Signature) -> float:
    """Estimates the Jaccard similarity of two sets from their signatures: the share of equal hash values."""
    return float(np.mean(first == second))
