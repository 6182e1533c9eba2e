"""What a results file holds: intervals over clustered questions, rows, and where they were measured."""
