"""Thin factors of a batch of matrices."""

from .api import factorise as factorise
