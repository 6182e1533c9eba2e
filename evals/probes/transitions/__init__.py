"""What the transitions of trained hybrids keep: how far their maps decay, and in how many directions."""
