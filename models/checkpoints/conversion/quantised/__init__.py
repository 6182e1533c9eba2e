"""Quantised checkpoints: FP8 with scales, GPTQ, AWQ and compressed-tensors, dequantised where they are read.

Sources: DeepSeek-V3's `README_WEIGHTS.md`; the packing of AutoAWQ, AutoGPTQ, GPTQModel and compressed-tensors.
"""

from .settings import Quantisation as Quantisation
from .settings import read_quantisation as read_quantisation
from .source import DequantisedSource as DequantisedSource
from .source import check_plain_tensors as check_plain_tensors
from .source import find_quantised as find_quantised
