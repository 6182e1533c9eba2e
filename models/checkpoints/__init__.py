"""Checkpoints: tensors by name from whatever holds them, strictly checked against what a model expects.

`TensorSource` says which tensors there are and reads regions of them; `TensorEntry` says where each one goes. What must
be there, and in which shape, follows from the parameters that the model expects. Everything is checked before the first
byte of data is read, so a bad checkpoint raises one typed error and leaves nothing half loaded.
"""

from .adapters import ADAPTER_CONFIG as ADAPTER_CONFIG
from .adapters import ADAPTER_FILE as ADAPTER_FILE
from .adapters import LoRASource as LoRASource
from .entries import TRANSPOSE as TRANSPOSE
from .entries import Expected as Expected
from .entries import ParamPath as ParamPath
from .entries import Params as Params
from .entries import Part as Part
from .entries import TensorEntry as TensorEntry
from .entries import flatten_params as flatten_params
from .entries import fused_entries as fused_entries
from .entries import module_entries as module_entries
from .gguf import GgufFile as GgufFile
from .gguf import find_gguf as find_gguf
from .json_table import read_table as read_table
from .naming import rename as rename
from .naming import translate as translate
from .reading import UnknownTensorWarning as UnknownTensorWarning
from .reading import load_weights as load_weights
from .reading import same_tensors as same_tensors
from .reading import tensor_shapes as tensor_shapes
from .safetensors_files import INDEX_FILE as INDEX_FILE
from .safetensors_files import SINGLE_FILE as SINGLE_FILE
from .safetensors_files import SafetensorsSource as SafetensorsSource
from .source import RenamedSource as RenamedSource
from .source import TensorInfo as TensorInfo
from .source import TensorSource as TensorSource
from .writing import save_weights as save_weights
