"""Which tokens' logits are wanted."""

import jax
import numpy as np
from jaxtyping import Array

from kvpatch_jax.backbone import Logits, Tokens
from kvpatch_jax.errors import InputError


def logit_rows(tokens: Tokens, logits: Logits, what: str) -> np.ndarray | Array | None:
    """Returns the tokens whose logits are wanted, int32 [B,n]; None for all.

    Raises:
      InputError: another word, indices of another shape, or ones that no token has.
    """
    batch, length, _ = tokens.embeddings.shape
    if isinstance(logits, str):
        if logits not in ("last", "all"):
            raise InputError(f"{what}: got logits {logits!r}; expected 'last', 'all' or indices [B, n]")
        return np.full((batch, 1), length - 1, np.int32) if logits == "last" else None
    if logits is None or np.ndim(logits) != 2 or len(logits) != batch:
        raise InputError(
            f"{what}: got logits of shape {np.shape(logits)}; expected 'last', 'all' or indices [{batch}, n]"
        )
    if isinstance(logits, jax.Array):
        return logits

    rows = np.asarray(logits)
    if rows.dtype.kind not in "iu" or (rows.size and not 0 <= rows.min() <= rows.max() < length):
        raise InputError(f"{what}: got logits of tokens {rows.tolist()}; expected indices from 0 to {length - 1}")
    return rows.astype(np.int32)
