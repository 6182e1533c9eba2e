"""Index of segments: LSH over MinHash signatures, and the runs of equal tokens that a prompt shares with stored spans.

Segment reuse (proposal, §3.1, §3.4 step 1), mended in three places. Windows are keys into the span that they lie in,
so that overlaps are stored once. A similar segment is reused only where its token ids are equal: the KV of another
token is not an approximation of this token's. And such a run is followed beyond the window that found it, as far as the
stored span is equal; to the left only where no similarity of contexts is asked for.
"""

import difflib
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..errors import ConfigError
from .segment_options import ReuseThresholds, SegmentIndexOptions
from .segmentation import SegmentPrompt, TokenRange, segments, spans
from .signatures import Signature, SignatureMaker, jaccard, units_of


class StoredSpan(NamedTuple):
    """A span as the index knows it.

    Attributes:
      key: digest of its ids and of the `context` tokens to their left.
      ids: its token ids [T].
      donor: digest of the whole prompt that it was computed in. start: where it stood there.
      prefix: digest of the ids in front of it there.
      generation: reuses behind its KV; 0: it was computed exactly.
    """

    key: str
    ids: Int[np.ndarray, " T"]
    donor: str
    start: int
    prefix: str
    generation: int


class SegmentKey(NamedTuple):
    """Key of the LSH: a segment, which is a span or a window `offset` tokens into it."""

    span: str
    offset: int
    length: int


class IndexedSegment(NamedTuple):
    """Signatures of a segment and of its left context."""

    segment: Signature
    context: Signature


class EqualRun(NamedTuple):
    """Tokens of a prompt that equal tokens of one stored span.

    Attributes:
      start, stop: tokens of the prompt. span: key of the stored span. offset: where they begin in it.
      similarity, context_similarity: estimated Jaccard of the segment that found them, and of its left context.
    """

    start: int
    stop: int
    span: str
    offset: int
    similarity: float
    context_similarity: float

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


class SegmentIndex:
    """Spans of one tenant and one model, found by the similarity of their segments.

    Raises:
      MissingExtraError: `datasketch` is not installed.
    """

    def __init__(self, options: SegmentIndexOptions):
        self.options = options
        self.spans: dict[str, StoredSpan] = {}
        self._maker = SignatureMaker(options.shingle, options.permutations, options.seed)
        # False negatives are lost for good; false positives are refused by the signatures themselves.
        self._lsh = self._maker.datasketch.MinHashLSH(
            threshold=options.least_similarity, num_perm=options.permutations, weights=(0.25, 0.75)
        )
        self._segments: dict[SegmentKey, IndexedSegment] = {}
        self._keys: dict[str, list[SegmentKey]] = {}

    def __len__(self) -> int:
        return len(self.spans)

    def described(self, prompt: SegmentPrompt, generations: list[int] | None = None) -> list[StoredSpan]:
        """Describes the spans of a prompt that are long enough to be stored.

        Args:
          generations: of each of the prompt's tokens; None: all 0.
        """
        donor = ids_digest(prompt.ids)
        found = []
        for span in spans(prompt, self.options.segmentation):
            if span.length < self.options.segmentation.shortest:
                continue
            left = prompt.ids[max(span.start - self.options.context, 0) : span.start]
            ids = prompt.ids[span.start : span.stop]
            key = ids_digest(ids) + ids_digest(left)
            generation = 0 if generations is None else max(generations[span.start : span.stop])
            prefix = ids_digest(prompt.ids[: span.start])
            found.append(StoredSpan(key, ids.copy(), donor, span.start, prefix, generation))
        return found

    def add(self, prompt: SegmentPrompt, span: StoredSpan) -> None:
        """Adds a span of a prompt, described by `described`, with its windows. A known key is left as it is."""
        if span.key in self.spans:
            return
        prepared = []
        here = TokenRange(span.start, span.start + len(span.ids))
        for segment in segments(here, self.options.segmentation):
            key = SegmentKey(span.key, segment.start - span.start, segment.length)
            own, context = self._signed(prompt, segment)
            prepared.append((key, own, IndexedSegment(own.digest(), context)))

        for key, own, signatures in prepared:
            self._lsh.insert(key, own)
            self._segments[key] = signatures
        self.spans[span.key] = span
        self._keys[span.key] = [key for key, _, _ in prepared]

    def remove(self, key: str) -> None:
        """Removes a span and its windows; unknown keys are ignored."""
        if self.spans.pop(key, None) is None:
            return
        for segment in self._keys.pop(key):
            self._lsh.remove(segment)
            del self._segments[segment]

    def similar(
        self, prompt: SegmentPrompt, segment: TokenRange, thresholds: ReuseThresholds
    ) -> list[tuple[SegmentKey, float, float]]:
        """Finds stored segments above both thresholds: (key, similarity, context similarity), the best first."""
        own, context = self._signed(prompt, segment)
        digest, found = own.digest(), []
        for key in self._lsh.query(own):
            stored = self._segments[key]
            similarity = jaccard(digest, stored.segment)
            of_context = jaccard(context, stored.context)
            if similarity >= thresholds.segment and of_context >= thresholds.context:
                found.append((key, similarity, of_context))

        # Ties are broken by the key, so that results do not depend on the order of a set.
        found.sort(key=lambda entry: (-entry[1], -entry[2], entry[0]))
        return found

    def runs(self, prompt: SegmentPrompt, thresholds: ReuseThresholds) -> list[EqualRun]:
        """Finds all runs of tokens that a prompt shares with stored segments above the thresholds, in order.

        Windows are only looked up where the span around them has no equal among what was found.

        Raises:
          ConfigError: a threshold below the similarity that the LSH is laid out for.
        """
        least = self.options.least_similarity
        if thresholds.segment < least:
            raise ConfigError(
                f"segment: got {thresholds.segment}; expected {least} or more, the index's least_similarity"
            )

        found: dict[tuple[int, int, str], EqualRun] = {}
        for span in spans(prompt, self.options.segmentation):
            covered = False
            for segment in segments(span, self.options.segmentation):
                if covered:
                    break
                candidates = self.similar(prompt, segment, thresholds)[: thresholds.candidates]
                for key, similarity, of_context in candidates:
                    for run in self._equal_runs(prompt, segment, key, not thresholds.context):
                        run = run._replace(similarity=similarity, context_similarity=of_context)
                        found.setdefault((run.start, run.stop, run.span), run)
                        covered |= run.start <= span.start and run.stop >= span.stop
        return sorted(found.values())

    def _signed(self, prompt: SegmentPrompt, segment: TokenRange) -> tuple[Any, Signature]:
        """Computes a segment's MinHash and the signature of its left context."""
        left = TokenRange(max(segment.start - self.options.context, 0), segment.start)
        own = self._maker.minhash(units_of(prompt, segment, self.options.canonical))
        return own, self._maker.minhash(units_of(prompt, left, self.options.canonical)).digest()

    def _equal_runs(
        self, prompt: SegmentPrompt, segment: TokenRange, key: SegmentKey, leftwards: bool
    ) -> Iterator[EqualRun]:
        """Aligns a segment with a stored one, and yields the runs of equal ids, as long as the stored span has them.

        Args:
          leftwards: whether runs go on in front of the segment. Where left contexts have a threshold they do not:
            tokens further left have another context than the one that was compared.
        """
        stored, ids = self.spans[key.span].ids, prompt.ids
        piece = ids[segment.start : segment.stop].tolist()
        other = stored[key.offset : key.offset + key.length].tolist()
        blocks = [(0, 0, len(piece))] if piece == other else _matching_blocks(piece, other)
        for first, second, size in blocks:
            start, offset = segment.start + first, key.offset + second
            back = _equal_count(ids[:start][::-1], stored[:offset][::-1]) if leftwards else 0
            ahead = _equal_count(ids[start + size :], stored[offset + size :])
            yield EqualRun(start - back, start + size + ahead, key.span, offset - back, 0.0, 0.0)


def ids_digest(ids: Int[np.ndarray, " T"]) -> str:
    """Computes a digest of token ids."""
    return hashlib.blake2b(np.ascontiguousarray(ids, np.int32).tobytes(), digest_size=16).hexdigest()


def _matching_blocks(first: list[int], second: list[int]) -> list[tuple[int, int, int]]:
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    return [(block.a, block.b, block.size) for block in matcher.get_matching_blocks() if block.size]


def _equal_count(first: Int[np.ndarray, " n"], second: Int[np.ndarray, " m"]) -> int:
    """Counts equal tokens from the start until the first difference."""
    size = min(len(first), len(second))
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if len(differ) else size
