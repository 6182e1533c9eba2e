"""Import of optional packages on first use, with an error that names the extra if a package is missing."""

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

from ..errors import MissingExtraError

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
_IMPORTING = threading.RLock()
"""Held while transformers is imported: what is changed for that is the process's, and several threads load models."""


def require(module: str, package: str, extra: str = "models") -> ModuleType:
    """Imports a module of an optional package.

    `transformers` is imported without its advice to install PyTorch, and as if PyTorch were absent where PyTorch is
    there but broken.

    Args:
      module: name to import ("PIL.Image"). Of `transformers` the exact module of a class and not its package, whose
        choice between the image processors of Pillow and of torchvision depends on what is installed.
      package: name to install ("Pillow").
      extra: extra of this library that installs it.

    Raises:
      MissingExtraError: the package is not installed.
    """
    try:
        if package != "transformers":
            return importlib.import_module(module)
        with _IMPORTING, _without_advice():
            return _import_beside_torch(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package}: got {error!r}; expected it to be installed: pip install 'kvpatch_jax[{extra}]'"
        ) from error


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    before = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_ADVICE)
        if before is not None:
            os.environ[_ADVICE] = before


def _import_beside_torch(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "transformers":
            raise
        # transformers imports a PyTorch that it finds. Start again with one that cannot be found.
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        torch = sys.modules.pop("torch", None)
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
        try:
            return importlib.import_module(module)
        finally:
            del sys.modules["torch"]
            if torch is not None:
                sys.modules["torch"] = torch
