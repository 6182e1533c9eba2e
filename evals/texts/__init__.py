"""Real weights over real text: facts that must be bound, continuous text, and prompts that choose tokens."""
