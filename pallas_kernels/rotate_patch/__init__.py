"""Add a thin correction to cached keys or values and rotate them, in one pass."""

from .api import rotate_patch as rotate_patch
