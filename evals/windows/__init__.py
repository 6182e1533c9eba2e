"""Windows on the task: what operations do to answers, which antecedents and first tokens matter, what stores return."""
