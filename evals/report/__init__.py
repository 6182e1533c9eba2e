"""Figures, tables and the HTML page of a run."""
