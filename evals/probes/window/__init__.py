"""Images of a window one behind the other, for certificates."""
