"""Retrieval of resources by vectors: nearest by cosine.

A vector is an encoder output pooled over its tokens, so that images are found by an image. A search is one small matrix
product on the host, so it may run between two decoding steps.
"""

import threading
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from ...core import AnyArray
from ...errors import InputError, NotFiniteError, ShapeError

Vector = Float[AnyArray, " D"]
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

    def set(self, id: str, vector: np.ndarray) -> None:
        if not isinstance(id, str):
            raise InputError(f"retriever: got id {id!r:.80}; expected a str")
        row = self.row_of.get(id)
        if row is None:
            row = self.row_of[id] = len(self.ids)
            if row == len(self._room):
                self._room = np.concatenate([self._room, np.empty_like(self._room)])
            self.ids.append(id)
        self._room[row] = vector

    def remove(self, id: str) -> None:
        row, moved = self.row_of.pop(id), self.ids.pop()
        if row != len(self.ids):
            self.ids[row] = moved
            self.row_of[moved] = row
            self._room[row] = self._room[len(self.ids)]

    def best(self, query: np.ndarray, k: int) -> tuple[list[str], np.ndarray]:
        """Returns the k best; equal scores are ordered by id."""
        scores = self.matrix @ query
        count = min(k, len(scores))
        if not count:
            return [], np.empty(0, np.float32)
        bar = np.partition(scores, len(scores) - count)[len(scores) - count]

        found = np.flatnonzero(scores >= bar - _ROUNDING)
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
            known = id in self._rows.row_of
            if known:
                self._rows.remove(id)
            return known

    def search(self, query: Vector, k: int) -> tuple[list[str], Float[np.ndarray, " k"]]:
        """Returns the at most k ids nearest to a query [D], nearest first, with cosines. Raises as `add`."""
        _check_k(k)
        unit = _unit(query, self._rows.width)
        with self._lock:
            return self._rows.best(unit, k)
