"""What a backbone's calls check of their input on the host, before anything is traced."""

from typing import Any

import numpy as np
from jaxtyping import Int32

from kvpatch_jax.errors import DtypeError, InputError


def check_ids(input_ids: Any, config: Any) -> Int32[np.ndarray, "B T"]:
    """Check token ids and return them on the host; placeholders of images may lie past the vocabulary.

    Raises:
      InputError: ids that are not whole numbers, or that the embedding has no row for.
    """
    ids, size = np.asarray(input_ids), config.text.vocabulary
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"input_ids of {ids.dtype} {list(ids.shape)}; expected whole numbers [rows, tokens]")
    pads = [getattr(config, name, -1) for name in ("image_token", "video_token")]
    wrong = ids[((ids < 0) | (ids >= size)) & ~np.isin(ids, [pad for pad in pads if pad >= 0])]
    if wrong.size:
        raise InputError(f"token id {int(wrong[0])} is outside the vocabulary; expected 0 … {size - 1}")
    return ids.astype(np.int32)


def check_mask(mask: Any) -> None:
    """Raises DtypeError for a mask that is not bool: taken for one, a mask to add to scores would mean the opposite."""
    if mask is not None and mask.dtype != bool:
        raise DtypeError(
            f"mask is {mask.dtype}; expected bool, True where a token may attend (of a mask that is added to the "
            "scores: mask == 0)"
        )
