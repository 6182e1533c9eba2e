"""Windows on the task: what operations do to answers, which antecedents matter, and what a store brings back."""
