"""Attention for decoders and towers: one function, masks as structure, several implementations of one result."""

from .dispatch import attention as attention
from .dispatch import using as using
from .dispatch import what_runs as what_runs
from .mask import Mask as Mask
from .mask import as_mask as as_mask
