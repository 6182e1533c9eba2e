"""Thin factors of a batch of matrices."""

from .api import factorise as factorise
from .api import merge as merge
