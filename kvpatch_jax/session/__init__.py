"""Sessions: an agent's window, with what reuse it may have, in a few calls.

`Session` is one agent's; what it runs on is a `Runtime`.
"""

from .runtime import PrivateRuntime, Runtime

__all__ = ["PrivateRuntime", "Runtime"]
