"""Import of optional packages on first use, with an error that names the extra if a package is missing."""

import importlib
from types import ModuleType

from ..errors import MissingExtraError


def require(module: str, package: str, extra: str = "models") -> ModuleType:
    """Imports a module of an optional package.

    Args:
      module: name to import ("PIL.Image").
      package: name to install ("Pillow").
      extra: extra of this library that installs it.

    Raises:
      MissingExtraError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package}: got {error!r}; expected it to be installed: pip install 'kvpatch_jax[{extra}]'"
        ) from error
