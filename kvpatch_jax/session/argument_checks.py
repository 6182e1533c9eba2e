"""What callers give sessions and batches, refused before anything is made of it."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backbone import check_is_backbone
from ..errors import DtypeError, InputError, RankError
from ..window import PatchStore


def check_backbone(backbone: Any, store: Any, what: str) -> None:
    """Refuses what is no backbone, or no store.

    Raises:
      InputError: either.
    """
    check_is_backbone(backbone, what)
    if store is not None and not isinstance(store, PatchStore):
        raise InputError(f"{what}: store {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")


def check_rank(rank: Any, what: str, least: int) -> None:
    """Refuses what is no rank: a whole number, or one for each channel; None passes where 0 does.

    Raises:
      RankError: it is none.
    """
    numbers = list(rank.values()) if isinstance(rank, Mapping) else [rank]
    if rank is None and least == 0:
        return
    for number in numbers:
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < least:
            raise RankError(f"{what}: rank {rank!r:.80}; expected a whole number from {least}, or one for each channel")


def float_dtype(dtype: Any, what: str) -> np.dtype:
    """The dtype that somebody names.

    Raises:
      DtypeError: none of floating point.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise DtypeError(f"{what}: dtype {dtype!r:.80}; expected one of floating point, such as 'bfloat16'")
    return found
