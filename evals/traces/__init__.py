"""Traces of agents' windows: four kinds that are drawn here, and their replay in every way of serving a window."""

from .generate import KINDS, generate

__all__ = ["KINDS", "generate"]
