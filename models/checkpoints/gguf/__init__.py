"""GGUF files of the Llama and Qwen families: their header, what it says of the model, and their tensors."""

from .header import GgufHeader as GgufHeader
from .header import find_gguf as find_gguf
from .header import read_header as read_header
from .model import ARCHITECTURES as ARCHITECTURES
from .model import GgufConversion as GgufConversion
from .model import read_config as read_config
from .source import GgufSource as GgufSource
