"""Retrieval of resources by vectors: the nearest by cosine, exactly or approximately.

A vector is a tower's output pooled over its tokens, so that an image finds images. A search is one thin matrix product
on the host, and so may be made between two steps of decoding. The approximate retriever is an inverted file: vectors
are filed under the nearest of some centroids (k-means), and a search looks only into the nearest few files.
"""

import threading
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from ...core import AnyArray
from ...errors import InputError, NotFiniteError, ShapeError

Vector = Float[AnyArray, " D"]
_SAMPLE = 64  # vectors per centroid that k-means looks at
_BLOCK = 1 << 14
_ROUNDING = 1e-5
"""Of a score of float32 unit vectors, generously."""


@runtime_checkable
class Retriever(Protocol):
    """Finds ids by vectors."""

    def add(self, id: str, vector: Vector) -> None:
        """Files an id under a vector, in place of its former one."""
        ...

    def search(self, query: Vector, k: int) -> tuple[list[str], Float[np.ndarray, " k"]]:
        """Returns the ids nearest to a query, at most k, nearest first, with their scores."""
        ...


def pooled(output: Float[AnyArray, "T D"], length: int | None = None) -> Float[np.ndarray, " D"]:
    """Averages a tower's output [T, D] over its first `length` tokens, or all, and scales it to length 1.

    Raises:
      ShapeError: no tokens. NotFiniteError, InputError: a mean that has no direction.
    """
    if not isinstance(output, np.ndarray | jax.Array) or output.ndim != 2 or not len(output[:length]):
        found = f"output {output.shape}" if isinstance(output, np.ndarray | jax.Array) else f"a {type(output).__name__}"
        raise ShapeError(f"pooled: {found}, length {length!r:.40}; expected an array [T, D] and at least one token")
    tokens = np.asarray(output, np.float32)[:length]
    return _unit(tokens.mean(axis=0), tokens.shape[1])


def as_vector(vector: Any, what: str) -> np.ndarray:
    """Converts what is given to find something by to numbers in float32.

    Raises:
      InputError: no numbers. `what` begins the message.
    """
    try:
        return np.asarray(vector, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what}: vector {vector!r:.80}; expected an array of numbers") from None


def _unit(vector: AnyArray, width: int) -> np.ndarray:
    value = as_vector(vector, "retriever")
    if value.shape != (width,):
        raise ShapeError(f"retriever: vector of shape {value.shape}; expected ({width},)")
    if not np.isfinite(value).all():
        raise NotFiniteError("retriever: a vector with NaN or infinity; expected finite values")
    largest = np.abs(value).max()
    if not largest > 0:
        raise InputError("retriever: a vector of zeros; expected a direction")
    value = value / largest  # so that squares neither overflow nor vanish
    return value / np.linalg.norm(value)


class _Rows:
    """Unit vectors by row, with their ids; grows by doubling. A removed row is filled by the last one."""

    def __init__(self, width: int):
        if not isinstance(width, int | np.integer) or isinstance(width, bool) or width < 1:
            raise InputError(f"retriever: width {width!r:.40}; expected a whole number from 1")
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
            raise InputError(f"retriever: id {id!r:.80}; expected a str")
        row = self.row_of.get(id)
        if row is None:
            row = self.row_of[id] = len(self.ids)
            if row == len(self._room):
                self._room = np.concatenate([self._room, np.empty_like(self._room)])
            self.ids.append(id)
        self._room[row] = vector
        return row

    def remove(self, id: str) -> tuple[int, int]:
        """The row that was given up, and the row that moved into it."""
        row, last = self.row_of.pop(id), len(self.ids) - 1
        moved = self.ids.pop()
        if row != last:
            self.ids[row] = moved
            self.row_of[moved] = row
            self._room[row] = self._room[last]
        return row, last

    def best(self, rows: np.ndarray | None, query: np.ndarray, k: int) -> tuple[list[str], np.ndarray]:
        """Returns the k best of some rows, or of all; equal scores in the order of their ids."""
        scores = (self.matrix if rows is None else self.matrix[rows]) @ query
        count = min(k, len(scores))
        if not count:
            return [], np.empty(0, np.float32)
        bar = np.partition(scores, len(scores) - count)[len(scores) - count]
        near = np.flatnonzero(scores >= bar - _ROUNDING)
        found = near if rows is None else rows[near]
        # A product with a matrix rounds a row by where it stands in it: equal vectors would have unequal scores.
        each = np.einsum("nd,d->n", self.matrix[found], query, dtype=np.float64)
        ranked = sorted(zip((-each).tolist(), (self.ids[row] for row in found), strict=True))[:count]
        return [id for _, id in ranked], -np.array([score for score, _ in ranked], np.float32)


def _check_k(k: int) -> None:
    if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 1:
        raise InputError(f"retriever: k {k!r:.40}; expected a whole number from 1")


class ExactRetriever:
    """Searches by cosine with every vector, on the host. Any number of threads.

    Args:
      width: D of the vectors.
    """

    def __init__(self, width: int):
        self._rows = _Rows(width)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id: str, vector: Vector) -> None:
        """Files an id under a vector [D], in place of its former one.

        Raises:
          ShapeError, NotFiniteError, InputError: a vector of another width or without a direction.
        """
        unit = _unit(vector, self._rows.width)
        with self._lock:
            self._rows.set(id, unit)

    def remove(self, id: str) -> bool:
        """Forgets an id. Whether it was known."""
        with self._lock:
            return id in self._rows.row_of and bool(self._rows.remove(id))

    def search(self, query: Vector, k: int) -> tuple[list[str], Float[np.ndarray, " k"]]:
        """Returns the ids nearest to a query [D], at most k, nearest first, with cosines. Raises as `add`."""
        _check_k(k)
        unit = _unit(query, self._rows.width)
        with self._lock:
            return self._rows.best(None, unit, k)


class ApproximateRetriever:
    """Searches by cosine in the nearest few lists of an inverted file. Any number of threads.

    Up to `exact_below` vectors it is exact. From then on there are about 8√n files, made again whenever the number of
    vectors has doubled. Which ids it misses is measured: `recall`.

    Args:
      width: D of the vectors.
      probes: share of the files that a search looks into, above 0 and up to 1 (then it is exact).
      exact_below: vectors.
      seed: of the first centroids.

    Raises:
      InputError: `probes` out of range.
    """

    FINENESS = 8
    """Files per √n. Many small ones follow the query's surroundings better than a few large ones."""

    def __init__(self, width: int, *, probes: float = 0.2, exact_below: int = 1024, seed: int = 0):
        if not 0 < probes <= 1:
            raise InputError(f"retriever: probes {probes}; expected above 0 and up to 1")
        self._rows = _Rows(width)
        self._probes, self._threshold, self._random = probes, max(exact_below, 2), np.random.default_rng(seed)
        self._centroids = np.empty((0, width), np.float32)
        self._file_of: list[int] = []
        self._files: list[set[int]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id: str, vector: Vector) -> None:
        """As `ExactRetriever.add`. Makes the files again where the number of vectors has doubled."""
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
        """Forgets an id. Whether it was known."""
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
        """Returns the nearest ids to a query [D] it finds, at most k, nearest first, with cosines. Raises as `add`.

        Looks into more files where the nearest hold fewer than k vectors.
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
    """Computes unit centroids of unit vectors by k-means under cosine. An empty one restarts at a random vector."""
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
    """Measures, of the k ids nearest to each query by `exact`, the share that `found` finds too."""
    shares = []
    for query in np.asarray(queries):
        wanted = set(exact.search(query, k)[0])
        shares.append(len(wanted & set(found.search(query, k)[0])) / max(len(wanted), 1))
    return np.array(shares)
