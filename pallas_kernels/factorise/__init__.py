"""Thin factors of a batch of matrices."""

from .api import factorise as factorise
from .api import factorise_sharded as factorise_sharded
from .api import merge as merge
from .api import update as update
