"""The report of a run: summary, curves, plot."""
