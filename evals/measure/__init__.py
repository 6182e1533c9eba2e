"""A user's model on a user's data: what reuse loses, what repairs bring back, and what they cost."""
