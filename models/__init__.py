"""Flax backbones. `load(directory)` reads any supported Hugging Face checkpoint directory."""

from kvpatch_jax.answers import Sampling as Sampling
from kvpatch_jax.answers import TextPiece as TextPiece
from kvpatch_jax.core import Buckets as Buckets

from .backbone import ModelBackbone as ModelBackbone
from .checkpoints import UnknownTensorWarning as UnknownTensorWarning
from .decoding import pad_rows as pad_rows
from .directory import load as load
from .directory import save as save
from .families.parsed import UnknownKeyWarning as UnknownKeyWarning
from .families.registry import FAMILIES as FAMILIES
