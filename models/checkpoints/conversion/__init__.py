"""What only converts files: GGUF files, and directories quantised as FP8, GPTQ, AWQ or compressed-tensors.

Nothing else in the library knows of these forms. A conversion gives what a directory of plain safetensors has: a
`config.json` and tensors.
"""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike

from ..source import TensorSource
from .gguf import GgufConversion as GgufConversion
from .gguf import find_gguf
from .quantised import DequantisedSource as DequantisedSource
from .quantised import check_plain_tensors as check_plain_tensors
from .quantised import find_quantised


@runtime_checkable
class Conversion(Protocol):
    """A checkpoint whose tensors are stored in another form than the model has them.

    Attributes:
      config: `config.json` of the model, with plain weights.
    """

    @property
    def config(self) -> dict[str, Any]: ...

    def source(self, dtype: DTypeLike) -> TensorSource:
        """Opens the tensors, as the model names them; what is dequantised has this dtype.

        Raises:
          WeightsError: tensors that do not hold what the configuration says, or a damaged file.
        """
        ...


def find_conversion(checkpoint: Path) -> Conversion | None:
    """Returns how a directory or GGUF file is converted; None where its weights are plain safetensors.

    Raises:
      ConfigError: weights quantised in a way that is not read; it says which was found and which are read.
      WeightsError: a damaged GGUF file, or a directory of several.
    """
    path = find_gguf(checkpoint)
    return find_quantised(checkpoint) if path is None else GgufConversion(path)
