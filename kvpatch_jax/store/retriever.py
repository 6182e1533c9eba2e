"""Retrieval of resources by vectors: nearest by cosine.

A vector is an encoder output pooled over its tokens, so that images are found by an image. A search is one small matrix
product on the host, so it may run between two decoding steps.
"""

import threading
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float

from ..core import AnyArray
from ..errors import InputError, NotFiniteError, ShapeError
from ..utils.kinds import expect_kind, is_whole

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
    is_array = isinstance(output, np.ndarray | jax.Array)
    if not is_array or output.ndim != 2 or not len(output[:length]):
        kind = f"output {output.shape}" if is_array else f"a {type(output).__name__}"
        raise ShapeError(f"pooled: got {kind}, length {length!r:.40}; expected an array [T, D] and at least one token")
    tokens = np.asarray(output, np.float32)[:length]
    return _unit(tokens.mean(axis=0), tokens.shape[1])


def as_vector(vector: Any, what: str) -> Float[np.ndarray, "..."]:
    """Converts a vector to a float32 array.

    Raises:
      InputError: it has no numbers. NotFiniteError: it has NaN or infinity. `what` begins the message.
    """
    try:
        array = np.asarray(vector, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{what}: got vector {vector!r:.80}; expected an array of numbers") from None
    if not np.isfinite(array).all():
        raise NotFiniteError(f"{what}: got a vector with NaN or infinity; expected finite values")
    return array


def _unit(vector: Any, width: int) -> np.ndarray:
    array = as_vector(vector, "retriever")
    if array.shape != (width,):
        raise ShapeError(f"retriever: got a vector of shape {array.shape}; expected ({width},)")
    largest = np.abs(array).max()
    if not largest > 0:
        raise InputError("retriever: got a vector of zeros; expected a direction")
    array = array / largest  # so that squares neither overflow nor underflow
    return array / np.linalg.norm(array)


class ExactRetriever:
    """Retriever that compares a query with every vector, on the host. Thread-safe.

    Args:
      width: dimension D of the vectors.
    """

    def __init__(self, width: int):
        if not is_whole(width, 1):
            raise InputError(f"retriever: got width {width!r:.40}; expected an integer >= 1")
        self._width, self._lock = int(width), threading.Lock()
        self._vectors: dict[str, np.ndarray] = {}
        self._matrix: np.ndarray | None = None  # of all vectors in order; None after a change

    def __len__(self) -> int:
        return len(self._vectors)

    def add(self, id: str, vector: Vector) -> None:
        """Adds an id with a vector [D], or replaces its vector.

        Raises:
          ShapeError, NotFiniteError, InputError: the vector has another dimension, is not finite, or is zero.
        """
        expect_kind(id, str, "retriever: id", "a str")
        unit = _unit(vector, self._width)
        with self._lock:
            self._vectors[id], self._matrix = unit, None

    def remove(self, id: str) -> bool:
        """Removes an id. Returns whether it was known."""
        with self._lock:
            self._matrix = None
            return self._vectors.pop(id, None) is not None

    def search(self, query: Vector, k: int) -> tuple[list[str], Float[np.ndarray, " k"]]:
        """Returns the at most k ids nearest to a query [D], nearest first, with cosines; equal ones by id.

        Raises:
          InputError: k is below 1. As `add`.
        """
        if not is_whole(k, 1):
            raise InputError(f"retriever: got k {k!r:.40}; expected an integer >= 1")
        unit = _unit(query, self._width)
        with self._lock:
            ids, matrix = list(self._vectors), self._matrix
            if matrix is None and ids:
                matrix = self._matrix = np.stack(list(self._vectors.values()))
        if matrix is None:
            return [], np.empty(0, np.float32)

        # A matrix product rounds a row depending on its position, so that equal vectors may have unequal scores. What
        # may be among the k best is scored again in float64.
        scores, count = matrix @ unit, min(k, len(ids))
        least = np.partition(scores, len(ids) - count)[len(ids) - count]
        rows = np.flatnonzero(scores >= least - _ROUNDING)
        exact = np.einsum("nd,d->n", matrix[rows], unit, dtype=np.float64)
        ranked = sorted(zip((-exact).tolist(), (ids[row] for row in rows), strict=True))[:count]
        return [id for _, id in ranked], -np.array([score for score, _ in ranked], np.float32)
