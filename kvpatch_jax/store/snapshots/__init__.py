"""Snapshots, restores, arrays for Orbax, and several processes doing it together."""
