"""Optional packages: imported where they are first needed, and named with their extra where they are absent."""

import importlib
from types import ModuleType

from ..errors import MissingExtraError


def require(module: str, package: str, extra: str = "models") -> ModuleType:
    """Imports a module of an optional package.

    Args:
      module: as it is imported ("PIL.Image"). package: as it is installed ("Pillow"). extra: of this library's.

    Raises:
      MissingExtraError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{package} is not installed ({error}); expected it for this: pip install 'kvpatch_jax[{extra}]'"
        ) from error
