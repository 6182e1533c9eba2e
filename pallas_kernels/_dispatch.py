"""Which implementation runs."""

from .errors import KernelUnavailableError

AVAILABLE = ("xla",)


def choose(operation: str, implementation: str | None) -> str:
    """Returns the implementation to run; None means the best one that can run here.

    Raises:
      KernelUnavailableError: `implementation` is unknown or cannot run here.
    """
    if implementation is None:
        return "xla"
    if implementation not in AVAILABLE:
        raise KernelUnavailableError(
            f"{operation}: implementation {implementation!r} is not available; expected None or one of {AVAILABLE}"
        )
    return implementation
