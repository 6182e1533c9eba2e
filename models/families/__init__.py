"""What tells one model family from another."""
