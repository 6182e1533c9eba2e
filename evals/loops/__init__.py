"""Agents' loops: which screenshots stand in each prompt, what computing it takes, and what reuse loses."""
