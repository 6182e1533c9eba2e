"""Masks as structure: who may look where is said by a few numbers per token, and blocks of the mask are made of them.

Axis letters: B batch (or 1: alike for every row), T queries, S keys.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvpatch_jax.core import check_mask
from kvpatch_jax.errors import ShapeError

NOWHERE = np.iinfo(np.int32).max
"""The place of a key that no query sees: padding between a context and the tokens behind it."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["query_places", "key_places", "ahead", "query_segments", "key_segments", "allowed"],
    meta_fields=["causal", "offset", "window"],
)
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys each query sees: those that every rule allows. `Mask()` allows all.

    Causal order and windows are about places in the sequence, which are counted in tokens and know nothing of rotary
    positions. Query t is at place `offset + t` and key s at place s, unless arrays say otherwise.

    Attributes:
      causal: a query sees no key behind its own place.
      offset: place of the first query, static: how many keys stand in front of it.
      window: how many places a query sees, its own included, or None for all; places of keys k and queries q obey
        q - window < k, as in Mistral (arXiv:2310.06825, section 2).
      query_places, key_places: int32 [B,T] and [B,S]; a key that is `NOWHERE` is hidden.
      ahead: int32 [B,T], how many places behind its own a query sees too where order is causal (an image's tokens that
        see each other); None for none. A window bounds what is in front alone.
      query_segments, key_segments: int32 [B,T] and [B,S], both or neither; a query sees keys of its own number, and
        what has a negative number sees nothing and is not seen.
      allowed: bool [B,1,T,S], True where a query may look: for rules that are none of these.

    Raises:
      ShapeError: a window below one, segments of queries without those of keys, or the reverse.
    """

    causal: bool = False
    offset: int = 0
    window: int | None = None
    query_places: Any = None
    key_places: Any = None
    ahead: Any = None
    query_segments: Any = None
    key_segments: Any = None
    allowed: Any = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ShapeError(f"window: got {self.window} places; expected at least 1")
        if (self.query_segments is None) != (self.key_segments is None):
            raise ShapeError("segments: got those of queries alone or of keys alone; expected both or neither")

    def check(self, rows: int, queries: int, keys: int) -> None:
        """Refuses a mask that was not made for [rows, queries] over [rows, keys], of bools and whole numbers.

        Raises:
          ShapeError: it names the array.
        """
        expected = {
            "query_places": (queries,),
            "key_places": (keys,),
            "ahead": (queries,),
            "query_segments": (queries,),
            "key_segments": (keys,),
            "allowed": (1, queries, keys),
        }
        check_mask(self.allowed, "mask: allowed")
        for name, rest in expected.items():
            array = getattr(self, name)
            kind = np.dtype(getattr(array, "dtype", object)).kind
            if array is not None and name != "allowed" and kind not in "iu":
                shown = getattr(array, "dtype", f"a {type(array).__name__}")
                raise ShapeError(f"mask: got {name} of {shown}; expected an array of integers")
            if array is not None and (array.shape[1:] != rest or array.shape[0] not in (1, rows)):
                raise ShapeError(f"mask: got {name} of shape {tuple(array.shape)}; expected {(rows, *rest)}")

    def places_of_queries(self, queries: int) -> Int[Array, "B T"]:
        """Returns places of the queries, [1,T] or [B,T]."""
        if self.query_places is None:
            return (jnp.arange(queries, dtype=jnp.int32) + self.offset)[None]
        return jnp.asarray(self.query_places, jnp.int32)

    def places_of_keys(self, keys: int) -> Int[Array, "B S"]:
        """Returns places of the keys, [1,S] or [B,S]."""
        if self.key_places is None:
            return jnp.arange(keys, dtype=jnp.int32)[None]
        return jnp.asarray(self.key_places, jnp.int32)

    def dense(self, queries: int, keys: int) -> Bool[Array, "B 1 T S"]:
        """Returns the whole mask, True where a query sees a key; B is 1 where every row is alike."""
        seen = jnp.ones((1, 1, queries, keys), bool)
        if self.causal or self.window is not None or self.key_places is not None:
            places = self.places_of_queries(queries)
            seen = seen & self.sees_places(places, self.places_of_keys(keys), self.reach(places))[:, None]
        if self.query_segments is not None:
            seen = seen & sees_segments(jnp.asarray(self.query_segments), jnp.asarray(self.key_segments))[:, None]
        return seen if self.allowed is None else seen & self.allowed

    def reach(self, places: Int[Array, "#B T"]) -> Int[Array, "#B T"]:
        """Returns the last place that each query sees in causal order, by its own place."""
        return places if self.ahead is None else places + jnp.asarray(self.ahead, jnp.int32)

    def sees_places(
        self, query: Int[Array, "#B T"], key: Int[Array, "#B S"], reach: Int[Array, "#B T"]
    ) -> Bool[Array, "#B #T S"]:
        """Returns what causal order and the window allow between these places; `reach` is as the method gives it."""
        query, key = query[:, :, None], key[:, None, :]
        seen = key != NOWHERE
        seen = seen & (key <= reach[:, :, None]) if self.causal else seen
        return seen if self.window is None else seen & (key > query - self.window)

    def take_queries(self, start: Any, count: int, queries: int) -> "Mask":
        """Returns the mask of queries start … start+count-1 out of `queries`; `start` may be traced."""

        def cut(x, axis):
            return None if x is None else jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, count, axis)

        return dataclasses.replace(
            self,
            query_places=cut(self.places_of_queries(queries), 1),
            ahead=cut(self.ahead, 1),
            query_segments=cut(self.query_segments, 1),
            allowed=cut(self.allowed, 2),
        )

    def padded(self, queries: int, extra: int) -> "Mask":
        """Returns the mask with so many more queries behind, and as many keys, which none of the others sees."""
        if not extra:
            return self
        fills = {"query_places": 0, "ahead": 0, "query_segments": 0, "key_places": NOWHERE, "key_segments": -1}
        grown = {}
        for name, fill in fills.items():
            array = getattr(self, name)
            if array is not None:
                grown[name] = jnp.pad(jnp.asarray(array), ((0, 0), (0, extra)), constant_values=fill)
        if self.allowed is not None:
            grown["allowed"] = jnp.pad(jnp.asarray(self.allowed), ((0, 0), (0, 0), (0, extra), (0, extra)))
        if not self.causal and self.allowed is None:
            raise ShapeError(f"mask: got one of {queries} queries that hides nothing; expected a causal one, or bools")
        return dataclasses.replace(self, **grown)

    def take_rows(self, start: Any, rows: int) -> "Mask":
        """Returns the mask of rows start … start+rows-1 of the batch; `start` may be traced."""

        def cut(x):
            return x if x.shape[0] == 1 else jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, rows, 0)

        return jax.tree.map(cut, self)


def as_mask(
    mask: "Mask | Bool[Array | np.ndarray, 'B 1 T S']", queries: int, slots: Int[Array, "B T"] | None = None
) -> Mask:
    """Returns the rule that an array of bools is; a `Mask` as it is.

    Args:
      slots: where among the keys each query stands; None: they are the last ones.
    """
    if isinstance(mask, Mask):
        return mask
    return Mask(offset=mask.shape[-1] - queries, query_places=slots, allowed=mask)


def sees_segments(query: Int[Array, "#B T"], key: Int[Array, "#B S"]) -> Bool[Array, "#B T S"]:
    """Returns whether a query and a key are of one segment."""
    return (query[:, :, None] == key[:, None, :]) & (query >= 0)[:, :, None]
