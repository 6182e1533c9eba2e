"""Checks of arguments that sessions and batches have in common."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..backbone import check_is_backbone
from ..errors import DtypeError, InputError, RankError
from ..window import PatchStore


def check_backbone(backbone: Any, store: Any, caller: str) -> None:
    """Refuses an invalid backbone or store.

    Raises:
      InputError: either. `caller` begins the message.
    """
    check_is_backbone(backbone, caller)
    if store is not None and not isinstance(store, PatchStore):
        raise InputError(f"{caller}: got store {store!r:.80}; expected a kvpatch_jax.ChunkStore, or None")


def check_rank(rank: Any, caller: str, least: int) -> None:
    """Refuses an invalid rank: neither a whole number, nor one for each channel. None is valid if 0 is.

    Raises:
      RankError.
    """
    if rank is None and least == 0:
        return
    for number in rank.values() if isinstance(rank, Mapping) else [rank]:
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < least:
            expected = f"a whole number from {least}, or one for each channel"
            raise RankError(f"{caller}: got rank {rank!r:.80}; expected {expected}")


def float_dtype(dtype: Any, caller: str) -> np.dtype:
    """Returns a dtype by its name.

    Raises:
      DtypeError: no floating-point dtype.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise DtypeError(f"{caller}: got dtype {dtype!r:.80}; expected a floating-point one, such as 'bfloat16'")
    return found
