"""Traces of agents' windows: a generator of four kinds, and their replay in every mode of serving a window."""

from .trace_generator import KINDS, STEPS, generate
from .window_tracker import load_trace

__all__ = ["KINDS", "STEPS", "generate", "load_trace"]
