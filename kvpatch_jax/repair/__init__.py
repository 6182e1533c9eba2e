"""Placeholder, filled by the first modules."""
