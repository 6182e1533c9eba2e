"""Flax backbones. `load(directory)` reads any supported Hugging Face checkpoint directory."""

from .backbone import ModelBackbone as ModelBackbone
from .directory import load as load
from .directory import save as save
from .families.registry import FAMILIES as FAMILIES
from .inputs.buckets import Buckets as Buckets
