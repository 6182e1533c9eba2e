"""Index of stored spans: MinHash-LSH finds similar segments, of which runs of equal tokens are reused.

Segment reuse (proposal, §3.1, §3.4 step 1), changed in three places. Windows are keys into the span that they lie in,
so overlaps are stored once. Of a similar segment only equal token ids are reused: the KV of another token approximates
nothing. And a run extends beyond the window that found it, as far as the stored span is equal.
"""

import difflib
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..utils.optional_packages import require
from .text import SegmentPrompt, segments, spans

SHINGLE = 6
"""k, units of a shingle (6 … 10 in the proposal)."""
PERMUTATIONS, SEED = 128, 1
LEAST_SIMILARITY = 0.5
"""Jaccard similarity that the index is laid out for: it misses segments that are less alike."""
CANDIDATES = 4
"""The most similar segments that a segment of a prompt is compared with token by token."""
SegmentKey = tuple[str, int, int]
"""A stored segment: its span's key, and its offset and length in the span."""


class StoredSpan(NamedTuple):
    """A span as the index knows it.

    Attributes:
      key: digest of its ids and of the context to their left.
      donor, start: digest of the prompt that it was computed in, and its first token there.
      prefix: digest of the ids in front of it there.
      generation: reuses behind its KV; 0: it was computed exactly.
    """

    key: str
    ids: Int[np.ndarray, " T"]
    donor: str
    start: int
    prefix: str
    generation: int


class EqualRun(NamedTuple):
    """Tokens start … stop-1 of a prompt that equal those of a stored span from `offset` on.

    Attributes:
      context_similarity: estimated Jaccard similarity of the left contexts of the segments that led to it.
    """

    start: int
    stop: int
    span: str
    offset: int
    context_similarity: float

    def cut(self, begin: int, end: int) -> "EqualRun":
        """Returns the part of it in tokens begin … end-1."""
        start = max(self.start, begin)
        return self._replace(start=start, stop=min(self.stop, end), offset=self.offset + start - self.start)


class SegmentIndex:
    """Spans, found by the similarity of their segments.

    Attributes:
      context: W, tokens of the left context that is compared.
      spans: by their keys.

    Raises:
      MissingExtraError: `datasketch` is not installed.
    """

    def __init__(self, context: int):
        datasketch = require("datasketch", "datasketch", "segments")
        self.context = context
        self.spans: dict[str, StoredSpan] = {}
        self._signatures: dict[SegmentKey, tuple[Any, Any]] = {}
        # Drawing the permutations takes longer than hashing a segment.
        self._empty = datasketch.MinHash(num_perm=PERMUTATIONS, seed=SEED)
        # Segments that the LSH misses are lost; those that it finds wrongly are refused by their signatures.
        self._lsh = datasketch.MinHashLSH(threshold=LEAST_SIMILARITY, num_perm=PERMUTATIONS, weights=(0.25, 0.75))

    def describe(self, prompt: SegmentPrompt, tokens: range, generation: int = 0) -> StoredSpan:
        """Describes a span of a prompt, to be stored."""
        ids, left = prompt.ids[tokens.start : tokens.stop], self._left(tokens)
        key = ids_digest(ids) + ids_digest(prompt.ids[left.start : left.stop])
        prefix = ids_digest(prompt.ids[: tokens.start])
        return StoredSpan(key, ids.copy(), ids_digest(prompt.ids), tokens.start, prefix, generation)

    def add(self, prompt: SegmentPrompt, span: StoredSpan) -> None:
        """Adds a new span of a prompt with its windows."""
        for segment in segments(range(span.start, span.start + len(span.ids))):
            key = (span.key, segment.start - span.start, len(segment))
            self._signatures[key] = self._signed(prompt, segment)
            self._lsh.insert(key, self._signatures[key][0])
        self.spans[span.key] = span

    def remove(self, key: str) -> None:
        """Removes a span and its windows."""
        for segment in segments(range(len(self.spans.pop(key).ids))):
            self._lsh.remove((key, segment.start, len(segment)))
            del self._signatures[key, segment.start, len(segment)]

    def similar(
        self, prompt: SegmentPrompt, segment: range, least: float, least_context: float
    ) -> list[tuple[SegmentKey, float]]:
        """Finds stored segments above both thresholds, with their contexts' similarity, the most similar first."""
        signature, context = self._signed(prompt, segment)
        ranked = []
        for key in self._lsh.query(signature):
            stored, stored_context = self._signatures[key]
            similarity, context_similarity = signature.jaccard(stored), context.jaccard(stored_context)
            if similarity >= least and context_similarity >= least_context:
                # The key breaks ties, because a query has no order.
                ranked.append((-similarity, -context_similarity, key))
        return [(key, -context_similarity) for _, context_similarity, key in sorted(ranked)]

    def runs(self, prompt: SegmentPrompt, least: float, least_context: float) -> list[EqualRun]:
        """Finds the runs of tokens that a prompt shares with stored segments above both thresholds, in order.

        Windows are looked up only where no stored span equals the span around them.
        """
        runs: dict[tuple[int, int, str], EqualRun] = {}
        for span in spans(prompt):
            for segment in segments(span):
                for key, context_similarity in self.similar(prompt, segment, least, least_context)[:CANDIDATES]:
                    # Tokens further left have another context than the one that was compared.
                    for start, stop, offset in self._equal_runs(prompt, segment, key, leftwards=not least_context):
                        run = EqualRun(start, stop, key[0], offset, context_similarity)
                        runs.setdefault((start, stop, key[0]), run)
                if any(start <= span.start and stop >= span.stop for start, stop, _ in runs):
                    break
        return sorted(runs.values())

    def _left(self, segment: range) -> range:
        return range(max(segment.start - self.context, 0), segment.start)

    def _signed(self, prompt: SegmentPrompt, segment: range) -> tuple[Any, Any]:
        """Computes the MinHashes of a segment and of its left context."""
        signatures = self._empty.copy(), self._empty.copy()
        for signature, tokens in zip(signatures, (segment, self._left(segment)), strict=True):
            # All runs of `SHINGLE` units; fewer units are one shingle.
            units = prompt.units(tokens)
            starts = range(max(len(units) - SHINGLE, 0) + 1)
            signature.update_batch(sorted({"\x1f".join(units[at : at + SHINGLE]).encode() for at in starts}))
        return signatures

    def _equal_runs(
        self, prompt: SegmentPrompt, segment: range, key: SegmentKey, *, leftwards: bool
    ) -> Iterator[tuple[int, int, int]]:
        """Aligns a segment with a stored one, and yields (start, stop, offset) of equal runs, as of `EqualRun`.

        They extend as far as the stored span has them; in front of the segment only if `leftwards`.
        """
        span, offset, length = key
        stored, ids = self.spans[span].ids, prompt.ids
        first, second = ids[segment.start : segment.stop].tolist(), stored[offset : offset + length].tolist()
        for a, b, size in difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
            if size:
                start, place = segment.start + a, offset + b
                back = _equal_count(ids[:start][::-1], stored[:place][::-1]) if leftwards else 0
                ahead = _equal_count(ids[start + size :], stored[place + size :])
                yield start - back, start + size + ahead, place - back


def ids_digest(ids: Int[np.ndarray, " T"]) -> str:
    """Computes a digest of token ids."""
    return hashlib.blake2b(np.ascontiguousarray(ids, np.int32).tobytes(), digest_size=16).hexdigest()


def _equal_count(first: Int[np.ndarray, " n"], second: Int[np.ndarray, " m"]) -> int:
    """Counts equal tokens from the start until the first difference."""
    pairs = zip(first.tolist(), second.tolist(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
