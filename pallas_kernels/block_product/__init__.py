"""Multiply every block of rows by one matrix of a stack: the products of experts, for tokens grouped by them."""

from .api import block_product as block_product
from .api import what_runs as what_runs
