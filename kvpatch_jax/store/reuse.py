"""How soon chunks are asked for again, and which of them a tier of so many bytes still has.

A log of requests gives exact answers for LRU: a request is a hit if the bytes of the distinct chunks since the last
request of the same chunk fit (stack distances: Mattson, Gecsei, Slutz, Traiger, "Evaluation techniques for storage
hierarchies", 1970). A curve of revisits gives the working set of a time, whose growth is the rate of misses (Denning,
Schwartz, "Properties of the working-set model", 1972).
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float, Int

from ..errors import InputError
from ..traces import Trace
from ..utils.kinds import expect_kind

DAY = 86400.0
"""Seconds."""
_GRID = np.concatenate([[0.0], np.geomspace(1e-3, 1e10, 6500)])
"""Seconds at which curves are evaluated: half a percent apart, up to three centuries."""

Numbers = Float[np.ndarray, " n"]
Places = Int[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True, eq=False)
class RequestLog:
    """Requests for chunks in their order.

    Attributes:
      keys: which chunk, int64 [n], any numbers.
      seconds: when, float64 [n], ascending.
      tokens: of the chunk, int64 [n].

    Raises:
      InputError: the lengths differ, there are no requests, or time runs backwards.
    """

    keys: Places
    seconds: Numbers
    tokens: Places

    def __post_init__(self) -> None:
        lengths = {len(self.keys), len(self.seconds), len(self.tokens)}
        if len(lengths) > 1 or not len(self.keys) or np.any(np.diff(self.seconds) < 0) or np.any(self.tokens < 1):
            raise InputError(
                f"sizing: got {len(self.keys)} keys, {len(self.seconds)} times, {len(self.tokens)} numbers of tokens; "
                "expected as many of each, at least one, times that ascend and tokens above 0"
            )

    @classmethod
    def of(cls, trace: Trace, tokens: int | None = None) -> "RequestLog":
        """Returns the requests of a trace: chunks that are added, take another's place, or are recalled.

        Chunks of one content are one, in all sessions.

        Args:
          tokens: of chunks of which the trace does not say it.

        Raises:
          InputError: the trace asks for no chunk, or does not say its tokens and `tokens` is None.
        """
        expect_kind(trace, Trace, "sizing: trace", "a Trace, as Trace.read gives")
        numbers, known = dict[str, int](), dict[tuple[str, str], tuple[str, int]]()
        keys, seconds, lengths = list[int](), list[float](), list[int]()
        for event in trace.events:
            if event.op == "fork" and event.branch is not None:  # a branch knows what its session knew
                for (session, chunk), piece in list(known.items()):
                    if session == event.session:
                        known[event.branch, chunk] = piece
            if event.op not in ("add", "replace", "recall") or event.chunk is None or event.kind != "chunk":
                continue
            if event.op != "recall":
                length = event.tokens if event.tokens is not None else tokens
                if length is None:
                    raise InputError(f"sizing: got chunk {event.chunk!r:.40} of unknown length; expected --tokens")
                known[event.session, event.chunk] = event.content or event.chunk, length
            elif (event.session, event.chunk) not in known:
                continue  # a text
            content, length = known[event.session, event.chunk]
            keys.append(numbers.setdefault(content, len(numbers)))
            seconds.append(event.at)
            lengths.append(length)
        if not keys:
            raise InputError(f"sizing: got a trace of {len(trace)} events without a chunk; expected some")
        return cls(np.array(keys), np.array(seconds, float), np.array(lengths))

    @functools.cached_property
    def previous(self) -> Places:
        """The request before of the same chunk, by its place; −1: none. int64 [n]."""
        return previous_uses(self.keys)

    @functools.cached_property
    def gaps(self) -> Numbers:
        """Seconds since the request before of the same chunk; infinite: none. float64 [n]."""
        before = self.seconds[np.maximum(self.previous, 0)]
        return np.where(self.previous >= 0, self.seconds - before, np.inf)

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.keys) / max(float(self.seconds[-1] - self.seconds[0]), 1e-9)

    def at_rate(self, rate: float | int) -> "RequestLog":
        """Returns the same requests at another rate, with times stretched alike."""
        began = self.seconds[0]
        return dataclasses.replace(self, seconds=(self.seconds - began) * (self.rate / rate))

    def revisits(self) -> "RevisitCurve":
        """Returns the curve of the log's revisits: first requests are none, so a short log has few."""
        gaps = np.sort(self.gaps[np.isfinite(self.gaps)])
        return RevisitCurve(gaps, np.arange(1, len(gaps) + 1) / len(self.gaps))


def previous_uses(keys: Places) -> Places:
    """Returns for each place of a sequence that of the same key before it, or −1."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    previous = np.full(len(keys), -1)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def stack_distances(keys: Places, nbytes: Numbers) -> Numbers:
    """Returns the bytes that LRU must hold to have each request's chunk still: those of all distinct chunks since.

    In O(n log n): the sum over the requests in between that are the first of their chunk there, by splitting the order
    by last use into halves of time, level by level.

    Args:
      keys: which chunk, in the order of the requests.
      nbytes: of the chunk, at each request.

    Returns:
      Bytes with the chunk's own, float64 [n]; infinite for the first request of a chunk.
    """
    previous = previous_uses(keys)
    count = len(keys)
    order = np.argsort(previous, kind="stable")
    earlier = np.zeros(count)  # bytes of requests before each whose own last use is before its last use

    for bit in reversed(range(int(count - 1).bit_length())):
        # `order` is sorted by block of 2^(bit+1) places, then by last use.
        parent = order >> (bit + 1)
        start = parent << (bit + 1)
        is_left = (order >> bit) & 1 == 0
        weights = np.concatenate([[0.0], np.cumsum(np.where(is_left, nbytes[order], 0.0))])
        lefts = np.concatenate([[0], np.cumsum(is_left)])
        earlier[order] += np.where(is_left, 0.0, weights[1:] - weights[start])

        # Stable partition of each block into its halves.
        left_rank = lefts[:-1] - lefts[start]
        right_rank = np.arange(count) - start - left_rank
        place = np.where(is_left, start + left_rank, start + (1 << bit) + right_rank)
        parted = np.empty_like(order)
        parted[place] = order
        order = parted

    # Requests up to the last use have a last use before it, all of them, and are no part of the stack.
    through = np.concatenate([[0.0], np.cumsum(nbytes)])[previous + 1]
    return np.where(previous >= 0, earlier - through + nbytes, np.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class RevisitCurve:
    """Which share of requests asks for a chunk that was last asked for within a time.

    Attributes:
      seconds: times, ascending. shares: of all requests, ascending, at most 1. In between they grow with the time's
        logarithm; after the last time nothing comes back.

    Raises:
      InputError: other times or shares.
    """

    seconds: Numbers
    shares: Numbers

    def __post_init__(self) -> None:
        ascending = np.all(np.diff(self.seconds) >= 0) and np.all(np.diff(self.shares) >= 0)
        inside = np.all(self.seconds >= 0) and np.all((self.shares >= 0) & (self.shares <= 1))
        if len(self.seconds) != len(self.shares) or not ascending or not inside:
            raise InputError(
                f"sizing: revisits: got {list(zip(self.seconds[:4], self.shares[:4], strict=False))}; expected times "
                "and shares that ascend, shares from 0 to 1"
            )

    @functools.cached_property
    def _on_grid(self) -> Numbers:
        if not len(self.seconds):
            return np.zeros(len(_GRID))
        first = max(float(self.seconds[0]), 1e-9)
        times = np.log(np.concatenate([[first / 10], np.maximum(self.seconds, 1e-9)]))
        return np.interp(np.log(np.maximum(_GRID, 1e-12)), times, np.concatenate([[0.0], self.shares]), left=0.0)

    def share(self, seconds: float | int) -> float:
        """Returns the share of requests whose chunk was asked for within so many seconds."""
        return float(np.interp(seconds, _GRID, self._on_grid))

    def fresh(self, seconds: float | int, stay: float | int = 1.0) -> float:
        """Returns distinct chunks of so many seconds, for a rate of one request a second.

        Args:
          stay: share of revisits that come to the same place; others count as new there.
        """
        ends = np.concatenate([_GRID[: np.searchsorted(_GRID, seconds)], [min(seconds, _GRID[-1])]])
        missed = 1 - stay * np.interp(ends, _GRID, self._on_grid)
        return float(np.sum(np.diff(ends) * (missed[1:] + missed[:-1]) / 2))

    def residence(self, chunks: float | int, stay: float | int = 1.0) -> float:
        """Returns the seconds after its last use at which a tier of so many chunks evicts one, as `fresh`."""
        missed = 1 - stay * self._on_grid
        held = np.concatenate([[0.0], np.cumsum(np.diff(_GRID) * (missed[1:] + missed[:-1]) / 2)])
        return float("inf") if chunks >= held[-1] else float(np.interp(chunks, held, _GRID))
