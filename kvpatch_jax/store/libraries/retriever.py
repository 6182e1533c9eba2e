"""Retrieval of resources by vectors: nearest by cosine, exactly or approximately.

A vector is an encoder output pooled over its tokens, so that images are found by an image. A search is one small matrix
product on the host, so it may run between two decoding steps. The approximate retriever is an inverted file: each
vector is in the list of its nearest centroid (k-means), and a search reads only the nearest few lists.
"""

import threading
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from ...core import AnyArray
from ...errors import InputError, NotFiniteError, ShapeError

Vector = Float[AnyArray, " D"]
_SAMPLE = 64  # vectors per centroid for k-means
_BLOCK = 1 << 14
_ROUNDING = 1e-5
"""Upper limit of the rounding error of a score of float32 unit vectors."""


@runtime_checkable
class Retriever(Protocol):
    """Interface for the search of ids by vectors."""

    def add(self, id: str, vector: Vector) -> None:
        """Adds an id with a vector, or replaces its vector."""
        ...

    def search(self, query: Vector, k: int) -> tuple[list[str], Float[np.ndarray, " k"]]:
        """Returns the at most k ids nearest to a query, nearest first, with their scores."""
        ...


def pooled(output: Float[AnyArray, "T D"], length: int | None = None) -> Float[np.ndarray, " D"]:
    """Returns the mean of an encoder output [T, D] over its first `length` tokens, or all, as a unit vector.

    Raises:
      ShapeError: there are no tokens.
      NotFiniteError, InputError: the mean is not finite, or zero.
    """
    if not isinstance(output, np.ndarray | jax.Array) or output.ndim != 2 or not len(output[:length]):
        found = f"output {output.shape}" if isinstance(output, np.ndarray | jax.Array) else f"a {type(output).__name__}"
        raise ShapeError(f"pooled: got {found}, length {length!r:.40}; expected an array [T, D] and at least one token")
    tokens = np.asarray(output, np.float32)[:length]
    return _unit(tokens.mean(axis=0), tokens.shape[1])


def as_vector(vector: Any, what: str) -> np.ndarray:
    """Converts a vector to a float32 array.

    Raises:
      InputError: it has no numbers. `what` begins the message.
    """
    try:
        return np.asarray(vector, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what}: got vector {vector!r:.80}; expected an array of numbers") from None


def _unit(vector: AnyArray, width: int) -> np.ndarray:
    value = as_vector(vector, "retriever")
    if value.shape != (width,):
        raise ShapeError(f"retriever: got a vector of shape {value.shape}; expected ({width},)")
    if not np.isfinite(value).all():
        raise NotFiniteError("retriever: got a vector with NaN or infinity; expected finite values")
    largest = np.abs(value).max()
    if not largest > 0:
        raise InputError("retriever: got a vector of zeros; expected a direction")
    value = value / largest  # so that squares neither overflow nor underflow
    return value / np.linalg.norm(value)


class _VectorRows:
    """Matrix of unit vectors with their ids. It grows by doubling; the last row replaces a removed one."""

    def __init__(self, width: int):
        if not isinstance(width, int | np.integer) or isinstance(width, bool) or width < 1:
            raise InputError(f"retriever: got width {width!r:.40}; expected an integer >= 1")
        self.width = width
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self._room = np.empty((16, width), np.float32)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def matrix(self) -> np.ndarray:
        return self._room[: len(self.ids)]

    def set(self, id: str, vector: np.ndarray) -> int:
        if not isinstance(id, str):
            raise InputError(f"retriever: got id {id!r:.80}; expected a str")
        row = self.row_of.get(id)
        if row is None:
            row = self.row_of[id] = len(self.ids)
            if row == len(self._room):
                self._room = np.concatenate([self._room, np.empty_like(self._room)])
            self.ids.append(id)
        self._room[row] = vector
        return row

    def remove(self, id: str) -> tuple[int, int]:
        """Removes an id. Returns its row, and the row that was moved there."""
        row, last = self.row_of.pop(id), len(self.ids) - 1
        moved = self.ids.pop()
        if row != last:
            self.ids[row] = moved
            self.row_of[moved] = row
            self._room[row] = self._room[last]
        return row, last

    def best(self, rows: np.ndarray | None, query: np.ndarray, k: int) -> tuple[list[str], np.ndarray]:
        """Returns the k best of some rows, or of all; equal scores are ordered by id."""
        scores = (self.matrix if rows is None else self.matrix[rows]) @ query
        count = min(k, len(scores))
        if not count:
            return [], np.empty(0, np.float32)
        bar = np.partition(scores, len(scores) - count)[len(scores) - count]

        near = np.flatnonzero(scores >= bar - _ROUNDING)
        found = near if rows is None else rows[near]
        # A matrix product rounds a row depending on its position: equal vectors would have unequal scores.
        exact = np.einsum("nd,d->n", self.matrix[found], query, dtype=np.float64)
        ranked = sorted(zip((-exact).tolist(), (self.ids[row] for row in found), strict=True))[:count]
        return [id for _, id in ranked], -np.array([score for score, _ in ranked], np.float32)


def _check_k(k: int) -> None:
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1:
        raise InputError(f"retriever: got k {k!r:.40}; expected an integer >= 1")


class ExactRetriever:
    """Retriever that compares a query with every vector, on the host. Thread-safe.

    Args:
      width: dimension D of the vectors.
    """

    def __init__(self, width: int):
        self._rows = _VectorRows(width)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id: str, vector: Vector) -> None:
        """Adds an id with a vector [D], or replaces its vector.

        Raises:
          ShapeError, NotFiniteError, InputError: the vector has another dimension, is not finite, or is zero.
        """
        unit = _unit(vector, self._rows.width)
        with self._lock:
            self._rows.set(id, unit)

    def remove(self, id: str) -> bool:
        """Removes an id. Returns whether it was known."""
        with self._lock:
            return id in self._rows.row_of and bool(self._rows.remove(id))

    def search(self, query: Vector, k: int) -> tuple[list[str], Float[np.ndarray, " k"]]:
        """Returns the at most k ids nearest to a query [D], nearest first, with cosines. Raises as `add`."""
        _check_k(k)
        unit = _unit(query, self._rows.width)
        with self._lock:
            return self._rows.best(None, unit, k)


class ApproximateRetriever:
    """Retriever that searches the nearest few lists of an inverted file. Thread-safe.

    It is exact up to `exact_below` vectors. Above, there are about 8√n lists, rebuilt whenever the number of vectors
    has doubled. `recall` measures the share of ids that it finds.

    Args:
      width: dimension D of the vectors.
      probes: share of the lists that a search reads, above 0 and up to 1 (then it is exact).
      exact_below: number of vectors.
      seed: seed of the first centroids.

    Raises:
      InputError: `probes` is out of range.
    """

    FINENESS = 8
    """Lists per √n. Many small lists approximate a query's neighbourhood better than a few large ones."""

    def __init__(self, width: int, *, probes: float = 0.2, exact_below: int = 1024, seed: int = 0):
        if not 0 < probes <= 1:
            raise InputError(f"retriever: got probes {probes}; expected a number above 0 and up to 1")
        self._rows = _VectorRows(width)
        self._probes, self._threshold, self._random = probes, max(exact_below, 2), np.random.default_rng(seed)
        self._centroids = np.empty((0, width), np.float32)
        self._file_of: list[int] = []
        self._files: list[set[int]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id: str, vector: Vector) -> None:
        """Adds a vector, as `ExactRetriever.add`. Rebuilds the lists if the number of vectors has doubled."""
        unit = _unit(vector, self._rows.width)
        with self._lock:
            known = id in self._rows.row_of
            row = self._rows.set(id, unit)
            if known:
                self._unfile(row)
            else:
                self._file_of.append(-1)
            if len(self._rows) > self._threshold:
                self._make_files()
            elif self._files:
                self._file(row, int(np.argmax(self._centroids @ unit)))

    def remove(self, id: str) -> bool:
        """Removes an id. Returns whether it was known."""
        with self._lock:
            if id not in self._rows.row_of:
                return False
            row, last = self._rows.remove(id)
            self._unfile(row)
            if row != last:
                file = self._file_of[last]
                self._unfile(last)
                self._file(row, file)
            self._file_of.pop()
            return True

    def search(self, query: Vector, k: int) -> tuple[list[str], Float[np.ndarray, " k"]]:
        """Returns at most k of the ids nearest to a query [D], nearest first, with cosines. Raises as `add`.

        Reads more lists if the nearest ones have fewer than k vectors.
        """
        _check_k(k)
        unit = _unit(query, self._rows.width)
        with self._lock:
            return self._rows.best(self._candidates(unit, k) if self._files else None, unit, k)

    def _candidates(self, unit: np.ndarray, k: int) -> np.ndarray:
        order = np.argsort(-(self._centroids @ unit))
        least = int(np.ceil(self._probes * len(self._files)))
        rows: list[int] = []
        for place, file in enumerate(order):
            if place >= least and len(rows) >= k:
                break
            rows.extend(self._files[file])
        return np.array(rows, np.int64)

    def _file(self, row: int, file: int) -> None:
        self._file_of[row] = file
        if file >= 0:
            self._files[file].add(row)

    def _unfile(self, row: int) -> None:
        if self._file_of[row] >= 0:
            self._files[self._file_of[row]].discard(row)

    def _make_files(self) -> None:
        matrix = self._rows.matrix
        count = min(int(self.FINENESS * np.sqrt(len(matrix))), len(matrix) // 2)
        sample = self._random.choice(len(matrix), min(len(matrix), _SAMPLE * count), replace=False)
        self._centroids = centroids(matrix[sample], count, self._random)
        self._file_of = _nearest(matrix, self._centroids).tolist()
        self._files = [set() for _ in self._centroids]
        for row, file in enumerate(self._file_of):
            self._files[file].add(row)
        self._threshold = 2 * len(matrix)


def _nearest(vectors: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    blocks = (vectors[start : start + _BLOCK] @ chosen.T for start in range(0, len(vectors), _BLOCK))
    return np.concatenate([np.argmax(scores, axis=1) for scores in blocks])


def centroids(
    vectors: Float[np.ndarray, "n D"], count: int, random: np.random.Generator, rounds: int = 8
) -> Float[np.ndarray, "m D"]:
    """Computes unit centroids of unit vectors by spherical k-means. An empty cluster restarts at a random vector."""
    chosen = vectors[random.choice(len(vectors), count, replace=False)]
    for _ in range(rounds):
        nearest = _nearest(vectors, chosen)
        order = np.argsort(nearest, kind="stable")
        there, starts = np.unique(nearest[order], return_index=True)
        sums = vectors[random.choice(len(vectors), count)]
        sums[there] = np.add.reduceat(vectors[order], starts, axis=0)
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        chosen = np.where(norms > 0, sums / np.maximum(norms, np.float32(1e-30)), chosen)
    return chosen


def recall(found: Retriever, exact: Retriever, queries: Float[AnyArray, "n D"], k: int = 10) -> Float[np.ndarray, " n"]:
    """Returns for each query the share of the k ids nearest by `exact` that `found` finds too."""
    shares = []
    for query in np.asarray(queries):
        wanted = set(exact.search(query, k)[0])
        shares.append(len(wanted & set(found.search(query, k)[0])) / max(len(wanted), 1))
    return np.array(shares)
