"""What placing, scheduling and cascades save: traces of agents replayed in numbers, and rebuilding on a small model."""
