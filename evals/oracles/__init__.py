"""Reference implementations that evaluations and tests compare the library with."""

from .host_executor import HostExecutor, HostPiece

__all__ = ["HostExecutor", "HostPiece"]
