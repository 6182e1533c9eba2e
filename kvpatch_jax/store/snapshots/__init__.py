"""Snapshots, restores, exports as Orbax arrays, and the store as an item of an Orbax checkpoint."""
